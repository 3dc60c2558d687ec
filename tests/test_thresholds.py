from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headgate.exits.thresholds import EVERYBODY, NOBODY, everybody_at, shifted, thresholds
from tests.test_exits import cascade, data, one_by_one

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


def hard_case(seed: int, images: int = 400) -> tuple[Tensor, Tensor]:
    """Hard images are hard everywhere, so those that come to a later exit are not like all; gates know a part of it."""
    generator = torch.Generator().manual_seed(seed)
    skill = torch.cat([torch.rand(2, generator=generator).sort().values * 2.5, torch.tensor([2.2])])
    ease = skill - torch.randn(images, 1, generator=generator) + 0.7 * torch.randn(images, 3, generator=generator)
    right = torch.rand(images, 3, generator=generator) < torch.sigmoid(3 * ease)
    return torch.sigmoid(ease[:, :2] + 0.6 * torch.randn(images, 2, generator=generator)), right


def one_alone(p: Tensor, number: int) -> list[list[float]]:
    """All thresholds that an exit can have, the other being out of use."""
    every = [everybody_at(number, 2) for _ in range(len(p) + 1)]
    for taus, tau in zip(every, p[:, number].tolist(), strict=False):
        taus[number] = tau
    return every


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), goal=st.floats(0.53, 0.99), ties=st.booleans())
def test_no_exit_alone_is_better(seed: int, goal: float, ties: bool) -> None:
    p, right = hard_case(seed, 150)
    p = (p * 8).ceil() / 8 if ties else p
    cost = cost_of(p)
    alone = [taus for number in range(2) for taus in one_alone(p, number) if cost(taus) <= goal - 1e-9]
    best = max((right_of(p, right, taus) for taus in alone), default=0)
    assert right_of(p, right, found(p, right, goal)) >= best


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), goal=st.floats(0.55, 0.95))
def test_no_pair_of_a_grid_is_better_by_more_than_two_images(seed: int, goal: float) -> None:
    p, right = hard_case(seed)
    cost = cost_of(p)
    grid = [[NOBODY, *p[:, number].quantile(torch.linspace(0, 1, 41)).tolist(), EVERYBODY] for number in range(2)]
    best = max(right_of(p, right, (a, b)) for a in grid[0] for b in grid[1] if cost((a, b)) <= goal)
    assert right_of(p, right, found(p, right, goal)) >= best - 2


@pytest.mark.parametrize("goal", [0.56, 0.7, 0.8, 0.9, 0.97])
def test_every_exit_in_use_is_taken_by_somebody(goal: float) -> None:
    for seed in range(8):
        p, right = hard_case(seed)
        taus = found(p, right, goal)
        reach = ways(p, taus).sum(0)
        assert all((reach[k] > reach[k + 1]) == (taus[k] < NOBODY) for k in range(2))


def test_where_answers_are_as_good_the_surer_images_leave() -> None:
    """From 35 images at the first exit and 51 at the second to 45 and 26, all are right; at 39 each, the sure ones go."""
    p = torch.stack([torch.linspace(0.02, 0.98, 100), torch.linspace(0.02, 0.98, 100).flip(0)], 1)
    right = torch.cat([p > torch.tensor([0.55, 0.3]), torch.ones(100, 1, dtype=torch.bool)], 1)
    taus = found(p, right, 0.75)
    assert right_of(p, right, taus) == 100
    assert all(0.58 < tau < 0.63 for tau in taus)


@pytest.mark.parametrize("exits", [1, 3, 5, 6])
def test_any_number_of_exits(exits: int) -> None:
    """With few every choice is tried, with many they are taken out one by one: none alone is better than together."""
    generator = torch.Generator().manual_seed(exits)
    p = torch.rand(200, exits, generator=generator)
    right = torch.rand(200, exits + 1, generator=generator) < torch.cat([p**0.3, torch.full((200, 1), 0.9)], 1)
    segments = torch.full((200, exits + 1), 1 / (exits + 1), dtype=torch.float64)

    def cost(taus: Sequence[float]) -> float:
        reach = ways(p, taus).double()
        own = sum(float(reach[:, k].mean()) * 0.01 for k in range(exits) if taus[k] < NOBODY)
        return float((reach * segments).sum(1).mean()) + own

    taus = thresholds(p, right, segments, [0.01] * exits, cost, 0.8)
    assert cost(taus) <= 0.8
    for number in range(exits):
        for tau in p[:, number].tolist():
            alone = [tau if each == number else NOBODY for each in range(exits)]
            assert cost(alone) > 0.8 - 1e-9 or right_of(p, right, alone) <= right_of(p, right, taus)


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


def test_whom_a_gate_gives_no_chance_stays() -> None:
    """Even where the second exit is right and the last is not; but the goal counts more."""
    p, right = case(3)
    p[:, 1], right[:, 1], right[:, 2] = 0.0, True, False
    assert found(p, right, 0.9)[1] == NOBODY
    p[:, 0] = 0.0
    assert found(p, right, 0.9) == everybody_at(0, 2)


def test_nobody_has_to_leave_where_the_goal_is_the_whole_model() -> None:
    p, right = case(1)
    assert found(p, right, 1.0) == [NOBODY, NOBODY]


def test_everybody_leaves_where_the_goal_asks_for_it() -> None:
    p, right = case(2)
    assert cost_of(p)(found(p, right, 0.52)) == pytest.approx(0.52)


# -------------------------------------------------------------------------------------------- moved together


def test_equal_thresholds_stay_equal() -> None:
    assert shifted([0.5, 0.5], 0.3) == [0.3, 0.3]


def test_the_others_move_by_as_much_logit_and_back_again() -> None:
    taus = [NOBODY, 0.6, 0.9, 0.2]
    moved = shifted(taus, 0.95)
    assert moved[:2] == [NOBODY, 0.95]
    by = torch.tensor(moved[1:]).logit() - torch.tensor(taus[1:]).logit()
    torch.testing.assert_close(by, by[:1].expand(3))
    assert shifted(moved, 0.6) == pytest.approx(taus)
    assert shifted(taus, 0.6) == taus, "exactly, not only nearly"


@pytest.mark.parametrize(
    ("taus", "tau", "moved"),
    [
        ([NOBODY, NOBODY], 0.3, [NOBODY, NOBODY]),
        ([0.4, 0.7], 1.0, [NOBODY, NOBODY]),
        ([NOBODY, 0.7, 0.8], 0.0, [NOBODY, 0.0, 0.0]),
        ([0.4, EVERYBODY], 0.8, [0.8, EVERYBODY]),
        ([EVERYBODY, 0.7], 0.8, [0.8, 0.7]),
    ],
)
def test_thresholds_that_have_no_logit(taus: list[float], tau: float, moved: list[float]) -> None:
    assert shifted(taus, tau) == moved


@pytest.mark.parametrize("taus", [[0.4, 0.7], [NOBODY, 0.6], [0.6, NOBODY]])
def test_a_sweep_passes_through_the_cascades_own_point_and_leaves_exits_off(taus: list[float]) -> None:
    exits = cascade().eval()
    exits.taus = taus
    watched, own = exits.watch(data()), exits.table(data())
    first = next(tau for tau in taus if tau < NOBODY)
    lower, point, higher, nobody = exits.sweep_of(watched, [0.1, first, 0.99, NOBODY])
    assert (point.accuracy, point.macs) == (own.accuracy, own.macs)
    assert lower.macs <= point.macs <= higher.macs and nobody.macs == pytest.approx(exits.dense_macs)
    off = taus.index(NOBODY) if NOBODY in taus else None
    assert all((exits.taus_at(tau)[k] == NOBODY) == (k == off) for tau in (0.1, first, 0.99) for k in range(2))
    assert exits.taus == taus, "a sweep changes nothing"
    exits.taus = exits.taus_at(0.1)
    _, left = one_by_one(exits, torch.cat([images for images, _ in data()]))
    assert exits.exit_of(watched).tolist() == left
