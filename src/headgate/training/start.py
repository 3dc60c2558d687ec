"""Start a run, or go on with one: its folder, its processes, its journal.

What the command line calls. Knows nothing of options and tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headgate.data.sources import DataSet
from headgate.errors import FileError, HeadgateError
from headgate.storage import load
from headgate.training import forecast
from headgate.training.journal import AnyJournal, Journal, SilentJournal
from headgate.training.loop import Interrupted
from headgate.training.onward import take_over
from headgate.training.prepare import check, data_of, start_of, with_absolute_places, with_data_in
from headgate.training.recipe import PHASES, Recipe, overridden
from headgate.training.run import DENSE, RESULT, Run, create_folder, is_begun, is_done, recipe_in
from headgate.training.team import Team

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Interrupted", "Options", "dry_run", "go", "is_begun", "use_threads"]


@dataclass(frozen=True)
class Options:
    """How a run is watched and saved; nothing that changes what it computes."""

    tensorboard: bool = False
    quiet: bool = False
    checkpoint_seconds: float = 120.0


DEFAULTS = Options()


def use_threads(threads: int | None) -> None:
    """Set torch's threads, if a number is given; 0: as many as torch takes."""
    if threads is not None and threads < 0:
        raise HeadgateError(f"--threads {threads}: it must be 0 (as many as torch takes) or more")
    if threads:
        torch.set_num_threads(threads)


def go(
    folder: Path,
    recipe: Recipe | None,
    options: Options = DEFAULTS,
    places: Mapping[str, Any] | None = None,
    earlier: Path | None = None,
) -> dict[str, Any] | None:
    """Carry out a new run (or with no recipe, the one in the folder); its result in the main process.

    `places` are fields that say where things are now, for a run that goes on; `earlier` is the folder of a finished run
    whose network a new one tunes on.
    """
    going_on = recipe is None
    recipe = _placed(folder, recipe, places or {})
    team = Team(recipe.precision)
    if going_on and is_done(folder):
        raise FileError(f"{folder} is done: its result is in {folder / RESULT}")
    data = data_of(recipe)
    if not going_on:
        check(recipe, data, _dense_of(earlier, recipe, data))  # what is wrong shows before there is a folder
        if team.main:
            create_folder(folder, recipe, partial(take_over, folder, earlier, recipe) if earlier else None)
    team.wait()
    with only_user(folder) if team.main else nullcontext(), _journal(folder, recipe, data, team, options) as journal:
        result = Run(recipe, folder, team, journal, options.checkpoint_seconds, data).execute()
    return result if team.main else None


def _dense_of(earlier: Path | None, recipe: Recipe, data: DataSet) -> nn.Module | None:
    """The network that a run to be tuned on began with: the file it came from may be gone."""
    return None if earlier is None else load(earlier / DENSE, start_of(recipe, data.shape).architecture())


def dry_run(
    folder: Path, recipe: Recipe | None, places: Mapping[str, Any] | None = None, quiet: bool = False
) -> dict[str, Any]:  # fmt: skip
    """How long such a run would take, and what memory it would need; printed as a table, if not `quiet`."""
    recipe = _placed(folder, recipe, places or {})
    found = forecast.measure(recipe)
    if not quiet:
        forecast.show(found, recipe)
    return found.as_json()


def _placed(folder: Path, recipe: Recipe | None, places: Mapping[str, Any]) -> Recipe:
    """A new recipe, or that of the folder with its files where they are now."""
    if recipe is None:
        recipe = with_data_in(overridden(recipe_in(folder), places), places.get("data_dir"))
    return with_absolute_places(recipe)


def _journal(folder: Path, recipe: Recipe, data: DataSet, team: Team, options: Options) -> AnyJournal:
    if not team.main:
        return SilentJournal()
    journal = Journal(folder, title=recipe.name, tensorboard=options.tensorboard, quiet=options.quiet)
    journal.plan(_plan(recipe, data.train.steps(recipe.batch_size)))
    return journal


@contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Nobody else may go on with the same run meanwhile (where the system can tell)."""
    if fcntl is None:
        yield
        return
    try:
        lock = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise FileError(f"{folder} can't be written ({error}): a run needs to") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FileError(f"{folder} is in use by another process: wait for it, or stop it") from error
        yield


def _plan(recipe: Recipe, steps: int) -> list[tuple[str, int, float]]:
    """Steps of every phase and what one costs beside a dense step, for the time left."""
    teacher = 0.33 if recipe.distill else 0.0
    relative = {"dense": 1.0, "gates": 1.15 + teacher, "tune": 0.65 + teacher}
    return [(name, recipe.epochs_of(name) * steps, relative[name]) for name in PHASES if recipe.epochs_of(name)]
