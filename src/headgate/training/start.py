"""Start a run, or go on with one: its folder, its processes, its journal.

What the command line calls. Knows nothing of options and tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headgate.errors import FileError
from headgate.training.forecast import forecast
from headgate.training.journal import AnyJournal, Journal, SilentJournal
from headgate.training.loop import Interrupted
from headgate.training.recipe import PHASES, Recipe
from headgate.training.run import RESULT, Run, create_folder, data_of, is_done, recipe_in
from headgate.training.team import Team

__all__ = ["Interrupted", "Options", "forecast", "go", "recipe_in", "use_threads"]


@dataclass(frozen=True)
class Options:
    """How a run is watched and saved; nothing that changes what it computes."""

    tensorboard: bool = False
    quiet: bool = False
    checkpoint_seconds: float = 120.0


def use_threads(threads: int | None) -> None:
    """Set torch's threads, if a number is given."""
    if threads is not None:
        torch.set_num_threads(max(1, threads))


def go(folder: Path, recipe: Recipe | None, options: Options = Options()) -> dict[str, Any] | None:  # noqa: B008
    """Carry out a new run (or with no recipe, the one in the folder); its result in the main process."""
    going_on = recipe is None
    recipe = recipe_in(folder) if recipe is None else recipe
    team = Team(recipe.precision)
    if going_on and is_done(folder):
        raise FileError(f"{folder} is done: its result is in {folder / RESULT}")
    if team.main and not going_on:
        data_of(recipe)  # what is wrong with the data shows before there is a folder
        create_folder(folder, recipe)
    team.wait()
    journal: AnyJournal = SilentJournal()
    if team.main:
        journal = Journal(folder, title=recipe.name, tensorboard=options.tensorboard, quiet=options.quiet)
        journal.plan(_plan(recipe))
    with journal:
        result = Run(recipe, folder, team, journal, options.checkpoint_seconds).execute()
    return result if team.main else None


def _plan(recipe: Recipe) -> list[tuple[str, int, float]]:
    """Steps of every phase and what one costs beside a dense step, for the time left."""
    steps = data_of(recipe).train.steps(recipe.batch_size)
    teacher = 0.33 if recipe.distill else 0.0
    relative = {"dense": 1.0, "gates": 1.15 + teacher, "tune": 0.65 + teacher}
    return [(name, recipe.epochs_of(name) * steps, relative[name]) for name in PHASES if recipe.epochs_of(name)]
