"""Putting exits into a model: a classifier and a gate behind each cut, for as many classes as the model tells apart.

The model itself is copied, and its own code stays as it is. Knows nothing of how the cascade runs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headgate.errors import HeadgateError, ModelError, TargetError
from headgate.exits.cascade import ExitModel
from headgate.exits.cuts import CHANNELS, check_sides, find_cuts, gates_at, segments_between
from headgate.exits.heads import MakeHead, head_macs, head_maker, made_head
from headgate.gated import GatedModel
from headgate.gates.budget import Budget, own_budget, parse_target
from headgate.gates.draws import Channels
from headgate.gates.dynamic import GateNetwork
from headgate.gates.gumbel import Backward, Relaxation
from headgate.graph.analyse import check_module_names
from headgate.graph.macs import traced_macs
from headgate.graph.trace import ModuleSpan, as_arguments, stripped_copy, tensors_in
from headgate.graph.wrapped import unwrapped
from headgate.inference.shrink import TOLERANCE, difference, random_like

LEAVES_AT_FIRST = 0.1
"""P(leave) of every gate before training."""


def add_exits(
    model: nn.Module,
    example_input: Tensor,
    at: Sequence[str],
    *,
    head: str | MakeHead = "mean",
    target: float | str = 0.7,
    budget: Budget | None = None,
    classifier_weight: float = 1.0,
    initial_probability: float = LEAVES_AT_FIRST,
    train_model: bool = True,
    temperature: float = 1.0,
    hard: bool = True,
    backward: Backward = "sample",
) -> ExitModel:
    """Put an intermediate classifier and a gate behind the modules `at`. The model itself is not changed.

    The model may be plain, shrunk, or gated (then the cost of the cascade counts what its channels' gates leave). Each
    cut must be the only way through: what comes after it reads its output and nothing computed before. `head` is the
    kind of classifier: "mean", "conv", or what makes one from (channels, classes). `target` is a share of the whole
    model's MACs, or a number such as "60M". With `train_model=False` only classifiers and gates learn, and the last
    exit answers as the model always did. `temperature`, `hard` and `backward` are those of `headgate.gate`.
    """
    _check_places(at)
    example_input = _one_tensor(example_input)
    make_head, relaxation = head_maker(head), Relaxation(temperature, hard, backward)
    copied = _copied(unwrapped(model))
    if isinstance(copied, GatedModel):
        network, recorded = copied.model, copied.graph.trace
        costs = {item.name: item.macs for item in copied.graph.costs}
    else:
        network = copied
        recorded, costs = traced_macs(copied, example_input)
    check_module_names(at, dict(network.named_modules()), "at")
    share = parse_target(target, sum(costs.values()))
    budget = own_budget(budget, share, sum(costs.values()))
    spans = find_cuts(recorded, at)
    classes = _classes(copied, example_input)
    channels = [span.outputs[0].shape[CHANNELS] for span in spans]
    heads = [made_head(make_head, width, classes) for width in channels]
    gates = [GateNetwork(width + classes, 1, initial_probability) for width in channels]
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    segments = segments_between(recorded, costs, spans)
    if isinstance(copied, GatedModel):
        check_sides(segments)
    macs = [head_macs(made.to(like), span, classes, like) for made, span in zip(heads, spans, strict=True)]
    made = ExitModel(
        copied, [span.name for span in spans], heads, [gate.to(like.device) for gate in gates], macs,
        segments, share, budget, classifier_weight, example_input, _masks(copied, spans),
    )  # fmt: skip
    _check_least(made)
    _rehearse(made)
    made.relaxation = relaxation
    made.train_model = train_model
    if not train_model:
        made.model.requires_grad_(False)
    return made.train()


def _masks(model: nn.Module, spans: Sequence[ModuleSpan]) -> list[Channels | None]:
    """The gates on the channels at each cut: an exit reads them, as every layer does."""
    if not isinstance(model, GatedModel):
        return [None] * len(spans)
    readers = [gates_at(model.graph, span) for span in spans]
    return [None if reader is None else Channels(model._board, model.graph, reader) for reader in readers]


def _one_tensor(example_input: Any) -> Tensor:
    """The example of a model that takes one tensor; images that leave are taken out of no other."""
    args, kwargs = as_arguments(example_input)
    given = tensors_in((args, kwargs))
    if len(given) != 1 or len(args) + len(kwargs) != 1:
        raise ModelError(
            f"exits need a model that is called with one tensor, the images: this example has {len(given)}. "
            "Wrap the model so that it takes one"
        )
    return given[0]


def _check_places(at: Sequence[str]) -> None:
    if isinstance(at, str) or not at or not all(isinstance(name, str) for name in at):
        raise HeadgateError(f"at={at!r}: pass a list of module names, such as at=['layer1', 'layer2']")
    if len(set(at)) < len(at):
        raise HeadgateError(f"at={list(at)!r} names a module twice: name every exit once")


def _check_least(exits: ExitModel) -> None:
    """Whether the target can be reached at all."""
    least = exits.least_macs()
    if least is not None and exits.target * exits.dense_macs < least:
        raise TargetError(
            f"target {exits.target:.3g} can't be reached: up to `{exits.names[0]}`, with its classifier and gate, "
            f"{least / exits.dense_macs:.3f} of the MACs are needed. Choose a higher one, or an earlier first exit"
        )


def _rehearse(exits: ExitModel) -> None:
    """Let one of three images leave at every exit: code that remembers its batch shows only then."""
    gated = exits.model if isinstance(exits.model, GatedModel) else None
    if gated is not None and gated.sampled:
        return  # nobody leaves under gates that are drawn
    device = next(exits.parameters()).device
    images = random_like(torch.zeros(3, *exits.example_shape[1:], dtype=exits.example_dtype)).to(device)
    with torch.no_grad():
        whole = tensors_in(exits.eval().model(images))[0]
    remedy = "the forward code may remember how many images there were: write x.flatten(1) instead of x.view(n, -1)"
    for number, name in enumerate(exits.names[:-1]):
        try:
            rest = exits._rehearsed(number, images)
        except HeadgateError:
            raise
        except Exception as error:
            raise ModelError(f"`{name}` can't be an exit, with fewer images behind it: {error}. {remedy}") from error
        decided = gated is None or gated.dynamic is None  # gates that look at images may round another way
        tolerance = TOLERANCE.get(whole.dtype, TOLERANCE[torch.float32])
        if rest.shape != whole[1:].shape or (decided and not difference(whole[1:], rest) <= tolerance):
            raise ModelError(f"`{name}` can't be an exit: an image that leaves changes others' answers. {remedy}")


def _copied(model: nn.Module) -> nn.Module:
    if isinstance(model, ExitModel):
        raise ModelError("the model has exits already: name all of them at once, from `exits.model`")
    if isinstance(model, GatedModel):
        dense = model._unsqueezed()
        return copy.deepcopy(model) if dense is model else dense
    return stripped_copy(model, to_meta=False)


def _classes(model: nn.Module, example_input: Tensor) -> int:
    training = model.training
    with torch.no_grad():
        outputs = tensors_in(model.eval()(example_input))
    model.train(training)
    if len(outputs) != 1:
        shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
        raise ModelError(
            f"the model gives {len(outputs)} tensors ({shapes}): wrap it so that it gives class scores alone"
        )
    if outputs[0].dim() != 2:
        raise ModelError(f"a classifier gives (images, classes), this model gives {tuple(outputs[0].shape)}")
    return outputs[0].shape[1]
