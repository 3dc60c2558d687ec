"""A pass through a cascade: who is still in it, and what was said at the exits on the way.

A hook behind every module where images can leave tells the pass that is under way. Knows how images leave; knows
nothing of costs, or of how thresholds are found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from headgate.exits.thresholds import NOBODY
from headgate.gated import GatedModel
from headgate.gates.draws import Draw, GateHook
from headgate.graph.trace import tensors_in

if TYPE_CHECKING:
    from headgate.exits.cascade import ExitModel

# legend of axes: B images


@dataclass(frozen=True)
class Place:
    """Where images leave: a module, and what it was called with."""

    module: nn.Module
    args: Any

    def is_its_own(self, x: Tensor) -> bool:
        """Whether the memory of the module's output is nobody else's, so that images may move in it: not the caller's,
        not what a hook on the module or inside of it may have kept, not a part of something larger, and without
        gradients."""
        storage = x.untyped_storage()
        if torch.is_grad_enabled() or not x.is_contiguous() or storage.nbytes() != x.numel() * x.element_size():
            return False
        if any(given.untyped_storage().data_ptr() == storage.data_ptr() for given in tensors_in(self.args)):
            return False
        hooks = (hook for module in self.module.modules() for hook in module._forward_hooks.values())
        return not _global_forward_hooks and all(isinstance(hook, GateHook) for hook in hooks)


class Everyone(Exception):
    """All images have left: nothing more is to be computed."""


class Watching:
    """A pass in which all images go to the end: what every exit says."""

    def __init__(self, exits: ExitModel) -> None:
        self.exits = exits
        self.answers: list[Tensor] = []
        self.wishes: list[Tensor] = []

    def arrive(self, number: int, x: Tensor, at: Place) -> None:
        if torch.is_grad_enabled():
            x = x.clone()  # what comes next may overwrite it, and the classifier's gradient needs it as it is here
        answers, wishes = self.exits.read(number, x)
        self.answers.append(answers)
        self.wishes.append(wishes)


class Leaving:
    """A pass in which images leave: who is still in it, and what the others were answered."""

    def __init__(self, exits: ExitModel, images: int) -> None:
        self.exits = exits
        self.inside = torch.arange(images)
        self.answered: list[tuple[Tensor, Tensor]] = []
        self.entered = [images]

    def arrive(self, number: int, x: Tensor, at: Place) -> Tensor | None:
        if self.exits.taus[number] >= NOBODY:
            self.entered.append(len(self.inside))
            return None
        answers, wishes = self.exits.read(number, x)
        return self._go_on(x, answers, torch.sigmoid(wishes) > self.exits.taus[number], at)

    def _go_on(self, x: Tensor, answers: Tensor, leaves: Tensor, at: Place) -> Tensor | None:
        """What the others see next; None where nobody leaves."""
        left = int(leaves.sum())
        self.entered.append(len(self.inside) - left)
        if left == 0:
            return None
        if left == len(self.inside):
            self.answered.append((self.inside, answers))
            raise Everyone
        here = leaves.to(self.inside.device)
        self.answered.append((self.inside[here], answers[leaves]))
        others, stay = (~here).nonzero()[:, 0], len(here) - left
        own = at.is_its_own(x)
        if own:  # the last ones move to where others have left: fewer copies, and no new memory
            others, moving = torch.arange(stay), others[others >= stay]
            free = here[:stay].nonzero()[:, 0]
            others[free] = moving
            for to, come in zip(free.tolist(), moving.tolist(), strict=True):
                x[to].copy_(x[come])
        self.inside = self.inside[others]
        self._take_gates_out(others.to(x.device))
        return x[:stay] if own else x[others.to(x.device)]

    def together(self, images: int) -> Tensor:
        """The answers of all images, in their order."""
        first = self.answered[0][1]
        if len(self.answered) == 1:
            return first
        answers = first.new_zeros(images, first.shape[1])
        for inside, logits in self.answered:
            answers[inside.to(answers.device)] = logits.to(answers.dtype)
        return answers

    def _take_gates_out(self, others: Tensor) -> None:
        """Gates that were decided for an image leave with it: those of the others may be used further on."""
        gated = self.exits.model
        if not isinstance(gated, GatedModel) or gated.dynamic is None or gated._board.draw is None:
            return
        before, after = gated._board.draw, Draw(gated._ledger)
        after.parts, after.probabilities = (
            [part if part is None or len(part) == 1 else part[others] for part in parts]
            for parts in (before.parts, before.probabilities)
        )
        gated._board.draw = gated._last = after


class Rehearsing(Leaving):
    """A pass in which the first image leaves at one exit, whatever its gate says, and no other does anywhere."""

    def __init__(self, exits: ExitModel, images: int, at: int) -> None:
        super().__init__(exits, images)
        self.at = at

    def arrive(self, number: int, x: Tensor, at: Place) -> Tensor | None:
        if number != self.at:
            self.entered.append(len(self.inside))
            return None
        first = torch.arange(len(x), device=x.device) == 0
        return self._go_on(x, self.exits.read(number, x)[0], first, at)


class Arrival(GateHook):
    """The hook behind a module where images can leave. An object, so that a copied model's hooks are the copy's; a copy
    of the network alone has no exits."""

    def __init__(self, exits: ExitModel | None, number: int) -> None:
        self.exits = exits
        self.number = number

    def __deepcopy__(self, memo: dict[int, Any]) -> Arrival:
        return Arrival(memo.get(id(self.exits)), self.number)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Tensor | None:
        under_way = None if self.exits is None else self.exits._pass
        return None if under_way is None else under_way.arrive(self.number, output, Place(module, args))
