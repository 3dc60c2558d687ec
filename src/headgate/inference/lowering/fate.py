"""What becomes of a gate over all images: always open, never, or it depends.

Knows gate networks and the graph of channels; nothing of operators.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headgate.gates.cost import dead_branches
from headgate.gates.dynamic import DynamicGates, GateNetwork
from headgate.gates.gumbel import threshold_logit
from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, Decisions

NEVER, ALWAYS, DEPENDS = 0, 1, 2


def gates_over_all_images(
    dynamic: DynamicGates, graph: ChannelGraph, decided: Decisions, tau: float, fold: bool = True
) -> NDArray[np.int8]:
    """Which gates are open or closed whatever the image: those that are parameters, as decided, and with `fold` those
    whose network can't say anything else at this tau, since its hidden values are never negative."""
    fate = np.where(decided, ALWAYS, NEVER).astype(np.int8)
    for site, network in zip(dynamic.sites, dynamic.networks, strict=True):
        assert isinstance(network, GateNetwork)
        weight, bias = network.head.weight.detach(), network.head.bias.detach()
        above = bias > threshold_logit(tau)
        lowers, raises = (weight <= 0).all(1), (weight >= 0).all(1)
        told = torch.where(above & raises, ALWAYS, torch.where(~above & lowers, NEVER, DEPENDS)).cpu().numpy()
        if not fold:
            told[:] = DEPENDS
        start = 0
        for number in site.masks:
            mask = graph.masks[number]
            fate[mask.gates] = told[start : start + mask.size]
            if not mask.may_die and not (fate[mask.gates] != NEVER).any():
                fate[mask.gates] = DEPENDS  # one of them is opened, and which depends on the image
            start += mask.size
    return fate


def left_after_folding(graph: ChannelGraph, fate: NDArray[np.int8], dynamic: DynamicGates) -> Decisions:
    """What is not folded away: inner channels go where they are closed for good. Readers and writers of an indexed
    stream stay as wide as it, since the kernel reads and writes in place and a narrower layer would have to copy. A
    branch that is closed for good stays where its first layer shows the tensor that decides gates elsewhere."""
    indexed = np.zeros(graph.gate_count, bool)
    for writer in graph.writers:
        indexed[writer.gates[writer.gates != ALWAYS_OPEN]] = True
    for mask in graph.masks:
        indexed[mask.gates] |= mask.kind != "channels"
    left = (fate != NEVER) | indexed
    dead = set(dead_branches(graph, left))
    branches_around = {item.name: item.branches for item in graph.costs}
    for site in dynamic.sites:
        if any((fate[graph.masks[number].gates] == DEPENDS).any() for number in site.masks):
            for branch in dead & set(branches_around.get(site.layer, ())):
                for number in graph.branches[branch].masks:
                    left[graph.masks[number].gates] = True
    return left
