"""Small runs on the embedded digits, for the tests of the training package."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headgate.training.recipe import Recipe
from headgate.training.start import Options, go

TINY = f"{Path(__file__).parent / 'tiny.py'}:make"
RECIPE = Recipe(
    name="small", model=TINY, data="digits", image_size=8, batch_size=128, dense_epochs=1, gate_epochs=2,
    tune_epochs=1, gate_lr=0.1, calibration_batches=5,
)  # fmt: skip
QUIET = Options(quiet=True, checkpoint_seconds=1e9)


def run(folder: Path, quiet: Options = QUIET, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(123)  # a run must not depend on it
    result = go(folder, replace(RECIPE, **changes), quiet)
    assert result is not None
    return result


def same_weights(first: Path, second: Path, file: str = "small.safetensors") -> bool:
    a, b = load_file(first / file), load_file(second / file)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def options_of(recipe: Recipe) -> list[str]:
    """The command line that stands for a recipe."""
    words: list[str] = []
    for name, value in recipe.to_json().items():
        flag = "--" + name.replace("_", "-")
        if name == "name" or value in (None, [], ""):
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    return words


def start_process(*words: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, *prefix, "-m", "headgate", "train", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
