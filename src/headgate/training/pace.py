"""How long the rest of a run takes: learned from the steps so far, phase by phase.

Takes the plan of the run and the time of every step; gives the seconds left of a phase and of the run, or None where
nothing is known yet. Knows nothing of clocks (it is told the time), of torch, or of what a step does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

STEP_WEIGHT = 1 / 50
"""The least weight of the newest step in a running average."""

EPOCH_WEIGHT = 1 / 3
"""The same for what happens once an epoch: evaluating, saving, starting to load data."""

PlannedPhase = tuple[str, int] | tuple[str, int, float]
"""Name, steps in all, and (1 unless said) what a step costs, in any unit that is the same for all phases."""


class Average:
    """A running average: the plain mean at first, then exponential, with at least `weight` for the newest value.

    It starts anew at a value that is not finite, and after it, so that one NaN does not stay for ever.
    """

    def __init__(self, weight: float) -> None:
        self.value: float | None = None
        self._least = weight
        self._count = 0

    def add(self, value: float) -> float:
        """The average with `value` in it."""
        if self.value is None or not math.isfinite(self.value) or not math.isfinite(value):
            self.value, self._count = value, 1
        else:
            self._count += 1
            self.value += (value - self.value) * max(self._least, 1 / self._count)
        return self.value


class Rate:
    """How long a step of one phase takes, with its part of what happens once an epoch."""

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._step = Average(STEP_WEIGHT)
        self._between = Average(EPOCH_WEIGHT)

    def add(self, seconds: float, *, starts_epoch: bool) -> None:
        """A step took `seconds`; if it starts an epoch, the end of the epoch before is in them."""
        if starts_epoch and self._steps_per_epoch > 1 and self._step.value is not None:
            self._between.add(max(0.0, seconds - self._step.value))
        else:
            self._step.add(seconds)

    @property
    def seconds(self) -> float | None:
        """Seconds a step; None before the first one that was measured."""
        if self._step.value is None:
            return None
        return self._step.value + (self._between.value or 0.0) / self._steps_per_epoch


class Pace:
    """The rates of all phases, and from them the time left.

    The first step of a phase is not measured: it warms up. A phase not yet seen is guessed from the one seen last, by
    the plan's costs of a step.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._costs: dict[str, float] = {}
        self._rates: dict[str, Rate] = {}
        self._phase: str | None = None
        self._mark: float | None = None

    def plan(self, phases: Iterable[PlannedPhase]) -> None:
        """All phases of the run, in their order."""
        for name, steps, *cost in phases:
            self._steps[name] = steps
            self._costs[name] = cost[0] if cost else 1.0

    def begin(self, phase: str, steps_per_epoch: int) -> None:
        """The next steps are of `phase`."""
        known = self._rates.pop(phase, None)
        self._rates[phase] = known or Rate(steps_per_epoch)  # at the end: the latest
        self._phase, self._mark = phase, None

    def step(self, now: float, *, starts_epoch: bool) -> None:
        """A step ended."""
        assert self._phase is not None, "a step outside of any phase"
        if self._mark is not None:
            self._rates[self._phase].add(now - self._mark, starts_epoch=starts_epoch)
        self._mark = now

    def steps_before(self, phase: str) -> int | None:
        """Steps of the phases before `phase`; None if the plan does not have it."""
        names = list(self._steps)
        return sum(self._steps[name] for name in names[: names.index(phase)]) if phase in names else None

    def phase_left(self, steps: int) -> float | None:
        """Seconds for the `steps` that are left of the phase under way."""
        return None if self._phase is None else self._seconds(self._phase, steps)

    def run_left(self, steps: int) -> float | None:
        """The same with all phases after it; None if the plan does not have it."""
        names = list(self._steps)
        if self._phase not in names:
            return None
        after = [self._seconds(name, self._steps[name]) for name in names[names.index(self._phase) + 1 :]]
        times = [seconds for seconds in [self.phase_left(steps), *after] if seconds is not None]
        return sum(times) if len(times) == len(after) + 1 else None

    def _seconds(self, phase: str, steps: int) -> float | None:
        """Seconds for `steps` of `phase`, by its own rate or the latest that is known."""
        for name in [phase, *reversed(self._rates)]:
            rate = self._rates[name].seconds if name in self._rates else None
            if rate is not None:
                return steps * rate * self._costs.get(phase, 1.0) / self._costs.get(name, 1.0)
        return None
