"""One phase of a run, from top to bottom: batches, loss, gradient, step.

Takes a network (dense, gated or shrunk: it makes no difference), a split of the data, a recipe and a position; goes on
from there to the end of the phase. The order of the images, their augmentation and the noise of the gates depend on
nothing but the seed and the position, so a phase that went on from a checkpoint ends bit-identically. Knows nothing of
what comes before or after the phase, nor of files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from headgate.data.batches import Part, Split, eval_batch_size
from headgate.errors import HeadgateError, NonFiniteLoss
from headgate.exits.cascade import ExitModel
from headgate.gated import GatedModel
from headgate.graph.trace import tensors_in
from headgate.training.distill import Distillation, student_loss
from headgate.training.journal import AnyJournal
from headgate.training.mix import Mixture
from headgate.training.recipe import PHASES, PhaseName, Recipe
from headgate.training.teacher import answers, compiled_teacher
from headgate.training.team import Team

DECIDED_EVERY = 50
"""Steps after which the thresholded cost is looked at again."""
BINS = 20
"""Of histograms of p."""
SQUEEZE_EVERY = 50
"""Steps after which it is asked what has closed for good."""


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is written."""


@dataclass
class Totals:
    """Sums over the steps of an epoch, in this process; checkpoints hold them, so that all of it is reported."""

    loss: float = 0.0
    steps: int = 0
    right: int = 0
    images: int = 0
    seconds: float = 0.0

    def add(self, loss: float, logits: Tensor, labels: Tensor, seconds: float) -> None:
        """Count one step."""
        self.loss += loss
        self.steps += 1
        self.right += int((logits.argmax(1) == labels).sum())
        self.images += len(labels)
        self.seconds += seconds

    @property
    def accuracy(self) -> float:
        """Share of the training images that were classified right."""
        return self.right / max(self.images, 1)

    def means(self, team: Team) -> dict[str, float]:
        """Over all processes."""
        loss, steps, right, images = team.total([self.loss, self.steps, self.right, self.images])
        return {"loss": loss / max(steps, 1), "accuracy": right / max(images, 1), "seconds": self.seconds}


@dataclass
class Phase:
    """A phase in training: what is trained, with what, and how far it is."""

    name: PhaseName
    net: nn.Module
    optimizer: Optimizer
    teacher: nn.Module | None = None
    step: int = 0
    totals: Totals = field(default_factory=Totals)
    """Of the epoch that is under way."""


@dataclass(frozen=True)
class Surroundings:
    """What a phase needs around it."""

    recipe: Recipe
    split: Split
    team: Team
    journal: AnyJournal
    wants_stop: Callable[[], bool] = lambda: False
    wants_save: Callable[[], bool] = lambda: False
    save: Callable[[Phase], None] = lambda phase: None
    every_epoch: Callable[[Phase], dict[str, float]] = lambda phase: {}
    after_backward: Callable[[nn.Module], None] = lambda net: None
    """Between gradient and step: for regularizers that work on gradients."""


def begin(name: PhaseName, net: nn.Module, recipe: Recipe, teacher: nn.Module | None = None) -> Phase:
    """A phase at its first step."""
    if teacher is not None and recipe.compile:
        teacher = compiled_teacher(teacher)
    return Phase(name, net, make_optimizer(net, name, recipe), teacher)


def prepared(phase: Phase, recipe: Recipe, team: Team) -> tuple[nn.Module, Optimizer]:
    """The phase's network and optimizer as steps are taken with them: on all processes, compiled if the recipe says so.

    Networks that are squeezed while they train are not: each of their forms would have to be compiled.
    """
    net, optimizer = team.prepare(phase.net, phase.optimizer)
    if recipe.compile and not (phase.name == "gates" and recipe.squeeze_below):
        net = _compiled(net)
    return net, optimizer


def _compiled(net: nn.Module) -> nn.Module:
    """With code of its own for every shape of batch: which code runs must not depend on what ran before."""
    compiled = torch.compile(net, dynamic=False)
    assert isinstance(compiled, nn.Module)
    return compiled


def make_optimizer(net: nn.Module, name: PhaseName, recipe: Recipe) -> Optimizer:
    """SGD over the weights, and over the gates with their own rate and decay."""
    lr = recipe.lr(name, 0, 1)
    if isinstance(net, ExitModel):
        groups = net.param_groups(lr, recipe.weight_decay, recipe.gate_lr, recipe.classifier_scale)
    elif isinstance(net, GatedModel):
        groups = net.param_groups(lr=lr, weight_decay=recipe.weight_decay, gate_lr=recipe.gate_rate(name, 0, 1))
    else:
        weights = [parameter for parameter in net.parameters() if parameter.requires_grad]
        groups = [{"params": weights, "lr": lr, "weight_decay": recipe.weight_decay, "name": "weights"}]
    return SGD(groups, lr=max(lr, 1e-12), momentum=recipe.momentum, nesterov=recipe.momentum > 0)


def run_phase(phase: Phase, around: Surroundings) -> None:
    """Train to the end of the phase."""
    recipe, team, journal = around.recipe, around.team, around.journal
    steps = around.split.steps(recipe.batch_size)
    epochs = recipe.epochs_of(phase.name)
    journal.phase(phase.name, epochs=epochs, steps=steps, done=phase.step)
    net, optimizer = prepared(phase, recipe, team)
    gated = phase.net if isinstance(phase.net, (GatedModel, ExitModel)) else None
    for epoch in range(phase.step // steps, epochs):
        net.train()
        batches = around.split.train_batches(
            recipe.batch_size, seed=_number(recipe.seed, phase.name), epoch=epoch, start=phase.step % steps,
            rank=team.rank, processes=team.processes,
        )  # fmt: skip
        before = time.perf_counter()
        for images, labels in batches:
            lr = recipe.lr(phase.name, phase.step, steps)
            _set_lr_(optimizer, lr, recipe.gate_rate(phase.name, phase.step, steps))
            torch.manual_seed(_number(recipe.seed, phase.name, phase.step, team.rank))
            loss, logits = train_step(net, optimizer, phase, images.to(team.device), labels.to(team.device), around)
            phase.step += 1
            now = time.perf_counter()
            phase.totals.add(loss, logits, labels.to(team.device), now - before)
            before = now
            values = {"loss": loss, "accuracy": phase.totals.accuracy, "lr": lr}
            journal.step(values | _gate_values(gated, phase.step))
            if isinstance(gated, GatedModel) and recipe.squeeze_below and phase.step % SQUEEZE_EVERY == 0:
                net, optimizer = _squeeze(phase, gated, net, optimizer, around)
            if phase.step % steps:
                _obey(phase, around, loss)
        means = phase.totals.means(team)
        phase.totals = Totals()
        journal.epoch(means | _gate_values(gated, 0) | {"lr": lr} | around.every_epoch(phase))
        if (histogram := _histogram(gated, images, labels)) is not None:
            journal.note("gates", {"histogram": histogram})
        # only now, with the epoch logged: a run that stops here goes on with the next
        _obey(phase, around, loss, last_of_phase=phase.step == epochs * steps)
    team.release()


def train_step(
    net: nn.Module, optimizer: Optimizer, phase: Phase, images: Tensor, labels: Tensor, around: Surroundings
) -> tuple[float, Tensor]:
    """One step of the optimizer: the task loss, and the network's answers."""
    recipe, team = around.recipe, around.team
    mixture = Mixture.draw(len(images), recipe.mix) if recipe.mix else None
    images = mixture.images(images) if mixture else images
    taught = _taught(phase.teacher, images, team)
    with _in_the_loss():
        logits = tensors_in(net(images))[0]
    labels = mixture.labels(labels, logits.shape[1]) if mixture else labels
    distillation = Distillation(recipe.distill, recipe.distill_temperature)
    task_loss = student_loss(logits, labels, taught, distillation, recipe.label_smoothing)
    loss = task_loss + phase.net.cost_loss() if isinstance(phase.net, (GatedModel, ExitModel)) else task_loss
    if isinstance(phase.net, ExitModel):
        loss = loss + phase.net.classifier_loss(labels, recipe.label_smoothing)
    with _in_the_loss():
        team.backward(loss)
    around.after_backward(phase.net)
    optimizer.step()
    optimizer.zero_grad()
    return float(task_loss.detach()), logits.detach()


@contextmanager
def _in_the_loss() -> Iterator[None]:
    """Several processes wait for the gradient of every parameter: that one has none shows in the pass after."""
    try:
        yield
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        raise HeadgateError(
            "a parameter takes no part in the loss, which several processes can't do: "
            "freeze it with requires_grad_(False), or train in one process"
        ) from error


def _squeeze(
    phase: Phase, gated: GatedModel, net: nn.Module, optimizer: Optimizer, around: Surroundings
) -> tuple[nn.Module, Optimizer]:
    """Leave out what has closed for good, if that is worth it; all processes come to the same end."""
    if not gated.squeeze_(around.recipe.squeeze_below, phase.optimizer):
        return net, optimizer
    around.team.release()
    return prepared(phase, around.recipe, around.team)


def _obey(phase: Phase, around: Surroundings, loss: float, last_of_phase: bool = False) -> None:
    """Look up after a step: is the loss a number, does anybody want to stop or to save? All processes agree."""
    broken, stop, save = around.team.any_of([not np.isfinite(loss), around.wants_stop(), around.wants_save()])
    if broken:
        here = f"the loss became {loss}" if not np.isfinite(loss) else "the loss of another process is not finite"
        raise NonFiniteLoss(
            f"{here} at step {phase.step} of phase {phase.name!r}: "
            "start again in a new folder with a lower learning rate"
        )
    if stop or (save and not last_of_phase):
        around.save(phase)
    if stop:
        raise Interrupted


def _gate_values(gated: GatedModel | ExitModel | None, step: int) -> dict[str, float]:
    """What the view shows of gates; the thresholded cost only now and then."""
    if gated is None or (isinstance(gated, GatedModel) and gated.settled and not gated.learning):
        return {}
    values: dict[str, float] = {}
    if gated.budget.last_cost is not None:
        values["cost"] = gated.budget.last_cost
        if isinstance(gated, ExitModel) or gated.loss == "macs":  # the goal of other losses is no cost
            values["goal"] = gated.budget.target_now
    if isinstance(gated, ExitModel):
        return values
    values["polarised"] = gated.polarised()
    if step % DECIDED_EVERY == 0 and not gated.settled:  # otherwise what it costs is what is decided
        values["cost_decided"] = gated.thresholded_macs() / gated.dense_macs
    return values


def _histogram(gated: GatedModel | ExitModel | None, images: Tensor, labels: Tensor) -> list[int] | None:
    """How sure the gates are: parts of 0…1 by how many have their p there; of exits, P(leave) of these images."""
    if isinstance(gated, GatedModel):
        return None if gated.settled and not gated.learning else gated.histogram(BINS)
    if gated is None:
        return None
    counts, _ = np.histogram(gated.watch([(images, labels)]).p_NK.float().numpy(), BINS, (0.0, 1.0))
    return [int(count) for count in counts]


def _set_lr_(optimizer: Optimizer, lr: float, gate_lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = gate_lr if group.get("name") == "gates" else lr * group.get("lr_scale", 1.0)


def _number(seed: int, phase: PhaseName, *more: int) -> int:
    """A seed for one phase, or one step and process of it."""
    return int(np.random.SeedSequence([seed, PHASES.index(phase), *more]).generate_state(1)[0])


def _taught(teacher: nn.Module | None, images: Tensor, team: Team) -> Tensor | None:
    if teacher is None:
        return None
    with torch.no_grad(), team.accelerator.autocast():
        return answers(teacher, images)


# -------------------------------------------------------------------------------------------------- evaluation


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """In eval mode, and back."""
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)


@torch.no_grad()
def measure(net: nn.Module, split: Split, team: Team, batch_size: int | None = None) -> tuple[float, float]:
    """Share of a split's images classified right, and for a gated network its multiply-adds an image (else 0):
    every image counted once, whatever the number of processes."""
    right = images_seen = 0
    macs = 0.0
    batch_size = batch_size or eval_batch_size(split)
    with evaluating(net):
        for images, labels in split.eval_batches(batch_size, rank=team.rank, processes=team.processes):
            answers = tensors_in(net(images.to(team.device)))[0].argmax(1)
            right += int((answers == labels.to(team.device)).sum())
            images_seen += len(labels)
            if isinstance(net, (GatedModel, ExitModel)):
                macs += float(net.macs()) * len(labels)
    right_total, macs_total, total = team.total([right, macs, images_seen])
    return right_total / max(total, 1), macs_total / max(total, 1)


def accuracy(net: nn.Module, split: Split, team: Team, batch_size: int | None = None) -> float:
    """Share of a split's images classified right."""
    return measure(net, split, team, batch_size)[0]


def calibration_batches(split: Split, recipe: Recipe) -> Iterator[Any]:
    """Training images to prime gates and to re-estimate BatchNorm on: the same in every process."""
    wanted = max(recipe.calibration_batches, recipe.prime_batches)
    epochs = -(-wanted // split.steps(recipe.batch_size))
    for epoch in range(max(1, epochs)):
        yield from split.train_batches(recipe.batch_size, seed=_number(recipe.seed, "tune", 10**6), epoch=epoch)


def plain_batches(split: Split, recipe: Recipe) -> Part:
    """As many training images as calibration takes, as they are: what thresholds are set on. Augmented ones are harder
    than those that will come, so fewer of them would leave early, and the thresholds would spend less than was asked.
    """
    return Part(split, recipe.calibration_batches * recipe.batch_size)
