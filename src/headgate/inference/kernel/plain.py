"""The plain twin of the kernel: the same function in PyTorch's own operators. It computes everything and masks.

The contract that both must pass is in the tests. Knows tensors only.
"""

from __future__ import annotations

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
