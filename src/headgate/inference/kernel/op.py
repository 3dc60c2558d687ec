"""The kernel as an operator of torch, `headgate::masked_conv2d`, so that export and compile see it.

Checks what it is given, then calls the compiled kernel for float32 on the CPU, and the plain twin otherwise. For
inference: it has no gradient. Knows nothing of gates or networks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.inference.kernel import native, plain

_ops = torch.library.Library("headgate", "FRAGMENT")
_ops.define(
    "masked_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? in_mask, Tensor? out_mask, Tensor? residual, "
    "int[2] stride, int[2] padding, int[2] dilation, bool relu) -> Tensor"
)


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
    sizes = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, pad, gap, kernel, step in zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True)
    ]
    return [x.shape[0], weight.shape[0], *sizes]


def _check(x: Tensor, weight: Tensor, masks: dict[str, tuple[Tensor | None, int]], shape: list[int]) -> None:
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise HeadgateError(
            f"masked_conv2d takes images (B, C, H, W) and weights (K, C, h, w), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if min(shape[2:]) < 1:
        raise HeadgateError(f"masked_conv2d: images of {tuple(x.shape[2:])} are smaller than the kernel")
    for name, (mask, channels) in masks.items():
        if mask is not None and (mask.dim() != 2 or mask.shape[1] != channels or mask.shape[0] not in (1, x.shape[0])):
            raise HeadgateError(
                f"masked_conv2d: {name} is {tuple(mask.shape)}, which does not fit {x.shape[0]} images of "
                f"{channels} channels"
            )


@torch.library.impl(_ops, "masked_conv2d", "CPU")
def _on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, in_mask: Tensor | None, out_mask: Tensor | None,
    residual: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], relu: bool,
) -> Tensor:  # fmt: skip
    shape = _output_shape(x, weight, stride, padding, dilation)
    _check(x, weight, {"in_mask": (in_mask, x.shape[1]), "out_mask": (out_mask, weight.shape[0])}, shape)
    if residual is not None and list(residual.shape) != shape:
        raise HeadgateError(f"masked_conv2d: the residual is {tuple(residual.shape)}, the output {tuple(shape)}")
    pairs = (stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1])
    if native.compiled() is None or x.dtype != torch.float32 or weight.dtype != torch.float32 or 0 in shape:
        return plain.conv2d(x, weight, bias, in_mask, out_mask, residual, *pairs, relu)
    y = torch.empty(shape)
    native.conv2d(
        x.contiguous(), weight.contiguous(), None if bias is None else bias.float().contiguous(), _bytes(in_mask),
        _bytes(out_mask), None if residual is None else residual.float().contiguous(), *pairs, relu, y,
    )  # fmt: skip
    return y


def _bytes(mask: Tensor | None) -> Tensor | None:
    """One byte a channel, 0 or not."""
    if mask is None:
        return None
    return (mask if mask.dtype in (torch.bool, torch.uint8) else mask != 0).contiguous()


@torch.library.register_fake("headgate::masked_conv2d", lib=_ops)
def _shape_only(
    x: Tensor, weight: Tensor, bias: Tensor | None, in_mask: Tensor | None, out_mask: Tensor | None,
    residual: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], relu: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(_output_shape(x, weight, stride, padding, dilation))
