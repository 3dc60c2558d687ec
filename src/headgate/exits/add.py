"""Putting exits into a model: where it can be cut, what each stretch costs, and how many classes there are.

Everything is read from the traced graph; the model's own code stays as it is. Knows nothing of how the cascade runs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headgate.errors import HeadgateError, ModelError, TargetError
from headgate.exits.cascade import ExitModel
from headgate.exits.heads import MakeHead, head_maker
from headgate.gated import GatedModel
from headgate.gates.budget import Budget, check_budget_, parse_target
from headgate.gates.dynamic import GateNetwork
from headgate.gates.gumbel import Backward, Relaxation
from headgate.graph.analyse import check_module_names
from headgate.graph.macs import count_macs, traced_macs
from headgate.graph.op_rules import OP_MACS
from headgate.graph.relayout import dense_name
from headgate.graph.trace import ModuleSpan, Trace, stripped_copy, tensors_in

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
    make_head, relaxation = head_maker(head), Relaxation(temperature, hard, backward)
    copied = _copied(model)
    if isinstance(copied, GatedModel):
        network, recorded = copied.model, copied.graph.trace
        costs = {item.name: item.macs for item in copied.graph.costs}
    else:
        network = copied
        recorded, costs = traced_macs(copied, example_input)
    check_module_names(at, dict(network.named_modules()), "at")
    share = parse_target(target, sum(costs.values()))
    check_budget_(budget, share, sum(costs.values()))
    spans = sorted((_span(recorded, name) for name in at), key=lambda span: span.last)
    for span in spans:
        _check_cut(recorded, span)
    if isinstance(copied, GatedModel):
        _check_gates(copied, spans)
    classes = _classes(copied, example_input)
    channels = [span.outputs[0].shape[1] for span in spans]
    heads = [make_head(width, classes) for width in channels]
    gates = [GateNetwork(width + classes, 1, initial_probability) for width in channels]
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    segments = _segments(recorded, costs, spans)
    if isinstance(copied, GatedModel):
        _check_sides(segments)
    head_macs = [_head_macs(made.to(like), span, like) for made, span in zip(heads, spans, strict=True)]
    made = ExitModel(
        copied, [span.name for span in spans], heads, [gate.to(like.device) for gate in gates], head_macs,
        segments, share, budget, classifier_weight, example_input,
    )  # fmt: skip
    _check_least(made)
    made.relaxation = relaxation
    made.train_model = train_model
    if not train_model:
        made.model.requires_grad_(False)
    return made.train()


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


def _copied(model: nn.Module) -> nn.Module:
    if isinstance(model, ExitModel):
        raise ModelError("the model has exits already: name all of them at once, from `exits.model`")
    if isinstance(model, GatedModel):
        model.unsqueeze_()
        return copy.deepcopy(model)
    return stripped_copy(model, to_meta=False)


def _span(recorded: Trace, name: str) -> ModuleSpan:
    spans = recorded.spans_of.get(name, [])
    if len(spans) != 1 or len(spans[0].outputs) != 1:
        raise ModelError(f"`{name}` can't be an exit: it runs {len(spans)} times, or does not give one tensor")
    if len(spans[0].outputs[0].shape) != 4:
        raise ModelError(f"`{name}` can't be an exit: it gives {spans[0].outputs[0].shape}, no batch of images")
    if spans[0].outputs[0].shape[0] != recorded.batch_size:
        raise ModelError(f"`{name}` can't be an exit: images are folded with something else there (frames, windows)")
    return spans[0]


def _check_cut(recorded: Trace, span: ModuleSpan) -> None:
    """Everything after the cut must come from its output."""
    known = {span.outputs[0].index}
    for call in recorded.calls[span.last :]:
        for value in call.inputs:
            if value.from_input and value.index not in known:
                raise ModelError(
                    f"`{span.name}` can't be an exit: {call.title} behind it reads what was computed before it"
                )
        known.update(value.index for value in call.outputs)


def _check_gates(gated: GatedModel, spans: Sequence[ModuleSpan]) -> None:
    """Gates that are decided before a cut must not be used behind it: images leave in between."""
    if gated.dynamic is None:
        return
    called = {call.layer: call.index for call in gated.graph.trace.calls if call.layer is not None}
    owner = [number for number, mask in enumerate(gated.graph.masks) for _ in range(mask.size)]
    decided = {number: called[site.layer] for site in gated.dynamic.sites for number in site.masks}
    for reader in gated.graph.readers:
        for number in {owner[gate] for gate in reader.gates.tolist() if gate >= 0} & decided.keys():
            if any(decided[number] < span.last <= called[reader.layer] for span in spans):
                raise ModelError(
                    f"the gates of `{gated.graph.masks[number].name}` are decided before an exit and used behind it: "
                    "gate with stream='indexed'"
                )


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


def _head_macs(head: nn.Module, span: ModuleSpan, like: Tensor) -> int:
    return count_macs(head, like.new_zeros(1, *span.outputs[0].shape[1:]))


def _segments(recorded: Trace, costs: dict[str, int], spans: Sequence[ModuleSpan]) -> list[dict[str, int]]:
    """The layers between the cuts, with their multiply-adds; a layer that is called on both sides of a cut is divided
    in proportion to what its calls compute."""
    ends = [span.last for span in spans]
    weights: dict[str, list[int]] = {}
    for call in recorded.calls:
        if call.layer is not None:
            name, weight = dense_name(call.layer), sum(math.prod(value.shape) for value in call.outputs)
        elif call.target in OP_MACS:
            name, weight = call.inside or "(model)", OP_MACS[call.target](call)
        else:
            continue
        shares = weights.setdefault(name, [0] * (len(spans) + 1))
        shares[sum(call.index >= end for end in ends)] += weight
    segments: list[dict[str, int]] = [{} for _ in range(len(spans) + 1)]
    for name, macs in costs.items():
        shares = weights[name]
        for segment, share in zip(segments, shares, strict=True):
            if share:
                segment[name] = macs * share // sum(shares)
    return segments


def _check_sides(segments: Sequence[dict[str, int]]) -> None:
    """What gates leave of a layer is known for the layer, not for each of its calls."""
    for name in set().union(*segments):
        if sum(name in segment for segment in segments) > 1:
            raise ModelError(
                f"`{name}` computes on both sides of an exit, and the model is gated: choose another exit, "
                "or add exits to the model without gates"
            )
