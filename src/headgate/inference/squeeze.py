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
from headgate.graph.plan import Plan, first_names, make_plan
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
    attach(net, graph, board, left, plan.replace)
    return Squeezed(net.train(dense.training), plan, left)


@torch.no_grad()
def write_back_(dense: nn.Module, squeezed: Squeezed) -> None:
    """Give the dense network the stand-in's tensors at their places, and zeros where channels are gone for good."""
    found = {dense_name(name): tensor for name, tensor in squeezed.net.state_dict().items()}
    first = first_names(dense)
    for name, tensor in dense.state_dict(keep_vars=True).items():
        owner = name.rpartition(".")[0]
        if isinstance(tensor, Tensor) and first.get(owner) == owner:
            if name not in found or name in squeezed.plan.take:
                tensor.data.zero_()
            if name in found:
                put_(tensor.data, found[name], squeezed.plan, name)


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


def homes_in(optimizer: Optimizer, net: nn.Module) -> dict[str, int]:
    """The optimizer's group of each of the network's parameters, by the number of the group; those it has."""
    names = {parameter: dense_name(name) for name, parameter in net.named_parameters()}
    return {
        names[parameter]: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter in names
    }


def move_state_(
    optimizer: Optimizer, homes: Mapping[str, int], before: tuple[nn.Module, Plan], after: tuple[nn.Module, Plan],
    shapes: Mapping[str, torch.Size],
) -> None:  # fmt: skip
    """Let the optimizer go on with another form of the network: momentum follows its channels, what is gone is dropped.

    A form is a network and the plan that made it of the dense one (an empty plan for that one itself), whose
    parameters have these `shapes`. Parameters go to the groups that are their `homes`; those without one are not the
    optimizer's.
    """
    names = {parameter: dense_name(name) for name, parameter in before[0].named_parameters()}
    new = {dense_name(name): parameter for name, parameter in after[0].named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                continue
            name, state = names[parameter], optimizer.state.pop(parameter, {})
            if state and name in new:
                optimizer.state[new[name]] = {
                    key: _moved(value, parameter.shape, shapes[name], before[1], after[1], name)
                    for key, value in state.items()
                }
        others = [parameter for parameter in group["params"] if parameter not in names]  # gates
        group["params"] = others + [new[name] for name in new if homes.get(name) == number]


def _moved(value: object, shape: torch.Size, dense_shape: torch.Size, before: Plan, after: Plan, name: str) -> object:
    if not isinstance(value, Tensor) or value.shape != shape:
        return value
    whole = value.new_zeros(dense_shape)
    put_(whole, value, before, name)
    return taken(whole, after, name)
