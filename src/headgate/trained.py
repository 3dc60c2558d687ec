"""Trained networks by name: what the runs in the README ended with, ready to use.

Each is a safetensors file and a JSON record beside it (architecture, accuracy, MACs, recipe, commit). Nothing is
downloaded. Knows files and architectures, nothing of training.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from headgate.errors import FileError, HeadgateError
from headgate.models.names import build
from headgate.storage import load


@dataclass(frozen=True)
class ZooEntry:
    """One trained network: its file, and the record of the run that made it."""

    name: str
    path: Path
    record: dict[str, Any]


def zoo_folder() -> Path:
    """Where the files are."""
    return Path(str(resources.files("headgate"))) / "zoo_files"


def zoo_entries() -> dict[str, ZooEntry]:
    """All networks of the zoo, by name."""
    entries = {}
    for path in sorted(zoo_folder().glob("*.safetensors")):
        record = path.with_suffix(".json")
        if not record.is_file():
            raise FileError(f"{path} has no record {record.name} beside it: the installation is incomplete")
        entries[path.stem] = ZooEntry(path.stem, path, json.loads(record.read_text(encoding="utf-8")))
    return entries


def zoo_entry(name: str) -> ZooEntry:
    """The file and the record of the trained network called `name`."""
    entries = zoo_entries()
    if name not in entries:
        close = difflib.get_close_matches(name, entries, 3, 0.4)
        there = ", ".join(entries) or "nothing: the installation has no weights"
        raise HeadgateError(
            f"the zoo has no {name!r}: " + (f"did you mean {close[0]!r}?" if close else f"it has {there}")
        )
    return entries[name]


def zoo(name: str) -> nn.Module:
    """The trained network called `name`, in eval mode; `zoo_entries()` lists them with their records."""
    entry = zoo_entry(name)
    return load(entry.path, build(entry.record["model"])).eval()
