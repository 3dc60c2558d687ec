"""What each ATen operator does to channels: one table, operator → small rule.

A rule takes the call and the labels of its inputs and returns the labels of its outputs; on the way it may tie
channels together or freeze them. An operator that is not in the table freezes whatever touches it. Multiply-adds
of the operators that have some are a second table. Knows nothing of layers and parameters' owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from headgate.graph.labels import NO_CHANNEL, Labels, along, split_axes, varying_axes, viewed
from headgate.graph.trace import Call, Value

aten = torch.ops.aten
MaybeLabels = Labels | None


class ChannelBook(Protocol):
    """Where rules write down what they find."""

    def labels_of(self, value: Value) -> MaybeLabels: ...
    def tie(self, first: Labels, second: Labels) -> None: ...
    def freeze(self, labels: MaybeLabels, reason: str) -> None: ...
    def fresh(self, owner: tuple[Any, ...], count: int) -> Labels: ...
    def slot(self, call: Call) -> int: ...


OpRule = Callable[[Call, ChannelBook], Sequence[MaybeLabels]]
OP_RULES: dict[Any, OpRule] = {}
OP_MACS: dict[Any, Callable[[Call], int]] = {}


def _register(names: Iterable[str]) -> Callable[[OpRule], OpRule]:
    """Put a rule in the table for every overload of the named operators (and their in-place forms) that exists."""

    def put(rule: OpRule) -> OpRule:
        for name in names:
            for variant in (name, name + "_"):
                packet = getattr(aten, variant, None)
                for overload in packet.overloads() if packet is not None else ():
                    OP_RULES[getattr(packet, overload)] = rule
        return rule

    return put


def unknown(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """No rule: freeze all that goes in; what comes out has no channels."""
    for value in call.inputs:
        book.freeze(book.labels_of(value), f"{call.title} has no channel rule")
    return [None] * len(call.outputs)


# ---------------------------------------------------------------------------------------------- elementwise

ELEMENTWISE_OPS = (
    "relu gelu silu mish sigmoid hardsigmoid hardswish hardtanh tanh leaky_relu elu celu selu softplus log_sigmoid "
    "abs neg exp log log1p sqrt rsqrt square sign reciprocal erf sin cos clamp clamp_min clamp_max relu6 threshold "
    "add sub mul div rsub maximum minimum pow addcmul addcdiv lerp where eq ne lt le gt ge logical_not logical_and "
    "clone _to_copy detach alias contiguous lift_fresh native_dropout dropout bernoulli isnan nan_to_num copy "
    "zeros_like ones_like empty_like rand_like full_like fill masked_fill prelu _prelu_kernel rrelu_with_noise"
)


@_register(ELEMENTWISE_OPS.split())
def elementwise(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Places stay where they are; operands that meet are tied, place by place."""
    dims = max((len(value.shape) for value in call.outputs), default=0)
    operands = [(value, _aligned(book.labels_of(value), dims)) for value in call.inputs]
    # constants last: the result is named after a layer's channels
    operands.sort(key=lambda operand: operand[1] is None)
    labelled = [labels for _, labels in operands if labels is not None]
    if not labelled:
        return [None] * len(call.outputs)
    joint = np.broadcast_shapes(*(labels.shape for labels in labelled))
    result: MaybeLabels = None
    for value, labels in operands:
        shape = (1,) * (dims - len(value.shape)) + value.shape
        varying = [axis for axis, size in enumerate(joint) if size != 1]
        if labels is None:
            labels = _labels_for_constant(value, shape, joint, varying, book)
            if labels is None:
                if any(shape[axis] != 1 for axis in varying):
                    fixed = "a tensor of fixed channels" if value.in_state else f"`{value.parameter}`, {NOT_IN_STATE}"
                    for other in labelled:
                        book.freeze(other, f"{call.title} combines it with {fixed}")
                continue
        if any(shape[axis] == 1 for axis in varying):  # one channel that is spread over many
            book.freeze(labels, f"{call.title} spreads one channel over many")
            continue
        if result is not None:
            book.tie(result, labels)
            labels = np.where(result == NO_CHANNEL, labels, result)
        result = labels
    return [result] * len(call.outputs)


def _aligned(labels: MaybeLabels, dims: int) -> MaybeLabels:
    if labels is None or labels.ndim == dims:
        return labels
    return labels.reshape((1,) * (dims - labels.ndim) + labels.shape) if labels.ndim < dims else None


def _labels_for_constant(
    value: Value, shape: tuple[int, ...], joint: tuple[int, ...], varying: list[int], book: ChannelBook
) -> MaybeLabels:
    """A parameter that meets channels (a layer scale, say) gets channels of its own along that dimension."""
    if not _can_shrink(value) or len(varying) != 1 or shape[varying[0]] != joint[varying[0]]:
        return None
    assert value.parameter is not None
    own_axis = varying[0] - (len(shape) - len(value.shape))
    atoms = book.fresh(("parameter", value.parameter, own_axis), shape[varying[0]])
    return along(atoms, varying[0], len(shape))


NOT_IN_STATE = "a buffer that no state dict holds, so that none could hold less of it (persistent=False)"


def _can_shrink(value: Value) -> bool:
    """Whether this is a tensor of which a smaller network, or its file, can hold a part."""
    return value.parameter is not None and value.in_state


BATCH_NORM_OPS = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update "
    "_batch_norm_no_update cudnn_batch_norm miopen_batch_norm"
)


@_register(BATCH_NORM_OPS.split())
def batch_norm(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Each channel (dimension 1) by itself; parameters and statistics with one entry a channel are tied to it."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None] * len(call.outputs)
    if varying_axes(labels) != [1] or not all(map(_can_shrink, call.inputs[1:])):
        return unknown(call, book)
    for value in call.inputs[1:]:
        book.tie(labels.reshape(-1), book.fresh(("parameter", value.parameter, 0), labels.size))
    statistics = labels.reshape(-1)
    return [labels, *(statistics if value.shape == statistics.shape else None for value in call.outputs[1:])]


# ------------------------------------------------------------------------------------- pooling and reductions

PIXEL_OPS = (
    "max_pool2d_with_indices max_pool2d max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_avg_pool2d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest2d "
    "upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa reflection_pad2d "
    "replication_pad2d"
)


@_register(PIXEL_OPS.split())
def over_pixels(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Acts on the last dimensions, on each channel by itself."""
    labels = book.labels_of(call.inputs[0])
    spatial = 3 if "3d" in str(call.target) else 2
    if labels is not None and any(axis >= labels.ndim - spatial for axis in varying_axes(labels)):
        return unknown(call, book)
    return [labels] * len(call.outputs)


@_register(["mean", "sum", "amax", "amin", "var", "std", "prod", "logsumexp"])
def reduction(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Fine over pixels; over channels it mixes them."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None] * len(call.outputs)
    dims = labels.ndim
    given = _argument(call, "dim", 1)
    given = [given] if isinstance(given, int) else given
    axes = sorted({axis % dims for axis in given}) if given else list(range(dims))
    kept = len(call.outputs[0].shape) == dims
    if any(axis in axes for axis in varying_axes(labels)) or not varying_axes(labels):
        book.freeze(labels, f"{call.title} mixes channels")
        return [None] * len(call.outputs)
    return [labels if kept else labels.squeeze(tuple(axes))] * len(call.outputs)


@_register(["_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "flip", "sort", "topk"])
def along_one_axis(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Mixes along one dimension: fine if that is not the channels'."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None] * len(call.outputs)
    given = _argument(call, "dim", 2 if "topk" in str(call.target) else 1)
    axes = {axis % labels.ndim for axis in ([given] if isinstance(given, int) else given)}
    if axes & set(varying_axes(labels)) or not varying_axes(labels):
        book.freeze(labels, f"{call.title} mixes channels")
        return [None] * len(call.outputs)
    return [labels] * len(call.outputs)


# ------------------------------------------------------------------------------------------------- structure


@_register(["view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "_reshape_alias"])
def view(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """The same places in the same order, counted otherwise. Channels cut in parts keep equal numbers in each."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None]
    new = viewed(labels, call.inputs[0].shape, call.outputs[0].shape)
    parts = split_axes(new)
    if parts is not None and split_axes(labels) is None:
        first = new
        for axis in parts[0]:
            first = first.take([0], axis)
        book.tie(np.broadcast_to(first, new.shape), new)
    return [new]


@_register(["permute", "transpose", "t", "numpy_T", "movedim"])
def permute(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Dimensions change their order."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None]
    dims = labels.ndim
    name = str(call.target)
    if "permute" in name:
        order = [axis % dims for axis in _argument(call, "dims", 1)]
    else:
        first, second = (
            (0, 1) if ".t." in name else (_argument(call, "dim0", 1) % dims, _argument(call, "dim1", 2) % dims)
        )
        order = list(range(dims))
        if dims > 1:
            order[first], order[second] = order[second], order[first]
    return [labels.transpose(order)]


@_register(["expand"])
def expand(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Repeats along dimensions of size 1."""
    labels = _aligned(book.labels_of(call.inputs[0]), len(call.outputs[0].shape))
    return [labels]


@_register(["slice"])
def slice_(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Part of a dimension. Every second channel is another one when some are gone: that freezes them."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None]
    axis = _argument(call, "dim", 1, 0) % labels.ndim
    start, end, step = (_argument(call, *given) for given in (("start", 2), ("end", 3), ("step", 4, 1)))
    if step != 1 and axis in varying_axes(labels):
        return unknown(call, book)
    return [_take(labels, axis, slice(start, end, step))]


@_register(["select"])
def select(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """One index of a dimension, which disappears. One numbered channel must stay where it is: that freezes them."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None]
    axis = call.args[1] % labels.ndim
    return unknown(call, book) if axis in varying_axes(labels) else [labels.squeeze(axis)]


@_register(["split", "split_with_sizes", "chunk"])
def split(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Parts of a dimension. Parts of equal size keep equal numbers of channels: tied, place by place."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None] * len(call.outputs)
    axis = _argument(call, "dim", 2, 0) % labels.ndim
    starts = np.cumsum([0] + [value.shape[axis] for value in call.outputs])
    parts = [_take(labels, axis, slice(int(a), int(b))) for a, b in pairwise(starts)]
    if labels.shape[axis] != 1 and len({part.shape for part in parts}) == 1:
        for part in parts[1:]:
            book.tie(parts[0], part)
    return [*parts]


@_register(["unbind"])
def unbind(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Every index of a dimension by itself."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None] * len(call.outputs)
    axis = _argument(call, "dim", 1, 0) % labels.ndim
    return [np.take(labels, 0 if labels.shape[axis] == 1 else index, axis) for index in range(len(call.outputs))]


@_register(["cat"])
def cat(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """One behind the other along a dimension; tied along the others."""
    dims = len(call.outputs[0].shape)
    axis = _argument(call, "dim", 1, 0) % dims
    pieces = [(value, book.labels_of(value)) for value in call.inputs if prod(value.shape)]
    known = [labels for _, labels in pieces if labels is not None]
    if not known:
        return [None]
    across = any(axis in varying_axes(labels) for labels in known) or all(not varying_axes(labels) for labels in known)
    return [_cat_channels(pieces, axis, dims) if across else _cat_other(call, pieces, book)]


def _cat_channels(pieces: list[tuple[Value, MaybeLabels]], axis: int, dims: int) -> Labels:
    others = np.broadcast_shapes(
        *((*labels.shape[:axis], 1, *labels.shape[axis + 1 :]) for _, labels in pieces if labels is not None)
    )
    parts = []
    for value, labels in pieces:
        shape = (*others[:axis], value.shape[axis], *others[axis + 1 :])
        parts.append(np.broadcast_to(np.full([1] * dims, NO_CHANNEL) if labels is None else labels, shape))
    return np.concatenate(parts, axis)


def _cat_other(call: Call, pieces: list[tuple[Value, MaybeLabels]], book: ChannelBook) -> MaybeLabels:
    first: MaybeLabels = None
    for _, labels in pieces:
        if labels is None:
            for _, other in pieces:
                book.freeze(other, f"{call.title} joins it with a tensor of fixed channels")
            return None
        if first is not None:
            book.tie(first, labels)
        first = labels if first is None else first
    return first


@_register(["stack"])
def stack(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Along a new dimension; tied along the others."""
    labels = _cat_other(call, [(value, book.labels_of(value)) for value in call.inputs], book)
    return [
        None if labels is None else np.expand_dims(labels, _argument(call, "dim", 1, 0) % len(call.outputs[0].shape))
    ]


@_register(["constant_pad_nd"])
def pad(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Zeros before and behind: channels of their own, if it is channels that are padded."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None]
    amounts = list(_argument(call, "pad", 1))
    for step in range(0, len(amounts), 2):
        axis = labels.ndim - 1 - step // 2
        before, behind = amounts[step], amounts[step + 1]
        if (before or behind) and axis in varying_axes(labels):
            if varying_axes(labels) != [axis] or before < 0 or behind < 0 or _argument(call, "value", 2, 0) != 0:
                return unknown(call, book)
            zeros = book.fresh(("zeros", book.slot(call), axis), before + behind)
            front, back = zeros[:before], zeros[before:]
            labels = along(np.concatenate([front, labels.reshape(-1), back]), axis, labels.ndim)
    return [labels]


@_register(["roll"])
def roll(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """A turn along dimensions."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None]
    axes = [axis % labels.ndim for axis in _argument(call, "dims", 2, [])]
    return [labels] if axes and not set(axes) & set(varying_axes(labels)) else unknown(call, book)


@_register(["native_channel_shuffle", "channel_shuffle"])
def channel_shuffle(call: Call, book: ChannelBook) -> list[MaybeLabels]:
    """Groups interleaved: each keeps the same number."""
    labels = book.labels_of(call.inputs[0])
    if labels is None:
        return [None]
    if varying_axes(labels) != [1]:
        return unknown(call, book)
    grid = labels.reshape(call.args[1], -1)
    book.tie(np.broadcast_to(grid[:1], grid.shape), grid)
    return [along(grid.T.reshape(-1), 1, labels.ndim)]


def _take(labels: Labels, axis: int, part: slice) -> Labels:
    axis %= labels.ndim
    return labels if labels.shape[axis] == 1 else labels[(slice(None),) * axis + (part,)]


def _argument(call: Call, name: str, place: int, default: Any = None) -> Any:
    return call.kwargs[name] if name in call.kwargs else call.args[place] if place < len(call.args) else default


# ---------------------------------------------------------------------------------------------- multiply-adds


def _macs_of_convolution(call: Call) -> int:
    weight, output = call.inputs[1], call.outputs[0]
    transposed = bool(call.args[6])
    places = prod(call.inputs[0].shape[2:]) if transposed else prod(output.shape[2:])
    return output.shape[0] * places * prod(weight.shape)


def _macs_of_product(call: Call) -> int:
    left = call.inputs[-2].shape
    return prod(left[:-1]) * left[-1] * call.inputs[-1].shape[-1]


def _macs_of_attention(call: Call) -> int:
    query, key, value = (given.shape for given in call.inputs[:3])
    return prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _macs_of_linear(call: Call) -> int:
    return prod(call.inputs[0].shape) * call.inputs[1].shape[0]


def _macs_of_vector_product(call: Call) -> int:
    return prod(call.inputs[-2].shape)


OP_MACS[aten.convolution.default] = _macs_of_convolution
for _name in ("mv", "addmv", "dot", "vdot"):
    OP_MACS[getattr(aten, _name).default] = _macs_of_vector_product
OP_MACS[aten.linear.default] = _macs_of_linear
for _name in ("mm", "bmm", "addmm", "baddbmm"):
    OP_MACS[getattr(aten, _name).default] = _macs_of_product
for _name in (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
):
    if hasattr(aten, f"_scaled_dot_product_{_name}"):
        OP_MACS[getattr(aten, f"_scaled_dot_product_{_name}").default] = _macs_of_attention
