"""Thresholds for a budget: which images may leave where, so that the fewest right answers are lost for what is saved.

A right answer is worth 1 and multiply-adds have a price. At a given price the best threshold of an exit follows from
those behind it, so they are found from the last exit back; the price is moved until the images cost the budget. An exit
that does not earn what its classifier and gate cost goes out of use. Knows what some images were told at every exit,
and nothing of networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# legend of axes: N images, K exits (the last, where nobody decides, among them only where said)

NOBODY = 1.0
"""A threshold that no probability is above: such an exit is passed by, its classifier and its gate are not computed."""
EVERYBODY = -1.0
PRICES = (-7.0, 4.0)
"""Right answers for the whole model's multiply-adds, as powers of ten: from next to nothing to far above any answer."""
HALVINGS = 40


def thresholds(
    p_NK: Tensor, right_NK: Tensor, segments_NK: Tensor, own_K: Sequence[float],
    cost: Callable[[Sequence[float]], float], goal: float,
) -> list[float]:  # fmt: skip
    """One for each exit but the last, under which the images cost at most `goal`, by `cost`.

    `segments_NK` is what the way from exit to exit costs each image and `own_K` what an exit itself costs, as shares of
    the whole model; the goal must be possible.
    """
    dear: list[int] = [0] * len(own_K)
    sorted_KN = [p_NK[:, number].double().sort(descending=True).values for number in range(len(own_K))]
    if cost(_at(sorted_KN, dear)) <= goal:
        return _at(sorted_KN, dear)  # nobody has to leave
    cheap = [len(p_NK)] + [0] * (len(own_K) - 1)
    low, high = PRICES
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        leaving = _best(p_NK.double(), right_NK.double(), segments_NK.double(), own_K, 10**middle)
        if cost(_at(sorted_KN, leaving)) <= goal:
            cheap, high = leaving, middle
        else:
            dear, low = leaving, middle
    return _between(dear, cheap, lambda leaving: _at(sorted_KN, leaving), cost, goal)


def _best(
    p_NK: Tensor, right_NK: Tensor, segments_NK: Tensor, own_K: Sequence[float], price: float
) -> list[int]:  # fmt: skip
    """How many of the images, the likeliest first, should leave at each exit if they came to it."""
    worth_N = right_NK[:, -1]
    found = [0] * len(own_K)
    for number in reversed(range(len(own_K))):
        stay_N = worth_N - price * segments_NK[:, number + 1]
        order = p_NK[:, number].argsort(descending=True, stable=True)
        gains = (right_NK[:, number] - stay_N)[order].cumsum(0)
        best = int(gains.argmax())
        if float(gains[best]) > price * own_K[number] * len(p_NK):
            found[number] = best + 1
            leaves_N = torch.zeros_like(stay_N, dtype=torch.bool)
            leaves_N[order[: best + 1]] = True
            worth_N = torch.where(leaves_N, right_NK[:, number], stay_N) - price * own_K[number]
        else:
            worth_N = stay_N
    return found


def _between(
    dear: Sequence[int], cheap: Sequence[int], at: Callable[[Sequence[int]], list[float]],
    cost: Callable[[Sequence[float]], float], goal: float,
) -> list[float]:  # fmt: skip
    """On the straight way from what costs too much to what does not, the dearest that is within the goal."""

    def mixed(share: float) -> list[float]:
        return at([round(a + share * (b - a)) for a, b in zip(dear, cheap, strict=True)])

    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if cost(mixed(middle)) <= goal else (middle, high)
    return mixed(high)


def _at(sorted_KN: Sequence[Tensor], leaving: Sequence[int]) -> list[float]:
    """Thresholds above which just so many images are: between two of them, so that rounding moves neither across. Of
    images that are alike all stay; an exit that is left with nobody is out of use."""
    found = []
    for p_N, count in zip(sorted_KN, leaving, strict=True):
        if count >= len(p_N):
            found.append(EVERYBODY)
            continue
        tau = NOBODY if count == 0 else float(p_N[count - 1] + p_N[count]) / 2
        found.append(tau if tau < float(p_N[0]) else NOBODY)
    return found
