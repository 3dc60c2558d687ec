"""The plain twin of the kernel: the same function in PyTorch's own operators. It computes everything and masks.

The contract that both must pass is in the tests. Knows tensors only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, in_mask: Tensor | None, out_mask: Tensor | None,
    residual: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, relu: bool,
) -> Tensor:  # fmt: skip
    """What the kernel computes, in the order in which it is written down."""
    if in_mask is not None:
        x = x.masked_fill(~in_mask.bool()[:, :, None, None], 0)
    y = F.conv2d(x, weight, bias, stride, padding, dilation)
    if out_mask is not None:
        y = y.masked_fill(~out_mask.bool()[:, :, None, None], 0)
    if residual is not None:
        y = y + residual
    return y.relu() if relu else y


def read_planes(x: Tensor, scale: Tensor, shift: Tensor, tile: Pair) -> tuple[Tensor, Tensor]:
    """relu(scale x + shift) averaged over tiles, and the means of all channels."""
    rectified = torch.relu(x * scale[:, None, None] + shift[:, None, None])
    return F.avg_pool2d(rectified, tile), x.mean((2, 3))


def gate_masks(
    means: Tensor, arriving: Tensor | None, trunk: tuple[Tensor, Tensor], head: tuple[Tensor, Tensor], threshold: float,
    sizes: list[int], immortal: list[int], groups: list[int],
) -> list[Tensor]:  # fmt: skip
    """One boolean (images, gates) mask for each of `sizes`, from the means of the channels of each image.

    Channels that are closed in `arriving` count as zero. A mask that is `immortal` opens its likeliest gate where all
    are closed; of each group of masks (their numbers, -1 behind each group), all close where one is closed.
    """
    if arriving is not None:
        means = means * arriving
    logits = F.linear(torch.relu(F.linear(means, *trunk)), *head)
    masks = list((logits > threshold).split(sizes, 1))
    scores = logits.split(sizes, 1)
    for number, lives in enumerate(immortal):
        if lives:
            closed = ~masks[number].any(1, keepdim=True)
            likeliest = F.one_hot(scores[number].argmax(1), sizes[number]).bool()
            masks[number] = masks[number] | (likeliest & closed)
    group: list[int] = []
    for number in groups:
        if number >= 0:
            group.append(number)
            continue
        alive = torch.stack([masks[each].any(1, keepdim=True) for each in group]).all(0)
        for each in group:
            masks[each] = masks[each] & alive
        group = []
    return [mask.contiguous() for mask in masks]
