"""What will a run take? Carries out a few steps of each phase and says: time, memory, and both with more processes.

The shrunk network is not known before the gates are; one from random decisions at the target stands for it. Knows
nothing of folders or checkpoints.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from headgate.data.batches import DataSet
from headgate.errors import HeadgateError
from headgate.training.journal import SilentJournal
from headgate.training.loop import Surroundings, begin, prepared, train_step
from headgate.training.prepare import Start, check, data_of, gated_of, start_of, teacher_of, tuned_of
from headgate.training.recipe import PHASES, PhaseName, Recipe
from headgate.training.screen import duration
from headgate.training.team import Team

STEPS = 4
PREFETCHED = 2
"""Batches that each process which decodes images has ready, at most."""
PROCESSES = (1, 2, 4, 8)


@dataclass(frozen=True)
class PhaseForecast:
    """One phase: how many steps, and what one takes at each share of the batch, image loading included."""

    name: PhaseName
    steps: int
    step_seconds: dict[int, float]
    """By number of processes, each with its share of the batch."""
    activation_bytes: dict[int, int]
    """What a step keeps for its gradient, in each process."""
    parameter_bytes: int
    """Weights that learn: exchanged by the processes at each step as gradients."""


@dataclass(frozen=True)
class Forecast:
    """A whole run."""

    phases: tuple[PhaseForecast, ...]
    peak_bytes: int | None

    def seconds(self, processes: int = 1) -> float:
        """Training time, without evaluation and start."""
        return sum(phase.steps * phase.step_seconds[processes] for phase in self.phases)

    def memory(self, processes: int) -> int | None:
        """Of one process: what was measured here, with its smaller share of the activations."""
        if self.peak_bytes is None:
            return None
        largest = max(self.phases, key=lambda phase: phase.activation_bytes[1])
        return self.peak_bytes - largest.activation_bytes[1] + largest.activation_bytes[processes]

    def as_json(self) -> dict[str, Any]:
        """For programs: by number of processes, the time of a run and the memory of each."""
        shared = [
            {"processes": count, "seconds": round(self.seconds(count), 1), "bytes_each": self.memory(count)}
            for count in self.counts()
        ]
        phases = [
            {"phase": phase.name, "steps": phase.steps, "step_seconds": phase.step_seconds[1]} for phase in self.phases
        ]
        return {"phases": phases, "by_processes": shared}

    def counts(self) -> list[int]:
        """Numbers of processes that the batch can be shared by."""
        return [count for count in PROCESSES if all(count in phase.step_seconds for phase in self.phases)]


def measure(recipe: Recipe) -> Forecast:
    """Carry out a few steps of each phase with each share of the batch."""
    data = data_of(recipe)
    check(recipe, data)
    start = start_of(recipe, data.shape)
    if not recipe.epochs:
        raise HeadgateError("the run has no epochs, so there is nothing to measure: give --gate-epochs")
    team = Team(recipe.precision)
    phases = tuple(_measure_phase(name, start, data, team) for name in PHASES if recipe.epochs_of(name))
    return Forecast(phases, _peak_bytes(team.device))


def _measure_phase(name: PhaseName, start: Start, data: DataSet, team: Team) -> PhaseForecast:
    recipe = start.recipe
    steps = recipe.epochs_of(name) * data.train.steps(recipe.batch_size)
    net = _net(name, start, steps).to(team.device)
    seconds, kept = {}, {}
    for count in PROCESSES:
        if recipe.batch_size % count == 0 and (count == 1 or recipe.batch_size > count):  # one image has no variance
            share = replace(recipe, batch_size=recipe.batch_size // count)
            seconds[count], kept[count] = _measure_steps(name, net, replace(start, recipe=share), data, team)
    learning = sum(p.numel() * p.element_size() for p in net.parameters() if p.requires_grad)
    return PhaseForecast(name, steps, seconds, kept, learning)


def _net(name: PhaseName, start: Start, steps: int) -> nn.Module:
    model = start.build()
    if name == "dense":
        return model
    gated = gated_of(model, start.example, start.recipe, steps)
    return gated.train() if name == "gates" else tuned_of(gated, start.recipe)


def _measure_steps(name: PhaseName, net: nn.Module, start: Start, data: DataSet, team: Team) -> tuple[float, int]:
    """The median step after the first, and the bytes that it keeps for its gradient."""
    recipe = start.recipe
    teacher = teacher_of(recipe, name, start.build(), tuple(start.example.shape))
    phase = begin(name, net.train(), recipe, None if teacher is None else teacher.to(team.device))
    around = Surroundings(recipe, data.train, team, SilentJournal())
    stepping, optimizer = prepared(phase, recipe, team)
    times: list[float] = []
    kept = [0]
    batches = data.train.train_batches(recipe.batch_size, seed=0, epoch=0)
    ahead = PREFETCHED * recipe.workers
    if data.train.steps(recipe.batch_size) > ahead + STEPS:  # what was loaded while nobody computed says nothing
        for _ in range(ahead):
            next(batches)
    for _ in range(STEPS + 1):
        before = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        with _counting_kept(kept) if not times else _nothing():
            train_step(stepping, optimizer, phase, batch[0].to(team.device), batch[1].to(team.device), around)
        times.append(time.perf_counter() - before)
    team.release()
    return statistics.median(times[1:] or times), kept[0]


@contextmanager
def _counting_kept(total: list[int]) -> Iterator[None]:
    """Add up what autograd saves, each tensor once."""
    seen: set[int] = set()

    def count(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            total[0] += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _peak_bytes(device: torch.device) -> int | None:
    """The most memory that tensors on a GPU have had; of the processor, this process, where the system tells it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu":
        return None
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def show(found: Forecast, recipe: Recipe) -> None:
    """Print what was found."""
    table = Table(title=f"{recipe.name}: forecast from {STEPS} steps of each phase", title_justify="left")
    for column in ("phase", "epochs", "steps", "ms a step", "time"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in found.phases:
        seconds = phase.step_seconds[1]
        table.add_row(
            phase.name, str(recipe.epochs_of(phase.name)), f"{phase.steps:,}", f"{seconds * 1000:.0f}",
            duration(seconds * phase.steps),
        )  # fmt: skip
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"In all {duration(found.seconds())}; {_gigabytes(found.memory(1))} of memory. "
        "Priming, calibration and evaluation are not counted."
    )
    console.print("With more processes, each on cores of its own, sharing the batch, traffic between them not counted:")
    exchanged = max((phase.parameter_bytes for phase in found.phases), default=0) / 2**20
    for count in found.counts()[1:]:
        console.print(
            f"  {count} processes: {duration(found.seconds(count))}, "
            f"{found.seconds() / found.seconds(count):.1f}× as fast; "
            f"{_gigabytes(found.memory(count))} in each; {exchanged:.1f} MB of gradients exchanged a step"
        )


def _gigabytes(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / 2**30:.2f} GB"
