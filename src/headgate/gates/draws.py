"""The gates of one forward pass, and the hooks that multiply channels by them.

A `Draw` holds the 0/1 gates of a batch, cut into masks. `MaskInput` sits before a layer, `MaskOutput` behind a module
that writes to an indexed stream, `MaskBranch` behind the last module of a residual branch, `Decide` where gates that
depend on the input find it. All of them see the draw on one `Board` that the gated model writes before each pass. Knows
the channel graph; knows nothing of how gates are drawn or decided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headgate.errors import HeadgateError
from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, Decisions, Reader
from headgate.graph.relayout import dense_name
from headgate.graph.sites import Site

NO_BACKWARD = -1
SMALLEST_IMAGE = 256
"""Pixels from which the quicker product with a mask pays."""

# legend of axes: B images, G gates of the network, M masks, N branches (or gates of a group), C channels of a tensor


class Draw:
    """Gates of one pass, mask by mask; those that depend on the input arrive while the pass is under way.

    A mask's gates have one row where all images share them.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.parts: list[Tensor | None] = [None] * len(ledger.sizes)
        self.probabilities: list[Tensor | None] = [None] * len(ledger.sizes)
        self._joined: Tensor | None = None
        self._alive_BN: Tensor | None = None
        self._all_alive: tuple[bool, ...] | None = None
        self.blind: set[int] = set()
        """Hooks that used gates while gradients were switched off."""

    def fill_(self, group: Group, gates_BN: Tensor, probabilities_BN: Tensor | None = None) -> None:
        """The gates of a group of masks, side by side."""
        if len(group.masks) == len(self.parts):
            self._joined = gates_BN
        for number, part in zip(group.masks, gates_BN.split(group.sizes, 1), strict=True):
            self.parts[number] = part
        if probabilities_BN is not None:
            for number, part in zip(group.masks, probabilities_BN.split(group.sizes, 1), strict=True):
                self.probabilities[number] = part

    def part(self, number: int) -> Tensor:
        """The gates of one mask."""
        found = self.parts[number]
        if found is None:
            raise HeadgateError(
                "a mask is needed before the layer that decides it has run: the forward pass took another way than in "
                "the example. Use kind='static', or freeze the layers concerned"
            )
        return found

    @property
    def gates_BG(self) -> Tensor:
        """All gates; closed where the pass did not come by."""
        if self._joined is None:
            images = _images_of([part for part in self.parts if part is not None])
            given = next(part for part in self.parts if part is not None)
            parts = [
                given.new_zeros(images, size) if part is None else part.expand(images, -1)
                for part, size in zip(self.parts, self._ledger.sizes, strict=True)
            ]
            self._joined = torch.cat(parts, 1)
        return self._joined

    @property
    def alive_BN(self) -> Tensor:
        """1 where a branch lives, image by image."""
        if self._alive_BN is None:
            self._alive_BN = self._ledger.alive_BN(self.gates_BG)
        return self._alive_BN

    def living(self, number: int) -> Tensor | None:
        """1 where branch `number` lives, image by image; None where it lives everywhere."""
        if self._joined is None:  # the pass is under way: look at the branch's own masks
            masks = self._ledger.branch_masks[number]
            lives = [self.part(mask).detach().sum(1, keepdim=True) > 0 for mask in masks]
            alive = torch.stack(torch.broadcast_tensors(*lives)).all(0)
            return None if everywhere(alive) else alive.to(self.part(masks[0]).dtype)
        if torch.compiler.is_compiling():
            return self.alive_BN[:, number : number + 1]
        if self._all_alive is None:
            self._all_alive = tuple(bool(value) for value in self.alive_BN.all(0))
        return None if self._all_alive[number] else self.alive_BN[:, number : number + 1]


def _images_of(parts: Sequence[Tensor]) -> int:
    """How many images the gates are of; those with one row are the same for all, and there may be none."""
    return next((len(part) for part in parts if len(part) != 1), 1)


class Group:
    """Masks that are decided together, and which of them must not all close."""

    def __init__(self, graph: ChannelGraph, masks: Sequence[int]) -> None:
        self.masks = tuple(masks)
        self.sizes = [graph.masks[number].size for number in masks]
        self.count = sum(self.sizes)
        self.ends = torch.tensor(self.sizes, dtype=torch.int64).cumsum(0)
        self.firsts = [end - size for end, size in zip(self.ends.tolist(), self.sizes, strict=True)]
        self.mortal = torch.tensor([graph.masks[number].may_die for number in masks], dtype=torch.bool)
        self.immortal = [place for place, number in enumerate(masks) if not graph.masks[number].may_die]
        gates = [np.arange(graph.masks[number].first, graph.masks[number].gates.stop) for number in masks]
        self.gates = torch.from_numpy(np.concatenate(gates) if gates else np.zeros(0, np.int64))
        """Their numbers among all gates."""

    def counts_BM(self, gates_BN: Tensor) -> Tensor:
        """How many gates of each mask are open (or, for soft gates, their sum)."""
        running = gates_BN.detach().cumsum(1)
        ends = running.index_select(1, (self.ends - 1).to(running.device))
        return torch.diff(ends, dim=1, prepend=ends.new_zeros(len(ends), 1))

    def keep_one_open(self, gates_BN: Tensor, probabilities_BN: Tensor) -> Tensor:
        """Open the likeliest gate of every mask that is all closed, unless the mask may die."""
        closed_BM = (self.counts_BM(gates_BN) < 0.5) & ~self.mortal.to(gates_BN.device)
        if everywhere(~closed_BM):
            return gates_BN
        parts = list(torch.zeros_like(gates_BN).split(self.sizes, 1))
        for number in self._to_rescue(closed_BM):
            first = self.firsts[number]
            likeliest_B = probabilities_BN[:, first : first + self.sizes[number]].argmax(1)
            one_hot = torch.nn.functional.one_hot(likeliest_B, self.sizes[number]).to(gates_BN.dtype)
            parts[number] = one_hot * closed_BM[:, number : number + 1]
        rescue = torch.cat(parts, 1)
        return gates_BN + rescue * (1 - gates_BN.detach())

    def _to_rescue(self, closed_BM: Tensor) -> list[int]:
        """Masks that are all closed for some image; in compiled code, which can't tell, all that must not be."""
        if torch.compiler.is_compiling():
            return self.immortal
        found: list[int] = closed_BM.any(0).nonzero().flatten().tolist()
        return found


def everywhere(true: Tensor) -> bool:
    """Whether all of it is true, where the code may take another way then: compiled code takes the same way always."""
    return not torch.compiler.is_compiling() and bool(true.all())


class Ledger(Group):
    """All masks of a network, and the branches that die with them."""

    def __init__(self, graph: ChannelGraph) -> None:
        super().__init__(graph, range(len(graph.masks)))
        self.branch_masks = [list(branch.masks) for branch in graph.branches]

    def alive_BN(self, gates_BG: Tensor) -> Tensor:
        """1 where a branch lives, image by image."""
        if not self.branch_masks:
            return gates_BG.new_ones(len(gates_BG), 0)
        open_BM = self.counts_BM(gates_BG) > 0
        return torch.stack([open_BM[:, masks].all(1) for masks in self.branch_masks], 1).to(gates_BG.dtype)

    def draw(self, gates_BG: Tensor) -> Draw:
        """A draw of which all gates are known."""
        made = Draw(self)
        made.fill_(self, gates_BG)
        return made


class Board:
    """Where the draw of the current pass hangs; None lets everything through."""

    def __init__(self) -> None:
        self.draw: Draw | None = None
        self.decide: Callable[[int, Tensor, Draw], None] | None = None
        """Fills in what a site decides, by the site's number, from the tensor there."""
        self.hear: Callable[[Channels | MaskBranch, Tensor], None] | None = None
        """Is told every tensor before its mask."""
        self.kept: Draw | None = None
        """That of the last pass with gradients: what its backward pass computes again must find the same gates."""

    def __getstate__(self) -> dict[str, None]:
        """A copy's passes are its own."""
        return dict.fromkeys(("draw", "decide", "hear", "kept"))

    def now(self) -> Draw | None:
        """The draw of the pass under way, or of the one whose parts are computed again (gradient checkpoints)."""
        if self.draw is not None or self.kept is None or torch._C._current_graph_task_id() == NO_BACKWARD:
            return self.draw
        return self.kept


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
        self.gates = torch.from_numpy(reader.gates)
        """The number of each channel's gate among all gates; `ALWAYS_OPEN` for those that have none."""

    def mask_BC(self, draw: Draw) -> Tensor:
        """The 0/1 factor of each channel, image by image."""
        parts = [draw.part(number) for number in self.masks]
        if self.index is None:
            return parts[0]
        if self.has_open:
            parts.append(parts[0].new_ones(len(parts[0]), 1))
        if len({len(part) for part in parts}) > 1:  # static and dynamic masks side by side
            parts = [part.expand(_images_of(parts), -1) for part in parts]
        joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return joined.index_select(1, self.index.to(joined.device))

    def apply(self, x: Tensor) -> Tensor:
        """The tensor, times its channels' gates."""
        draw = self.board.now()
        if draw is None:
            return x
        if self.board.hear is not None:
            self.board.hear(self, x)
        mask_BC = self.mask_BC(draw)
        self._look_out(draw, mask_BC)
        return times(x, spread(mask_BC, x, self.axis, self.batch_axis))

    def _look_out(self, draw: Draw, mask_BC: Tensor) -> None:
        """Gates that were used without gradients and are now used again with some would get wrong ones."""
        if mask_BC.requires_grad and not torch.is_grad_enabled():
            draw.blind.add(id(self))
        elif self.board.draw is None and id(self) in draw.blind:
            raise HeadgateError(
                "checkpoint(use_reentrant=True) does not see that gates have gradients: use use_reentrant=False"
            )


def spread(mask_BC: Tensor, x: Tensor, axis: int | None, batch_axis: int = 0) -> Tensor:
    """A mask shaped to multiply `x`; `axis` None for one gate an image.

    Where images are folded with something else (windows, tokens), their masks are repeated.
    """
    images, places = mask_BC.shape[0], x.shape[batch_axis]
    if images > 1 and places != images:
        mask_BC = mask_BC.repeat_interleave(places // images, 0) if places % images == 0 else mask_BC[:1]
    shape = [1] * x.dim()
    if axis is not None:
        axis %= x.dim()
        shape[axis] = mask_BC.shape[1]
        mask_BC = mask_BC if batch_axis < axis else mask_BC.t()
    shape[batch_axis] = mask_BC.shape[0 if axis is None or batch_axis < axis else 1]
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
    if torch.compiler.is_compiling():  # which does without that tensor by itself
        return x * mask
    quick = x.dim() == 4 and mask.shape[:2] == x.shape[:2] and mask.dtype == x.dtype == torch.float32
    if not (quick and mask.requires_grad and x.shape[2] * x.shape[3] >= SMALLEST_IMAGE):
        return x * mask
    product: Tensor = _Times.apply(x, mask)
    return product


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    """What a layer reads: its first argument, or, called by keyword, its first tensor and the name of that."""
    if args:
        return None, args[0]
    return next((name, value) for name, value in kwargs.items() if isinstance(value, Tensor))


class MaskInput(Channels):
    """Before a layer: closed channels arrive as zeros."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.board.now() is None:
            return None
        name, x = first_of(args, kwargs)
        return ((self.apply(x), *args[1:]), kwargs) if name is None else (args, kwargs | {name: self.apply(x)})


class MaskOutput(Channels):
    """Behind a module: closed channels leave as zeros."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self.apply(output)


class MaskBranch(GateHook):
    """Behind a branch's last module: a dead branch adds nothing."""

    axis = None

    def __init__(self, board: Board, number: int, mask: int | None, batch_axis: int, gates: Sequence[int] = ()) -> None:
        self.board = board
        self.batch_axis = batch_axis
        self.number = number
        self.mask = mask
        """The branch's own mask of one gate, if it has one."""
        self.gates = torch.tensor(gates, dtype=torch.int64)
        """That gate's number among all gates."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        draw = self.board.now()
        if draw is None:
            return output
        if self.board.hear is not None and self.mask is not None:
            self.board.hear(self, output)
        alive = draw.living(self.number) if self.mask is None else draw.part(self.mask)
        return output if alive is None else output * spread(alive, output, None, self.batch_axis)


class Decide(GateHook):
    """Before the first layer that reads a site: its gates are decided now."""

    def __init__(self, board: Board, number: int) -> None:
        self.board = board
        self.number = number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        draw = self.board.now()
        if draw is not None and self.board.decide is not None:
            self.board.decide(self.number, first_of(args, kwargs)[1], draw)


def attach(
    model: nn.Module,
    graph: ChannelGraph,
    board: Board,
    left: Decisions | None = None,
    replaced: Collection[str] = (),
    sites: Sequence[Site] = (),
) -> None:
    """Put the graph's masks on the model's modules; on a model that only has the gates `left`, on what it has.

    Modules that were `replaced` stand for a dead branch: they read and write nothing that has a mask. At `sites`, gates
    are decided, before they are used.
    """
    # what is wrapped, not its wrapper
    modules = {
        dense_name(name): module
        for name, module in model.named_modules()
        if not any(dense_name(name) == gone or dense_name(name).startswith(f"{gone}.") for gone in replaced)
    }
    for number, site in enumerate(sites):
        modules[site.layer].register_forward_pre_hook(Decide(board, number), with_kwargs=True)
    for reader in _left_of(graph.readers, left):
        if reader.layer in modules:
            modules[reader.layer].register_forward_pre_hook(MaskInput(board, graph, reader), with_kwargs=True)
    for writer in _left_of(graph.writers, left):
        if writer.layer in modules:
            modules[writer.layer].register_forward_hook(MaskOutput(board, graph, writer))
    for number, gated in enumerate(graph.branches):
        mask = graph.masks[gated.masks[0]]
        own = gated.masks[0] if mask.kind == "branch" else None
        lives = left is None or all(left[graph.masks[number].gates].any() for number in gated.masks)
        if lives and gated.branch.mask_at in modules:
            gates = () if own is None else (mask.first,)
            hook = MaskBranch(board, number, own, gated.batch_axis, gates)
            modules[gated.branch.mask_at].register_forward_hook(hook)


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
                module._forward_pre_hooks_with_kwargs.pop(key, None)
