"""What the user sees of a run: a live view in a terminal, plain lines elsewhere, or nothing.

Takes where the run stands (`View`) and lines to keep; prints them. Knows nothing of files, of torch, or of how the
numbers came about. Its own words are ASCII, so that they print wherever the output goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

REFRESH_SECONDS = 0.1
BAR_WIDTH = 30


def duration(seconds: float) -> str:
    """`seconds` in the units that matter: '4.2 s', '43 s', '12 min 04 s', '3 h 05 min', '2 d 07 h'."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole} s"
    if not hours:
        return f"{minutes} min {whole % 60:02} s"
    return f"{days} d {hours % 24:02} h" if days else f"{hours} h {minutes % 60:02} min"


def _number(value: float) -> str:
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def _percent(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}%}" if math.isfinite(value) else str(value)


def _fine_percent(value: float) -> str:
    return _percent(value, 2)


SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", _number),
    "accuracy": ("train", _fine_percent),
    "validation_accuracy": ("validation", _fine_percent),
    "cost": ("cost", _percent),
    "cost_decided": ("decided", _percent),
    "goal": ("goal", _percent),
    "polarised": ("polarised", _percent),
    "lr": ("lr", "{:.3g}".format),
    "seconds": ("took", duration),
}
"""The values that are shown, in this order, with label and form. There is no place for others."""


def describe(values: Mapping[str, float]) -> str:
    """The values of `SHOWN` that are there, with their labels."""
    return "  ".join(f"{label} {form(values[key])}" for key, (label, form) in SHOWN.items() if key in values)


@dataclass(frozen=True)
class View:
    """Where a run stands. `step` counts within the epoch, `done` is the share of the phase; times are in seconds."""

    phase: str
    epoch: int
    epochs: int
    step: int
    steps: int
    done: float
    values: Mapping[str, float]
    phase_left: float | None
    run_left: float | None

    @property
    def epoch_of(self) -> str:
        """'epoch  3/12', as wide for every epoch."""
        return f"epoch {self.epoch:{len(str(self.epochs))}}/{self.epochs}"

    @property
    def left(self) -> str:
        """The time left of the phase, and of the run if that is more; empty while it is not known."""
        if self.phase_left is None:
            return ""
        phase = f"{duration(self.phase_left)} left"
        more = self.run_left is not None and self.run_left > self.phase_left
        return f"{phase}, {duration(self.run_left or 0)} for the run" if more else phase


class Screen:
    """One that shows nothing."""

    def due(self, now: float) -> bool:
        """Whether it is time to call `step`."""
        return False

    def begin(self, view: View, now: float) -> None:
        """A phase begins."""

    def step(self, view: View, now: float) -> None:
        """The run went on."""

    def epoch(self, view: View, now: float) -> None:
        """An epoch ended; the view's values are of the whole of it."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Nothing follows."""


class Lines(Screen):
    """Plain lines: one an epoch, and one every `every_seconds` within it. No control characters, no cut at a width."""

    def __init__(self, console: Console, every_seconds: float) -> None:
        self._console = console
        self._every = every_seconds
        self._last = -math.inf

    def due(self, now: float) -> bool:
        return now - self._last >= self._every

    def begin(self, view: View, now: float) -> None:
        self._last = now

    def step(self, view: View, now: float) -> None:
        self._last = now
        self._line(view.phase, view.epoch_of, f"step {view.step}/{view.steps}", describe(view.values), view.left)

    def epoch(self, view: View, now: float) -> None:
        self._last = now
        self._line(view.phase, view.epoch_of, describe(view.values), view.left)

    def say(self, text: str) -> None:
        clean = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
        self._console.print(clean, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _line(self, *parts: str) -> None:
        self.say("  ".join(part for part in parts if part))


class Bar(Screen):
    """A live view at the bottom of a terminal; what stays scrolls above it.

    It is drawn anew from within `step`, not by a thread of its own: data loaders fork, and threads do not like it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: View | None = None
        self._last = -math.inf
        self._live = Live(console=console, auto_refresh=False, transient=True, get_renderable=self._render)

    def due(self, now: float) -> bool:
        return now - self._last >= REFRESH_SECONDS

    def begin(self, view: View, now: float) -> None:
        self._live.start()
        self.step(view, now)

    def step(self, view: View, now: float) -> None:
        self._view, self._last = view, now
        self._live.refresh()

    def epoch(self, view: View, now: float) -> None:
        line = Text.assemble((view.phase, "bold"), "  ", view.epoch_of, "  ", describe(view.values))
        self._console.print(line, highlight=False)
        self.step(view, now)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        view = self._view
        if view is None:
            return Text()
        top = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=1.0, completed=view.done, width=BAR_WIDTH)
        top.add_row(Text(view.phase, "bold"), view.epoch_of, bar, _percent(view.done), Text(view.left, "cyan"))
        return Group(top, Text(describe(view.values), "dim"))


def screen_for(console: Console, *, quiet: bool, line_every_seconds: float) -> Screen:
    """Nothing if `quiet`, the live view in a terminal that can draw it, plain lines elsewhere."""
    if quiet:
        return Screen()
    if console.is_terminal and console.is_interactive:
        return Bar(console)
    return Lines(console, line_every_seconds)
