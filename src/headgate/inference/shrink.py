"""From decisions to a smaller network: the closed channels gone, nothing of headgate in it where that is possible.

`shrink(...)` returns a copy; `check_same(...)` compares it with the gated network on data and names the first layer
that differs. Knows graphs, plans and decisions; knows nothing of how decisions came about.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.utils._pytree import tree_map

from headgate.errors import NonFiniteLoss, ShrinkMismatch
from headgate.gates.cost import dead_branches
from headgate.gates.draws import detach
from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, Decisions
from headgate.graph.labels import Labels
from headgate.graph.layer_rules import Index, Mixing, rule_for
from headgate.graph.plan import Plan, fingerprint, make_plan, put, restructure, small_state
from headgate.graph.propagate import kept_places
from headgate.graph.relayout import dense_name
from headgate.graph.trace import as_arguments, stripped_copy, tensors_in

PLANS_ATTRIBUTE = "headgate_plans"
"""Where a shrunk network keeps the plans that made it from the dense one, in order."""
ORIGIN_ATTRIBUTE = "headgate_origin"
"""Where it keeps the fingerprint of that dense network."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def shrink(
    model: nn.Module,
    graph: ChannelGraph,
    decisions: Decisions,
    *,
    padding: Decisions | None = None,
    fold_batchnorm: bool = False,
) -> nn.Module:
    """The smaller network. `padding` are gates that stay for a rounder width; what they let through is cut off."""
    kept = decisions if padding is None else _without_unfillable(graph, decisions, padding)
    plan = make_plan(graph, kept, dead_branches(graph, decisions))
    small = build(model, plan)
    if padding is not None:
        _cut_padding(small, graph, kept, decisions)
    if fold_batchnorm:
        plan.folded = _fold(small, graph, plan)
    setattr(small, PLANS_ATTRIBUTE, (*getattr(model, PLANS_ATTRIBUTE, ()), plan))
    setattr(small, ORIGIN_ATTRIBUTE, getattr(model, ORIGIN_ATTRIBUTE, None) or fingerprint(model))
    return small.eval()


def with_folded_batchnorm(small: nn.Module, graph: ChannelGraph, example_input: Any) -> nn.Module:
    """A copy of a network that was shrunk from the graph's model, tuned or not, in which each convolution and the
    BatchNorm behind it are one layer."""
    *earlier, plan = getattr(small, PLANS_ATTRIBUTE)
    folded = stripped_copy(small, to_meta=False, attributes=False).eval()
    plan = replace(plan, folded=_fold(folded, graph, plan))
    setattr(folded, PLANS_ATTRIBUTE, (*earlier, plan))
    args, kwargs = as_arguments(random_like(example_input))
    with torch.no_grad():
        pairs = zip(tensors_in(small.eval()(*args, **kwargs)), tensors_in(folded(*args, **kwargs)), strict=True)
        worst = max((difference(a, b) / TOLERANCE.get(a.dtype, 1e-4) for a, b in pairs), default=0.0)
    if not worst <= 1:
        raise ShrinkMismatch(
            f"with BatchNorm folded the network's output differs by {worst:.2g} of what is allowed: report the model"
        )
    return folded


def build(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the dense model with the plan carried out, weights included; masks are taken off."""
    small = stripped_copy(model, to_meta=True, attributes=False)
    detach(small)
    restructure(small, plan)
    assign(small, small_state(plan, tensors_of(model), small), model)
    return small


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, also those that no state dict holds."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return {name: tensor.detach() for name, tensor in tensors.items()}


def assign(small: nn.Module, state: dict[str, Tensor], model: nn.Module) -> None:
    """Give the structure its tensors. Buffers that no file holds are the model's; parameters it shares stay shared."""
    versioned = small.state_dict()  # some modules look at the version that comes with a state dict
    versioned.clear()
    versioned.update(state)
    small.load_state_dict(versioned, strict=False, assign=True)
    dense = tensors_of(model)
    for name, buffer in list(small.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            small.get_submodule(owner)._buffers[leaf] = dense[dense_name(name)].clone()
    first_name: dict[int, str] = {}
    parameters = dict(small.named_parameters(remove_duplicate=False))
    new_name = {dense_name(name): name for name in parameters}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        twin = first_name.setdefault(id(parameter), name)
        if twin != name and twin in new_name and name in new_name:
            owner, _, leaf = new_name[name].rpartition(".")
            setattr(small.get_submodule(owner), leaf, parameters[new_name[twin]])
    left = [name for name, tensor in (*small.named_parameters(), *small.named_buffers()) if tensor.is_meta]
    assert not left, f"tensors without values: {left}"


def _without_unfillable(graph: ChannelGraph, decisions: Decisions, padding: Decisions) -> Decisions:
    """Padding only where it can be cut off: not in channels that a module without an affine map adds to a stream."""
    kept = decisions | padding
    for writer in graph.writers:
        module = graph.book.modules[writer.layer]
        if getattr(module, "weight", None) is None or getattr(module, "bias", None) is None:
            gates = writer.gates[writer.gates != ALWAYS_OPEN]
            kept[gates] = decisions[gates]
    return kept


def _cut_padding(small: nn.Module, graph: ChannelGraph, kept: Decisions, decisions: Decisions) -> None:
    """Zero the weights with which layers read, or add to a stream, channels that are there for their width only."""
    kept_atoms, open_atoms = graph.open_atoms(kept), graph.open_atoms(decisions)
    by_name = {dense_name(name): module for name, module in small.named_modules()}

    def padded(atoms: Labels) -> Index:
        left = atoms[kept_places(atoms, kept_atoms)]
        return np.flatnonzero((left >= 0) & ~open_atoms[left])

    for usage in graph.book.usages:
        module = by_name.get(usage.layer)
        if usage.mode == "whole" or usage.reads is None or module is None:
            continue
        rule = rule_for(module)
        if len(places := padded(usage.reads)) and isinstance(rule, Mixing):
            rule.cut_inputs(module, places)
    for port in graph.book.write_ports.values():
        module = by_name.get(port.module)
        affine = [getattr(module, name, None) for name in ("weight", "bias")]  # none where the branch was removed
        if len(places := padded(port.atoms)):
            with torch.no_grad():
                for tensor in affine:
                    if isinstance(tensor, Tensor):
                        tensor[torch.from_numpy(places)] = 0


def _fold(small: nn.Module, graph: ChannelGraph, plan: Plan) -> list[tuple[str, str]]:
    """Make each convolution and the BatchNorm behind it one layer."""
    by_name = {dense_name(name): name for name, _ in small.named_modules()}
    users = graph.trace.users()
    outputs = {value.index for value in graph.trace.outputs}
    folded = []
    for call in graph.trace.calls:
        readers = users.get(call.outputs[0].index, []) if call.layer and len(call.outputs) == 1 else []
        if len(readers) != 1 or readers[0].layer is None or {call.layer, readers[0].layer} & set(plan.replace):
            continue
        names = (str(call.layer), readers[0].layer)
        if call.outputs[0].index in outputs or not _same_channels(graph, *names):
            continue
        if any(graph.trace.layer_calls[name] != 1 or name not in by_name for name in names):
            continue
        if {names[0]} & set(plan.behind) or {names[1]} & set(plan.before):
            continue
        layer, norm = (small.get_submodule(by_name[name]) for name in names)
        if _foldable(layer) and isinstance(norm, _BatchNorm) and norm.running_var is not None:
            _fold_pair(layer, norm)
            put(small, by_name[names[1]], nn.Identity())
            folded.append(names)
    return folded


def _foldable(layer: nn.Module) -> bool:
    """A layer of ours or of PyTorch's; what a class derived from them makes of its weight is not known."""
    return any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in FOLDABLE)


def _same_channels(graph: ChannelGraph, layer: str, norm: str) -> bool:
    """Whether the norm's channels are the layer's, and not another dimension of its output."""
    made, read = graph.book.sizes.get(layer, (None, None))[1], graph.book.sizes.get(norm, (None, None))[0]
    return made is not None and read is not None and np.array_equal(made, read)


def _fold_pair(layer: Any, norm: _BatchNorm) -> None:
    assert norm.running_mean is not None and norm.running_var is not None
    mean, var = norm.running_mean, norm.running_var
    fuse = fuse_linear_bn_weights if isinstance(layer, nn.Linear) else fuse_conv_bn_weights
    scale = norm.weight if norm.weight is not None else torch.ones_like(mean)
    shift = norm.bias if norm.bias is not None else torch.zeros_like(mean)
    weight, bias = fuse(layer.weight, layer.bias, mean, var, norm.eps, scale, shift)
    layer.weight, layer.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())


def random_like(example_input: Any, seed: int = 0) -> Any:
    """A random batch shaped like the example (integers are left as they are)."""
    generator = torch.Generator().manual_seed(seed)

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf)
        return leaf

    return tree_map(fill, example_input)


def check_same(
    gated: Callable[..., Any],
    gated_body: nn.Module,
    small: nn.Module,
    graph: ChannelGraph,
    kept: Decisions,
    example_input: Any,
) -> float:
    """The relative difference of the two networks' outputs on a random batch; raises if it is more than rounding."""
    args, kwargs = as_arguments(random_like(example_input))
    with torch.no_grad():
        expected = tensors_in(gated(*args, **kwargs))
        if any(tensor.is_floating_point() and bool(tensor.isnan().all()) for tensor in expected if tensor.numel()):
            raise NonFiniteLoss(
                "the gated network gives nothing but NaN on random images: weights, or statistics, are not finite"
            )
        try:
            found = tensors_in(small(*args, **kwargs))
        except Exception as error:
            raise ShrinkMismatch(
                f"the shrunk network does not run: {type(error).__name__} in {where_it_stopped(small, args, kwargs)}: "
                f"{error}. Its forward code, or a rule that was registered, does not fit fewer channels: "
                "freeze that layer (frozen=[…]), or mend the rule"
            ) from error
    worst = max((difference(a, b) for a, b in zip(expected, found, strict=True)), default=0.0)
    tolerance = max(TOLERANCE.get(tensor.dtype, 1e-4) for tensor in expected)
    if not worst <= tolerance:
        layer = first_difference(gated, gated_body, small, graph, kept, (args, kwargs), tolerance)
        raise ShrinkMismatch(
            f"the shrunk network's output differs from the gated one's by {worst:.2g} (allowed: {tolerance:g}), "
            f"first at {layer}. Freeze that layer (frozen=[…]) and report the model"
        )
    return worst


def where_it_stopped(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The innermost module that was running when a forward pass failed."""
    running: list[str] = []
    handles = []

    def leave(*_: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        with torch.no_grad(), contextlib.suppress(Exception):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return f"`{dense_name(running[-1])}`" if running and running[-1] else "the model's own forward"


def difference(expected: Tensor, found: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite for other shapes, or where NaNs differ."""
    if expected.shape != found.shape:
        return float("inf")
    expected, found = expected.double(), found.double()
    both_nan = expected.isnan() & found.isnan()
    gap = torch.where(both_nan | (expected == found), torch.zeros_like(expected), (expected - found).abs())
    if not bool(gap.isfinite().all()):
        return float("inf")
    scale = expected[expected.isfinite()].abs()
    return float(gap.max() / scale.max().clamp_min(1e-12)) if gap.numel() and scale.numel() else 0.0


def first_difference(
    gated: Callable[..., Any], gated_body: nn.Module, small: nn.Module, graph: ChannelGraph, kept: Decisions,
    arguments: tuple[tuple[Any, ...], dict[str, Any]], tolerance: float,
) -> str:  # fmt: skip
    """The first layer whose kept channels differ."""
    open_atoms = graph.open_atoms(kept)
    recorded: dict[str, dict[str, Tensor]] = {"gated": {}, "small": {}}
    handles = []
    for side, body in (("gated", gated_body), ("small", small)):
        for name, module in body.named_modules():
            layer = dense_name(name)
            if layer in graph.book.sizes:

                def keep(_: nn.Module, __: Any, output: Any, side: str = side, layer: str = layer) -> None:
                    if isinstance(output, Tensor):
                        recorded[side].setdefault(layer, output.detach())  # fmt: skip

                handles.append(module.register_forward_hook(keep))
    try:
        with torch.no_grad():
            for run in (gated, small):
                run(*arguments[0], **arguments[1])
    finally:
        for handle in handles:
            handle.remove()
    for layer, ours in recorded["gated"].items():
        theirs = recorded["small"].get(layer)
        writes = graph.book.sizes[layer][1]
        if theirs is None or writes is None:
            continue
        axis = next((a for a, size in enumerate(ours.shape) if a and size == len(writes)), None)
        if axis is not None:
            ours = ours.index_select(axis, torch.from_numpy(kept_places(writes, open_atoms)))
        if difference(ours, theirs) > tolerance:
            return f"`{layer}`"
    return "the output"
