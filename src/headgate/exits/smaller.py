"""The exits of a smaller network: each behind the same place, its classifier and its gate without what is closed there.

A closed channel is zero at the cut. To the gate, which reads means, zeros tell nothing; in a classifier they become
constants, which go into the layers behind. Knows the plan by which the network became smaller; knows nothing of how
a cascade runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headgate.errors import ModelError
from headgate.exits.cuts import CHANNELS, find_cuts, left_at, segments_between
from headgate.exits.heads import ConvHead, MeanHead, head_macs
from headgate.gates.dynamic import GateNetwork
from headgate.graph.grouping import ChannelGraph, Decisions
from headgate.graph.layer_rules import Index
from headgate.graph.macs import traced_macs
from headgate.graph.relayout import dense_name, index_tensor
from headgate.graph.trace import ModuleSpan
from headgate.inference.shrink import PLANS_ATTRIBUTE


@dataclass(frozen=True)
class SmallerExits:
    """What a cascade around a smaller network is made of."""

    names: list[str]
    heads: list[nn.Module]
    gates: list[GateNetwork]
    head_macs: list[int]
    segments: list[dict[str, int]]


def smaller_exits(
    graph: ChannelGraph, decisions: Decisions, small: nn.Module, example: Tensor, names: Sequence[str],
    heads: Iterable[nn.Module], gates: Iterable[nn.Module],
) -> SmallerExits:  # fmt: skip
    """The exits `names` of the graph's model, for the network that the decisions have made of it."""
    before = [graph.trace.spans_of[name][0] for name in names]
    kept = [left_at(graph, span, decisions) for span in before]
    widths = [span.outputs[0].shape[CHANNELS] for span in before]
    new_heads = [_head(*each) for each in zip(heads, before, kept, widths, strict=True)]
    new_gates = [_gate(*each) for each in zip(gates, kept, widths, strict=True)]
    recorded, costs = traced_macs(small, example)
    spans = find_cuts(recorded, [_name_in(small, graph, span) for span in before])
    classes, like = recorded.outputs[0].shape[1], next(each for each in small.parameters() if each.is_floating_point())
    macs = [head_macs(head, span, classes, like) for head, span in zip(new_heads, spans, strict=True)]
    segments = segments_between(recorded, costs, spans)
    return SmallerExits([span.name for span in spans], new_heads, new_gates, macs, segments)


def _head(head: nn.Module, span: ModuleSpan, kept: Index, width: int) -> nn.Module:
    """A classifier of `width` channels for those that are left of them; in eval mode it gives the same scores."""
    if len(kept) == width:
        return copy.deepcopy(head)
    if type(head) not in (MeanHead, ConvHead):
        raise ModelError(
            f"the classifier behind `{span.name}` is a {type(head).__name__}, which headgate can't take channels out "
            f"of, and {width - len(kept)} of {width} are closed there: use head='mean' or 'conv', or keep the channels "
            f"with headgate.gate(…, frozen=[{span.name!r}])"
        )
    assert isinstance(head, (MeanHead, ConvHead))
    return head.narrowed(kept)


@torch.no_grad()
def _gate(gate: nn.Module, kept: Index, width: int) -> GateNetwork:
    """The gate of an exit where these of `width` channels are left; what it reads of the classifier stays."""
    assert isinstance(gate, GateNetwork)
    made = copy.deepcopy(gate)
    weight = gate.trunk.weight
    left = torch.cat([index_tensor(kept), torch.arange(width, gate.trunk.in_features)]).to(weight.device)
    made.trunk.weight = nn.Parameter(weight[:, left], weight.requires_grad)
    made.trunk.in_features = len(left)
    return made


def _name_in(small: nn.Module, graph: ChannelGraph, span: ModuleSpan) -> str:
    """The module of a smaller network that gives what is left of a cut's output."""
    plan = getattr(small, PLANS_ATTRIBUTE)[-1]
    around = next((name for name in plan.replace if span.name.startswith(f"{name}.")), None)
    if around is not None:  # the cut is inside a block that is gone
        if [value.index for value in graph.trace.spans_of[around][0].outputs] != [span.outputs[0].index]:
            raise ModelError(
                f"the exit behind `{span.name}` is inside of `{around}`, all of which is closed: name `{around}` as "
                "the exit instead"
            )
        return around
    return min((name for name, _ in small.named_modules() if dense_name(name) == span.name), key=len)
