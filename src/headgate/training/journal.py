"""The journal of a training run: what the user sees while it runs, and what can be read of it afterwards.

Takes numbers by name after every step and every epoch. Gives a view on the screen with the time left, a log of JSON
lines in the run's folder (`read_log` reads it back), and TensorBoard's files on request. Knows nothing of models, of
data, of what the numbers mean, or of torch: TensorBoard's writer is imported when it is asked for.

A line of the log is `{"time": UTC, "kind": "step" | "epoch" | …, "phase": name, "epoch": n, "step": n, **values}`; the
epoch and the step count from 1 within the phase. NaN and infinity are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from headgate.errors import FileError, HeadgateError
from headgate.training.pace import STEP_WEIGHT, Average, Pace, PlannedPhase
from headgate.training.screen import View, screen_for

LOG_NAME = "log.jsonl"
TENSORBOARD_NAME = "tensorboard"

SMOOTHED = ("loss", "cost")
"""What jumps from batch to batch: the view shows its running average. The log keeps what was measured."""

J = TypeVar("J", bound="AnyJournal")


class AnyJournal:
    """What a training loop writes to. As it stands it takes everything and does nothing."""

    def plan(self, phases: Iterable[PlannedPhase]) -> None:
        """All phases of the run, in their order: name, steps in all, and if it is known what a step costs.

        With it the time left is that of the whole run, and TensorBoard's steps count on over phases.
        """

    def resume_at(self, position: int) -> None:
        """Cut the log back to `position` bytes: what comes after them will be logged again."""

    @property
    def position(self) -> int:
        """Bytes of the log so far, safe on the disk."""
        return 0

    def phase(self, name: str, *, epochs: int, steps: int, done: int = 0) -> None:
        """A phase of `epochs` times `steps` begins, or goes on with `done` of them done."""

    def step(self, values: Mapping[str, float]) -> None:
        """An optimizer step was made."""

    def epoch(self, values: Mapping[str, float]) -> None:
        """An epoch ended."""

    def note(self, kind: str, values: Mapping[str, Any]) -> None:
        """Anything else worth keeping."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def close(self) -> None:
        """Nothing follows. May be called twice."""

    def __enter__(self: J) -> J:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SilentJournal(AnyJournal):
    """The journal of every process but the main one."""


class Journal(AnyJournal):
    """The journal of the main process; its files are in `folder`.

    `step_every` thins the log's lines of steps, `line_every_seconds` is for output that is no terminal, `quiet` prints
    nothing at all; `now` tells the time in seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        title: str,
        tensorboard: bool = False,
        quiet: bool = False,
        console: Console | None = None,
        step_every: int = 50,
        line_every_seconds: float = 60.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scalars = Scalars(folder / TENSORBOARD_NAME) if tensorboard else None
        self._log = Log(folder / LOG_NAME)
        self._screen = screen_for(console or Console(), quiet=quiet, line_every_seconds=line_every_seconds)
        self._title: str | None = title
        self._step_every = step_every
        self._now = now
        self._pace = Pace()
        self._place = Place()
        self._shown: dict[str, float] = {}
        self._averages: dict[str, Average] = {}
        self._resumed = False

    def plan(self, phases: Iterable[PlannedPhase]) -> None:
        self._pace.plan(phases)

    def resume_at(self, position: int) -> None:
        self._resumed = True
        if not self._log.cut(position):
            self.say(
                f"warning: {self._log.path} has fewer than the {position} bytes it had at the checkpoint: "
                "lines are missing, the run goes on"
            )

    @property
    def position(self) -> int:
        return self._log.position

    def phase(self, name: str, *, epochs: int, steps: int, done: int = 0) -> None:
        self._say_title()
        self._place = self._place.at_phase(name, epochs, steps, done, self._pace.steps_before(name))
        self._pace.begin(name, max(steps, 1))
        self._shown, self._averages = {}, {key: Average(STEP_WEIGHT) for key in SMOOTHED}
        if self._scalars is not None:
            self._scalars.open(purge_after=self._place.step_of_run if self._resumed else None)
        self._screen.begin(self._view({}), self._now())

    def step(self, values: Mapping[str, float]) -> None:
        now = self._now()
        self._place = self._place.next()
        self._pace.step(now, starts_epoch=self._place.step_of_epoch == 1)
        for key, value in values.items():
            self._shown[key] = self._averages[key].add(value) if key in self._averages else value
        if self._place.done % self._step_every == 0:
            self._write("step", values)
        if self._screen.due(now):
            self._screen.step(self._view(self._shown), now)

    def epoch(self, values: Mapping[str, float]) -> None:
        self._write("epoch", values)
        self._screen.epoch(self._view(values), self._now())

    def note(self, kind: str, values: Mapping[str, Any]) -> None:
        place = self._place
        head = {"time": _utc(), "kind": kind, "phase": place.phase, "epoch": place.epoch, "step": place.done}
        self._log.write(head | plain(values))

    def say(self, text: str) -> None:
        self._screen.say(text)

    def close(self) -> None:
        self._screen.close()
        self._log.close()
        if self._scalars is not None:
            self._scalars.close()

    def _write(self, kind: str, values: Mapping[str, float]) -> None:
        self.note(kind, values)
        if self._scalars is not None:
            self._scalars.write(kind, values, self._place.step_of_run)

    def _view(self, values: Mapping[str, float]) -> View:
        place, left = self._place, self._place.left
        return View(
            phase=place.phase or "",
            epoch=max(place.epoch, 1),
            epochs=place.epochs,
            step=place.step_of_epoch,
            steps=place.steps,
            done=place.done / max(place.done + left, 1),
            values=dict(values),
            phase_left=self._pace.phase_left(left),
            run_left=self._pace.run_left(left),
        )

    def _say_title(self) -> None:
        if self._title is not None:
            self.say(self._title)
        self._title = None


@dataclasses.dataclass(frozen=True)
class Place:
    """How far a run has come: `done` steps of a phase of `epochs` times `steps`, after `before` steps of others."""

    phase: str | None = None
    epochs: int = 0
    steps: int = 0
    done: int = 0
    before: int = 0

    def at_phase(self, name: str, epochs: int, steps: int, done: int, before: int | None) -> Place:
        """In another phase; where nobody knows the steps `before` it, those so far count."""
        if before is None:
            before = self.before if name == self.phase else self.step_of_run
        return Place(name, epochs, steps, done, before)

    def next(self) -> Place:
        """One step further."""
        assert self.phase is not None, "a step outside of any phase"
        return dataclasses.replace(self, done=self.done + 1)

    @property
    def epoch(self) -> int:
        """The epoch that the last step was of; 0 before the first step."""
        return math.ceil(self.done / max(self.steps, 1))

    @property
    def step_of_epoch(self) -> int:
        """Steps of that epoch so far."""
        return self.done - max(self.epoch - 1, 0) * self.steps

    @property
    def step_of_run(self) -> int:
        return self.before + self.done

    @property
    def left(self) -> int:
        """Steps left of the phase."""
        return max(self.epochs * self.steps - self.done, 0)


# ------------------------------------------------------------------------------------------------------ the log


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a log. A last line that a killed process left unfinished is skipped; other damage is refused."""
    path = Path(path)
    try:
        *lines, _torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FileError(f"{path} can't be read ({error.strerror}): give the {LOG_NAME} of a run") from error
    return [_parsed(line, path, number) for number, line in enumerate(lines, 1)]


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise FileError(f"{path}, line {number} is damaged ({error}): delete the line, or restore the file") from error
    if not isinstance(data, dict):
        raise FileError(f"{path}, line {number} is no JSON object: delete the line, or restore the file")
    return data


def plain(value: Any) -> Any:
    """`value` as JSON data: floats with six digits, NaN and infinity as strings that `float` understands.

    What JSON has no word for becomes its `str`: a run of hours does not end because of its log.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def _utc() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class Log:
    """A file of JSON lines to append to. What a killed process left of its last line is cut off first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)  # a line that could not be written does not come up again
        except OSError as error:
            raise FileError(f"{path} can't be written ({error.strerror}): choose another folder") from error
        self._cut_torn_line()

    @property
    def position(self) -> int:
        """Bytes so far, safe on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._full(error) from error
        return self._file.seek(0, os.SEEK_END)

    def cut(self, position: int) -> bool:
        """Cut off all after `position`; False if there are not even as many bytes."""
        if self._file.seek(0, os.SEEK_END) < position:
            return False
        self._file.truncate(position)
        self._cut_torn_line()
        return True

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append a line; it outlives this process from here on."""
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> FileError:
        return FileError(f"{self.path} can't be written ({error.strerror}): free some space, then go on with --resume")

    def close(self) -> None:
        """May be called twice."""
        self._file.close()

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        whole = sum(len(line) for line in self._file if line.endswith(b"\n"))
        self._file.truncate(whole)


# -------------------------------------------------------------------------------------------------- TensorBoard


class Scalars:
    """TensorBoard's files of a run, one curve for each value of the log's lines of steps and epochs."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise HeadgateError(
                f"TensorBoard's files can't be written ({error}): pip install 'headgate[train]', or do without them"
            ) from error
        self._make_writer: Callable[..., Any] = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def open(self, purge_after: int | None) -> None:
        """Ready to write; what an earlier process wrote of steps after `purge_after` is hidden."""
        if self._writer is None:
            purge_step = None if purge_after is None else purge_after + 1
            self._writer = self._make_writer(str(self._folder), purge_step=purge_step)

    def write(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """One point for each value; after an epoch they can be seen."""
        for key, value in values.items():
            self._writer.add_scalar(f"{kind}/{key}", float(value), step)
        if kind == "epoch":
            self._writer.flush()

    def close(self) -> None:
        """May be called twice."""
        if self._writer is not None:
            self._writer.close()
