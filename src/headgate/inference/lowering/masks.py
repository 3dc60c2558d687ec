"""Masks at inference: a site's gates decided in one call, and what a graph does with masks.

Through the kernel where there is one, in plain PyTorch otherwise. Knows nothing of the graph these are put into.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headgate.gates.draws import spread
from headgate.gates.dynamic import GateNetwork, pooled
from headgate.gates.gumbel import LOWEST_LOGIT
from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, Decisions
from headgate.graph.sites import Site, gates_at
from headgate.inference.kernel import native, op, plain
from headgate.inference.lowering.fate import ALWAYS, NEVER


class GateSite(nn.Module):
    """The gates of one site at inference: from the tensor there to one mask of booleans for each of its masks."""

    def __init__(
        self, network: GateNetwork, site: Site, graph: ChannelGraph, fate: NDArray[np.int8], left: Decisions
    ) -> None:
        super().__init__()
        masks = [graph.masks[number] for number in site.masks]
        numbers = gates_at(site, graph)
        kept = left[numbers]
        self.numbers = numbers[kept]
        """Of its gates, among all gates of the network."""
        weight, bias = network.head.weight.detach().clone(), network.head.bias.detach().clone()
        for value, told in ((LOWEST_LOGIT * 2, NEVER), (math.inf, ALWAYS)):  # closed for good at tau = 0, too
            rows = torch.from_numpy(fate[numbers] == told)
            weight[rows], bias[rows] = 0.0, value
        index = torch.from_numpy(np.flatnonzero(kept))
        inputs, bias_of_trunk = network.folded_trunk()
        if site.reads is not None:  # channels that are gone were zero
            inputs = inputs[:, torch.from_numpy((site.reads == ALWAYS_OPEN) | left[site.reads])]
        self.register_buffer("trunk_weight", inputs.contiguous())
        self.register_buffer("trunk_bias", bias_of_trunk)
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
        if images and not self.plain and not op.is_recorded(x) and native.compiled() is not None:
            return self.prepared(x)(x.contiguous(), arriving, self.threshold)
        trunk, head = self._tensors()
        numbers = self.threshold, self.sizes, self.immortal, self.groups
        if self.plain:
            return plain.gate_masks(pooled(x, self.site, x.shape[0]), arriving, trunk, head, *numbers)
        x = x if self._by_channel else pooled(x, self.site, x.shape[0])
        masks: list[Tensor] = torch.ops.headgate.gate_masks(x, arriving, *trunk, *head, *numbers)
        return masks

    @property
    def by_kernel(self) -> bool:
        """Whether the kernel can read what arrives here, if it is images in float32."""
        return self._by_channel and not self.plain

    def prepared(self, x: Tensor) -> native.Gates:
        """The kernel's call for tensors like `x`, with all that does not change."""
        op.check_channels(x, self.trunk_weight)  # type: ignore[arg-type]
        if self._made is None:
            self._made = native.Gates(*self._tensors(), self.sizes, self.immortal, self.groups)
        return self._made

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
