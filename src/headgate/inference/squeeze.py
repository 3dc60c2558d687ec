"""A smaller stand-in for a network whose gates are still learning.

Gates that have closed for good cost time as long as their channels are computed and multiplied by zero. `squeeze`
builds the network without them, masks on the channels that are left; `write_back_` brings its weights home to the
dense network; `move_state_` takes the optimizer along. Knows plans and masks, nothing of when to squeeze.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headgate.gates.cost import dead_branches
from headgate.gates.draws import Board, attach
from headgate.graph.grouping import ChannelGraph, Decisions
from headgate.graph.plan import Plan, make_plan
from headgate.graph.relayout import dense_name, index_tensor
from headgate.inference.shrink import build


@dataclass(frozen=True)
class Squeezed:
    """The stand-in, the plan that made it, and the gates that are left."""

    net: nn.Module
    plan: Plan
    left: Decisions


def squeeze(dense: nn.Module, graph: ChannelGraph, left: Decisions, board: Board) -> Squeezed:
    """The network without the gates that are not left, in the mode the dense one is in."""
    plan = make_plan(graph, left, dead_branches(graph, left))
    net = build(dense, plan)
    attach(net, graph, board, left)
    return Squeezed(net.train(dense.training), plan, left)


@torch.no_grad()
def write_back_(dense: nn.Module, squeezed: Squeezed) -> None:
    """Give the dense network the stand-in's tensors at their places."""
    home = dict(dense.state_dict(keep_vars=True))
    for name, tensor in squeezed.net.state_dict().items():
        if isinstance(tensor, Tensor) and dense_name(name) in home:
            put_(home[dense_name(name)].data, tensor, squeezed.plan, dense_name(name))


def put_(whole: Tensor, part: Tensor, plan: Plan, name: str) -> None:
    """Write the part of a tensor that the plan left to its place in the whole."""
    places = plan.take.get(name)
    if not places:
        whole.copy_(part)
        return
    index = [torch.arange(size, device=whole.device) for size in whole.shape]
    for dim, kept in places.items():
        index[dim] = index_tensor(kept, whole.device)
    whole[torch.meshgrid(*index, indexing="ij")] = part.to(whole)


def taken(whole: Tensor, plan: Plan, name: str) -> Tensor:
    """The part of a tensor that the plan leaves."""
    for dim, kept in plan.take.get(name, {}).items():
        whole = whole.index_select(dim, index_tensor(kept, whole.device))
    return whole.clone()


def move_state_(
    optimizer: Optimizer, before: nn.Module, before_plan: Plan, after: Squeezed, shapes: Mapping[str, torch.Size]
) -> None:
    """Let the optimizer go on with the stand-in's parameters: momentum follows its channels, the rest is dropped."""
    names = {parameter: dense_name(name) for name, parameter in before.named_parameters()}
    new = {dense_name(name): parameter for name, parameter in after.net.named_parameters()}
    for group in optimizer.param_groups:
        kept = []
        for parameter in group["params"]:
            if parameter not in names:
                kept.append(parameter)  # a gate's
                continue
            name = names[parameter]
            state = optimizer.state.pop(parameter, {})
            if name in new:
                kept.append(new[name])
                if state:
                    optimizer.state[new[name]] = {
                        key: _moved(value, parameter.shape, shapes[name], before_plan, after.plan, name)
                        for key, value in state.items()
                    }
        group["params"] = kept


def _moved(value: object, shape: torch.Size, dense_shape: torch.Size, before: Plan, after: Plan, name: str) -> object:
    if not isinstance(value, Tensor) or value.shape != shape:
        return value
    whole = value.new_zeros(dense_shape)
    put_(whole, value, before, name)
    return taken(whole, after, name)
