"""Rewrite the exported graph of a network: gates where they are decided, and the kernel wherever it can take over.

A convolution with masks goes to the kernel together with the BatchNorm, the residual addition and the ReLU behind it.
What has no fast path is computed densely and masked, and listed with the reason. Knows nothing of how it is run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from headgate.errors import HeadgateError
from headgate.gates.cost import dead_branches
from headgate.gates.dynamic import DynamicGates, GateNetwork
from headgate.graph.branches import ZERO_STAYS_ZERO
from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, CostItem, Decisions
from headgate.graph.relayout import BODY, dense_name
from headgate.graph.sites import needed_calls
from headgate.graph.trace import Call
from headgate.inference.lowering.fate import ALWAYS, DEPENDS
from headgate.inference.lowering.masks import GateSite, alive, closed_where_dead, join_masks, times_mask
from headgate.inference.lowering.nodes import (
    FRESH,
    aliases,
    averages_over_images,
    conv_arguments,
    dims,
    is_layer_call,
    is_rectified,
    is_view,
    modules_around,
    only_user,
    padding_in_numbers_,
    pair,
    same_shape,
)  # fmt: skip

aten = torch.ops.aten
Gates = NDArray[np.int64]


@dataclass(frozen=True)
class Report:
    """What became of the layers with masks: computed by the kernel, or densely and masked, with the reason."""

    fast: tuple[str, ...]
    dense: dict[str, str]


def _handing_on(graph: ChannelGraph) -> set[str]:
    """Modules whose output is masked and that give what they are given, as nn.Identity does."""
    spans = [graph.trace.spans_of[gated.branch.mask_at][0] for gated in graph.branches]
    spans += [graph.trace.spans_of[writer.layer][0] for writer in graph.writers]
    return {span.name for span in spans if span.outputs[0].index in {value.index for value in span.inputs}}


@contextmanager
def marked(net: nn.Module, graph: ChannelGraph) -> Iterator[None]:
    """Within this, modules that hand on what is masked behind them make a copy: they would leave no operator in the
    exported graph. `Lowering` finds the copies and takes them away."""
    names = _handing_on(graph)
    hooks = [
        module.register_forward_hook(lambda module, args, output: output.clone())
        for name, module in net.named_modules()
        if dense_name(name) in names and not name.endswith(BODY)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Lowering:
    """Rewrites the exported graph of a network."""

    program: fx.GraphModule
    graph: ChannelGraph
    left: Decisions
    fate: NDArray[np.int8]
    dynamic: DynamicGates
    parts: dict[int, fx.Node] = field(default_factory=dict)
    """The node of each mask's gates."""
    masks: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)
    fast: list[str] = field(default_factory=list)
    dense: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ops = self.program.graph
        handed_on = self._without_marks()
        self.nodes_of: dict[str, list[fx.Node]] = {}
        for node in self.ops.nodes:
            for name in modules_around(node):
                self.nodes_of.setdefault(name, []).append(node)
        self.nodes_of.update(handed_on)
        self.mask_of_gate = np.repeat(np.arange(len(self.graph.masks)), [mask.size for mask in self.graph.masks])
        self.place_of_gate = np.cumsum(self.left) - 1  # among those left; counted from the mask's first below
        self.covered: set[str] = set()
        """Modules whose output is masked by the kernel already."""

    def _without_marks(self) -> dict[str, list[fx.Node]]:
        """Take away the copies that stand for modules; what each of these modules hands on."""
        names, found = _handing_on(self.graph), {}
        for node in list(self.ops.nodes):
            if node.target is aten.clone.default and (inside := modules_around(node)[-1:]) and inside[0] in names:
                found[inside[0]] = [node.args[0]]
                node.replace_all_uses_with(node.args[0])
                self.ops.erase_node(node)
        return found

    def carry_out(self) -> None:
        for node in list(self.ops.nodes):
            if node.op == "call_module" and "guards" in str(node.target):
                self.ops.erase_node(node)
            if node.target is aten.conv2d.padding:
                padding_in_numbers_(node)
        self._place_gates()
        readers = {reader.layer: reader for reader in self.graph.readers}
        places = {writer.layer for writer in self.graph.writers}
        places |= {gated.branch.mask_at for gated in self.graph.branches}
        for item in self.graph.costs:
            for node in [node for node in self.nodes_of.get(item.name, ()) if node.op == "call_function"]:
                reader = readers.get(item.name)
                reads = None if reader is None else self._left(reader.gates)
                if node.target is aten.conv2d.default and node.args[0] in self.ops.nodes:
                    if (reason := self._lower_conv(node, item, reads, places)) is None:
                        continue
                elif is_layer_call(node):
                    reason = "no kernel for this kind of layer"
                else:
                    continue
                if self._is_masked(item):
                    self.dense.setdefault(item.name, reason)
                if reads is not None and reader is not None and is_layer_call(node):
                    self._mask_input(node, reads, reader.axis, reader.batch_axis)
        self._mask_outputs()
        self.ops.eliminate_dead_code()
        self._pool()
        self._add_in_place()
        self.ops.lint()
        self.program.recompile()

    # ------------------------------------------------------------------------------------------------ masks

    def _place_gates(self) -> None:
        """Gates are decided right before the first layer that reads their site."""
        for number, (site, network) in enumerate(zip(self.dynamic.sites, self.dynamic.networks, strict=True)):
            if not any((self.fate[self.graph.masks[mask].gates] == DEPENDS).any() for mask in site.masks):
                continue
            node = next((node for node in self.nodes_of.get(site.layer, ()) if is_layer_call(node)), None)
            if node is None:
                raise HeadgateError(f"`{site.layer}` is not found in the exported network")
            assert isinstance(network, GateNetwork)
            name = f"gate_site_{number}"
            self.program.add_submodule(name, GateSite(network, site, self.graph, self.fate, self.left))
            arriving = self._mask(self._left(site.reads))
            with self.ops.inserting_before(node):
                decided = self.ops.call_module(name, (self._arriving_at(site.layer, node), arriving))
                for place, mask in enumerate(site.masks):
                    self.parts[mask] = self.ops.call_function(operator.getitem, (decided, place))

    def _arriving_at(self, layer: str, node: fx.Node) -> Any:
        """What the layer is given: its call may read something that the layer itself has made of it, by padding.

        A view that stands inside the layer's own work was made before it: torch.export makes a view anew behind an
        operator that works in place.
        """
        inside = set(self.nodes_of[layer])
        read: Any = node.args[0]
        if read not in inside or (node.target in (aten.conv2d.default, aten.linear.default) and is_view(read)):
            return read
        given = [each for made in self.nodes_of[layer] for each in made.all_input_nodes if each not in inside]
        return next(each for each in given if each.op != "get_attr")

    def _constant(self, name: str, value: Tensor) -> fx.Node:
        self.program.register_buffer(name, value, persistent=False)
        first = next(node for node in self.ops.nodes if node.op != "placeholder")
        with self.ops.inserting_before(first):
            return self.ops.get_attr(name)

    def _part(self, number: int) -> fx.Node:
        """The gates of a mask; where no image has a say, a constant."""
        if number not in self.parts:
            mask = self.graph.masks[number]
            open_ones = self.fate[mask.gates][self.left[mask.gates]] == ALWAYS
            self.parts[number] = self._constant(f"mask_{number}", torch.from_numpy(open_ones)[None])
        return self.parts[number]

    def _left(self, gates: Gates | None) -> Gates | None:
        """The gates of the channels that are left."""
        return None if gates is None else gates[(gates == ALWAYS_OPEN) | self.left[gates]]

    def _all_open(self, gates: Gates | None) -> bool:
        if gates is None:
            return True
        gated = gates[gates != ALWAYS_OPEN]
        return bool((self.fate[gated] == ALWAYS).all()) and not any(
            number in self.parts for number in np.unique(self.mask_of_gate[gated])
        )

    def _mask(self, gates: Gates | None) -> fx.Node | None:
        """A node with the mask of these channels, or None where all of them are always open."""
        if gates is None or self._all_open(gates):
            return None
        key = ("mask", gates.tobytes())
        if key in self.masks:
            return self.masks[key]
        gated = gates != ALWAYS_OPEN
        numbers = np.unique(self.mask_of_gate[gates[gated]])
        firsts = np.array([self.place_of_gate[self.graph.masks[n].gates][0] for n in numbers])
        sizes = [int(self.left[self.graph.masks[n].gates].sum()) for n in numbers]
        # `place_of_gate` of a mask's first gate is one too low where that gate is not left
        firsts += ~self.left[[self.graph.masks[n].first for n in numbers]]
        starts = np.cumsum([0, *sizes])
        rank = np.searchsorted(numbers, self.mask_of_gate[np.where(gated, gates, 0)])
        rank = np.where(gated, rank, 0)
        index = np.where(gated, starts[rank] + self.place_of_gate[gates] - firsts[rank], starts[-1])
        parts = [self._part(int(number)) for number in numbers]
        if len(parts) == 1 and np.array_equal(index, np.arange(sizes[0])):
            self.masks[key] = parts[0]
        else:
            table = self._constant(f"mask_index_{len(self.masks)}", torch.from_numpy(index))
            with self.ops.inserting_after(max([*parts, table])):  # there for all that ask later, wherever they are
                self.masks[key] = self.ops.call_function(join_masks, (parts, table))
        return self.masks[key]

    def _branch_lives(self, number: int) -> fx.Node | None:
        """Where branch `number` lives, or None where it can't die."""
        gated = self.graph.branches[number]
        numbers = list(gated.masks)
        if all((self.fate[self.graph.masks[mask].gates] == ALWAYS).any() for mask in numbers):
            return None
        key = ("alive", number)
        if key not in self.masks:
            parts = [self._part(mask) for mask in numbers]
            with self.ops.inserting_after(max(parts)):
                self.masks[key] = self.ops.call_function(alive, (parts,))
        return self.masks[key]

    def _out_mask(self, item: CostItem, channels: int, before: fx.Node) -> fx.Node | None:
        """What of a layer's output is computed: its open channels, where the branches around it live."""
        writes = self._left(item.writes)
        mask = self._mask(writes)
        own = set() if writes is None else set(self.mask_of_gate[writes[writes != ALWAYS_OPEN]].tolist())
        for number in item.branches:
            masks = self.graph.branches[number].masks
            if own & set(masks) and self._closed_together(masks):
                continue  # the gates' own module has closed them where the branch is dead
            lives = self._branch_lives(number)
            if lives is not None:
                with self.ops.inserting_before(before):
                    mask = self.ops.call_function(closed_where_dead, (mask, lives, channels))
        return mask

    def _closed_together(self, masks: Sequence[int]) -> bool:
        return any(set(masks) <= set(site.masks) for site in self.dynamic.sites) and any(
            (self.fate[self.graph.masks[mask].gates] == DEPENDS).any() for mask in masks
        )

    def _is_masked(self, item: CostItem) -> bool:
        return not (
            self._all_open(self._left(item.reads))
            and self._all_open(self._left(item.writes))
            and all(
                all((self.fate[self.graph.masks[mask].gates] == ALWAYS).any() for mask in self.graph.branches[b].masks)
                for b in item.branches
            )
        )

    # ---------------------------------------------------------------------------------------- convolutions

    def _lower_conv(self, node: fx.Node, item: CostItem, reads: Gates | None, places: set[str]) -> str | None:
        """Hand a convolution and what follows it to the kernel; the reason where that is not possible."""
        x, weight, bias, stride, padding, dilation, groups = conv_arguments(node)
        weight_t, bias_t = self._tensor(weight), self._tensor(bias)
        if groups != 1:
            return "grouped convolution"
        if weight_t is None or (bias is not None and bias_t is None):
            return "its weights are computed"
        if weight_t.dtype != torch.float32:
            return "not float32"
        shape = node.meta["val"].shape
        if len(shape) != 4:
            return "no batch of images"
        if averages_over_images(node):
            return "its BatchNorm averages over the batch"
        out_gates = self._left(item.writes)
        if out_gates is not None and len(out_gates) != weight_t.shape[0]:
            return "its output channels are folded"
        last, name = node, item.name
        norm = only_user(node)
        if norm is not None and name not in places:
            folded = self._folded(norm, weight_t, bias_t)
            after = only_user(norm)
            if folded is not None and after is not None and after.target is operator.getitem:
                weight_t, bias_t = folded
                last, name = after, (modules_around(norm) or (name,))[-1]
        if not self._is_masked(item):
            if last is not node:
                self._plain_conv(node, last, weight_t, bias_t)
            return None
        self.covered |= {item.name, name}
        residual, relu = None, False
        add = only_user(last)
        if add is not None and add.target is aten.add.Tensor and len(add.args) == 2 and not add.kwargs:
            other = add.args[1] if add.args[0] is last else add.args[0]
            if isinstance(other, fx.Node) and other is not last and same_shape(other, last):
                residual, last = other, add
        act = only_user(last)
        if act is not None and act.target is aten.relu.default:
            relu, last = True, act
        in_mask = self._mask(reads)
        out_mask = self._out_mask(item, weight_t.shape[0], last)
        prefix = f"compact_{len(self.fast)}"
        constants = [self._constant(f"{prefix}_weight", weight_t.contiguous())]
        constants.append(None if bias_t is None else self._constant(f"{prefix}_bias", bias_t.contiguous()))  # type: ignore[arg-type]
        with self.ops.inserting_before(last):
            made = self.ops.call_function(
                torch.ops.headgate.masked_conv2d.default,
                (x, *constants, in_mask, out_mask, residual, list(stride), list(padding), list(dilation), relu),
            )
        made.meta["val"] = last.meta.get("val")
        made.meta["headgate_layer"] = item.name
        last.replace_all_uses_with(made)
        self.fast.append(item.name)
        return None

    def _plain_conv(self, node: fx.Node, last: fx.Node, weight: Tensor, bias: Tensor | None) -> None:
        """A convolution without masks is torch's own; only its BatchNorm goes."""
        name = f"folded_{node.name}"
        constants = [self._constant(f"{name}_weight", weight)]
        if bias is not None:
            constants.append(self._constant(f"{name}_bias", bias))
        with self.ops.inserting_before(node):
            made = self.ops.call_function(aten.conv2d.default, (node.args[0], *constants, *node.args[3:]))
        made.meta.update(last.meta)
        last.replace_all_uses_with(made)

    def _tensor(self, node: Any) -> Tensor | None:
        """The parameter or buffer that a node stands for."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        value: Any = self.program
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return value.detach() if isinstance(value, Tensor) else None

    def _folded(self, norm: fx.Node, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if norm.target is not aten._native_batch_norm_legit_no_training.default:
            return None
        gamma, beta, mean, var = (self._tensor(each) for each in norm.args[1:5])
        if mean is None or var is None:
            return None
        eps: Any = norm.args[6]
        new_weight, new_bias = fuse_conv_bn_weights(weight, bias, mean, var, eps, gamma, beta)
        return new_weight.detach(), new_bias.detach()

    # ------------------------------------------------------------------------------------------ less memory

    def _pool(self) -> None:
        """Torch's max pooling also writes down where the maxima were."""
        for node in list(self.ops.nodes):
            if node.target is not aten.max_pool2d.default:
                continue
            given: Any = (*node.args, *(None, [0], [1], False)[len(node.args) - 2 :])
            x, kernel, stride, padding, dilation, ceil = given
            pairs = [pair(size) for size in (kernel, stride or kernel, padding, dilation)]
            if pairs[3] == [1, 1] and not ceil and dims(node) == 4:
                node.target, node.args = torch.ops.headgate.max_pool2d.default, (x, *pairs[:3])

    def _add_in_place(self) -> None:
        """Where nobody reads the residual any more, the sum takes its place: closed channels then cost nothing."""
        order = {node: place for place, node in enumerate(self.ops.nodes)}
        for node in list(self.ops.nodes):
            node.meta["headgate_rectified"] = is_rectified(node)
            if node.target is not torch.ops.headgate.masked_conv2d.default or node.args[5] is None:
                continue
            residual, relu = node.args[5], node.args[9]
            assert isinstance(residual, fx.Node)
            shared = aliases(residual)
            readers = {user for alias in shared for user in alias.users if user is not node}
            if residual.target not in FRESH or any(order[user] > order[node] for user in readers):
                continue
            if node.args[0] in shared:
                continue
            with self.ops.inserting_before(node):
                added = self.ops.call_function(
                    torch.ops.headgate.masked_conv2d_add_.default, (*node.args, is_rectified(residual))
                )
            added.meta.update(node.meta)
            order[added] = order[node]
            residual.meta["headgate_rectified"] = bool(relu)
            node.replace_all_uses_with(residual)
            self.ops.erase_node(node)

    # ------------------------------------------------------------------------------------- dense and masked

    def _mask_input(self, node: fx.Node, gates: Gates, axis: int, batch_axis: int) -> None:
        mask = self._mask(gates)
        if mask is None:
            return
        x = node.args[0]
        with self.ops.inserting_before(node):
            masked = self.ops.call_function(times_mask, (x, mask, axis, batch_axis))
        masked.meta["val"] = x.meta.get("val")  # type: ignore[union-attr]
        node.args = (masked, *node.args[1:])

    def _mask_outputs(self) -> None:
        """Masks behind modules, where the kernel has not already written zeros."""
        for writer in self.graph.writers:
            if self._is_left_to_mask(writer.layer):
                self._behind(writer.layer, self._mask(self._left(writer.gates)), writer.axis, writer.batch_axis)
        for number, gated in enumerate(self.graph.branches):
            if self._is_left_to_mask(gated.branch.mask_at):
                self._behind(gated.branch.mask_at, self._branch_lives(number), None, gated.batch_axis)

    def _is_left_to_mask(self, module: str) -> bool:
        """Whether a module's output is computed, and not by the kernel: nor is it what such an output becomes by
        operators that leave zeros zeros."""
        value = self.graph.trace.spans_of[module][0].outputs[0]
        if value.index not in self._computed:
            return False
        while not self.covered & self._giving.get(value.index, set()):
            producer = self._computed.get(value.index)
            read = [] if producer is None else [given for given in producer.inputs if given.from_input]
            if producer is None or producer.target not in ZERO_STAYS_ZERO or len(read) != 1:
                return True
            value = read[0]
        return False

    @cached_property
    def _computed(self) -> dict[int, Call]:
        """The call that makes each value that the answer needs and that is not folded away with its branch."""
        needed = needed_calls(self.graph.trace)
        for number in dead_branches(self.graph, self.left):
            needed -= self.graph.branches[number].branch.calls
        calls = [self.graph.trace.calls[index] for index in sorted(needed)]
        return {value.index: call for call in calls for value in call.outputs}

    @cached_property
    def _giving(self) -> dict[int, set[str]]:
        """The modules that give each value."""
        found: dict[int, set[str]] = {}
        for span in self.graph.trace.spans:
            for value in span.outputs:
                found.setdefault(value.index, set()).add(span.name)
        return found

    def _behind(self, module: str, mask: fx.Node | None, axis: int | None, batch_axis: int) -> None:
        if mask is None:
            return  # never closed
        nodes = [node for node in self.nodes_of.get(module, ()) if node.users and node.op == "call_function"]
        if not nodes:
            raise HeadgateError(
                f"`{module}`, whose output is masked, is not found in the exported network: use the gated model itself"
            )
        last = nodes[-1]
        users = list(last.users)
        with self.ops.inserting_after(max(last, mask)):
            masked = self.ops.call_function(times_mask, (last, mask, axis, batch_axis))
        masked.meta["val"] = last.meta.get("val")
        for user in users:
            if user is not mask:
                user.replace_input_with(last, masked)
        self.dense.setdefault(module, "masked behind the module")
