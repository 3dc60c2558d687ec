"""What each layer (a module with weights) does to channels: one table, module type → rule.

A rule is a small frozen object built from four kinds:

- `Mixing`: every output channel reads every input channel (of its group): convolutions, Linear;
- `PerChannel`: each channel by itself, with parameters that have one entry a channel: BatchNorm, PReLU, GroupNorm;
- `Elementwise`: each element by itself, no parameters: a user's own activation;
- `Opaque`: needs all its channels; has a cost perhaps: attention, LayerNorm.

`register_rule(MyLayer, rule)` adds a layer of the user's own. A type is found by itself or by a base class whose
`forward` it inherits unchanged: a subclass that computes something else is not guessed at. A layer without a rule
is seen through, operator by operator. Knows nothing of gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headgate.graph.labels import Labels, along, channel_axis
from headgate.graph.op_rules import ChannelBook, MaybeLabels, elementwise
from headgate.graph.relayout import Relayout
from headgate.graph.trace import Call, Layers, Trace, Value, trace

Index = NDArray[np.int64]
GroupMode = Literal["full", "positions", "whole"]


@dataclass(frozen=True)
class ModuleEdit:
    """How a layer becomes smaller: which entries its tensors keep, and what its attributes become."""

    take: dict[str, dict[int, Index]] = field(default_factory=dict)
    set: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """One call of a mixing layer: the channels it reads and writes, and its multiply-adds in the whole batch."""

    layer: str
    kind: str
    reads: Labels | None
    writes: Labels
    macs: int
    mode: GroupMode
    groups: int
    in_axis: int
    batch_axis: int
    out_shape: tuple[int, ...]


class LayerBook(ChannelBook):
    """What a layer rule writes to, beside ties and freezes."""

    def use(self, usage: Usage) -> None:
        """Write down that a mixing layer was called."""
        raise NotImplementedError

    def resize(self, layer: str, reads: Labels | None, writes: Labels | None) -> None:
        """Write down which channels a layer's inputs and outputs hold, so that it can be made smaller.

        A layer that is called again must find the same channels: they are tied, call to call.
        """
        raise NotImplementedError

    def repeats(self, call: Call) -> int:
        """How often one call counts in the batch's cost: what does not depend on the images, once for each of them."""
        raise NotImplementedError

    def batch_axis(self, value: Value) -> int:
        """The dimension of a value that runs over images (or over images times something else)."""
        raise NotImplementedError

    def has_images(self, value: Value) -> bool:
        """Whether some dimension of a value runs over images."""
        raise NotImplementedError

    def reading(self, call: Call, labels: MaybeLabels) -> MaybeLabels:
        """The channels a mixing layer reads: those of its input, or masked ones of its own (an indexed stream)."""
        raise NotImplementedError


class LayerRule:
    """What every rule answers."""

    keeps_shape: bool = False
    """Whether the output is shaped like the input, so that a trace need not compute it."""

    def propagate(self, call: Call, module: nn.Module, book: LayerBook) -> list[MaybeLabels]:
        """Labels of the outputs; ties and freezes go to the book."""
        raise NotImplementedError

    def edit(self, module: nn.Module, keep_in: Index | None, keep_out: Index | None) -> ModuleEdit:
        """The change that leaves only these places of the input's and output's channels (None: all)."""
        return ModuleEdit()

    def macs(self, call: Call, module: nn.Module) -> int:
        """Multiply-adds of one call, for the whole batch."""
        return 0

    def applies_to(self, module: nn.Module) -> bool:
        """False for an instance that the rule can't stand for (a missing tensor, say)."""
        return True


@dataclass(frozen=True)
class Mixing(LayerRule):
    """Every output channel reads every input channel of its group.

    `in_dims` and `out_dims` name the dimension of each tensor that runs over input and output channels.
    `macs_over` says over which tensor's places each weight is used: the output's, or the input's. `dims` is the number
    of a batch's dimensions, for layers that take a single image too: there, channels lie one dimension earlier.
    """

    axis: int = 1
    in_dims: Mapping[str, int] = field(default_factory=lambda: {"weight": 1})
    out_dims: Mapping[str, int] = field(default_factory=lambda: {"weight": 0, "bias": 0})
    in_attribute: str | None = "in_channels"
    out_attribute: str | None = "out_channels"
    groups_attribute: str | None = "groups"
    macs_over: Literal["output", "input"] = "output"
    dims: int | None = None

    def propagate(self, call: Call, module: nn.Module, book: LayerBook) -> list[MaybeLabels]:
        assert call.layer is not None
        given, made = call.inputs[0], call.outputs[0]
        axis = _axis_in(given, self.axis, self.dims)
        labels = book.labels_of(given)
        if labels is not None and channel_axis(labels, axis) is None:
            book.freeze(labels, f"{call.title} reads it along an unexpected dimension")
            labels = None
        labels = book.reading(call, labels)
        reads = None if labels is None else np.broadcast_to(labels.reshape(-1), given.shape[axis])
        writes = book.fresh(("layer", call.layer), made.shape[axis])
        if given.from_input and not book.has_images(given):
            for channels in (reads, writes):
                book.freeze(channels, f"{call.title} is called without a batch, and gates are an image's own")
        mode = self._tie_groups(call, module, book, reads, writes)
        batch_axis = book.batch_axis(given)
        usage = Usage(
            call.layer, type(module).__name__, reads, writes, self.macs(call, module) * book.repeats(call), mode,
            self._groups(module), axis, batch_axis, made.shape,
        )  # fmt: skip
        book.use(usage)
        book.resize(call.layer, reads, writes)
        return [along(writes, axis, len(made.shape))]

    def _groups(self, module: nn.Module) -> int:
        return int(getattr(module, self.groups_attribute)) if self.groups_attribute else 1

    def _tie_groups(
        self, call: Call, module: nn.Module, book: LayerBook, reads: Labels | None, writes: Labels
    ) -> GroupMode:
        """A grouped layer stays one: either whole groups go, or every group loses the same places."""
        groups = self._groups(module)
        if groups == 1:
            return "full"
        per_group = call.inputs[0].shape[_axis_in(call.inputs[0], self.axis, self.dims)] // groups
        whole = groups >= per_group and reads is not None
        grid_out = writes.reshape(groups, -1)
        grid_in = None if reads is None else reads.reshape(groups, -1)
        if not whole:
            for grid in (grid_out, grid_in):
                if grid is not None:
                    book.tie(np.broadcast_to(grid[:1], grid.shape), grid)
            return "positions"
        assert grid_in is not None
        for grid in (grid_in, grid_out):
            book.tie(np.broadcast_to(grid_in[:, :1], grid.shape), grid)
        return "whole"

    def edit(self, module: nn.Module, keep_in: Index | None, keep_out: Index | None) -> ModuleEdit:
        take: dict[str, dict[int, Index]] = {}
        values: dict[str, int] = {}
        groups = self._groups(module)
        per_group = self._weight(module).shape[self._in_dim]
        if keep_in is not None and self.in_attribute:
            values[self.in_attribute] = len(keep_in)
        if keep_out is not None and self.out_attribute:
            values[self.out_attribute] = len(keep_out)
        if groups > 1 and keep_in is not None:
            kept_groups = np.unique(keep_in // per_group)
            if groups >= per_group:
                assert self.groups_attribute is not None
                values[self.groups_attribute] = len(kept_groups)
                keep_in = None
            else:
                keep_in = np.unique(keep_in % per_group)
        for dims, keep in ((self.in_dims, keep_in), (self.out_dims, keep_out)):
            for name, dim in dims.items():
                if keep is not None and getattr(module, name, None) is not None:
                    take.setdefault(name, {})[dim] = keep
        return ModuleEdit(take, values)

    def macs(self, call: Call, module: nn.Module) -> int:
        value = call.outputs[0] if self.macs_over == "output" else call.inputs[0]
        channels = value.shape[_axis_in(value, self.axis, self.dims)]
        return prod(value.shape) // channels * prod(self._weight(module).shape)

    def applies_to(self, module: nn.Module) -> bool:
        grouped_input_first = self._in_dim == 0 and self._groups(module) > 1
        return isinstance(module._parameters.get(self._weight_name), nn.Parameter) and not grouped_input_first

    @property
    def _weight_name(self) -> str:
        """The tensor that reads input channels: the first of `in_dims`."""
        return next(iter(self.in_dims))

    @property
    def _in_dim(self) -> int:
        return self.in_dims[self._weight_name]

    def _weight(self, module: nn.Module) -> Tensor:
        weight: Tensor = getattr(module, self._weight_name)
        return weight

    def cut_inputs(self, module: nn.Module, places: Index) -> None:
        """Zero the weights with which these places of the input are read."""
        weight = self._weight(module)
        per_group = weight.shape[self._in_dim]
        with torch.no_grad():
            weight.index_fill_(self._in_dim, torch.from_numpy(np.unique(places % per_group)), 0)


@dataclass(frozen=True)
class PerChannel(LayerRule):
    """Each channel by itself, with tensors that have one entry a channel.

    `groups_attribute` names the number of groups of neighbours that must stay or go together (GroupNorm). `dims` is
    the number of a batch's dimensions, for layers that take a single image too (InstanceNorm). `keeps_shape` spares a
    trace the layer's own code: it gives back a tensor shaped like its input.
    """

    axis: int = 1
    tensors: tuple[str, ...] = ("weight", "bias", "running_mean", "running_var")
    attribute: str | None = "num_features"
    groups_attribute: str | None = None
    keeps_shape: bool = False
    dims: int | None = None

    def propagate(self, call: Call, module: nn.Module, book: LayerBook) -> list[MaybeLabels]:
        assert call.layer is not None
        given = call.inputs[0]
        labels, axis = book.labels_of(given), _axis_in(given, self.axis, self.dims)
        if labels is None:
            return [None] * len(call.outputs)
        if channel_axis(labels, axis) is None:
            book.freeze(labels, f"{call.title} has its channels along another dimension")
            return [None] * len(call.outputs)
        atoms = np.broadcast_to(labels.reshape(-1), given.shape[axis])
        if self.groups_attribute:
            grid = atoms.reshape(int(getattr(module, self.groups_attribute)), -1)
            book.tie(np.broadcast_to(grid[:, :1], grid.shape), grid)
        book.resize(call.layer, atoms, atoms)
        return [labels] * len(call.outputs)

    def edit(self, module: nn.Module, keep_in: Index | None, keep_out: Index | None) -> ModuleEdit:
        if keep_in is None:
            return ModuleEdit()
        values: dict[str, int] = {}
        if self.attribute:
            if self.groups_attribute:
                groups = int(getattr(module, self.groups_attribute))
                values[self.groups_attribute] = len(keep_in) * groups // int(getattr(module, self.attribute))
            values[self.attribute] = len(keep_in)
        return ModuleEdit(
            {name: {0: keep_in} for name in self.tensors if getattr(module, name, None) is not None}, values
        )


@dataclass(frozen=True)
class PReLURule(PerChannel):
    """PReLU: one slope for all channels, or one a channel."""

    tensors: tuple[str, ...] = ("weight",)
    attribute: str | None = "num_parameters"
    keeps_shape: bool = True

    def edit(self, module: nn.Module, keep_in: Index | None, keep_out: Index | None) -> ModuleEdit:
        return super().edit(module, keep_in if module.num_parameters != 1 else None, None)


@dataclass(frozen=True)
class Elementwise(LayerRule):
    """Each element by itself: channels pass, operands are tied."""

    def propagate(self, call: Call, module: nn.Module, book: LayerBook) -> list[MaybeLabels]:
        return list(elementwise(call, book))


@dataclass(frozen=True)
class Opaque(LayerRule):
    """Needs all channels it reads. `count` gives its multiply-adds for the whole batch."""

    reason: str = "needs all its channels"
    count: Callable[[Call, nn.Module], int] | None = None

    def propagate(self, call: Call, module: nn.Module, book: LayerBook) -> list[MaybeLabels]:
        for value in call.inputs:
            book.freeze(book.labels_of(value), f"{call.title} {self.reason}")
        return [None] * len(call.outputs)

    def macs(self, call: Call, module: nn.Module) -> int:
        return self.count(call, module) if self.count else 0


def attention_macs(call: Call, module: nn.Module) -> int:
    """Projections of query, key, value and output, scores, and weighted sum of nn.MultiheadAttention."""
    assert isinstance(module, nn.MultiheadAttention)
    given = {**dict(zip(("query", "key", "value"), call.args, strict=False)), **call.kwargs}
    query, key, value = (given[name].shape for name in ("query", "key", "value"))
    width = module.embed_dim
    keys = prod(key[:-1])
    queries = prod(query[:-1])
    batch = 1 if len(query) == 2 else query[0 if module.batch_first else 1]
    projections = queries * width * width * 2 + keys * width * (key[-1] + value[-1])
    return projections + 2 * queries * (keys // batch) * width


def _axis_in(value: Value, axis: int, dims: int | None) -> int:
    """The dimension of a value that runs over channels, if it is `axis` in a batch of `dims` dimensions."""
    return axis - 1 if dims is not None and len(value.shape) == dims - 1 else axis


_CONVOLUTIONS = {dims: Mixing(dims=dims) for dims in (3, 4, 5)}
_TRANSPOSED = {
    dims: Mixing(in_dims={"weight": 0}, out_dims={"weight": 1, "bias": 0}, macs_over="input", dims=dims)
    for dims in (3, 4, 5)
}
_BATCH_NORM = PerChannel(keeps_shape=True)
_INSTANCE_NORM = {dims: PerChannel(keeps_shape=True, dims=dims) for dims in (3, 4, 5)}

LAYER_RULES: dict[type[nn.Module], LayerRule] = {
    nn.Conv1d: _CONVOLUTIONS[3],
    nn.Conv2d: _CONVOLUTIONS[4],
    nn.Conv3d: _CONVOLUTIONS[5],
    nn.ConvTranspose1d: _TRANSPOSED[3],
    nn.ConvTranspose2d: _TRANSPOSED[4],
    nn.ConvTranspose3d: _TRANSPOSED[5],
    nn.Linear: Mixing(-1, in_attribute="in_features", out_attribute="out_features", groups_attribute=None),
    nn.BatchNorm1d: _BATCH_NORM,
    nn.BatchNorm2d: _BATCH_NORM,
    nn.BatchNorm3d: _BATCH_NORM,
    nn.SyncBatchNorm: _BATCH_NORM,
    nn.InstanceNorm1d: _INSTANCE_NORM[3],
    nn.InstanceNorm2d: _INSTANCE_NORM[4],
    nn.InstanceNorm3d: _INSTANCE_NORM[5],
    nn.GroupNorm: PerChannel(
        tensors=("weight", "bias"), attribute="num_channels", groups_attribute="num_groups", keeps_shape=True
    ),
    nn.PReLU: PReLURule(),
    nn.LayerNorm: Opaque("normalises over all its channels"),
    nn.RMSNorm: Opaque("normalises over all its channels"),
    nn.LocalResponseNorm: Opaque("normalises over neighbouring channels"),
    nn.MultiheadAttention: Opaque("needs all its channels", attention_macs),
}


def register_rule(layer: type[nn.Module], rule: LayerRule) -> None:
    """Teach headgate a layer of your own: `register_rule(MyConv, headgate.rules.Mixing())`."""
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise TypeError(f"register_rule takes a module class, got {layer!r}: pass type(module), not the module")
    if not isinstance(rule, LayerRule):
        raise TypeError(f"{rule!r} is no rule: use headgate.rules.Mixing, PerChannel, Elementwise or Opaque")
    LAYER_RULES[layer] = rule


def rule_for(module: nn.Module) -> LayerRule | None:
    """The rule of a module's own type, or of a base whose forward it inherits; None if there is none."""
    own = type(module)
    for base in own.__mro__:
        rule = LAYER_RULES.get(base)
        if rule is not None:
            same_code = own is base or own.forward is getattr(base, "forward", None)
            return rule if same_code and rule.applies_to(module) else None
    return None


def shape_only(module: nn.Module) -> None:
    """Let a layer of a twin on the meta device give back only a shape, where that is the shape of its input."""
    rule = rule_for(module)
    if rule is not None and rule.keeps_shape:
        module.forward = torch.empty_like


def is_layer(module: nn.Module) -> bool:
    """Whether a module is recorded as one call."""
    return isinstance(module, Relayout) or rule_for(module) is not None


LAYERS = Layers(is_layer, shape_only)


@contextmanager
def plain_attention(wanted: bool = True) -> Iterator[None]:
    """Keep PyTorch's transformer layers from running as one fused operator, in which no channel can be seen."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before and not wanted)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def trace_model(model: nn.Module, example_input: Any, *, training: bool = False) -> Trace:
    """Record a forward pass with the layers of the table."""
    with plain_attention():
        return trace(model, example_input, LAYERS, training=training)
