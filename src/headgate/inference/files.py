"""Files of tensors and a description: safetensors with JSON in its header, never a pickle.

`write(path, tensors, description)` is atomic: a crash or a full disk leaves the old file. `read(path)` checks the file
as a whole (a digest over description and tensors) before it gives anything back. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headgate.errors import FileError

FORMAT = 1
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
HEADER_START = 8
"""A safetensors file opens with its header's length in 8 bytes, which may look like anything, and then a brace."""


def digest(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> str:
    """SHA-256 of a description and all tensors: names, types, shapes and bytes."""
    total = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return total.hexdigest()


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write a file, or leave whatever is there as it is."""
    path = Path(path)
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    header = {
        "headgate": json.dumps({"format": FORMAT, **description}, sort_keys=True),
        "digest": digest(kept, {"format": FORMAT, **description}),
    }
    if not path.parent.is_dir():
        raise FileError(f"{path}: the folder {path.parent} does not exist: create it first")
    if path.exists() and not path.is_file():
        raise FileError(f"{path} is there already and no file: choose another place")
    scratch = ""
    try:
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        save_file(kept, scratch, metadata=header)
        os.chmod(scratch, 0o644)
        _to_disk(scratch)
        os.replace(scratch, path)
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"{path}: can't be written ({error}). Nothing was changed; free some space or choose another place"
        ) from error
    finally:
        if os.path.exists(scratch):
            os.unlink(scratch)


def _to_disk(path: str) -> None:
    """Whoever finds the new name after a power cut finds all of the file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_scratch(path: Path) -> None:
    """Remove what writers of this file left behind when they were killed."""
    for left in path.parent.glob(f".{path.name}.*"):
        left.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of a file that `write` wrote, all of it verified."""
    path = Path(path)
    if not path.is_file():
        raise FileError(f"{path}: no such file")
    with open(path, "rb") as file:
        start = file.read(HEADER_START + 1)
        if start.startswith(PICKLE_STARTS) and start[HEADER_START:] != b"{":
            raise FileError(
                f"{path} is a pickle, which can run any code when it is loaded: "
                "headgate refuses it. Save with headgate.save"
            )
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise FileError(
            f"{path} is damaged or no safetensors file ({error}): it may have been cut short; save it again"
        ) from error
    if "headgate" not in header:
        raise FileError(
            f"{path} was not written by headgate.save: load plain weights with safetensors and load_state_dict"
        )
    try:
        description = json.loads(header["headgate"])
    except json.JSONDecodeError as error:
        raise FileError(f"{path}: its description is damaged ({error})") from error
    if not isinstance(description, dict):
        raise FileError(f"{path}: its description is damaged (it is no table)")
    if description.get("format") != FORMAT:
        raise FileError(f"{path} has format {description.get('format')}, this headgate reads {FORMAT}: update headgate")
    if digest(tensors, description) != header.get("digest"):
        raise FileError(f"{path} was changed after it was saved: its contents do not match its digest")
    return tensors, description
