"""A pass through a cascade: who is still in it, and what was said at the exits on the way.

A hook behind every module where images can leave tells the pass that is under way. Knows how images leave; knows
nothing of costs, or of how thresholds are found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headgate.exits.thresholds import NOBODY
from headgate.gated import GatedModel
from headgate.gates.draws import Draw, GateHook

if TYPE_CHECKING:
    from headgate.exits.cascade import ExitModel

# legend of axes: B images


class Everyone(Exception):
    """All images have left: nothing more is to be computed."""


class Watching:
    """A pass in which all images go to the end: what every exit says."""

    def __init__(self, exits: ExitModel) -> None:
        self.exits = exits
        self.answers: list[Tensor] = []
        self.wishes: list[Tensor] = []

    def arrive(self, number: int, x: Tensor) -> None:
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

    def arrive(self, number: int, x: Tensor) -> Tensor | None:
        if self.exits.taus[number] >= NOBODY:
            self.entered.append(len(self.inside))
            return None
        answers, wishes = self.exits.read(number, x)
        return self._go_on(x, answers, torch.sigmoid(wishes) > self.exits.taus[number])

    def _go_on(self, x: Tensor, answers: Tensor, leaves: Tensor) -> Tensor | None:
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
        self.inside = self.inside[~here]
        self._take_gates_out(~leaves)
        return x[~leaves]

    def together(self, images: int) -> Tensor:
        """The answers of all images, in their order."""
        first = self.answered[0][1]
        if len(self.answered) == 1:
            return first
        answers = first.new_zeros(images, first.shape[1])
        for inside, logits in self.answered:
            answers[inside.to(answers.device)] = logits.to(answers.dtype)
        return answers

    def _take_gates_out(self, stays_B: Tensor) -> None:
        """Gates that were decided for an image leave with it: those of the others may be used further on."""
        gated = self.exits.model
        if not isinstance(gated, GatedModel) or gated.dynamic is None or gated._board.draw is None:
            return
        before, after = gated._board.draw, Draw(gated._ledger)
        after.parts, after.probabilities = (
            [part if part is None or len(part) == 1 else part[stays_B] for part in parts]
            for parts in (before.parts, before.probabilities)
        )
        gated._board.draw = gated._last = after


class Rehearsing(Leaving):
    """A pass in which the first image leaves at one exit, whatever its gate says, and no other does anywhere."""

    def __init__(self, exits: ExitModel, images: int, at: int) -> None:
        super().__init__(exits, images)
        self.at = at

    def arrive(self, number: int, x: Tensor) -> Tensor | None:
        if number != self.at:
            self.entered.append(len(self.inside))
            return None
        first = torch.arange(len(x), device=x.device) == 0
        return self._go_on(x, self.exits.read(number, x)[0], first)


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
        return None if under_way is None else under_way.arrive(self.number, output)
