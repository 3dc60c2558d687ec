"""Where gates start: from what a trained network already says about its channels.

A gate's worth is the mean square, over images, of the gradient of the loss with respect to it, all gates open: how much
the loss would change without its channels (the diagonal of the Fisher information). Divided by the MACs that it lets
through, it tells which gates to close first. Knows classifiers, gradients and costs; nothing of what becomes of gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headgate.errors import HeadgateError
from headgate.gates.cost import Cost
from headgate.gates.draws import Board, Ledger
from headgate.gates.loudness import Loudness
from headgate.graph.trace import tensors_in

TINY = 1e-12
LEAST_DEVIATION = 1e-3
"""Of the logarithms of worth: nearer to each other than that, gates are alike."""


def worth(
    model: nn.Module, ledger: Ledger, board: Board, batches: Iterable[tuple[tuple[Tensor, ...], Tensor]],
    as_arguments: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]],
    heard: Loudness | None = None,
) -> Tensor:  # fmt: skip
    """The mean square, over batches of (inputs, labels), of the loss's gradient with respect to each gate, all open.

    What is to be heard meanwhile goes to `heard`.
    """
    device = next(model.parameters()).device
    total, images_seen = torch.zeros(ledger.count, dtype=torch.float64), 0
    try:
        board.hear, board.decide = (None, None) if heard is None else (heard.hear, heard.see)  # nothing is decided
        for inputs, labels in batches:
            images = len(labels)
            if heard is not None:
                heard.begin(images)
            gates_BG = torch.ones(images, ledger.count, device=device, requires_grad=True)
            board.draw = ledger.draw(gates_BG)
            args, kwargs = as_arguments([tensor.to(device) for tensor in inputs])
            scores = tensors_in(model(*args, **kwargs))[0].float()
            loss = nn.functional.cross_entropy(scores, labels.to(device), reduction="sum")
            (gradient_BG,) = torch.autograd.grad(loss, gates_BG)
            total += gradient_BG.double().square().sum(0).cpu()
            images_seen += images
            if heard is not None:
                heard.end()
    finally:
        board.draw = board.hear = board.decide = None
    if not images_seen:
        raise HeadgateError("the loader is empty: prime_ needs at least one batch")
    return total / images_seen


def marginal_macs(cost: Cost, ledger: Ledger) -> Tensor:
    """The share of the MACs that each gate lets through, the others open."""
    ones = torch.ones(1, ledger.count, requires_grad=True)
    (share_1G,) = torch.autograd.grad(cost.macs_B(ledger.draw(ones)).sum(), ones)
    return share_1G[0]


def primed_logits(worth_G: Tensor, macs_G: Tensor, logit: float, spread: float) -> tuple[Tensor, float]:
    """Logits around `logit`, `spread` deviations wide, in the order of worth for the MACs; and by how much one rises
    where a gate is worth e times as much."""
    value = (worth_G.double() + TINY).log() - (macs_G.double() + TINY).log()
    deviation = max(float(value.std(correction=0)), LEAST_DEVIATION)
    return (logit + spread * (value - value.mean()) / deviation).float(), spread / deviation
