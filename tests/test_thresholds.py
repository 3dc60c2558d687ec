from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headgate.exits.thresholds import EVERYBODY, NOBODY, thresholds

SEGMENTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
OWN = (0.02, 0.01)


def case(seed: int, images: int = 60, ties: bool = False) -> tuple[Tensor, Tensor]:
    """Images that exits answer the better, the surer their gates are."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(images, 2, generator=generator)
    p = (p * 4).round() / 4 if ties else p
    right = torch.rand(images, 3, generator=generator) < torch.cat([p, torch.full((images, 1), 0.9)], 1)
    return p, right


def ways(p: Tensor, taus: Sequence[float]) -> Tensor:
    leaves = (p > torch.tensor(taus)).double()
    stays = torch.cumprod(1 - leaves, 1)
    return torch.cat([torch.ones(len(p), 1), stays], 1)


def cost_of(p: Tensor) -> Callable[[Sequence[float]], float]:
    def cost(taus: Sequence[float]) -> float:
        reach = ways(p, taus)
        own = sum(float(reach[:, k].mean()) * OWN[k] for k in range(2) if taus[k] < NOBODY)
        return float((reach * SEGMENTS).sum(1).mean()) + own

    return cost


def right_of(p: Tensor, right: Tensor, taus: Sequence[float]) -> int:
    reach = ways(p, taus)
    leave = torch.cat([reach[:, :-1] - reach[:, 1:], reach[:, -1:]], 1)
    return int((leave * right).sum())


def found(p: Tensor, right: Tensor, goal: float) -> list[float]:
    return thresholds(p, right, SEGMENTS.expand(len(p), 3), OWN, cost_of(p), goal)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), goal=st.floats(0.53, 1.1), ties=st.booleans())
def test_images_never_cost_more_than_the_goal(seed: int, goal: float, ties: bool) -> None:
    p, right = case(seed, ties=ties)
    assert cost_of(p)(found(p, right, goal)) <= goal


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("goal", [0.6, 0.75, 0.9])
def test_they_come_near_the_best_of_all_thresholds(seed: int, goal: float) -> None:
    """Every pair of thresholds tried; the price finds what is best on the whole, the goal cuts it within a few images."""
    p, right = case(seed)
    cost = cost_of(p)
    grid = [NOBODY, *(tau / 40 for tau in range(40)), EVERYBODY]
    best = max(right_of(p, right, (a, b)) for a in grid for b in grid if cost((a, b)) <= goal)
    assert right_of(p, right, found(p, right, goal)) >= best - 3


def test_exits_that_are_always_wrong_are_left_out_where_they_can_be() -> None:
    p, right = case(0)
    right[:, 0] = False
    right[:, 1] = right[:, 2]
    taus = found(p, right, 0.9)
    assert taus[0] == NOBODY and taus[1] < NOBODY


def test_a_surer_exit_lets_more_images_go_than_one_tau_for_all_would() -> None:
    """The second gate is timid, but right: it has a lower threshold than the first, which is bold and wrong."""
    p = torch.stack([torch.linspace(0.5, 0.9, 50), torch.linspace(0.1, 0.3, 50)], 1)
    right = torch.ones(50, 3, dtype=torch.bool)
    right[:, 0] = False
    taus = found(p, right, 0.85)
    assert taus[0] == NOBODY and taus[1] < 0.3


def test_nobody_has_to_leave_where_the_goal_is_the_whole_model() -> None:
    p, right = case(1)
    assert found(p, right, 1.0) == [NOBODY, NOBODY]


def test_everybody_leaves_where_the_goal_asks_for_it() -> None:
    p, right = case(2)
    assert cost_of(p)(found(p, right, 0.52)) == pytest.approx(0.52)
