"""Gates that are free parameters: training them ends in a pruned network.

One flat vector of logits for all masks of the network, so that a forward pass draws all its gates at once. Whatever the
optimizer, a step moves no logit farther than `largest_move`. What went farther is cut off before the logits are next
used, or written to a file. Knows how many gates there are and nothing of what they do.
"""

from __future__ import annotations

from typing import Any

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
        self.largest_move: float | None = None
        logits = torch.full((count,), logit_at_first(initial_probability), dtype=torch.float32)
        self.logits = nn.Parameter(logits, requires_grad=count > 0)
        self._before: Tensor
        self.register_buffer("_before", logits.clone(), persistent=False)  # the logits as last held

    def probabilities(self) -> Tensor:
        """P(open) of every gate."""
        self._hold_back_()
        return torch.sigmoid(self.logits.float())

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor:
        """Gates of a batch, image by image: (batch, gates)."""
        self._hold_back_()
        noise = logistic_noise((batch_size, len(self.logits)), self.logits.device, generator)
        finite = self.logits.clamp(CLOSED, -CLOSED)  # beyond all noise on either side
        return draw(scale_gradient(finite, self.gradient_scale), noise, self.relaxation)

    def set_probabilities(self, probabilities: Tensor) -> None:
        """Import probabilities; 0 and 1 become as good as sure."""
        self.set_logits(torch.logit(probabilities.to(self.logits).clamp(1e-6, 1 - 1e-6)))

    @torch.no_grad()
    def set_logits(self, logits: Tensor) -> None:
        """Go there at once, however far it is."""
        self.logits.copy_(logits)
        self._before.copy_(self.logits)

    @torch.no_grad()
    def close_(self, closed_G: Tensor) -> None:
        """Close some gates for good: no noise opens them, and no gradient reaches them."""
        self._hold_back_()
        self.set_logits(self.logits.masked_fill(closed_G.to(self.logits.device), CLOSED))

    @torch.no_grad()
    def _hold_back_(self) -> None:
        """Cut off how far the last step went beyond the largest move; in eval mode nobody takes steps."""
        if self.largest_move is None or not self.training:
            return
        before = self._before
        held = torch.clamp(self.logits, before - self.largest_move, before + self.largest_move)
        # not written where nothing changes: a backward pass may still be to come
        if torch.compiler.is_compiling() or not torch.equal(held, self.logits):
            self.logits.copy_(held)
        before.copy_(held)

    def train(self, mode: bool = True) -> StaticGates:
        """Train mode, or eval mode, where logits stay as they are."""
        self._hold_back_()
        return super().train(mode)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._hold_back_()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._before = self.logits.detach().clone()

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move with the model, but stay float32: `model.half()` must not round probabilities."""
        self._hold_back_()
        logits = self.logits.data
        super()._apply(fn, recurse)
        if self.logits.dtype != torch.float32:
            self.logits.data = logits.to(self.logits.device)
        self._before = self.logits.detach().clone()
        return self
