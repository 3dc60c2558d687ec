"""A plan says how a dense network becomes a smaller one; this module writes plans and carries them out.

`make_plan(graph, decisions)` lists the entries every tensor keeps. `restructure(model, plan)` gives a network of the
new shapes, whatever its weights. `small_state(...)` picks the weights out of the dense network's. A plan without its
indices (`to_json`) is enough to rebuild the structure from a fresh dense network: that is what a file holds.
Knows graphs and modules, nothing of probabilities, training or files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headgate.errors import FileError
from headgate.graph.branches import replacements
from headgate.graph.grouping import ChannelGraph, Decisions
from headgate.graph.layer_rules import Index, rule_for
from headgate.graph.propagate import kept_places
from headgate.graph.relayout import ScatterChannels, SelectChannels, ZeroBranch, dense_name, index_tensor, wrapped
from headgate.graph.trace import under

Sizes = dict[int, int]


@dataclass(frozen=True)
class Move:
    """Channels moved before or behind a module: `select` leaves `index`, `scatter` puts them back among `size`."""

    kind: str
    index: Index
    size: int
    axis: int

    def module(self) -> nn.Module:
        """The module that does it."""
        index = index_tensor(self.index)
        return (
            SelectChannels(index, self.axis) if self.kind == "select" else ScatterChannels(index, self.size, self.axis)
        )

    def to_json(self) -> dict[str, Any]:
        """The move without its index: only how many channels it holds."""
        return {"kind": self.kind, "count": len(self.index), "size": self.size, "axis": self.axis}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Move:
        """A move with an index that only has the right length."""
        return cls(str(data["kind"]), np.arange(int(data["count"])), int(data["size"]), int(data["axis"]))


@dataclass
class Plan:
    """How a dense network becomes a smaller one. Names are those of the dense network."""

    take: dict[str, dict[int, Index]] = field(default_factory=dict)
    """Tensor → dimension → entries that stay."""
    set: dict[str, dict[str, int]] = field(default_factory=dict)
    """Module → attribute → new value."""
    before: dict[str, Move] = field(default_factory=dict)
    behind: dict[str, Move] = field(default_factory=dict)
    replace: dict[str, dict[str, Any]] = field(default_factory=dict)
    folded: list[tuple[str, str]] = field(default_factory=list)
    """(convolution, BatchNorm) pairs made one."""

    def to_json(self) -> dict[str, Any]:
        """The structure without the indices: sizes, attributes, moves, replacements."""
        return {
            "sizes": {name: {str(dim): len(kept) for dim, kept in dims.items()} for name, dims in self.take.items()},
            "set": self.set,
            "before": {name: move.to_json() for name, move in self.before.items()},
            "behind": {name: move.to_json() for name, move in self.behind.items()},
            "replace": self.replace,
            "folded": [list(pair) for pair in self.folded],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """A plan that knows the sizes, with indices that only have the right lengths."""
        return cls(
            take={
                name: {int(dim): np.arange(int(count)) for dim, count in dims.items()}
                for name, dims in data["sizes"].items()
            },
            set={name: {key: int(value) for key, value in values.items()} for name, values in data["set"].items()},
            before={name: Move.from_json(entry) for name, entry in data["before"].items()},
            behind={name: Move.from_json(entry) for name, entry in data["behind"].items()},
            replace={name: dict(entry) for name, entry in data["replace"].items()},
            folded=[(str(conv), str(norm)) for conv, norm in data["folded"]],
        )


def fingerprint(model: nn.Module) -> str:
    """A digest of an architecture: the names and shapes of its tensors."""
    shapes = {
        dense_name(name): list(tensor.shape)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()


def make_plan(graph: ChannelGraph, decisions: Decisions, dead: tuple[int, ...] = ()) -> Plan:
    """The plan that leaves the open channels and takes the dead branches out."""
    book = graph.book
    open_atoms = graph.open_atoms(decisions)
    plan = Plan()
    for layer, (reads, writes) in book.sizes.items():
        module = book.modules[layer]
        rule = rule_for(module)
        assert rule is not None
        keep_in, keep_out = (None if labels is None else kept_places(labels, open_atoms) for labels in (reads, writes))
        keep_in = None if reads is None or keep_in is None or len(keep_in) == len(reads) else keep_in
        keep_out = None if writes is None or keep_out is None or len(keep_out) == len(writes) else keep_out
        if keep_in is None and keep_out is None:
            continue
        edit = rule.edit(module, keep_in, keep_out)
        for name, dims in edit.take.items():
            plan.take[f"{layer}.{name}"] = dims
        plan.set[layer] = edit.set
    for owner, atoms in book.owners.items():
        if owner[0] == "parameter" and len(kept := kept_places(atoms, open_atoms)) != len(atoms):
            plan.take.setdefault(owner[1], {})[owner[2]] = kept
    _plan_moves(graph, open_atoms, plan)
    for number in dead:
        _plan_removal(graph, number, open_atoms, plan)
    gone = [name for name in plan.replace if any(name.startswith(outer + ".") for outer in plan.replace)]
    for name in gone:  # what a larger removal takes along
        del plan.replace[name]
    return plan


def _plan_moves(graph: ChannelGraph, open_atoms: np.ndarray, plan: Plan) -> None:
    book = graph.book
    for table, ports, kind in ((plan.before, book.read_ports, "select"), (plan.behind, book.write_ports, "scatter")):
        for name, port in ports.items():
            kept = kept_places(port.atoms, open_atoms)
            if len(kept) != len(port.atoms):
                table[name] = Move(kind, kept, len(port.atoms), port.axis)
    for name in graph.islands:
        span = graph.trace.spans_of[name][0]
        for table, value, kind in ((plan.before, span.inputs[0], "scatter"), (plan.behind, span.outputs[0], "select")):
            labels, axis = book.labels_of(value), book.axis_of_channels(value)
            if labels is None or axis is None:
                continue
            kept = kept_places(labels.reshape(-1), open_atoms)
            if len(kept) != labels.size:
                table[name] = Move(kind, kept, labels.size, axis)


def _plan_removal(graph: ChannelGraph, number: int, open_atoms: np.ndarray, plan: Plan) -> None:
    """Replace the modules of a dead branch; whatever was planned inside them is void."""
    book = graph.book
    branch = graph.branches[number].branch
    found = replacements(branch, graph.trace, dict(book.modules))
    assert found is not None, branch.name
    for name, entry in found.items():
        if entry["kind"] == "zeros":
            labels, axis = book.labels_of(branch.mask_value), book.axis_of_channels(branch.mask_value)
            if labels is not None and axis is not None:
                channels = len(kept_places(labels.reshape(-1), open_atoms))
                entry = {"axis": axis, "channels": channels, **entry}
        plan.replace[name] = entry
        for table in (plan.take, plan.set, plan.before, plan.behind):
            for key in [key for key in table if under(key, name)]:
                del table[key]


def restructure(model: nn.Module, plan: Plan) -> nn.Module:
    """Give the model (changed in place and returned) the plan's structure; resized tensors hold no weights yet."""
    for module_name, entry in plan.replace.items():
        put(model, module_name, _replacement(entry))
    for tensor_name, dims in plan.take.items():
        owner_name, _, leaf = tensor_name.rpartition(".")
        owner = _module(model, owner_name)
        old = getattr(owner, leaf)
        shape = list(old.shape)
        for dim, kept in dims.items():
            shape[dim] = len(kept)
        new = torch.empty(shape, dtype=old.dtype, device=old.device)
        if isinstance(old, nn.Parameter):
            setattr(owner, leaf, nn.Parameter(new, requires_grad=old.requires_grad))
        else:
            setattr(owner, leaf, new)
    for module_name, values in plan.set.items():
        for attribute, value in values.items():
            setattr(_module(model, module_name), attribute, value)
    for conv_name, norm_name in plan.folded:
        conv = _module(model, conv_name)
        if conv.bias is None:
            weight: Tensor = conv.weight
            conv.bias = nn.Parameter(torch.empty(_out_size(conv), dtype=weight.dtype, device=weight.device))
        put(model, norm_name, nn.Identity())
    # inner modules first: wrapping an outer one changes the names of those inside
    for module_name in sorted({*plan.before, *plan.behind}, key=lambda name: -name.count(".")):
        moves = (plan.before.get(module_name), plan.behind.get(module_name))
        before, behind = (None if move is None else move.module() for move in moves)
        put(model, module_name, wrapped(_module(model, module_name), before, behind))
    return model


def _out_size(conv: nn.Module) -> int:
    return int(conv.out_channels if hasattr(conv, "out_channels") else conv.out_features)  # type: ignore[arg-type]


def small_state(plan: Plan, dense: Mapping[str, Tensor], small: nn.Module) -> dict[str, Tensor]:
    """The smaller network's tensors, picked out of the dense one's by the plan."""
    state: dict[str, Tensor] = {}
    indices = {
        name: module.index
        for name, module in small.named_modules()
        if isinstance(module, (SelectChannels, ScatterChannels))
    }
    first = first_names(small)
    for name in small.state_dict():
        owner, _, leaf = name.rpartition(".")
        owner = first[owner]
        if owner in indices:
            state[name] = indices[owner]
            continue
        source = dense_name(f"{owner}.{leaf}" if owner else leaf)
        if source not in dense:
            continue  # a bias that folding adds
        tensor = dense[source]
        for dim, kept in plan.take.get(source, {}).items():
            tensor = tensor.index_select(dim, index_tensor(kept, tensor.device))
        state[name] = tensor.clone() if source not in plan.take else tensor
    return state


def first_names(model: nn.Module) -> dict[str, str]:
    """The name that plans have for each module: the first of those under which it is registered."""
    first = {id(module): name for name, module in model.named_modules()}
    return {name: first[id(module)] for name, module in model.named_modules(remove_duplicate=False)}


def _replacement(entry: Mapping[str, Any]) -> nn.Module:
    kinds = {
        "identity": lambda: nn.Identity(),
        "relu": lambda: nn.ReLU(),
        "stride": lambda: nn.MaxPool2d(1, tuple(entry["stride"])),
        "zeros": lambda: ZeroBranch(entry.get("channels"), int(entry.get("axis", 1))),
    }
    if entry["kind"] not in kinds:
        raise FileError(f"unknown replacement {entry['kind']!r}: the file is of a newer headgate; update it")
    return kinds[entry["kind"]]()


def _module(model: nn.Module, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise FileError(
            f"the model has no module `{name}`: pass a fresh instance of the architecture that was saved"
        ) from error


def put(model: nn.Module, name: str, new: nn.Module) -> None:
    """Register another module instead of this one, wherever it is registered."""
    old = _module(model, name)
    for owner in list(model.modules()):
        for leaf in [leaf for leaf, child in owner._modules.items() if child is old]:
            setattr(owner, leaf, new)
