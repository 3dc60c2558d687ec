"""What gates cost, and the losses on it: against formulas by hand, and by enumeration of every outcome."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headgate
from headgate.gates import cost as cost_module
from headgate.gates.budget import Budget
from headgate.gates.cost import activation_rate, over_processes, per_gate_loss, target_rates
from headgate.gates.draws import Draw
from tests.networks import NETWORKS, example
from tests.oracle import decide_, independent_macs, randomize_

PIXELS = 36


def plain() -> nn.Module:
    """Two gated convolutions of four channels each: 1×1 and 3×3, on 6×6 pixels."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * PIXELS, 2)
    )


def plain_macs(first: float, second: float) -> float:
    """By hand: open channels of the two convolutions → MACs."""
    return PIXELS * (3 * first + 9 * first * second) + 2 * PIXELS * second


def outcomes(count: int) -> Tensor:
    return torch.tensor(list(product((0.0, 1.0), repeat=count)))


def weights(z_NG: Tensor, p_G: Tensor) -> Tensor:
    """The probability of every outcome of independent gates."""
    return torch.where(z_NG > 0.5, p_G, 1 - p_G).double().prod(1)


def gated_plain(**options: object) -> headgate.GatedModel:
    return headgate.gate(plain(), torch.randn(2, 3, 6, 6), **options)  # type: ignore[arg-type]


def test_every_outcome_costs_what_the_formula_says() -> None:
    gated = gated_plain()
    z_NG = outcomes(8)
    expected = plain_macs(z_NG[:, :4].sum(1), z_NG[:, 4:].sum(1)) / plain_macs(4, 4)
    torch.testing.assert_close(gated.cost.macs_B(gated._ledger.draw(z_NG)), expected)
    assert gated.dense_macs == plain_macs(4, 4)
    for z_G in z_NG:
        assert gated.cost.decided_macs(z_G.numpy() > 0.5) == plain_macs(float(z_G[:4].sum()), float(z_G[4:].sum()))


@pytest.mark.parametrize("target", [0.2, 0.5, 0.9])
def test_the_macs_loss_is_squared_bias_plus_variance(target: float) -> None:
    """E[L] = (t − E[Q])² + Var(Q): the left side by enumeration of the loss, the right one from the gates' moments."""
    gated = gated_plain(target=target, budget=Budget.paper(target)).train()
    p_G = torch.rand(8, generator=torch.Generator().manual_seed(1))
    z_NG = outcomes(8)
    losses = []
    for z_G in z_NG:
        gated._last = gated._ledger.draw(z_G[None])
        losses.append(gated.cost_loss())
    left = (weights(z_NG, p_G) * torch.stack(losses).double()).sum()
    moments = [gate_moments(p_G[:4].double()), gate_moments(p_G[4:].double())]
    (a, aa), (b, bb) = moments
    # Q is linear in the number of open gates of each mask and in their product, and the masks are independent
    mean = plain_macs(a, b)
    square = PIXELS**2 * (9 * aa + 54 * aa * b + 81 * aa * bb + 12 * a * b + 36 * a * bb + 4 * bb)
    dense = plain_macs(4, 4)
    right = (target - mean / dense) ** 2 + (square - mean**2) / dense**2
    assert float(left) == pytest.approx(right, rel=1e-5)


def gate_moments(p_G: Tensor) -> tuple[float, float]:
    """Mean and mean square of the number of open gates."""
    mean, variance = float(p_G.sum()), float((p_G * (1 - p_G)).sum())
    return mean, variance + mean**2


@pytest.mark.parametrize(("images", "gates"), [(1, 8), (2, 4), (4, 2)])
@pytest.mark.parametrize("target", [0.3, 0.6])
def test_the_activation_loss_is_squared_bias_plus_a_small_variance(images: int, gates: int, target: float) -> None:
    p_G = torch.rand(gates, generator=torch.Generator().manual_seed(images))
    z_NBG = outcomes(images * gates).reshape(-1, images, gates)
    rates_N = torch.stack([activation_rate(as_draw(z_BG)) for z_BG in z_NBG])
    losses_N = torch.stack([Budget.paper(target).loss(rate) for rate in rates_N])
    chance_N = weights(z_NBG.reshape(len(z_NBG), -1), p_G.repeat(images))
    variance = float((p_G * (1 - p_G)).sum()) / (gates**2 * images)
    expected = (target - float(p_G.mean())) ** 2 + variance
    assert float((chance_N * losses_N.double()).sum()) == pytest.approx(expected, rel=1e-5)
    assert variance <= 0.25 / (gates * images)


def as_draw(z_BG: Tensor) -> Draw:
    return SimpleNamespace(gates_BG=z_BG)  # type: ignore[return-value]


def test_the_macs_loss_of_a_batch_squares_after_the_mean() -> None:
    gated = gated_plain(budget=Budget.paper(0.5)).train()
    gated(torch.randn(16, 3, 6, 6))
    q_B = gated.cost.macs_B(gated._last).detach()
    assert len(q_B) == 16 and len(q_B.unique()) > 1, "every image has gates of its own"
    torch.testing.assert_close(gated.cost_loss(), (0.5 - q_B.mean()) ** 2)
    assert gated.macs() == pytest.approx(float(q_B.mean()) * gated.dense_macs)


def test_the_activation_loss_counts_every_gate_the_same() -> None:
    gated = gated_plain(loss="activation", budget=Budget.paper(0.5)).train()
    gated(torch.randn(16, 3, 6, 6))
    torch.testing.assert_close(gated.cost_loss(), (0.5 - gated._last.gates_BG.mean()) ** 2)


def test_the_per_gate_loss_sums_over_gates_with_a_target_each() -> None:
    rates = {"0": 0.25, "2": 0.75}
    gated = gated_plain(loss="per_gate", rates=rates).train()
    gated(torch.randn(16, 3, 6, 6))
    rate_G = gated._last.gates_BG.mean(0)
    expected = (rate_G[:4] - 0.25).square().sum() + (rate_G[4:] - 0.75).square().sum()
    torch.testing.assert_close(gated.cost_loss(), expected)
    assert torch.equal(target_rates(gated.graph, [0.25, 0.75]), target_rates(gated.graph, rates))
    assert torch.equal(target_rates(gated.graph, 0.5), torch.full((8,), 0.5))


@pytest.mark.parametrize(
    "rates", [torch.tensor([0.25, 0.75]), np.array([0.25, 0.75]), torch.tensor([0.25, 0.75]).unbind()]
)
def test_target_rates_may_be_tensors_and_arrays(rates: object) -> None:
    gated = gated_plain(loss="per_gate", rates=rates)
    assert torch.equal(gated._rates, target_rates(gated.graph, [0.25, 0.75]))


@pytest.mark.parametrize(
    "rates",
    [
        [0.5], [0.5, 0.5, 0.5], {"0": 0.5}, {"0": 0.5, "2": 0.5, "x": 1.0}, 1.5, [-0.1, 0.5], "0.5", ["0.5", "0.5"],
        [0.5, None], True, float("nan"), torch.ones(3), [torch.ones(2), 0.5], torch.ones(2, 2),
    ],
)  # fmt: skip
def test_wrong_target_rates_are_refused(rates: object) -> None:
    with pytest.raises(headgate.HeadgateError, match="target rate"):
        gated_plain(loss="per_gate", rates=rates)


def test_the_cost_passes_gradients_to_every_gate_by_its_price() -> None:
    gated = gated_plain()
    z_BG = torch.ones(1, 8).requires_grad_()
    gated.cost.macs_B(gated._ledger.draw(z_BG)).sum().backward()
    first, second = PIXELS * (3 + 9 * 4), PIXELS * (9 * 4 + 2)
    expected = torch.tensor([first] * 4 + [second] * 4) / plain_macs(4, 4)
    torch.testing.assert_close(z_BG.grad[0], expected)


@pytest.mark.parametrize("stream", ["shared", "indexed"])
@pytest.mark.parametrize(
    "name", ["residual projection", "inverted bottleneck", "grouped stream", "U-Net", "attention block"]
)
def test_batch_cost_decided_cost_and_the_counted_cost_agree(name: str, stream: str) -> None:
    case = NETWORKS[name]
    gated = headgate.gate(randomize_(case.make().eval()), example(case), target=1.0, stream=stream)  # type: ignore[arg-type]
    rows = []
    for seed in range(6):
        decide_(gated, (0.3, 0.6, 0.9)[seed % 3], seed)
        rows.append(gated._decide())
        assert independent_macs(gated.shrink(), *example(case)) == gated.macs() == gated.cost.decided_macs(rows[-1])
    z_BG = torch.from_numpy(np.stack(rows)).float()
    exact = torch.tensor([gated.cost.decided_macs(row) for row in rows]) / gated.dense_macs
    torch.testing.assert_close(gated.cost.macs_B(gated._ledger.draw(z_BG)), exact, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- several processes


class FakeProcesses:
    """`torch.distributed` as one of several processes sees it, the others' tensors being known."""

    def __init__(self, others: list[Tensor]) -> None:
        self.others = others

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self) -> int:
        return 1 + len(self.others)

    def all_reduce(self, tensor: Tensor) -> None:
        for other in self.others:
            tensor += other


def test_over_processes_is_the_joint_mean_with_the_local_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x_PB = torch.rand(3, 5, requires_grad=True)
    target = 0.2
    (target - x_PB.mean()).square().backward()
    averaged = torch.zeros_like(x_PB)
    for rank in range(3):
        local = x_PB.detach()[rank].clone().requires_grad_()
        others = [x_PB.detach()[other].mean() for other in range(3) if other != rank]
        monkeypatch.setattr(cost_module, "dist", FakeProcesses(others))
        q = over_processes(local.mean())
        torch.testing.assert_close(q, x_PB.detach().mean())
        (target - q).square().backward()
        averaged[rank] = local.grad / 3
    torch.testing.assert_close(averaged, x_PB.grad)


def test_one_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.rand((), requires_grad=True)
    assert over_processes(q) is q
    monkeypatch.setattr(cost_module, "dist", SimpleNamespace(is_available=lambda: False))
    assert over_processes(q) is q


def test_the_per_gate_loss_knows_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    z_BG, rates_G, other_G = torch.rand(4, 3), torch.full((3,), 0.5), torch.rand(3)
    monkeypatch.setattr(cost_module, "dist", FakeProcesses([other_G]))
    expected = ((z_BG.mean(0) + other_G) / 2 - rates_G).square().sum()
    torch.testing.assert_close(per_gate_loss(as_draw(z_BG), rates_G), expected)


# ------------------------------------------------------------------------------------------------------ weight decay


@pytest.mark.parametrize(("width", "share"), [(4, 1.0), (40, 20 / 80), (64, 20 / 128)])
def test_gates_get_a_twentieth_rule_of_the_weight_decay(width: int, share: float) -> None:
    """20/|G| of the usual, halved because one logit stands for two; never more than the usual."""
    model = nn.Sequential(
        nn.Conv2d(3, width, 1), nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, 2, 1)
    )
    gated = headgate.gate(model, torch.randn(1, 3, 4, 4))
    assert gated.graph.gate_count == 2 * width
    weights, gates = gated.param_groups(lr=0.1, weight_decay=1e-4)
    assert (weights["lr"], weights["weight_decay"]) == (0.1, 1e-4)
    assert gates["weight_decay"] == pytest.approx(1e-4 * share / 2)
    assert math.isclose(gated.param_groups(lr=0.1, gate_lr=0.3)[1]["lr"], 0.3)
    assert {id(p) for p in gates["params"]} == {id(p) for p in gated.gate_parameters()}
    everything = [id(p) for group in (weights, gates) for p in group["params"]]
    assert sorted(everything) == sorted(id(p) for p in gated.parameters())
