"""Where gates start: from what a trained network already says about its channels.

A gate's worth is the mean square, over images, of the gradient of the loss with respect to it, all gates open: how much
the loss would change without its channels (the diagonal of the Fisher information). Divided by the MACs that it lets
through, it tells which gates to close first. Knows gradients and costs; knows nothing of how they were computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headgate.gates.cost import Cost
from headgate.gates.draws import Ledger

TINY = 1e-12


def marginal_macs(cost: Cost, ledger: Ledger) -> Tensor:
    """The share of the MACs that each gate lets through, the others open."""
    ones = torch.ones(1, ledger.count, requires_grad=True)
    (share_1G,) = torch.autograd.grad(cost.macs_B(ledger.draw(ones)).sum(), ones)
    return share_1G[0]


def primed_logits(worth_G: Tensor, macs_G: Tensor, logit: float, spread: float) -> Tensor:
    """Logits around `logit`, `spread` deviations wide, in the order of worth for the MACs."""
    value = (worth_G.double() + TINY).log() - (macs_G.double() + TINY).log()
    deviation = value.std(correction=0).clamp_min(TINY)
    return (logit + spread * (value - value.mean()) / deviation).float()
