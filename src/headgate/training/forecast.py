"""What will a run take? Measures a few steps of each phase and says: time, memory, and both with more processes.

The shrunk network is not known before the gates are; a random one at the target stands for it. Knows nothing of
folders or checkpoints.
"""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from headgate.gated import GatedModel
from headgate.training.distill import Distillation, student_loss
from headgate.training.loop import begin, calibration_batches
from headgate.training.recipe import PHASES, PhaseName, Recipe
from headgate.training.run import Start, data_of, gated_of, start_of
from headgate.training.screen import duration

STEPS = 4
PROCESSES = (1, 2, 4, 8)


@dataclass(frozen=True)
class PhaseForecast:
    """One phase: how many steps, and the seconds of one at each share of the batch."""

    name: PhaseName
    steps: int
    step_seconds: dict[int, float]
    """By number of processes, each with its share of the batch, all on a machine like this one of their own."""
    gradient_bytes: int


@dataclass(frozen=True)
class Forecast:
    """A whole run."""

    phases: tuple[PhaseForecast, ...]
    peak_bytes: int

    def seconds(self, processes: int = 1) -> float:
        """Training time, without evaluation and start."""
        return sum(phase.steps * phase.step_seconds.get(processes, 0.0) for phase in self.phases)


def measure(recipe: Recipe) -> Forecast:
    """Run a few steps of each phase with each share of the batch."""
    data = data_of(recipe)
    start = start_of(recipe, data)
    steps = data.train.steps(recipe.batch_size)
    phases = []
    for name in PHASES:
        if recipe.epochs_of(name):
            net = _net(name, start, recipe, steps)
            teacher = start.build().eval() if recipe.distill and name != "dense" else None
            seconds = {
                count: _step_seconds(name, net, teacher, recipe, data.train, recipe.batch_size // count)
                for count in PROCESSES
                if recipe.batch_size // count >= 1
            }
            bytes_a_step = sum(p.numel() * p.element_size() for p in net.parameters() if p.requires_grad)
            phases.append(PhaseForecast(name, recipe.epochs_of(name) * steps, seconds, bytes_a_step))
    return Forecast(tuple(phases), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _net(name: PhaseName, start: Start, recipe: Recipe, steps: int) -> nn.Module:
    model = start.build()
    if name == "dense":
        return model
    gated = gated_of(model, start.example, recipe, recipe.gate_epochs * steps)
    if name == "gates":
        return gated
    generator = torch.Generator().manual_seed(0)
    gated.set_gate_probabilities(
        {mask: torch.rand(p.shape, generator=generator) for mask, p in gated.gate_probabilities().items()}
    )
    return gated.project(recipe.round_to).shrink()


def _step_seconds(name, net, teacher, recipe, split, batch) -> float:  # type: ignore[no-untyped-def]
    phase = begin(name, net.train(), recipe)
    distillation = Distillation(recipe.distill, recipe.distill_temperature)
    batches = calibration_batches(split, replace(recipe, batch_size=batch, calibration_batches=STEPS + 1))
    times = []
    for _, (images, labels) in zip(range(STEPS + 1), batches, strict=False):
        started = time.perf_counter()
        with torch.no_grad():
            answers = None if teacher is None else teacher(images)
        loss = student_loss(net(images), labels, answers, distillation, recipe.label_smoothing)
        (loss + net.cost_loss() if isinstance(net, GatedModel) else loss).backward()
        phase.optimizer.step()
        phase.optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:] or times)


def forecast(recipe: Recipe) -> Forecast:
    """Measure, and print what was found."""
    found = measure(recipe)
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
    console.print(f"In all {duration(found.seconds())}; {found.peak_bytes / 2**30:.2f} GB of memory in this process.")
    console.print("With more processes, each on cores of its own, sharing the batch, traffic between them not counted:")
    exchanged = max((phase.gradient_bytes for phase in found.phases), default=0) / 2**20
    for count in PROCESSES[1:]:
        if all(count in phase.step_seconds for phase in found.phases):
            times = found.seconds() / found.seconds(count)
            console.print(
                f"  {count} processes: {duration(found.seconds(count))}, {times:.1f}× as fast; "
                f"each step exchanges {exchanged:.1f} MB of gradients a process"
            )
    return found
