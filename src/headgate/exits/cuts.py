"""Where a model can be cut, what lies between the cuts, and which gates the channels there have.

Everything is read from the traced graph; the model's own code stays as it is. Knows graphs and what layers cost;
knows nothing of classifiers, or of how a cascade runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from headgate.errors import ModelError
from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, Decisions, Reader, gates_of
from headgate.graph.labels import Labels, varying_axes
from headgate.graph.layer_rules import Index
from headgate.graph.op_rules import OP_MACS
from headgate.graph.propagate import kept_places
from headgate.graph.relayout import dense_name
from headgate.graph.trace import ModuleSpan, Trace

CHANNELS = 1
"""The dimension that classifiers take for channels."""


def find_cuts(recorded: Trace, at: Sequence[str]) -> list[ModuleSpan]:
    """The modules behind which the model can be cut, in the order of the forward pass; raises where one can't."""
    spans = sorted((_span(recorded, name) for name in at), key=lambda span: span.last)
    for span in spans:
        _check_cut(recorded, span)
    for span, following in pairwise(spans):
        if span.outputs[0].index == following.outputs[0].index:
            raise ModelError(f"`{span.name}` and `{following.name}` end at the same place: name one of them")
    return spans


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


def segments_between(recorded: Trace, costs: dict[str, int], spans: Sequence[ModuleSpan]) -> list[dict[str, int]]:
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


def check_sides(segments: Sequence[dict[str, int]]) -> None:
    """What gates leave of a layer is known for the layer, not for each of its calls."""
    for name in set().union(*segments):
        if sum(name in segment for segment in segments) > 1:
            raise ModelError(
                f"`{name}` computes on both sides of an exit, and the model is gated: choose another exit, "
                "or add exits to the model without gates"
            )


# ---------------------------------------------------------------------------------------------------- gates


def gates_at(graph: ChannelGraph, span: ModuleSpan) -> Reader | None:
    """The gate of each channel at a cut, which an exit reads like a layer; None where no channel has one."""
    labels = _labels_at(graph, span)
    if labels is None:
        return None
    gates = gates_of(labels.reshape(-1), graph.atom_gate)
    if gates is None or not (gates != ALWAYS_OPEN).any():
        return None
    axes = varying_axes(labels)
    if len(axes) != 1:
        raise ModelError(
            f"`{span.name}` can't be an exit: its channels, which have gates, lie along several dimensions there. "
            f"Choose another exit, or gate with frozen=[{span.name!r}]"
        )
    return Reader(span.name, axes[0], gates)


def left_at(graph: ChannelGraph, span: ModuleSpan, decisions: Decisions) -> Index:
    """Places of the channels that are left at a cut under these decisions."""
    labels, width = _labels_at(graph, span), span.outputs[0].shape[CHANNELS]
    reader = gates_at(graph, span)
    if labels is None or reader is None:
        return np.arange(width)
    if reader.axis != CHANNELS:
        raise ModelError(
            f"the exit behind `{span.name}` can't be shrunk: the channels with gates lie along dimension {reader.axis} "
            f"there, where classifiers take dimension {CHANNELS}. Use the cascade as it is"
        )
    return kept_places(labels.reshape(-1), graph.open_atoms(decisions))


def _labels_at(graph: ChannelGraph, span: ModuleSpan) -> Labels | None:
    """Behind a module that writes to an indexed stream, the stream's channels, which have no gates."""
    return graph.book.labels_of(span.outputs[0])
