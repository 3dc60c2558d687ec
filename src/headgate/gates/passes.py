"""What a module keeps of its last pass, and who may make one: shared by gated models and cascades.

In eval mode threads take turns, since a pass is written on the module. A copy, or a file, is without the last pass: a
graph of gradients can be neither copied nor written. The budget moves on once a pass, however often its loss is asked
for. Knows budgets; knows nothing of gates or exits.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from headgate.gates.budget import Budget

P = TypeVar("P", bound="Passing")


class Passing(nn.Module):
    """A module that keeps something of its last pass."""

    of_a_pass: ClassVar[tuple[str, ...]] = ()
    """Attributes that are None until there is a pass, and in copies."""
    budget: Budget

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.RLock()
        self._pull: tuple[Any, Tensor] | None = None  # the cost loss, and what tells the pass it is of

    def _pulled(self, of: Any, share: Callable[[], Tensor]) -> Tensor:
        """The budget's loss for the pass that `of` is of; asked again, the same."""
        if self._pull is None or self._pull[0] is not of:
            self._pull = (of, self.budget.loss(share()))
        return self._pull[1]

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_turn"}
        return state | dict.fromkeys(("_pull", *self.of_a_pass))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._turn = threading.RLock()

    def __copy__(self: P) -> P:
        made = type(self).__new__(type(self))
        made.__setstate__(self.__getstate__())
        return made

    def __deepcopy__(self: P, memo: dict[int, Any]) -> P:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made
