"""Gates that are free parameters: training them ends in a pruned network.

One flat vector of logits for all masks of the network, so that a forward pass draws all its gates at once. Knows how
many gates there are and nothing of what they do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headgate.gates.gumbel import Relaxation, draw, logistic_noise, logit_at_first, scale_gradient

DEFAULT_RELAXATION = Relaxation()
CLOSED = -100.0
"""A logit beyond all noise."""


class StaticGates(nn.Module):
    """`count` gates, open with probability sigmoid(logits), whatever the input."""

    def __init__(
        self, count: int, initial_probability: float = 0.95, relaxation: Relaxation = DEFAULT_RELAXATION
    ) -> None:
        super().__init__()
        self.relaxation = relaxation
        self.gradient_scale = 1.0
        logits = torch.full((count,), logit_at_first(initial_probability), dtype=torch.float32)
        self.logits = nn.Parameter(logits, requires_grad=count > 0)

    def probabilities(self) -> Tensor:
        """P(open) of every gate."""
        return torch.sigmoid(self.logits.float())

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor:
        """Gates of a batch, image by image: (batch, gates)."""
        noise = logistic_noise((batch_size, len(self.logits)), self.logits.device, generator)
        return draw(scale_gradient(self.logits, self.gradient_scale), noise, self.relaxation)

    def set_probabilities(self, probabilities: Tensor) -> None:
        """Import probabilities; 0 and 1 become as good as sure."""
        with torch.no_grad():
            self.logits.copy_(torch.logit(probabilities.to(self.logits).clamp(1e-6, 1 - 1e-6)))

    @torch.no_grad()
    def close_(self, closed_G: Tensor) -> None:
        """Close some gates for good: no noise opens them, and no gradient reaches them."""
        self.logits[closed_G.to(self.logits.device)] = CLOSED

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move with the model, but stay float32: `model.half()` must not round probabilities."""
        before = self.logits.data
        super()._apply(fn, recurse)
        if self.logits.dtype != torch.float32:
            self.logits.data = before.to(self.logits.device)
        return self
