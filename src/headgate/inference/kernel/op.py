"""The kernel as operators of torch, so that export and compile see them.

`headgate::masked_conv2d`, the same adding to its residual in place, the masks of a gate network, and a pooling. Each
checks what it is given, then calls the compiled kernel for float32 on the CPU, and the plain twin otherwise. For
inference: they have no gradients. Knows nothing of graphs or networks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library

from headgate.errors import HeadgateError
from headgate.inference.kernel import native, plain

_ops = library.Library("headgate", "FRAGMENT")
_ops.define(
    "masked_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? in_mask, Tensor? out_mask, Tensor? residual, "
    "int[2] stride, int[2] padding, int[2] dilation, bool relu) -> Tensor"
)
_ops.define(
    "masked_conv2d_add_(Tensor x, Tensor weight, Tensor? bias, Tensor? in_mask, Tensor? out_mask, Tensor(a!) residual, "
    "int[2] stride, int[2] padding, int[2] dilation, bool relu, bool rectified) -> ()"
)
_ops.define(
    "gate_masks(Tensor x, Tensor? arriving, Tensor trunk_weight, Tensor trunk_bias, Tensor head_weight, "
    "Tensor head_bias, float threshold, int[] sizes, int[] immortal, int[] groups) -> Tensor[]"
)
_ops.define("max_pool2d(Tensor x, int[2] kernel, int[2] stride, int[2] padding) -> Tensor")


def masked_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, in_mask: Tensor | None = None,
    out_mask: Tensor | None = None, residual: Tensor | None = None, stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1), relu: bool = False,
) -> Tensor:  # fmt: skip
    """act(conv2d over the open inputs of each image, at its open outputs, + residual).

    `in_mask` and `out_mask` are boolean, (images, channels) or (1, channels); what is closed is read as zero, and
    written as zero before the residual is added.
    """
    result: Tensor = torch.ops.headgate.masked_conv2d(
        x, weight, bias, in_mask, out_mask, residual, list(stride), list(padding), list(dilation), relu
    )
    return result


def _output_shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    _check_steps("masked_conv2d", {"stride": stride, "dilation": dilation}, padding)
    sizes = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, pad, gap, kernel, step in zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True)
    ]
    return [x.shape[0], weight.shape[0], *sizes]


def _check_steps(name: str, steps: dict[str, Sequence[int]], padding: Sequence[int]) -> None:
    for step, pair in steps.items():
        if len(pair) != 2 or min(pair) < 1:
            raise HeadgateError(f"{name}: {step}={list(pair)}, which must be two numbers of at least 1")
    if len(padding) != 2 or min(padding) < 0:
        raise HeadgateError(f"{name}: padding={list(padding)}, which must be two numbers of at least 0")


def _checked_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, in_mask: Tensor | None, out_mask: Tensor | None,
    pairs: tuple[Sequence[int], ...],
) -> list[int]:  # fmt: skip
    """The output's, if everything fits."""
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise HeadgateError(
            f"masked_conv2d takes images (B, C, H, W) and weights (K, C, h, w), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise HeadgateError(
            f"masked_conv2d: the bias is {tuple(bias.shape)}, which does not fit {weight.shape[0]} output channels"
        )
    shape = _output_shape(x, weight, *pairs)
    if min(shape[2:]) < 1:
        raise HeadgateError(f"masked_conv2d: images of {tuple(x.shape[2:])} are smaller than the kernel")
    for name, mask, channels in (("in_mask", in_mask, x.shape[1]), ("out_mask", out_mask, weight.shape[0])):
        if mask is not None and (mask.dim() != 2 or mask.shape[1] != channels or mask.shape[0] not in (1, x.shape[0])):
            raise HeadgateError(
                f"masked_conv2d: {name} is {tuple(mask.shape)}, which does not fit {x.shape[0]} images of "
                f"{channels} channels"
            )
    return shape


@library.impl(_ops, "masked_conv2d", "CPU")
def _on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, in_mask: Tensor | None, out_mask: Tensor | None,
    residual: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], relu: bool,
) -> Tensor:  # fmt: skip
    shape = _checked_shape(x, weight, bias, in_mask, out_mask, (stride, padding, dilation))
    if residual is not None and list(residual.shape) != shape:
        raise HeadgateError(f"masked_conv2d: the residual is {tuple(residual.shape)}, the output {tuple(shape)}")
    pairs = (stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1])
    if _native(x, weight) and 0 not in shape:
        y = x.new_empty(shape)
        if native.conv2d(
            x.contiguous(), weight.contiguous(), None if bias is None else bias.float().contiguous(), _bytes(in_mask),
            _bytes(out_mask), None if residual is None else residual.float().contiguous(), *pairs, relu, y,
        ):  # fmt: skip
            return y
    return plain.conv2d(x, weight, bias, in_mask, out_mask, residual, *pairs, relu)


@library.impl(_ops, "masked_conv2d_add_", "CPU")
def _adding_on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, in_mask: Tensor | None, out_mask: Tensor | None,
    residual: Tensor, stride: list[int], padding: list[int], dilation: list[int], relu: bool, rectified: bool,
) -> None:  # fmt: skip
    """act(residual + convolution) in the residual's place; `rectified`: it has no negative values."""
    if not (_native(x, weight, residual) and residual.is_contiguous() and residual.numel()):
        residual.copy_(_on_cpu(x, weight, bias, in_mask, out_mask, residual, stride, padding, dilation, relu))
        return
    shape = _checked_shape(x, weight, bias, in_mask, out_mask, (stride, padding, dilation))
    if list(residual.shape) != shape:
        raise HeadgateError(f"masked_conv2d_add_: the residual is {tuple(residual.shape)}, the output {tuple(shape)}")
    pairs = (stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1])
    if not native.conv2d(
        x.contiguous(), weight.contiguous(), None if bias is None else bias.float().contiguous(), _bytes(in_mask),
        _bytes(out_mask), residual, *pairs, relu, residual, rectified,
    ):  # fmt: skip
        residual.copy_(plain.conv2d(x, weight, bias, in_mask, out_mask, residual, *pairs, relu))


def check_channels(x: Tensor, trunk_weight: Tensor) -> None:
    """Whether a gate network is given as many channels as it looks at."""
    if x.shape[1] != trunk_weight.shape[1]:
        raise HeadgateError(f"a gate network that looks at {trunk_weight.shape[1]} channels got {tuple(x.shape)}")


@library.impl(_ops, "gate_masks", "CPU")
def _gates_on_cpu(
    x: Tensor, arriving: Tensor | None, trunk_weight: Tensor, trunk_bias: Tensor, head_weight: Tensor,
    head_bias: Tensor, threshold: float, sizes: list[int], immortal: list[int], groups: list[int],
) -> list[Tensor]:  # fmt: skip
    trunk, head = (trunk_weight, trunk_bias), (head_weight, head_bias)
    check_channels(x, trunk_weight)
    if x.dim() > 2 and x.numel() and _native(x, trunk_weight):
        gates = native.Gates(trunk, head, sizes, immortal, groups)
        return gates(x.contiguous(), _bytes(arriving), threshold)
    means = x.float().mean(list(range(2, x.dim()))) if x.dim() > 2 else x.float()
    return plain.gate_masks(means, arriving, trunk, head, threshold, sizes, immortal, groups)


@library.impl(_ops, "max_pool2d", "CPU")
def _pool_on_cpu(x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    if not _native(x) or x.dim() != 4 or not x.numel():
        return torch.nn.functional.max_pool2d(x, kernel, stride, padding)
    y = x.new_empty(_pooled_shape(x, kernel, stride, padding))
    native.max_pool2d(
        x.contiguous(), (kernel[0], kernel[1]), (stride[0], stride[1]), (padding[0], padding[1]), y
    )  # fmt: skip
    return y


def _pooled_shape(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> list[int]:
    _check_steps("max_pool2d", {"kernel": kernel, "stride": stride}, padding)
    if any(2 * pad > k for pad, k in zip(padding, kernel, strict=True)):
        raise HeadgateError(f"max_pool2d: padding={list(padding)} is more than half of kernel={list(kernel)}")
    sizes = [
        (size + 2 * pad - k) // step + 1
        for size, pad, k, step in zip(x.shape[2:], padding, kernel, stride, strict=True)
    ]
    if min(sizes) < 1:
        raise HeadgateError(f"max_pool2d: images of {tuple(x.shape[2:])} are smaller than the kernel {tuple(kernel)}")
    return [x.shape[0], x.shape[1], *sizes]


def is_recorded(x: Tensor) -> bool:
    """Whether torch.compile or torch.export records what is done with this tensor, and does not run it. The switch
    that they turn is the whole process's: a plain tensor belongs to another thread than the one that exports."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and type(x) not in (Tensor, torch.nn.Parameter)


def _native(*tensors: Tensor) -> bool:
    return native.compiled() is not None and all(tensor.dtype == torch.float32 for tensor in tensors)


def _bytes(mask: Tensor | None) -> Tensor | None:
    """One byte a channel, 0 or not."""
    if mask is None:
        return None
    return (mask if mask.dtype in (torch.bool, torch.uint8) else mask != 0).contiguous()


@library.register_fake("headgate::masked_conv2d", lib=_ops)
def _shape_only(
    x: Tensor, weight: Tensor, bias: Tensor | None, in_mask: Tensor | None, out_mask: Tensor | None,
    residual: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], relu: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(_output_shape(x, weight, stride, padding, dilation))


@library.register_fake("headgate::masked_conv2d_add_", lib=_ops)
def _nothing_new(
    x: Tensor, weight: Tensor, bias: Tensor | None, in_mask: Tensor | None, out_mask: Tensor | None,
    residual: Tensor, stride: list[int], padding: list[int], dilation: list[int], relu: bool, rectified: bool,
) -> None:  # fmt: skip
    return None


@library.register_fake("headgate::gate_masks", lib=_ops)
def _masks_only(
    x: Tensor, arriving: Tensor | None, trunk_weight: Tensor, trunk_bias: Tensor, head_weight: Tensor,
    head_bias: Tensor, threshold: float, sizes: list[int], immortal: list[int], groups: list[int],
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape[0], size, dtype=torch.bool) for size in sizes]


@library.register_fake("headgate::max_pool2d", lib=_ops)
def _pooled_shape_only(x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return x.new_empty(_pooled_shape(x, kernel, stride, padding))
