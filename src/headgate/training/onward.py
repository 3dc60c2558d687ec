"""Tune the network of a finished run for more epochs: a new run that begins where another one ended.

Its folder takes over the other's networks, its log up to the decision and the time that was spent, so that all that is
measured of it counts from the dense network on. Knows nothing of the command line, nor of what happens in a step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headgate.errors import FileError, HeadgateError
from headgate.training import checkpoint as checkpoints
from headgate.training.journal import LOG_NAME, read_log
from headgate.training.prepare import with_data_in
from headgate.training.recipe import PLACES, Recipe, overridden
from headgate.training.run import BEFORE, DECIDED, DENSE, GATED, RESULT, TRAINED, last_file, recipe_in, result_in

FIELDS = (
    "tune_epochs", "tune_lr", "tune_gate_lr", "tune_schedule", "step_epochs", "momentum", "weight_decay", "batch_size",
    "label_smoothing", "mix", "distill", "distill_temperature", "teacher", "teacher_normalization",
    "calibration_batches", "seed", "precision", "compile", *(name for name in PLACES if name != "teacher"),
)  # fmt: skip
"""Fields of a recipe that still matter when the gates are decided."""


def onward(earlier: Path, changes: Mapping[str, Any]) -> Recipe:
    """The recipe of a run that tunes on what `earlier` made; images come in another order than there."""
    recipe = recipe_of_finished(earlier)
    given = {name: value for name, value in changes.items() if value is not None}
    if useless := [name for name in given if name not in FIELDS]:
        raise HeadgateError(
            f"--tune-on starts from gates that are decided: leave out --{useless[0].replace('_', '-')}; "
            f"it looks at {', '.join('--' + name.replace('_', '-') for name in FIELDS)}"
        )
    changed = with_data_in(overridden(replace(recipe, seed=recipe.seed + 1), given), given.get("data_dir"))
    if not changed.tune_epochs:
        raise HeadgateError("--tune-on has nothing to do: give --tune-epochs")
    return changed


def recipe_of_finished(earlier: Path) -> Recipe:
    """The recipe of a run that has come to its end, with a network whose gates are decided."""
    recipe = recipe_in(earlier)
    result_in(earlier)
    if recipe.exits or not (recipe.gate_epochs and (earlier / last_file(recipe)).exists()):
        raise HeadgateError(f"{earlier} has no network to go on with: only shrunk and conditional ones can be")
    return recipe


def take_over(folder: Path, earlier: Path, recipe: Recipe) -> None:
    """Fill a new run's folder with what another one left, at the start of its last phase."""
    inherit(folder, earlier, {last_file(recipe): DECIDED, RESULT: BEFORE}, lambda entry: entry.get("phase") != "tune")
    set_out(folder, earlier, recipe, "tune", result_in(earlier)["seconds"])


def inherit(folder: Path, earlier: Path, files: Mapping[str, str], keep: Callable[[Mapping[str, Any]], bool]) -> None:
    """Copy another run's networks up to the gates, `files` under their new names, and the part of its log to keep."""
    absent = {TRAINED, GATED} if _adopted(result_in(earlier)) else {TRAINED}
    kept = [entry for entry in read_log(earlier / LOG_NAME) if keep(entry) and entry["kind"] != "end"]
    try:
        for name in (DENSE, TRAINED, GATED):
            if name not in absent or (earlier / name).exists():
                shutil.copyfile(earlier / name, folder / name)
        for name, new in files.items():
            shutil.copyfile(earlier / name, folder / new)
        (folder / LOG_NAME).write_bytes("".join(json.dumps(entry) + "\n" for entry in kept).encode())
    except OSError as error:
        raise FileError(f"{earlier} can't be copied to {folder} ({error}): nothing is lost, begin again") from error


def _adopted(result: Mapping[str, Any]) -> bool:
    """Whether the network was trained elsewhere, and its gates were left there."""
    return "adopted" in result or ("before" in result and _adopted(result["before"]))


def set_out(folder: Path, earlier: Path, recipe: Recipe, phase: str, seconds: Mapping[str, float]) -> None:
    """The checkpoint of a run that begins with a later phase than the first."""
    images = checkpoints.read_checkpoint(earlier).rest.get("conditions", {}).get("images")
    conditions = {} if images is None else {"images": images}
    position = (folder / LOG_NAME).stat().st_size
    checkpoints.write_checkpoint(
        folder,
        checkpoints.Checkpoint(phase, 0, recipe.to_json(), dict(seconds), position, rest={"conditions": conditions}),
    )
