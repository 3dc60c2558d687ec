"""Intermediate classifiers: from the activations at a cut to class scores.

`mean` is what the network's own last layers usually are, and all that trained activations need. `conv` looks at
neighbouring places first: activations that were made for later layers, and stay as they are, hold their classes in
patterns rather than in means. Both can do without channels that are zero at the cut. Knows nothing of gates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate.errors import HeadgateError, ModelError
from headgate.graph.layer_rules import Index
from headgate.graph.macs import traced_macs
from headgate.graph.relayout import index_tensor
from headgate.graph.trace import ModuleSpan

Pair = tuple[int, int]
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

    @staticmethod
    def tile(x: Tensor) -> Pair:
        """What is averaged into one place: everything."""
        return x.shape[2], x.shape[3]

    def narrowed(self, kept: Index) -> MeanHead:
        """The same classifier where only these channels are left, and the others were zero."""
        made = copy.deepcopy(self)
        made.fc.bias.data += _narrow_(made.norm, made.fc, kept).to(made.fc.bias)
        return made


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
        tiles = F.avg_pool2d(F.relu(self.norm(x)), self.tile(x))
        logits: Tensor = self.fc(self.body(tiles).mean((2, 3)))
        return logits

    @staticmethod
    def tile(x: Tensor) -> Pair:
        """What is averaged into one place."""
        return max(1, x.shape[2] // SIDE), max(1, x.shape[3] // SIDE)

    def narrowed(self, kept: Index) -> ConvHead:
        """The same classifier where only these channels are left, and the others were zero."""
        made = copy.deepcopy(self)
        first, norm = made.body[0], made.body[1]
        assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
        norm.running_mean -= _narrow_(made.norm, first, kept).to(norm.running_mean)
        return made


@torch.no_grad()
def _narrow_(norm: nn.BatchNorm2d, layer: Any, kept: Index) -> Tensor:
    """Leave a norm, and the layer that reads it through a ReLU, these channels only. Gives what the others added to
    each of the layer's outputs: BatchNorm and ReLU make the same number of zero in every place of every image."""
    assert norm.running_mean is not None and norm.running_var is not None
    mean, var = norm.running_mean.double(), norm.running_var.double()
    of_zero = F.relu(norm.bias.double() - mean * norm.weight.double() / (var + norm.eps).sqrt())
    left = index_tensor(kept, norm.weight.device)
    of_zero[left] = 0
    added: Tensor = layer.weight.double().flatten(1) @ of_zero
    for name in ("weight", "bias"):
        whole = getattr(norm, name)
        setattr(norm, name, nn.Parameter(whole[left], whole.requires_grad))
    norm.running_mean, norm.running_var = norm.running_mean[left], norm.running_var[left]
    layer.weight = nn.Parameter(layer.weight[:, left], layer.weight.requires_grad)
    norm.num_features = len(kept)
    setattr(layer, "in_features" if isinstance(layer, nn.Linear) else "in_channels", len(kept))
    return added


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


def made_head(make: MakeHead, channels: int, classes: int) -> nn.Module:
    """A classifier for so many channels and classes."""
    head = make(channels, classes)
    if not isinstance(head, nn.Module):
        raise HeadgateError(
            f"head({channels}, {classes}) gives a {type(head).__name__}: pass what makes an nn.Module for an exit from "
            "(channels, classes)"
        )
    return head


def head_macs(head: nn.Module, span: ModuleSpan, classes: int, like: Tensor) -> int:
    """Multiply-adds of a classifier for an image; it must give one score a class."""
    shape = span.outputs[0].shape[1:]
    try:
        recorded, macs = traced_macs(head, like.new_zeros(1, *shape))
    except ModelError as error:
        raise ModelError(
            f"the classifier behind `{span.name}` does not take the activations there, {_shown(shape)}: {error}"
        ) from error
    given = [value.shape for value in recorded.outputs]
    if given != [(recorded.batch_size, classes)]:
        raise ModelError(
            f"the classifier behind `{span.name}` gives {' and '.join(_shown(each[1:]) for each in given)}, the model "
            f"{_shown((classes,))}: head(channels, classes) must make a module that gives one score a class"
        )
    return sum(macs.values())


def _shown(shape: tuple[int, ...]) -> str:
    return f"({', '.join(['images', *map(str, shape)])})"
