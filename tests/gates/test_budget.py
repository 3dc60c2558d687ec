"""The controller: its plain form is the paper's, its state is visible and saved, and it brings the cost to its target."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headgate
from headgate.gates.budget import Budget
from tests.networks import NETWORKS, example
from tests.oracle import randn

CASE = NETWORKS["residual projection"]


def train_(gated: headgate.GatedModel, steps: int, lr: float = 0.05, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(gated.param_groups(lr=lr), momentum=0.9)
    costs = []
    for step in range(steps):
        loss = F.cross_entropy(gated(randn(16, 3, 8, 8, seed=step)), torch.arange(16) % 5) + gated.cost_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        costs.append(gated.macs() / gated.dense_macs)
    return costs


@pytest.mark.parametrize("cost", [0.2, 0.5, 0.93])
@pytest.mark.parametrize("target", [0.3, 0.5])
def test_the_papers_form_is_the_squared_distance_at_every_step(cost: float, target: float) -> None:
    budget = Budget.paper(target)
    for _ in range(3):
        q = torch.tensor(cost, requires_grad=True)
        loss = budget.loss(q)
        loss.backward()
        assert float(loss.detach()) == pytest.approx((target - cost) ** 2, abs=1e-7)
        assert float(q.grad) == pytest.approx(2 * (cost - target), abs=1e-6)


def test_the_papers_form_leaves_the_gates_gradient_alone() -> None:
    gated = headgate.gate(
        CASE.make(), example(CASE), target=0.5, budget=Budget.paper(0.5), backward="probability"
    ).train()
    gated(*example(CASE))
    q_B = gated.cost.macs_B(gated._last)
    gated.cost_loss().backward()
    p = gated.gates.probabilities().detach()
    z_BG = gated._last.gates_BG.detach().requires_grad_()
    gated.cost.macs_B(gated._ledger.draw(z_BG)).mean().backward()
    expected = 2 * (q_B.mean().detach() - 0.5) * z_BG.grad.sum(0) * p * (1 - p)
    torch.testing.assert_close(gated.gates.logits.grad, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("target", [0.6, 0.4])
def test_the_default_brings_the_cost_to_the_target(target: float) -> None:
    """From p = 0.95 to the target with plain SGD and the learning rate of the weights, which the paper's form does not."""
    torch.manual_seed(0)
    budget = Budget(target, ramp_steps=60)
    gated = headgate.gate(CASE.make(), example(CASE), target=target, budget=budget).train()
    costs = train_(gated, 150)
    assert costs[0] > 0.8
    assert sum(costs[-20:]) / 20 == pytest.approx(target, abs=0.06)


def test_the_state_is_plain_numbers_that_move() -> None:
    budget = Budget(0.5, ramp_steps=10)
    for _ in range(4):
        budget.loss(torch.tensor(0.9))
    state = budget.state()
    assert state["step"] == 4 and state["last_cost"] == pytest.approx(0.9)
    assert all(value is None or isinstance(value, (int, float, bool, str)) for value in state.values())
    assert 0.5 < budget.target_now < 0.9


def test_the_ramp_ends_at_the_target() -> None:
    budget = Budget(0.5, ramp_steps=10)
    goals = []
    for _ in range(15):
        goals.append(budget.target_now)
        budget.loss(torch.tensor(0.95))
    assert goals[1:] == sorted(goals[1:], reverse=True) and goals[-1] == 0.5


def test_a_restored_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def fresh() -> headgate.GatedModel:
        torch.manual_seed(3)
        return headgate.gate(CASE.make(), example(CASE), target=0.5, budget=Budget(0.5, ramp_steps=20)).train()

    straight = fresh()
    train_(straight, 6)
    through_dict, through_file = fresh(), None
    torch.save(straight.state_dict(), tmp_path / "state.pt")
    through_dict.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    headgate.save(straight, tmp_path / "gated.safetensors")
    through_file = headgate.load(tmp_path / "gated.safetensors", CASE.make())
    assert isinstance(through_file, headgate.GatedModel)
    through_file.train()
    assert (
        straight.budget.step == 6
        and straight.budget.state() == through_dict.budget.state() == through_file.budget.state()
    )
    ends = [train_(gated, 3, seed=9) for gated in (straight, through_dict, through_file)]
    assert ends[0] == ends[1] == ends[2]
    for other in (through_dict, through_file):
        assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), other.parameters(), strict=True))


def test_a_copy_of_a_gated_model_trains_like_the_original() -> None:
    torch.manual_seed(0)
    gated = headgate.gate(CASE.make(), example(CASE), target=0.5, budget=Budget(0.5, ramp_steps=4)).train()
    twin = copy.deepcopy(gated)
    assert train_(gated, 5) == train_(twin, 5)
    assert torch.equal(gated.gates.logits, twin.gates.logits)


def test_evaluation_does_not_move_the_controller() -> None:
    gated = headgate.gate(CASE.make(), example(CASE), target=0.5).eval()
    gated(*example(CASE))
    before = gated.budget.state()
    gated.cost_loss()
    assert gated.budget.state() == before


@pytest.mark.parametrize("field", ["weight", "integral_rate", "ramp_steps"])
def test_negative_settings_are_refused(field: str) -> None:
    with pytest.raises(headgate.HeadgateError, match=f"Budget.{field}=-1"):
        Budget(0.5, **{field: -1})  # type: ignore[arg-type]


def test_a_state_of_another_version_is_refused() -> None:
    with pytest.raises(headgate.HeadgateError, match=r"unknown fields \['colour'\]"):
        Budget(0.5).load_state({"colour": 1})


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_a_cost_that_is_no_number_stops_the_training(cost: float) -> None:
    with pytest.raises(headgate.NonFiniteLoss, match="learning rate"):
        Budget(0.5).loss(torch.tensor(cost))


def test_a_budget_and_a_model_of_different_targets_are_refused() -> None:
    with pytest.raises(headgate.TargetError, match=r"0\.4 is not the model's 0\.5"):
        headgate.gate(CASE.make(), example(CASE), target=0.5, budget=Budget(0.4))


def test_weights_and_gates_learn_at_rates_of_their_own() -> None:
    gated = headgate.gate(CASE.make(), example(CASE), target=0.5).train()
    optimizer = torch.optim.Adam(gated.param_groups(lr=0.0, gate_lr=0.03))
    weights = [p.clone() for p in gated.model.parameters()]
    logits = gated.gates.logits.detach().clone()
    for _ in range(2):
        (gated(*example(CASE)).square().mean() + gated.cost_loss()).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, gated.model.parameters(), strict=True))
    assert not torch.equal(logits, gated.gates.logits)
    assert isinstance(gated.gates.logits, nn.Parameter)


# ------------------------------------------------------------------------------------------- how far a step may go


def step_(gated: headgate.GatedModel, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    (F.cross_entropy(gated(randn(16, 3, 8, 8, seed=seed)), torch.arange(16) % 5) + gated.cost_loss()).backward()
    optimizer.step()
    optimizer.zero_grad()


def gated_with(largest_move: float | None) -> headgate.GatedModel:
    """Held back as if it had 10,000 gates or more."""
    gates = headgate.gate(CASE.make(), example(CASE)).graph.gate_count
    limit = None if largest_move is None else largest_move * gates / 10_000
    return headgate.gate(CASE.make(), example(CASE), target=0.5, budget=Budget(0.5, ramp_steps=5, largest_move=limit))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 30.0, momentum=0.9), lambda p: torch.optim.Adam(p, 5.0)])
def test_no_step_of_any_optimizer_moves_a_gate_farther_than_allowed(make: object) -> None:
    gated = gated_with(0.1)
    optimizer = make(gated.gate_parameters())  # type: ignore[operator]
    before = torch.logit(torch.cat(list(gated.gate_probabilities().values())).double())
    for seed in range(3):
        step_(gated, optimizer, seed)
        assert float((gated.gates.logits.double() - before).abs().max().detach()) > 1  # what the optimizer wanted
        now = torch.logit(torch.cat(list(gated.gate_probabilities().values())).double())
        moved = (now - before).abs()
        assert float(moved.max()) == pytest.approx(0.1, abs=1e-4)
        before = now
    step_(gated, optimizer, 3)
    last = torch.logit(torch.cat(list(gated.eval().gate_probabilities().values())).double())
    assert float((last - before).abs().max()) == pytest.approx(0.1, abs=1e-4)


def test_smaller_steps_are_not_touched() -> None:
    free, held = gated_with(None), gated_with(0.1)
    held.load_state_dict({**free.state_dict(), "_extra_state": held.get_extra_state()})
    for gated in (free, held):
        optimizer = torch.optim.SGD(gated.param_groups(lr=1e-4), momentum=0.9)
        for seed in range(3):
            step_(gated, optimizer, seed)
    assert torch.equal(free.gates.logits, held.gates.logits)


def test_a_state_saved_between_two_steps_goes_on_as_if_it_had_not_been() -> None:
    whole, first, second = (gated_with(0.1) for _ in range(3))
    for other in (first, second):
        other.load_state_dict(whole.state_dict())
    optimizers = {gated: torch.optim.SGD(gated.param_groups(lr=1.0)) for gated in (whole, first, second)}
    for seed in range(4):
        step_(whole, optimizers[whole], seed)
    for seed in range(2):
        step_(first, optimizers[first], seed)
    second.load_state_dict(first.state_dict())
    for seed in range(2, 4):
        step_(second, optimizers[second], seed)
    assert torch.equal(whole.gates.probabilities(), second.gates.probabilities())
    assert torch.equal(whole.gates.logits, second.gates.logits)


def test_probabilities_that_are_set_are_there_at_once() -> None:
    gated = gated_with(0.1)
    gated(*example(CASE))
    wanted = {name: torch.full_like(p, 0.001) for name, p in gated.gate_probabilities().items()}
    gated.set_gate_probabilities(wanted)
    for name, p in gated.gate_probabilities().items():
        torch.testing.assert_close(p, wanted[name])


@pytest.mark.parametrize(("gates", "limit"), [(100, 10.0), (5_000, 0.2), (10_000, 0.1), (40_000, 0.1)])
def test_few_gates_may_move_farther(gates: int, limit: float) -> None:
    assert Budget(0.5).limit(gates) == pytest.approx(limit)
    assert Budget.paper(0.5).limit(gates) is None


@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_limit_that_lets_nothing_move_is_refused(limit: float) -> None:
    with pytest.raises(headgate.HeadgateError, match="largest_move"):
        Budget(0.5, largest_move=limit)
