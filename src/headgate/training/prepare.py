"""From a recipe to what a run needs: its data, its network, its gates, its teacher; and whether all of that fits.

`check` finds out before a run begins what would otherwise stop it hours later. Knows nothing of folders, steps or
checkpoints.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headgate.data.batches import normalization_named
from headgate.data.sources import DEFAULT_NORMALIZATION, DataSet, open_data
from headgate.errors import HeadgateError, ModelError, TargetError
from headgate.exits.add import add_exits
from headgate.exits.cascade import ExitModel
from headgate.gated import GatedModel
from headgate.gates.budget import Budget, parse_target
from headgate.gating import gate
from headgate.graph.grouping import granularity_named
from headgate.graph.macs import count_macs
from headgate.graph.trace import tensors_in
from headgate.models.names import load_named
from headgate.training.recipe import PhaseName, Recipe
from headgate.training.teacher import Renormalized


@dataclass(frozen=True)
class Start:
    """The network a run starts from, fresh each time it is asked for, and an input for it."""

    recipe: Recipe
    example: Tensor

    def build(self) -> nn.Module:
        """The dense network with the weights the recipe names, or random ones from its seed."""
        weights = self.recipe.weights
        return self._made(file=None if weights == "pretrained" else weights)

    def architecture(self) -> nn.Module:
        """The dense network, for weights of our own: those the recipe names may no longer be where they were."""
        return self._made(fetch=False)

    def _made(self, file: str | None = None, fetch: bool = True) -> nn.Module:
        torch.manual_seed(self.recipe.seed)
        pretrained = self.recipe.weights == "pretrained"
        shape = tuple(self.example.shape)
        return load_named(self.recipe.model, shape, weights=file, pretrained=pretrained, fetch=fetch).model


def start_of(recipe: Recipe, shape: tuple[int, ...]) -> Start:
    """Where a run begins; an input of the data's shape."""
    if not recipe.model:
        raise HeadgateError("the recipe names no model: pass --model, or the name of a recipe")
    return Start(recipe, torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)))


def data_of(recipe: Recipe) -> DataSet:
    """The data a recipe names."""
    root = None if recipe.data_dir is None else Path(recipe.data_dir)
    return open_data(
        recipe.data, root=root, validation=recipe.validation, normalization=recipe.normalization,
        size=recipe.image_size, workers=recipe.workers,
    )  # fmt: skip


def gated_of(model: nn.Module, example: Tensor, recipe: Recipe, steps: int) -> GatedModel | ExitModel:
    """The network with the recipe's gates, on channels or behind exits, its budget planned over `steps` steps."""
    share = parse_target(recipe.target, count_macs(model, example))
    budget = (
        Budget.paper(share)
        if recipe.budget == "paper"
        else Budget(share, ramp_steps=max(1, round(recipe.ramp * steps)), weight=recipe.budget_weight)
    )
    if recipe.exits:
        return add_exits(
            model, example, recipe.exits, head=recipe.exit_head, target=share, budget=budget,
            classifier_weight=recipe.classifier_weight, train_model=recipe.train_model,
            temperature=recipe.temperature, hard=recipe.hard, backward=recipe.backward,  # type: ignore[arg-type]
        )  # fmt: skip
    options: dict[str, Any] = {
        "kind": recipe.kind, "granularity": granularity_named(recipe.granularity), "loss": recipe.loss,
        "static": recipe.static,
        "stream": None if recipe.stream == "auto" else recipe.stream,
        "rates": recipe.rates(), "initial_probability": recipe.initial_probability, "temperature": recipe.temperature,
        "hard": recipe.hard, "backward": recipe.backward,
    }  # fmt: skip
    return gate(model, example, target=share, frozen=recipe.frozen, budget=budget, **options)


def teacher_of(recipe: Recipe, phase: PhaseName, dense: nn.Module, shape: tuple[int, ...]) -> nn.Module | None:
    """Who teaches in a phase: the dense network, or the one the recipe names, or nobody."""
    if recipe.distill == 0 or phase == "dense" or (phase == "gates" and not recipe.distill_gates):
        return None
    if recipe.teacher is not None:
        model, weights = _teacher_named(recipe.teacher)
        dense = load_named(model or recipe.model, shape, weights=weights).model
        dense = _used_to(recipe, dense)
    return dense.eval().requires_grad_(False)


def _used_to(recipe: Recipe, teacher: nn.Module) -> nn.Module:
    """The teacher as it sees images that are normalised for its student."""
    if recipe.teacher_normalization is None:
        return teacher
    if recipe.data == "digits":
        raise HeadgateError("the digits come normalised, for everybody alike: leave out --teacher-normalization")
    given = normalization_named(recipe.normalization or DEFAULT_NORMALIZATION)
    return Renormalized(teacher, given, normalization_named(recipe.teacher_normalization))


def check(recipe: Recipe, data: DataSet, dense: nn.Module | None = None) -> None:
    """Raise whatever would stop the run later: weights, shapes, classes, gates, target, teacher.

    `dense` is the network that the run starts from, where it is not the recipe that says so.
    """
    start = start_of(recipe, data.shape)
    if dense is None and recipe.weights is None and not recipe.dense_epochs:
        raise HeadgateError(
            "the run would gate a network with random weights: "
            "give --weights FILE, or train it first with --dense-epochs"
        )
    if recipe.tune_epochs and not recipe.gate_epochs:
        raise HeadgateError(f"recipe {recipe.name!r}: there is nothing to tune without gates: gate_epochs=0")
    if recipe.compile:
        _check_compiler()
    model = (dense or start.build()).eval()
    try:
        with torch.no_grad():
            logits = tensors_in(model(start.example))[0]
    except Exception as error:
        raise ModelError(
            f'"{recipe.model}" rejects images of shape {data.shape} ({type(error).__name__}: {error}): '
            "choose another model, or --image-size"
        ) from error
    if logits.dim() != 2 or logits.shape[1] < data.classes:
        raise ModelError(
            f'"{recipe.model}" gives {tuple(logits.shape[1:])} scores an image, but the data has {data.classes} '
            "classes: give the model as many outputs"
        )
    teacher = teacher_of(recipe, "tune", model, tuple(start.example.shape))
    if teacher is not None:
        _check_teacher(teacher, start.example, logits, recipe)
    if recipe.gate_epochs:
        tuned_of(gated_of(model, start.example, recipe, 1), recipe)


def _check_teacher(teacher: nn.Module, example: Tensor, logits: Tensor, recipe: Recipe) -> None:
    try:
        with torch.no_grad():
            answers = tensors_in(teacher(example))[0]
    except Exception as error:
        raise ModelError(
            f"the teacher {recipe.teacher!r} rejects images of shape {tuple(example.shape[1:])} "
            f"({type(error).__name__}: {error}): choose another"
        ) from error
    if answers.shape != logits.shape:
        raise ModelError(
            f"the teacher {recipe.teacher!r} gives {tuple(answers.shape[1:])} scores an image, "
            f"its student {tuple(logits.shape[1:])}: choose one of the same classes"
        )


def _check_compiler() -> None:
    try:
        torch.compile(torch.neg, dynamic=False)(torch.zeros(2))
    except Exception as error:
        raise HeadgateError(
            f"compile=True, but torch.compile does not work here ({type(error).__name__}): "
            "install a C++ compiler, or leave it out"
        ) from error


def settled(decided: nn.Module, recipe: Recipe) -> nn.Module:
    """What is left to tune: gates, where there still are some, are decided from now on, and learn if they shall."""
    return decided.settle_(learning=recipe.tune_gate_lr > 0) if isinstance(decided, GatedModel) else decided


def tuned_of(gated: GatedModel | ExitModel, recipe: Recipe) -> nn.Module:
    """What the last phase trains, with random decisions: a shrunk network at the recipe's target, or settled gates."""
    if isinstance(gated, ExitModel):
        return gated
    if gated.dynamic is not None:
        if recipe.round_to != 1:
            raise HeadgateError(
                f"round_to={recipe.round_to}: gates that depend on the input leave no widths to round; leave it out"
            )
        return settled(gated, recipe)
    generator = torch.Generator().manual_seed(0)
    gated.set_gate_probabilities(
        {name: torch.rand(p.shape, generator=generator) for name, p in gated.gate_probabilities().items()}
    )
    gated.project(recipe.round_to)
    if bool(gated.decisions.all()):  # type: ignore[operator]
        raise TargetError(
            f"target {recipe.target} leaves every gate open, so there is nothing to learn: choose a lower one"
        )
    return gated.shrink()


def with_absolute_places(recipe: Recipe) -> Recipe:
    """The recipe with all paths absolute: a run must find its files again from wherever it goes on."""
    changes: dict[str, str] = {}
    for name in ("weights", "data_dir"):
        value = getattr(recipe, name)
        if value is not None and value != "pretrained":
            changes[name] = _absolute(value)
    if (model := _absolute_model(recipe.model)) != recipe.model:
        changes["model"] = model
    if recipe.data.startswith("folder:"):
        path = os.path.expanduser(recipe.data.removeprefix("folder:"))
        changes["data"] = "folder:" + _absolute(os.path.join(recipe.data_dir or "", path))
    if recipe.teacher is not None:
        model, weights = _teacher_named(recipe.teacher)
        changes["teacher"] = f"{_absolute_model(model)}={_absolute(weights)}"
    return replace(recipe, **changes)  # type: ignore[arg-type]


def _teacher_named(teacher: str) -> tuple[str, str]:
    """The model and the weights of NAME=weights.safetensors; without a name, the student's model."""
    named = re.fullmatch(r"(.*\.py:\w+|(?:\w+:)?[\w.-]*)=(.+)", teacher)
    return (named[1], named[2]) if named else ("", teacher)


def _absolute_model(model: str) -> str:
    file, colon, function = model.rpartition(":")
    return os.path.abspath(file) + colon + function if file.endswith(".py") else model


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def with_data_in(recipe: Recipe, data_dir: str | None) -> Recipe:
    """The recipe of a run whose data has moved: to a folder that holds it, or, of images in folders, that is it."""
    if data_dir is None:
        return recipe
    data = f"folder:{_absolute(data_dir)}" if recipe.data.startswith("folder:") else recipe.data
    return replace(recipe, data_dir=data_dir, data=data)
