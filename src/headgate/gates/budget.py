"""Bring the cost to its target over a training run, whatever the number of gates.

The paper adds `(target − cost)²` with weight 1. With thousands of gates that moves no gate: the gradient of each is
divided by their number. `Budget` is what works instead, `Budget.paper()` is the plain form:

- the target comes down from 1 on a ramp, so that the network is never cut faster than it can follow;
- the pull is a proportional and an integral part, `integral × cost + weight × (target − cost)²`: where the cost lags
  behind, the integral grows until it follows (dual ascent);
- the gates' gradient is multiplied by their number, so that the learning rate means the same for 16 gates and 16,000;
- with thousands of gates, no step moves a logit farther than `largest_move`: multiplied by so many, the gradients of
  one batch, or of a network that knows nothing yet, would throw gates to an end from which they hardly come back.

Its state (step, integral, last cost) is plain numbers: visible, and saved with the gates. Knows costs as numbers only.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from headgate.errors import HeadgateError, NonFiniteLoss, TargetError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


MANY = 10_000
"""Gates from which on `largest_move` holds as it is: the gradient that it holds back grows with their number."""
LEAST_MACS = 100
"""Nobody asks for fewer: a smaller number without a unit is a share, if perhaps a wrong one."""


def parse_target(target: float | str, dense_macs: int) -> float:
    """A target as a share of the dense network's MACs: 0.5 (or "0.5"), or "60M" multiply-adds an image."""
    if isinstance(target, bool) or not isinstance(target, (int, float, str)):
        raise TargetError(f'target={target!r}: give a share of the MACs such as 0.5, or a number of them such as "60M"')
    if isinstance(target, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)\s*", target, re.IGNORECASE)
        if match is None:
            raise TargetError(f'target={target!r} is no number of MACs: write "60M", "1.5G", or a share such as 0.5')
        number = float(match[1])
        meant_as_share = not match[2] and number < LEAST_MACS
        share = number if meant_as_share else number * UNITS[match[2].upper()] / dense_macs
        shown = f"target={target!r} is {share:.3g} times the network's {dense_macs:,} MACs"
    else:
        share = float(target)
        shown = f"target={target!r}"
    if not 0 < share <= 1:
        raise TargetError(f"{shown}: it must be above 0 and at most 1, a share of the whole network's MACs")
    return share


@dataclass
class Budget:
    """A controller that pulls a cost to a target. All fields can be read, and changed, at any time."""

    target: float
    """A share of the MACs; a number of them such as "60M" becomes one when a model is gated with it."""
    ramp_steps: int = 1000
    """Passes in train mode (optimizer steps, where gradients are not accumulated) over which the target comes down from
    the cost at the start."""
    weight: float = 50.0
    """Of the squared distance to the target of the moment."""
    integral_rate: float = 2.0
    """How fast the integral part grows with the distance, a step. 0 switches it off."""
    scale_gradient: bool = True
    """Whether the gates' gradient is multiplied by their number."""
    largest_move: float | None = 0.1
    """How far a step may move the logit of a gate that is a parameter, where there are MANY gates or more; with half as
    many, twice as far. None: as far as the optimizer wants."""
    step: int = 0
    integral: float = 0.0
    start_cost: float | None = None
    last_cost: float | None = field(default=None)

    @classmethod
    def paper(cls, target: float) -> Budget:
        """The paper's plain loss: weight 1, no ramp, no integral, gradients as they are, steps of any length."""
        return cls(target, ramp_steps=0, weight=1.0, integral_rate=0.0, scale_gradient=False, largest_move=None)

    def __post_init__(self) -> None:
        for name in ("weight", "integral_rate", "ramp_steps"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and value >= 0):
                raise HeadgateError(f"Budget.{name}={value!r}: it must be a number, and can't be negative")
        if self.largest_move is not None and not self.largest_move > 0:
            raise HeadgateError(f"Budget.largest_move={self.largest_move!r}: it must be above 0, or None for no limit")

    @property
    def target_now(self) -> float:
        """The target of the moment: on the ramp from the first cost to the target, then the target."""
        if self.ramp_steps == 0 or self.step >= self.ramp_steps:
            return self.target
        start = 1.0 if self.start_cost is None else self.start_cost
        return start + (self.target - start) * self.step / self.ramp_steps

    def limit(self, gates: int) -> float | None:
        """How far a step may move the logit of one of so many gates."""
        return None if self.largest_move is None else self.largest_move * max(1.0, MANY / max(gates, 1))

    def loss(self, cost: Tensor) -> Tensor:
        """The pull on a cost (a share, differentiable); moves the controller one step on."""
        now = float(cost.detach())
        if not math.isfinite(now):
            raise NonFiniteLoss(
                "the cost of the gates is not finite: a gate's logit became NaN. "
                "Lower the learning rate of the gates, or clip gradients"
            )
        if self.start_cost is None:
            self.start_cost = now
        goal = self.target_now
        loss = self.weight * (goal - cost) ** 2 + self.integral * cost
        self.last_cost = now
        self.integral += self.integral_rate * (now - goal)
        self.step += 1
        return loss

    def state(self) -> dict[str, Any]:
        """Everything, as plain numbers."""
        return dict(vars(self))

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        unknown = set(state) - set(vars(self))
        if unknown:
            raise HeadgateError(
                f"budget state has unknown fields {sorted(unknown)}: it is of another version of headgate"
            )
        vars(self).update(state)


def own_budget(budget: Budget | None, share: float, dense_macs: int) -> Budget | None:
    """A model's own budget, made from the one that is given, which may be given to other models too. It must have the
    model's target; one that is given in MACs becomes a share."""
    if budget is None:
        return None
    if not isinstance(budget, Budget):
        raise HeadgateError(f"budget={budget!r}: pass headgate.Budget(target, ramp_steps=…), or leave it out")
    own = replace(budget)
    if isinstance(own.target, str):
        own.target = parse_target(own.target, dense_macs)
    if own.target != share:
        raise TargetError(f"the budget's target {budget.target} is not the model's {share}: give both the same")
    return own
