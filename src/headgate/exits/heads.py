"""Intermediate classifiers: from the activations at a cut to class scores.

`mean` is what the network's own last layers usually are, and all that trained activations need. `conv` looks at
neighbouring places first: activations that were made for later layers, and stay as they are, hold their classes in
patterns rather than in means. Knows nothing of gates or of where a cut is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

from headgate.errors import HeadgateError

MakeHead = Callable[[int, int], nn.Module]
SIDE: Final = 8
"""Places a side that convolutions look at; larger activations are averaged down to it."""
NARROW, WIDE = 32, 64
"""Channels of the 1×1 and of the 3×3 convolutions."""


class MeanHead(nn.Module):
    """BatchNorm, ReLU, mean over all places, linear."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(F.relu(self.norm(x)).mean((2, 3)))
        return logits


class ConvHead(nn.Module):
    """BatchNorm, ReLU and mean over tiles; a 1×1 and two 3×3 convolutions (the second with stride 2), each with its
    BatchNorm and ReLU; mean over all places, linear."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.body = nn.Sequential(
            nn.Conv2d(channels, NARROW, 1, bias=False), nn.BatchNorm2d(NARROW), nn.ReLU(),
            nn.Conv2d(NARROW, WIDE, 3, padding=1, bias=False), nn.BatchNorm2d(WIDE), nn.ReLU(),
            nn.Conv2d(WIDE, WIDE, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(WIDE), nn.ReLU(),
        )  # fmt: skip
        self.fc = nn.Linear(WIDE, classes)

    def forward(self, x: Tensor) -> Tensor:
        tiles = [max(1, side // SIDE) for side in x.shape[2:]]
        logits: Tensor = self.fc(self.body(F.avg_pool2d(F.relu(self.norm(x)), tiles)).mean((2, 3)))
        return logits


HEADS: Final[dict[str, type[nn.Module]]] = {"mean": MeanHead, "conv": ConvHead}


def head_maker(head: str | MakeHead) -> MakeHead:
    """What makes a classifier: one of ours by its name, or the user's own."""
    if isinstance(head, str):
        if head not in HEADS:
            raise HeadgateError(f"head={head!r}: choose {' or '.join(HEADS)}, or pass what makes a module")
        return HEADS[head]
    if isinstance(head, nn.Module):
        raise HeadgateError(
            "head is a module, but every exit needs its own: pass what makes one from (channels, classes)"
        )
    return head


def head_name(heads: nn.ModuleList) -> str | None:
    """The name that makes such classifiers again; None if they are the user's own."""
    for name, kind in HEADS.items():
        if all(type(head) is kind for head in heads):
            return name
    return None
