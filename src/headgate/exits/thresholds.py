"""Thresholds for a budget: which images may leave where, so that the most answers are right for what may be spent.

With the thresholds of all other exits given, the best one of an exit is found by counting: let the likeliest image
leave, then the next, and see what that saves and whose answers it changes. So two exits are set together by trying one
all over and counting out the other; more than two, pair by pair until nothing gets better. An exit that is in use costs
every image that comes to it, so which exits are in use is tried as well. Knows what some images were told at every
exit, and nothing of networks; what is best for these images need not be for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor

# legend of axes: N images, K exits (the last, where nobody decides, among them only where said), M settings to try

NOBODY = 1.0
"""A threshold that no probability is above: such an exit is passed by, its classifier and its gate are not computed."""
EVERYBODY = -1.0
FEW = 4
"""Exits of which every choice is tried; of more each alone, and all with one after the other taken out."""
COARSE, FINE = 48, 16
"""Thresholds that are tried of the one exit of a pair: all over, and about the best so far."""
ROUNDS = 8
"""Of all pairs, at most."""
ROUNDING = 1e-10
"""Of the whole model: two sums of the same costs differ by less."""


@dataclass(frozen=True)
class _Images:
    """What some images were told at every exit, and in which order they would leave there."""

    right_KN: Tensor
    """With the last exit."""
    segments_KN: Tensor
    """With the last exit."""
    own_K: Sequence[float]
    order_KN: Tensor
    """The likeliest to leave first."""
    rank_KN: Tensor
    """The place of each image in that order."""
    p_KN: Tensor
    """In that order."""
    ends_KN: Tensor
    """Whether a threshold can be behind this place of the order: not between images that are alike, nor below 0."""


@dataclass(frozen=True)
class _Policy:
    """So many images are above the threshold of each exit, 0 where it is out of use; what that comes to."""

    above: tuple[int, ...]
    right: float
    cost: float
    least: float
    """The lowest probability that is above a threshold."""

    @property
    def used(self) -> tuple[int, ...]:
        return tuple(number for number, above in enumerate(self.above) if above)

    def beats(self, other: _Policy) -> bool:
        """By right answers; where they are as many, by the higher of the lowest thresholds, which is the safer one."""
        return (self.right, self.least) > (other.right, other.least)


def thresholds(
    p_NK: Tensor, right_NK: Tensor, segments_NK: Tensor, own_K: Sequence[float],
    cost: Callable[[Sequence[float]], float], goal: float,
) -> list[float]:  # fmt: skip
    """One for each exit but the last, under which the images cost at most `goal`, by `cost`; the goal must be possible.

    Where the whole model is within the goal, nobody leaves. Otherwise no single exit, at whichever threshold from 0 up,
    has more right answers for the goal; what several can do together is sought pair by pair, which mostly comes within
    an image or two of the best, and need not. Of choices of exits with as many right answers the cheapest is taken; of
    thresholds tried at the same exits, those whose lowest is highest. Every exit in use is taken by somebody. Images
    of probability 0 stay; where nothing is found within the goal so, all leave at the exit where that is cheapest.

    `segments_NK` is what the way from exit to exit costs each image and `own_K` what an exit itself costs, as shares of
    the whole model.
    """
    exits = len(own_K)
    if cost([NOBODY] * exits) <= goal:
        return [NOBODY] * exits
    images = _images(p_NK, right_NK, segments_NK, own_K)
    found = _few(images, goal) if exits <= FEW else _many(images, goal)
    for policy in sorted(found, key=lambda policy: (-policy.right, policy.cost)):
        taus = [_tau(images, number, above) for number, above in enumerate(policy.above)]
        if cost(taus) <= goal:
            return taus
    return min((everybody_at(number, exits) for number in range(exits)), key=cost)


def everybody_at(number: int, exits: int) -> list[float]:
    """Thresholds under which all images leave at one exit."""
    return [EVERYBODY if each == number else NOBODY for each in range(exits)]


def shifted(taus: Sequence[float], tau: float) -> list[float]:
    """The same policy, bolder or more careful: the first exit in use has threshold `tau`, and the logits of the others'
    move by as much as its own does.

    Exits out of use stay so. Who lets everybody go has no logit: at a later exit that stays as it is, and where it is
    the first, the others stay as they are. With a tau of 1 or more nobody leaves, with one of 0 or less everybody.
    """
    first = next((each for each in taus if each < NOBODY), NOBODY)

    def moved(each: float) -> float:
        if each >= NOBODY:
            return each
        if each == first or tau <= 0 or tau >= NOBODY:
            return tau
        return each if min(each, first) <= 0 else _from_odds(_odds(each) * _odds(tau) / _odds(first))

    return list(taus) if tau == first else [moved(each) for each in taus]


def _odds(p: float) -> float:
    """Whose logarithm is the logit."""
    return p / (1 - p)


def _from_odds(odds: float) -> float:
    return odds / (1 + odds)


def _images(p_NK: Tensor, right_NK: Tensor, segments_NK: Tensor, own_K: Sequence[float]) -> _Images:
    p_KN = p_NK.float().T
    order_KN = p_KN.argsort(dim=1, descending=True, stable=True)
    sorted_KN = p_KN.gather(1, order_KN)
    ends_KN = sorted_KN > 0
    ends_KN[:, :-1] &= sorted_KN[:, :-1] > sorted_KN[:, 1:]
    right_KN, segments_KN = right_NK.double().T.contiguous(), segments_NK.double().T.contiguous()
    return _Images(right_KN, segments_KN, own_K, order_KN, order_KN.argsort(1), sorted_KN, ends_KN)


def _open_to_some(images: _Images) -> tuple[int, ...]:
    """Exits that some threshold from 0 up lets somebody leave through."""
    return tuple(number for number, ends_N in enumerate(images.ends_KN) if bool(ends_N.any()))


def _few(images: _Images, goal: float) -> Iterator[_Policy]:
    """With every choice of exits."""
    exits = _open_to_some(images)
    for used in (used for count in range(len(exits)) for used in combinations(exits, count + 1)):
        if (policy := _settled(images, used, goal)) is not None:
            yield policy


def _many(images: _Images, goal: float) -> Iterator[_Policy]:
    """With every exit alone; with all, and then always without the one that is missed least."""
    exits = _open_to_some(images)
    found = [_settled(images, (number,), goal) for number in exits]
    yield from (policy for policy in found if policy is not None)
    policy = _settled(images, exits, goal)
    while policy is not None:
        yield policy
        used = policy.used
        fewer = [_settled(images, used[:place] + used[place + 1 :], goal) for place in range(len(used))]
        policy = max((each for each in fewer if each is not None), key=lambda each: each.right, default=None)


def _settled(
    images: _Images, used: tuple[int, ...], goal: float, start: Sequence[int] | None = None
) -> _Policy | None:  # fmt: skip
    """The best that is found with these exits, or with some of them; None where they can't meet the goal.

    Pair after pair (of many exits, neighbours), one tried all over and the other counted out, until none gets better.
    An exit that nobody takes then goes out of use, and the search goes on without.
    """
    pairs = list(combinations(used, 2) if len(used) <= FEW else pairwise(used))
    start_MK = torch.tensor([start or [0] * len(images.own_K)])
    best = _best_at(images, used, start_MK, used[0], goal) if used else None
    for _ in range(ROUNDS):
        before = best
        for one, other in (turn for pair in pairs for turn in (pair, pair[::-1])):
            if best is not None:
                found = _best_at(images, used, _ways(images, best.above, one), other, goal)
                best = found if found is not None and found.beats(best) else best
        if best is before:
            break
    if best is None:
        return None
    taken = _taken(images, best.above)
    if taken == used:
        return best
    return _settled(images, taken, goal, [above * (number in taken) for number, above in enumerate(best.above)])


def _ways(images: _Images, above_K: Sequence[int], number: int) -> Tensor:
    """Thresholds to try at one exit, those of the others as they are: (M, K)."""
    ends = images.ends_KN[number].nonzero()[:, 0] + 1
    step = images.ends_KN.shape[1] / COARSE
    fine = torch.linspace(above_K[number] - step, above_K[number] + step, FINE + 1)
    wanted = torch.cat([torch.arange(1, COARSE + 1) * step, fine]).round().long()
    tried = ends[torch.searchsorted(ends, wanted).clamp(max=len(ends) - 1)].unique()
    ways_MK = torch.tensor([above_K]).repeat(len(tried), 1)
    ways_MK[:, number] = tried
    return ways_MK


def _best_at(images: _Images, used: Sequence[int], above_MK: Tensor, at: int, goal: float) -> _Policy | None:
    """The best threshold of exit `at`, and the best of these ways to set the others; None where the goal is not met.

    Image by image in the order in which they would leave there, so no threshold is better.
    """
    leave = {number: images.rank_KN[number] < above_MK[:, number, None] for number in used if number != at}
    right_M1, cost_M1, gained_MN, saved_MN = _if_all_stay(images, used, leave, at)
    order_N = images.order_KN[at]
    rights_MN = right_M1 + gained_MN[:, order_N].cumsum(1)
    costs_MN = cost_M1 - saved_MN[:, order_N].cumsum(1) / len(order_N)
    rights_MN = rights_MN.masked_fill((costs_MN > goal - ROUNDING) | ~images.ends_KN[at], -1.0)
    most = float(rights_MN.max())
    if most < 0:
        return None
    least_MN = images.p_KN[at].expand_as(rights_MN)
    for number in leave:
        above_M = above_MK[:, number]
        least_M = torch.where(above_M > 0, images.p_KN[number][above_M - 1], NOBODY)
        least_MN = torch.minimum(least_MN, least_M[:, None])
    way, last = divmod(int(least_MN.masked_fill(rights_MN < most, -1.0).argmax()), len(order_N))
    above = above_MK[way].tolist()
    above[at] = last + 1
    return _Policy(tuple(above), most, float(costs_MN[way, last]), float(least_MN[way, last]))


def _if_all_stay(
    images: _Images, used: Sequence[int], leave: dict[int, Tensor], at: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Right answers, and the mean cost, if nobody left at exit `at`; and what changes with each image that does."""
    right_MN, cost_MN = images.right_KN[-1:], images.segments_KN[-1:]
    gained_MN, saved_MN = right_MN, cost_MN
    for number in reversed(range(len(images.own_K))):
        if number == at:
            gained_MN, saved_MN = images.right_KN[at] - right_MN, cost_MN
        elif number in leave:
            right_MN = torch.where(leave[number], images.right_KN[number], right_MN)
            cost_MN = torch.where(leave[number], 0.0, cost_MN)
            if number < at:
                gained_MN, saved_MN = gained_MN * ~leave[number], saved_MN * ~leave[number]
        cost_MN = cost_MN + images.segments_KN[number] + (images.own_K[number] if number in used else 0.0)
    return right_MN.sum(1, keepdim=True), cost_MN.mean(1, keepdim=True), gained_MN, saved_MN


def _taken(images: _Images, above_K: Sequence[int]) -> tuple[int, ...]:
    """The exits that somebody leaves through."""
    inside_N = torch.ones_like(images.ends_KN[0])
    found = []
    for number, above in enumerate(above_K):
        leave_N = inside_N & (images.rank_KN[number] < above)
        inside_N = inside_N & ~leave_N
        if bool(leave_N.any()):
            found.append(number)
    return tuple(found)


def _tau(images: _Images, number: int, above: int) -> float:
    """The threshold that just so many images are above: between two of them, so that rounding moves neither across."""
    p_N = images.p_KN[number]
    if above in (0, len(p_N)):
        return EVERYBODY if above else NOBODY
    upper, lower = p_N[above - 1].double(), p_N[above].double()
    middle = ((upper + lower) / 2).float()
    return float(middle if middle < upper else lower)
