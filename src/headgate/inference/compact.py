"""A conditional network that computes only the open channels of each image.

`compact` takes the network apart into its operators (`torch.export`), puts the gates where they are decided, and hands
every convolution with masks to the kernel, together with the BatchNorm, the residual addition and the ReLU behind it.
Gates that are the same for every image are folded away first: inner channels that are always closed are gone, others
are closed for good. What has no fast path is computed densely and masked, and listed. Knows graphs and gate networks;
knows nothing of training.
"""

from __future__ import annotations

import copy
import math
import operator
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from headgate.errors import HeadgateError
from headgate.gates.cost import dead_branches
from headgate.gates.draws import spread
from headgate.gates.dynamic import DynamicGates, GateNetwork, pooled
from headgate.gates.gumbel import LOWEST_LOGIT, threshold_logit
from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, CostItem, Decisions
from headgate.graph.plan import make_plan
from headgate.graph.relayout import dense_name
from headgate.graph.sites import Site
from headgate.inference.kernel import native, op, plain
from headgate.inference.kernel.prepared import Conv
from headgate.inference.shrink import build

aten = torch.ops.aten
Gates = NDArray[np.int64]
NEVER, ALWAYS, DEPENDS = 0, 1, 2
"""What becomes of a gate over all images."""
MEASURED_ROUNDS = 4
DENSE_GAIN = 0.9
"""A layer is computed densely where that takes less than this share of the kernel's time."""
QUICKER = "quicker than the kernel here"
NO_KERNEL = "no compiled kernel here: in plain PyTorch"


# ---------------------------------------------------------------------------------------------------- constants


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


def _left_after_folding(graph: ChannelGraph, fate: NDArray[np.int8]) -> Decisions:
    """What is not folded away: inner channels go where they are closed for good. Readers and writers of an indexed
    stream stay as wide as it, since the kernel reads and writes in place and a narrower layer would have to copy."""
    indexed = np.zeros(graph.gate_count, bool)
    for writer in graph.writers:
        indexed[writer.gates[writer.gates != ALWAYS_OPEN]] = True
    for mask in graph.masks:
        indexed[mask.gates] |= mask.kind != "channels"
    return (fate != NEVER) | indexed


# -------------------------------------------------------------------------------------------------------- gates


class GateSite(nn.Module):
    """The gates of one site at inference: from the tensor there to one mask of booleans for each of its masks."""

    def __init__(
        self, network: GateNetwork, site: Site, graph: ChannelGraph, fate: NDArray[np.int8], left: Decisions
    ) -> None:
        super().__init__()
        masks = [graph.masks[number] for number in site.masks]
        numbers = np.concatenate([np.arange(mask.first, mask.gates.stop) for mask in masks])
        kept = left[numbers]
        self.numbers = numbers[kept]
        """Of its gates, among all gates of the network."""
        norm = network.norm
        assert norm.running_mean is not None and norm.running_var is not None
        scale = norm.weight.detach() * (norm.running_var + norm.eps).rsqrt()
        weight, bias = network.head.weight.detach().clone(), network.head.bias.detach().clone()
        for value, told in ((LOWEST_LOGIT * 2, NEVER), (math.inf, ALWAYS)):  # closed for good at tau = 0, too
            rows = torch.from_numpy(fate[numbers] == told)
            weight[rows], bias[rows] = 0.0, value
        index = torch.from_numpy(np.flatnonzero(kept))
        inputs = network.trunk.weight.detach() * scale[:, None]
        if site.reads is not None:  # channels that are gone were zero
            inputs = inputs[:, torch.from_numpy((site.reads == ALWAYS_OPEN) | left[site.reads])]
        self.register_buffer("trunk_weight", inputs.contiguous())
        self.register_buffer("trunk_bias", norm.bias.detach() - norm.running_mean * scale)
        self.register_buffer("head_weight", weight[index].contiguous())
        self.register_buffer("head_bias", bias[index].contiguous())
        self.site = site
        self._by_channel = site.axis in (1, -3) and site.batch_axis == 0
        self._made: native.Gates | None = None
        """The kernel's call with all that does not change."""
        self.plain = False
        """Whether to use torch's own operators only."""
        self.threshold = 0.0
        self.sizes = [int(left[mask.gates].sum()) for mask in masks]
        self.immortal = [int(not mask.may_die) for mask in masks]
        place_of = {number: place for place, number in enumerate(site.masks)}
        self.groups: list[int] = []
        """The masks of each branch that dies with them, by their places, -1 behind each branch."""
        for gated in graph.branches:
            if all(number in place_of for number in gated.masks):
                self.groups += [*(place_of[number] for number in gated.masks), -1]

    def forward(self, x: Tensor, arriving: Tensor | None = None) -> list[Tensor]:
        """One (images, gates) mask for each mask of the site. Masks of a branch that dies are closed altogether.

        `arriving` is the mask of the channels of `x` that was decided before, where there is one.
        """
        images = self._by_channel and x.dim() > 2 and x.dtype == torch.float32 and x.numel() > 0 and x.is_cpu
        if images and not self.plain and not torch.compiler.is_compiling() and native.compiled() is not None:
            op.check_channels(x, self.trunk_weight)  # type: ignore[arg-type]
            if self._made is None:
                self._made = native.Gates(*self._tensors(), self.sizes, self.immortal, self.groups)
            return self._made(x.contiguous(), arriving, self.threshold)
        trunk, head = self._tensors()
        numbers = self.threshold, self.sizes, self.immortal, self.groups
        if self.plain:
            return plain.gate_masks(pooled(x, self.site, x.shape[0]), arriving, trunk, head, *numbers)
        x = x if self._by_channel else pooled(x, self.site, len(x))
        masks: list[Tensor] = torch.ops.headgate.gate_masks(x, arriving, *trunk, *head, *numbers)
        return masks

    def _tensors(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        made: Any = (self.trunk_weight, self.trunk_bias), (self.head_weight, self.head_bias)
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> GateSite:
        """Move: what was prepared points to where the tensors were."""
        super()._apply(fn, recurse)
        self._made = None
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GateSite:
        made = GateSite.__new__(GateSite)
        memo[id(self)] = made
        nn.Module.__init__(made)
        for name, value in vars(self).items():
            made.__dict__[name] = None if name == "_made" else copy.deepcopy(value, memo)
        return made


def join_masks(parts: Sequence[Tensor], index: Tensor) -> Tensor:
    """Channels' gates picked from several masks; the last place stands for channels that are always open."""
    counts: list[Any] = [part.shape[0] for part in parts]  # symbols, where the network is exported
    images = next((count for count in counts if not (isinstance(count, int) and count == 1)), 1)
    ones = parts[0].new_ones(images, 1)
    return torch.cat([*(part.expand(images, -1) for part in parts), ones], 1).index_select(1, index)


def alive(parts: Sequence[Tensor]) -> Tensor:
    """Where a branch lives: (images, 1)."""
    lives = parts[0].any(1, keepdim=True)
    for part in parts[1:]:
        lives = lives & part.any(1, keepdim=True)
    return lives


def closed_where_dead(mask: Tensor | None, lives: Tensor, channels: int) -> Tensor:
    """A mask of `channels` channels, all of them closed where the branch around is dead."""
    return lives.expand(-1, channels).contiguous() if mask is None else mask & lives


def times_mask(x: Tensor, mask: Tensor, axis: int | None, batch_axis: int) -> Tensor:
    """The tensor, zero where channels are closed."""
    return x * spread(mask, x, axis, batch_axis)


# ------------------------------------------------------------------------------------------------------ lowering


@dataclass(frozen=True)
class Report:
    """What became of the layers with masks: computed by the kernel, or densely and masked, with the reason."""

    fast: tuple[str, ...]
    dense: dict[str, str]


@dataclass
class _Lowering:
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
        self.nodes_of: dict[str, list[fx.Node]] = {}
        for node in self.ops.nodes:
            for name in _modules_around(node):
                self.nodes_of.setdefault(name, []).append(node)
        self.mask_of_gate = np.repeat(np.arange(len(self.graph.masks)), [mask.size for mask in self.graph.masks])
        self.place_of_gate = np.cumsum(self.left) - 1  # among those left; counted from the mask's first below
        self.covered: set[str] = set()
        """Modules whose output is masked by the kernel already."""

    def carry_out(self) -> None:
        for node in list(self.ops.nodes):
            if node.op == "call_module" and "guards" in str(node.target):
                self.ops.erase_node(node)
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
                elif _is_layer_call(node):
                    reason = "no kernel for this kind of layer"
                else:
                    continue
                if self._is_masked(item):
                    self.dense.setdefault(item.name, reason)
                if reads is not None and reader is not None and _is_layer_call(node):
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
            node = next((node for node in self.nodes_of.get(site.layer, ()) if _is_layer_call(node)), None)
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
        if read not in inside or (node.target in (aten.conv2d.default, aten.linear.default) and _is_view(read)):
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
        x, weight, bias, stride, padding, dilation, groups = _conv_arguments(node)
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
        out_gates = self._left(item.writes)
        if out_gates is not None and len(out_gates) != weight_t.shape[0]:
            return "its output channels are folded"
        last, name = node, item.name
        norm = _only_user(node)
        if norm is not None and name not in places:
            folded = self._folded(norm, weight_t, bias_t)
            after = _only_user(norm)
            if folded is not None and after is not None and after.target is operator.getitem:
                weight_t, bias_t = folded
                last, name = after, (_modules_around(norm) or (name,))[-1]
        if not self._is_masked(item):
            if last is not node:
                self._plain_conv(node, last, weight_t, bias_t)
            return None
        self.covered |= {item.name, name}
        residual, relu = None, False
        add = _only_user(last)
        if add is not None and add.target is aten.add.Tensor and len(add.args) == 2 and not add.kwargs:
            other = add.args[1] if add.args[0] is last else add.args[0]
            if isinstance(other, fx.Node) and _same_shape(other, last):
                residual, last = other, add
        act = _only_user(last)
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
            pairs = [_pair(size) for size in (kernel, stride or kernel, padding, dilation)]
            if pairs[3] == [1, 1] and not ceil and _dims(node) == 4:
                node.target, node.args = torch.ops.headgate.max_pool2d.default, (x, *pairs[:3])

    def _add_in_place(self) -> None:
        """Where nobody reads the residual any more, the sum takes its place: closed channels then cost nothing."""
        order = {node: place for place, node in enumerate(self.ops.nodes)}
        for node in list(self.ops.nodes):
            if node.target is not torch.ops.headgate.masked_conv2d.default or node.args[5] is None:
                continue
            residual, relu = node.args[5], node.args[9]
            assert isinstance(residual, fx.Node)
            aliases = _aliases(residual)
            readers = {user for alias in aliases for user in alias.users if user is not node}
            if residual.target not in _FRESH or any(order[user] > order[node] for user in readers):
                continue
            if node.args[0] in aliases:
                continue
            with self.ops.inserting_before(node):
                added = self.ops.call_function(
                    torch.ops.headgate.masked_conv2d_add_.default, (*node.args, _is_rectified(residual))
                )
            added.meta.update(node.meta)
            order[added] = order[node]
            if relu:
                residual.meta["headgate_rectified"] = True
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
            if writer.layer not in self.covered:
                self._behind(writer.layer, self._mask(self._left(writer.gates)), writer.axis, writer.batch_axis)
        for number, gated in enumerate(self.graph.branches):
            if gated.branch.mask_at not in self.covered:
                self._behind(gated.branch.mask_at, self._branch_lives(number), None, gated.batch_axis)

    def _behind(self, module: str, mask: fx.Node | None, axis: int | None, batch_axis: int) -> None:
        nodes = [node for node in self.nodes_of.get(module, ()) if node.users and node.op == "call_function"]
        if not nodes or mask is None:
            return  # folded away with its branch, or never closed
        last = nodes[-1]
        users = list(last.users)
        with self.ops.inserting_after(max(last, mask)):
            masked = self.ops.call_function(times_mask, (last, mask, axis, batch_axis))
        masked.meta["val"] = last.meta.get("val")
        for user in users:
            if user is not mask:
                user.replace_input_with(last, masked)
        self.dense.setdefault(module, "masked behind the module")


def _modules_around(node: fx.Node) -> tuple[str, ...]:
    """The modules a node was recorded in, by their names in the dense network, innermost last."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(dense_name(path) for path, _ in stack.values() if path)


def _is_layer_call(node: fx.Node) -> bool:
    """Whether a node is a layer's own work on its input, not a getattr or a reshape."""
    return node.op == "call_function" and any(
        name in str(node.target) for name in ("conv", "linear", "mm", "bilinear", "attention", "matmul")
    )


def _is_view(node: fx.Node) -> bool:
    """Whether a node is another form of the same numbers."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    return isinstance(made, fx.Node) and bool(getattr(made.target, "is_view", False))


def _aliases(node: fx.Node) -> list[fx.Node]:
    """The node, and all that may share its memory."""
    found = [node]
    for each in found:
        found += [user for user in each.users if _is_view(user) or user.target in _ITSELF]
    return found


_ITSELF = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}
"""Operators whose result may be what they were given."""
_FRESH = {
    torch.ops.headgate.masked_conv2d.default, torch.ops.headgate.max_pool2d.default, aten.relu.default,
    aten.conv2d.default, aten.add.Tensor,
}  # fmt: skip
"""Operators whose result is memory of its own."""


def _is_rectified(node: fx.Node) -> bool:
    """Whether a node's values are known not to be negative."""
    if node.meta.get("headgate_rectified") or node.target is aten.relu.default:
        return True
    if node.target is torch.ops.headgate.max_pool2d.default:
        return isinstance(node.args[0], fx.Node) and _is_rectified(node.args[0])
    return node.target is torch.ops.headgate.masked_conv2d.default and bool(node.args[9])


def _pair(size: Any) -> list[int]:
    numbers = [size] if isinstance(size, int) else list(size)
    return numbers * 2 if len(numbers) == 1 else numbers


def _dims(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else 0


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _same_shape(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta.get("val"), second.meta.get("val")
    if isinstance(b, (tuple, list)):
        b = b[0]
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and len(a.shape) == len(b.shape)
        and all(str(x) == str(y) for x, y in zip(a.shape, b.shape, strict=True))
    )


def _conv_arguments(node: fx.Node) -> tuple[Any, Any, Any, Any, Any, Any, int]:
    given: list[Any] = [*node.args, *[None, [1, 1], [0, 0], [1, 1], 1][len(node.args) - 2 :]]
    x, weight, bias, stride, padding, dilation, groups = given
    return x, weight, bias, _pair(stride), _pair(padding), _pair(dilation), groups


# --------------------------------------------------------------------------------------------------- the module


class CompactModel(nn.Module):
    """A network that evaluates its gates and computes only what is open, image by image. For inference."""

    not_traced_because = "a compact network computes other channels for every image: ask the gated model of it"

    def __init__(
        self, program: fx.GraphModule, report: Report, tau: float, folded: bool, fate: NDArray[np.int8]
    ) -> None:  # fmt: skip
        super().__init__()
        self._fate = fate
        self.folded = folded
        """Whether some gates that depend on the image are folded away: their say is that of the tau they had."""
        self.program = program
        self.report = report
        self._tau = tau
        self.tau = tau
        self._quick = _prepared(program) if native.compiled() is not None else program
        self.eval()

    @property
    def tau(self) -> float:
        """Gates that depend on the image are open where p > tau. Can be moved at any time, unless gates are folded."""
        return self._tau

    @tau.setter
    def tau(self, tau: float) -> None:
        if not 0 <= tau <= 1:
            raise HeadgateError(f"tau={tau}: a gate is open where its probability is above tau, so tau lies in 0..1")
        if self.folded and tau != self._tau:
            raise HeadgateError(f"gates were folded away at tau={self._tau:g}: compact(fold=False) keeps tau movable")
        self._tau = tau
        for module in self.program.modules():
            if isinstance(module, GateSite):
                module.threshold = threshold_logit(tau)

    def in_plain_operators(self) -> nn.Module:
        """The same network in PyTorch's own operators, which computes everything and masks: for export to ONNX."""
        with _without_torchs_own_warnings():
            graph = copy.deepcopy(self.program.graph)
            twin = fx.GraphModule(copy.deepcopy(self.program), graph)
        order = {node: place for place, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            in_place = node.target is torch.ops.headgate.masked_conv2d_add_.default
            if node.target is torch.ops.headgate.max_pool2d.default:
                node.target = aten.max_pool2d.default
            if not in_place and node.target is not torch.ops.headgate.masked_conv2d.default:
                continue
            with graph.inserting_before(node):
                made = graph.call_function(plain.conv2d, node.args[:10])
            order[made] = order[node]
            if in_place:
                residual: Any = node.args[5]
                for user in [user for user in residual.users if order[user] > order[node]]:
                    user.replace_input_with(residual, made)
            else:
                node.replace_all_uses_with(made)
            graph.erase_node(node)
        for site in twin.modules():
            if isinstance(site, GateSite):
                site.plain = True
        graph.lint()
        twin.recompile()
        return twin

    def choose_(self, images: Tensor) -> None:
        """Time every layer both ways on these images, and compute densely where that is quicker."""
        reasons = {name: reason for name, reason in self.report.dense.items() if reason != QUICKER}
        convs = [module for module in self._quick.modules() if isinstance(module, Conv)]
        given: dict[Conv, tuple[Any, ...]] = {}
        hooks = [
            conv.register_forward_pre_hook(lambda module, args: given.update({module: _kept(args)})) for conv in convs
        ]
        try:
            self(images)
        finally:
            for hook in hooks:
                hook.remove()
        with torch.no_grad():
            for conv in convs:
                if conv in given:
                    conv.dense = _seconds(conv.densely, given[conv]) < DENSE_GAIN * _seconds(
                        conv.by_kernel, given[conv]
                    )
        by_kernel = {conv.layer for conv in convs}
        reasons |= {layer: NO_KERNEL for layer in self.report.fast if layer not in by_kernel}
        reasons |= {conv.layer: QUICKER for conv in convs if conv.dense}
        self.report = Report(tuple(conv.layer for conv in convs if not conv.dense), reasons)

    def watched(self, images: Tensor) -> tuple[Any, Tensor]:
        """What it returns, and which gates were open for which image; those of branches that died are all closed."""
        gates_BG = torch.from_numpy(self._fate == ALWAYS).repeat(len(images), 1)

        def note(site: nn.Module, args: Any, masks: list[Tensor]) -> None:
            assert isinstance(site, GateSite)
            gates_BG[:, torch.from_numpy(site.numbers)] = torch.cat(masks, 1).bool().cpu()

        sites = [module for module in self._quick.modules() if isinstance(module, GateSite)]
        hooks = [site.register_forward_hook(note) for site in sites]
        try:
            return self(images), gates_BG
        finally:
            for hook in hooks:
                hook.remove()

    def forward(self, *args: Any) -> Any:
        """What the gated network returns in eval mode."""
        with torch.no_grad():
            return self.program(*args) if torch.compiler.is_compiling() else self._quick(*args)

    def train(self, mode: bool = True) -> CompactModel:
        """It stays in eval mode: it can't be trained."""
        self.training = False
        return self

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {len(self.report.fast)} layers by the kernel, {len(self.report.dense)} dense"


def decided_otherwise(given_BN: Tensor, above_BN: Tensor, sure_BN: Tensor, sizes: list[int]) -> bool:
    """Whether gates were decided in a way that rounding can't explain: `given` by the compact network, `above` the
    threshold in the gated one, and `sure` where it is not a close decision; masks of the given sizes side by side.

    A mask whose gates are all below the threshold may have had its likeliest one opened. A mask that is all closed
    though some of its gates are above needs another one, of the same site, that has none: their branch has died.
    """
    masks = list(zip(*(each.split(sizes, 1) for each in (given_BN, above_BN, sure_BN)), strict=True))
    for given, above, sure in masks:
        heard = given.any(1) & above.any(1)
        if bool(((given != above) & sure)[heard].any()):
            return True
    closed_BM = torch.stack([~given.any(1) for given, _, _ in masks], 1)
    surely_BM = torch.stack([(above & sure).any(1) for _, above, sure in masks], 1)
    return bool((closed_BM.any(1) & ~(closed_BM & ~surely_BM).any(1)).any())


def _kept(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A layer's arguments; its residual may be overwritten later."""
    return (*args[:3], None if args[3] is None else args[3].clone())


def _seconds(call: Callable[..., Any], given: tuple[Any, ...]) -> float:
    call(*given)
    times = []
    for _ in range(MEASURED_ROUNDS):
        before = time.perf_counter()
        call(*given)
        times.append(time.perf_counter() - before)
    return min(times)


@contextmanager
def _without_torchs_own_warnings() -> Iterator[None]:
    """Copying a graph makes torch warn about its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        yield


def _prepared(program: fx.GraphModule) -> fx.GraphModule:
    """The same program, sharing its tensors, with calls of the kernel that have everything prepared."""
    with _without_torchs_own_warnings():
        graph = copy.deepcopy(program.graph)
    quick = fx.GraphModule(program, graph)
    for node in list(graph.nodes):
        in_place = node.target is torch.ops.headgate.masked_conv2d_add_.default
        if not in_place and node.target is not torch.ops.headgate.masked_conv2d.default:
            continue
        given: Any = node.args
        x, weight, bias, in_mask, out_mask, residual, stride, padding, dilation, relu, *rectified = given
        weight, bias = (None if constant is None else getattr(program, constant.target) for constant in (weight, bias))
        name = f"conv_{node.name}"
        assert weight is not None
        conv = Conv(weight, bias, stride, padding, dilation, relu, in_place, rectified == [True])
        conv.layer = node.meta["headgate_layer"]
        quick.add_submodule(name, conv)
        with graph.inserting_before(node):
            made = graph.call_module(name, (x, in_mask, out_mask, residual))
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.lint()
    quick.recompile()
    return quick


def compact(
    model: nn.Module, graph: ChannelGraph, dynamic: DynamicGates, decided: Decisions, tau: float, example: Tensor,
    fold: bool = True,
) -> CompactModel:  # fmt: skip
    """The conditional network in its fast form. `decided` are the gates that are parameters."""
    for site in dynamic.sites:
        if site.folded:
            raise HeadgateError(
                f"images are folded with something else (frames, windows) before `{site.layer}`, where gates are "
                "decided: compact() takes images one by one; use the gated model itself"
            )
    fate = gates_over_all_images(dynamic, graph, decided, tau, fold)
    looking = [mask for site in dynamic.sites for mask in site.masks]
    folded = any((fate[graph.masks[mask].gates] != DEPENDS).any() for mask in looking)
    left = _left_after_folding(graph, fate)
    net = build(model, make_plan(graph, left, dead_branches(graph, left))).eval()
    program = _exported(net, example)
    lowering = _Lowering(program, graph, left, fate, dynamic)
    lowering.carry_out()
    return CompactModel(program, Report(tuple(dict.fromkeys(lowering.fast)), lowering.dense), tau, folded, fate)


def _exported(net: nn.Module, example: Tensor) -> fx.GraphModule:
    """The network's operators, for any number of images, none of them in place."""
    two = torch.cat([example[:1], example[:1]])  # one image would be taken for a constant
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        any_number = torch.export.ShapesCollection()
        any_number[two] = {0: torch.export.Dim("batch")}
        try:
            shapes: Any = any_number
            exported = torch.export.export(net, (two,), dynamic_shapes=shapes, strict=False)
            program = exported.run_decompositions({}).module()
        except Exception as error:
            raise HeadgateError(
                f"torch.export can't take this network apart ({type(error).__name__}: {str(error).splitlines()[0]}): "
                "use the gated model itself. (A forward that asks for len(x) fixes the number of images: x.shape[0] "
                "does not)"
            ) from error
    assert isinstance(program, fx.GraphModule)
    return program
