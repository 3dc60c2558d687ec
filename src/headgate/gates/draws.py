"""The gates of one forward pass, and the hooks that multiply channels by them.

A `Draw` holds the 0/1 gates of a batch, cut into masks. `MaskInput` sits before a layer, `MaskOutput` behind a module
that writes to an indexed stream, `MaskBranch` behind the last module of a residual branch. All of them read the draw
from one `Board` that the gated model writes before each pass. Knows the channel graph; knows nothing of how gates are
drawn or decided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, Decisions, Reader
from headgate.graph.relayout import dense_name

SMALLEST_IMAGE = 256
"""Pixels from which the quicker product with a mask pays."""

# legend of axes: B images, G gates of the network, M masks, N branches, C channels of one tensor


@dataclass
class Draw:
    """Gates of one pass. `batch` is 1 where all images share them."""

    gates_BG: Tensor
    parts: tuple[Tensor, ...]
    alive_BN: Tensor
    all_alive: tuple[bool, ...]


class Ledger:
    """Where each mask's gates lie, and which of them must not all close."""

    def __init__(self, graph: ChannelGraph) -> None:
        self.sizes = [mask.size for mask in graph.masks]
        self.ends = torch.tensor([mask.gates.stop for mask in graph.masks], dtype=torch.int64)
        self.mortal = torch.tensor([mask.may_die for mask in graph.masks], dtype=torch.bool)
        self.branch_masks = [torch.tensor(branch.masks, dtype=torch.int64) for branch in graph.branches]

    def counts_BM(self, gates_BG: Tensor) -> Tensor:
        """How many gates of each mask are open (or, for soft gates, their sum)."""
        running = gates_BG.detach().cumsum(1)
        ends = running.index_select(1, (self.ends - 1).to(running.device))
        return torch.diff(ends, dim=1, prepend=ends.new_zeros(len(ends), 1))

    def keep_one_open(self, gates_BG: Tensor, probabilities_G: Tensor) -> Tensor:
        """Open the likeliest gate of every mask that is all closed, unless the mask may die."""
        closed_BM = (self.counts_BM(gates_BG) < 0.5) & ~self.mortal.to(gates_BG.device)
        if not bool(closed_BM.any()):
            return gates_BG
        rescue = torch.zeros_like(gates_BG)
        for number in closed_BM.any(0).nonzero().flatten().tolist():
            first = int(self.ends[number]) - self.sizes[number]
            likeliest = first + int(probabilities_G[first : first + self.sizes[number]].argmax())
            rescue[closed_BM[:, number], likeliest] = 1
        return gates_BG + rescue * (1 - gates_BG.detach())

    def draw(self, gates_BG: Tensor) -> Draw:
        """Cut a batch of gates into masks and see which branches live."""
        if not self.branch_masks:
            alive_BN = gates_BG.new_ones(len(gates_BG), 0)
        else:
            open_BM = self.counts_BM(gates_BG) > 0
            alive_BN = torch.stack([open_BM[:, masks].all(1) for masks in self.branch_masks], 1).to(gates_BG.dtype)
        all_alive = tuple(bool(value) for value in alive_BN.all(0)) if alive_BN.numel() else ()
        return Draw(gates_BG, gates_BG.split(self.sizes, 1), alive_BN, all_alive)


class Board:
    """Where the draw of the current pass hangs; None lets everything through."""

    def __init__(self) -> None:
        self.draw: Draw | None = None


class GateHook:
    """Base of the hooks, so that they can be found and taken off."""


class Channels(GateHook):
    """The gate of each channel of one tensor, looked up in a draw."""

    def __init__(self, board: Board, graph: ChannelGraph, reader: Reader) -> None:
        self.board = board
        self.axis = reader.axis
        self.batch_axis = reader.batch_axis
        firsts = np.array([mask.first for mask in graph.masks])
        gated = reader.gates != ALWAYS_OPEN
        mask_of = np.searchsorted(firsts, reader.gates, side="right") - 1
        self.masks: list[int] = np.unique(mask_of[gated]).tolist()
        widths = [graph.masks[number].size for number in self.masks]
        starts = np.cumsum([0, *widths])  # where each mask begins in the row of these masks; last, the column of ones
        rank = np.searchsorted(self.masks, mask_of)
        index = np.where(gated, starts[rank] + reader.gates - firsts[mask_of], starts[-1])
        straight = len(self.masks) == 1 and np.array_equal(index, np.arange(graph.masks[self.masks[0]].size))
        self.index: Tensor | None = None if straight else torch.from_numpy(index)
        self.has_open = bool((reader.gates == ALWAYS_OPEN).any())

    def mask_BC(self, draw: Draw) -> Tensor:
        """The 0/1 factor of each channel, image by image."""
        parts = [draw.parts[number] for number in self.masks]
        if self.index is None:
            return parts[0]
        if self.has_open:
            parts.append(parts[0].new_ones(len(parts[0]), 1))
        joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return joined.index_select(1, self.index.to(joined.device))

    def apply(self, x: Tensor) -> Tensor:
        """The tensor, times its channels' gates."""
        draw = self.board.draw
        return x if draw is None else times(x, spread(self.mask_BC(draw), x, self.axis, self.batch_axis))


def spread(mask_BC: Tensor, x: Tensor, axis: int | None, batch_axis: int = 0) -> Tensor:
    """A mask shaped to multiply `x`; `axis` None for one gate an image.

    Where images are folded with something else (windows, tokens), their masks are repeated.
    """
    images, places = len(mask_BC), x.shape[batch_axis]
    if images > 1 and places != images:
        mask_BC = mask_BC.repeat_interleave(places // images, 0) if places % images == 0 else mask_BC[:1]
    shape = [1] * x.dim()
    if axis is not None:
        axis %= x.dim()
        shape[axis] = mask_BC.shape[1]
        mask_BC = mask_BC if batch_axis < axis else mask_BC.t()
    shape[batch_axis] = max(mask_BC.shape) if axis is None else mask_BC.shape[0 if batch_axis < axis else 1]
    return mask_BC.to(x.dtype).reshape(shape)


class _Times(torch.autograd.Function):
    """Images times a mask of their channels; backward, the mask's gradient needs no tensor of the images' size."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: Tensor, mask_BC11: Tensor) -> Tensor:
        ctx.save_for_backward(x_BCHW, mask_BC11)
        return x_BCHW * mask_BC11

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x_BCHW, mask_BC11 = ctx.saved_tensors
        rows = x_BCHW.shape[0] * x_BCHW.shape[1]
        products = torch.bmm(gradients[0].reshape(rows, 1, -1), x_BCHW.reshape(rows, -1, 1))
        return gradients[0] * mask_BC11, products.reshape(mask_BC11.shape)


def times(x: Tensor, mask: Tensor) -> Tensor:
    """`x * mask`, on a quicker way where there is one."""
    quick = x.dim() == 4 and mask.shape[:2] == x.shape[:2] and mask.dtype == x.dtype == torch.float32
    if not (quick and mask.requires_grad and x.shape[2] * x.shape[3] >= SMALLEST_IMAGE):
        return x * mask
    product: Tensor = _Times.apply(x, mask)
    return product


class MaskInput(Channels):
    """Before a layer: closed channels arrive as zeros."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if self.board.draw is None else (self.apply(args[0]), *args[1:])


class MaskOutput(Channels):
    """Behind a module: closed channels leave as zeros."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self.apply(output)


class MaskBranch(GateHook):
    """Behind a branch's last module: a dead branch adds nothing."""

    def __init__(self, board: Board, number: int, gate: int | None, batch_axis: int) -> None:
        self.board = board
        self.batch_axis = batch_axis
        self.number = number
        self.gate = gate

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        draw = self.board.draw
        if draw is None:
            return output
        if self.gate is not None:
            return output * spread(draw.gates_BG[:, self.gate : self.gate + 1], output, None, self.batch_axis)
        if draw.all_alive[self.number]:
            return output
        return output * spread(draw.alive_BN[:, self.number : self.number + 1], output, None, self.batch_axis)


def attach(
    model: nn.Module,
    graph: ChannelGraph,
    board: Board,
    left: Decisions | None = None,
    replaced: Collection[str] = (),
) -> None:
    """Put the graph's masks on the model's modules; on a model that only has the gates `left`, on what it has.

    Modules that were `replaced` stand for a dead branch: they read and write nothing that has a mask.
    """
    # what is wrapped, not its wrapper
    modules = {
        dense_name(name): module
        for name, module in model.named_modules()
        if not any(dense_name(name) == gone or dense_name(name).startswith(f"{gone}.") for gone in replaced)
    }
    for reader in _left_of(graph.readers, left):
        if reader.layer in modules:
            modules[reader.layer].register_forward_pre_hook(MaskInput(board, graph, reader))
    for writer in _left_of(graph.writers, left):
        if writer.layer in modules:
            modules[writer.layer].register_forward_hook(MaskOutput(board, graph, writer))
    for number, gated in enumerate(graph.branches):
        mask = graph.masks[gated.masks[0]]
        gate = mask.first if mask.kind == "branch" else None
        lives = left is None or all(left[graph.masks[number].gates].any() for number in gated.masks)
        if lives and gated.branch.mask_at in modules:
            modules[gated.branch.mask_at].register_forward_hook(MaskBranch(board, number, gate, gated.batch_axis))


def _left_of(readers: tuple[Reader, ...], left: Decisions | None) -> Iterator[Reader]:
    """The readers with the channels that are left, where any of these has a gate."""
    for reader in readers:
        gates = reader.gates if left is None else reader.gates[(reader.gates == ALWAYS_OPEN) | left[reader.gates]]
        if (gates != ALWAYS_OPEN).any():
            yield replace(reader, gates=gates)


def detach(model: nn.Module) -> None:
    """Take all masks off."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, GateHook)]:
                del hooks[key]
