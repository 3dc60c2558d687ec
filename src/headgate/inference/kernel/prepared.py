"""Calls of the kernel with everything prepared that does not change from call to call.

An operator of torch that is written in Python costs some 50 µs a call before it computes anything; a small network has
a hundred of them. These are plain callables for a network that is run, not traced; their results are the operators'.
What they can't do (other types, no compiled kernel) they hand to the operators. Knows tensors, nothing of networks.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from headgate.errors import HeadgateError
from headgate.inference.kernel import native, plain
from headgate.inference.kernel.op import _output_shape

MOST_SHAPES = 256
"""Of images whose numbers a layer keeps: they are quickly made again."""


def read_planes(x: Tensor, scale: Tensor, shift: Tensor, tile: native.Pair) -> tuple[Tensor, Tensor]:
    """relu(scale x + shift) averaged over tiles, and the means of all channels, in one pass over the images."""
    fits = x.is_cpu and x.dtype == scale.dtype == shift.dtype == torch.float32 and x.numel() > 0
    if not fits or native.compiled() is None:
        return plain.read_planes(x, scale, shift, tile)
    images, channels, height, width = x.shape
    tiles = x.new_empty(images, channels, height // tile[0], width // tile[1])
    means = x.new_empty(images, channels)
    native.read_planes(x.contiguous(), scale.contiguous(), shift.contiguous(), tile, tiles, means)
    return tiles, means


class Conv(nn.Module):
    """`headgate::masked_conv2d` with one set of weights; or, `in_place`, `masked_conv2d_add_`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
        relu: bool, in_place: bool, rectified: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.bias = weight.contiguous(), None if bias is None else bias.contiguous()
        self.geometry = stride, padding, dilation
        self.relu, self.in_place, self.rectified = relu, in_place, rectified
        self.layer = ""
        self.dense = False
        """Whether everything is computed and then masked, because that is quicker."""
        self._shapes: dict[torch.Size, tuple[list[int], Any]] = {}
        self._call: Any = native.compiled()

    def __deepcopy__(self, memo: Any) -> Conv:
        made = Conv(self.weight.clone(), self.bias, *self.geometry, self.relu, self.in_place, self.rectified)
        made.dense, made.layer = self.dense, self.layer
        return made

    def forward(self, x: Tensor, in_mask: Tensor | None, out_mask: Tensor | None, residual: Tensor | None) -> Tensor:
        """The convolution over the open inputs of each image, at its open outputs."""
        if self.dense:
            return self.densely(x, in_mask, out_mask, residual)
        return self.by_kernel(x, in_mask, out_mask, residual)

    def densely(self, x: Tensor, in_mask: Tensor | None, out_mask: Tensor | None, residual: Tensor | None) -> Tensor:
        """All of it, then masked."""
        stride, padding, dilation = ((pair[0], pair[1]) for pair in self.geometry)
        y = plain.conv2d(x, self.weight, self.bias, in_mask, out_mask, residual, stride, padding, dilation, self.relu)
        return residual.copy_(y) if self.in_place and residual is not None else y

    def by_kernel(self, x: Tensor, in_mask: Tensor | None, out_mask: Tensor | None, residual: Tensor | None) -> Tensor:
        """Only what is open."""
        fits = x.is_cpu and x.dtype == torch.float32 and x.numel() > 0
        if not fits or (residual is not None and not residual.is_contiguous()):
            return self._by_operator(x, in_mask, out_mask, residual)
        if not x.is_contiguous():
            x = x.contiguous()
        shape, numbers = self.checked(x, in_mask, out_mask, residual)
        y = residual if self.in_place else x.new_empty(shape)
        assert y is not None
        failed = self._call.headgate_conv2d(
            x.data_ptr(), self.weight.data_ptr(), native.at(self.bias), native.at(residual), y.data_ptr(),
            native.at(in_mask), native.step(in_mask),
            native.at(out_mask), native.step(out_mask),
            ctypes.addressof(numbers), self.relu, self.rectified, torch.get_num_threads(), -1,
        )  # fmt: skip
        return y if native.done(failed) else self.densely(x, in_mask, out_mask, residual)

    def checked(
        self, x: Tensor, in_mask: Tensor | None, out_mask: Tensor | None, residual: Tensor | None
    ) -> tuple[list[int], Any]:
        """The shape of what it gives, and the kernel's numbers for it. Raises where what it is given does not fit."""
        known = self._shapes.get(x.shape)
        if known is None:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            known = self._shapes[x.shape] = self._numbers(x)
        shape = known[0]
        if residual is not None and list(residual.shape) != shape:
            raise HeadgateError(f"`{self.layer}` gives {shape}, but is added to {list(residual.shape)}")
        for mask in (in_mask, out_mask):
            if mask is not None and mask.shape[0] not in (1, x.shape[0]):
                raise HeadgateError(f"`{self.layer}`: {x.shape[0]} rows of images, but masks of {mask.shape[0]}")
        return known

    def _numbers(self, x: Tensor) -> tuple[list[int], Any]:
        stride, padding, dilation = self.geometry
        if x.dim() != 4 or x.shape[1] != self.weight.shape[1]:
            raise HeadgateError(f"`{self.layer}` takes images of {self.weight.shape[1]} channels, got {tuple(x.shape)}")
        shape = _output_shape(x, self.weight, stride, padding, dilation)
        if min(shape[2:]) < 1:
            raise HeadgateError(f"`{self.layer}`: {tuple(x.shape[2:])} places are fewer than its kernel takes")
        kept = (ctypes.c_int64 * 15)(*x.shape, *shape[1:], *self.weight.shape[2:], *stride, *padding, *dilation)
        return shape, kept

    def _by_operator(
        self, x: Tensor, in_mask: Tensor | None, out_mask: Tensor | None, residual: Tensor | None
    ) -> Tensor:  # fmt: skip
        given = x, self.weight.to(x.dtype), self.bias, in_mask, out_mask, residual, *self.geometry, self.relu
        if not self.in_place:
            y: Tensor = torch.ops.headgate.masked_conv2d(*given)
            return y
        assert residual is not None
        torch.ops.headgate.masked_conv2d_add_(*given, self.rectified)
        return residual
