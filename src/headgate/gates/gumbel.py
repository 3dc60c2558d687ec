"""0/1 random variables that gradients pass through.

One logit a gate: the difference w₁ − w₀ of the two logits of a Gumbel-softmax. The difference of two Gumbel
variables is logistic, so `Z = [logit + logistic noise > 0]` has P(Z = 1) = sigmoid(logit) exactly, and the relaxed
sample is `sigmoid((logit + noise) / temperature)`. Backward, Z stands for p ("probability", the paper's words) or for
the relaxed sample ("sample", what Gumbel-softmax code usually does).

Everything here is float32, whatever autocast says, with the noise kept away from ±infinity.
Knows nothing of layers, masks or costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headgate.errors import HeadgateError

Backward = Literal["probability", "sample"]
SMALLEST = 1e-7
"""Uniform noise is clamped to [SMALLEST, 1 − SMALLEST]: logistic noise within ±16."""


LOWEST_LOGIT = -100.0
"""Below it no p differs from 0."""


def threshold_logit(tau: float) -> float:
    """p > tau, said of logits: these tell gates apart whose p is 1.0 in float32, too."""
    if tau <= 0:
        return LOWEST_LOGIT
    return math.inf if tau >= 1 else max(math.log(tau / (1 - tau)), LOWEST_LOGIT)


@dataclass(frozen=True)
class Relaxation:
    """How gates are drawn in training: temperature, hard 0/1 or soft samples, and what stands for Z backward."""

    temperature: float = 1.0
    hard: bool = True
    backward: Backward = "sample"

    def __post_init__(self) -> None:
        if not isinstance(self.hard, bool):
            raise HeadgateError(f"hard={self.hard!r}: it is True (gates are 0 or 1) or False (soft samples)")
        if not isinstance(self.temperature, (int, float)) or not self.temperature > 0:
            raise HeadgateError(f"temperature={self.temperature}: it must be above 0 (the paper uses 1.0)")
        if self.backward not in ("probability", "sample"):
            raise HeadgateError(f'backward={self.backward!r}: use "probability" or "sample"')


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x` itself, which is finite, and whose gradient arrives multiplied by `factor`."""
    if not torch.is_grad_enabled():
        return x
    given = x.detach()
    return given + (x - given) * factor  # exactly 0 forward


def logistic_noise(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
    """The difference of two Gumbel variables."""
    uniform = torch.rand(shape, device=device, generator=generator, dtype=torch.float32).clamp_(SMALLEST, 1 - SMALLEST)
    return torch.log(uniform) - torch.log1p(-uniform)


def draw(logits: Tensor, noise: Tensor, relaxation: Relaxation) -> Tensor:
    """Samples of the gates, shaped like the noise: 0/1 forward and differentiable backward, or soft."""
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.float()
        shifted = logits + noise
        if not relaxation.hard:
            return torch.sigmoid(shifted / relaxation.temperature)
        if relaxation.backward == "probability":
            stand_in = torch.sigmoid(logits)
        else:
            stand_in = torch.sigmoid(shifted / relaxation.temperature)
        # the bracket is exactly 0 forward, so Z stays exactly 0 or 1
        return (shifted.detach() > 0).float() + (stand_in - stand_in.detach())


def decide(logits: Tensor, threshold: float, learning: bool = False) -> Tensor:
    """Gates that are open where the logit is above a threshold; where they are `learning`, what stands for Z backward
    is the probability as seen from there."""
    gates = (logits.detach() > threshold).to(logits.dtype)
    if not learning:
        return gates
    stand_in = torch.sigmoid(logits - threshold)
    return gates + (stand_in - stand_in.detach())


def logit_at_first(initial_probability: float) -> float:
    """Where gates that start at this probability begin."""
    if not (isinstance(initial_probability, (int, float)) and 0 < initial_probability < 1):
        raise HeadgateError(f"initial_probability={initial_probability!r}: it must be between 0 and 1, e.g. 0.95")
    return math.log(initial_probability / (1 - initial_probability))
