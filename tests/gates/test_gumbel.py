"""The laws of the gates: P(Z = 1) = p, what stands for Z backward, and one logit instead of two."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import headgate
from headgate.gates.gumbel import SMALLEST, Relaxation, decide, draw, logistic_noise
from headgate.gates.static import StaticGates

CPU = torch.device("cpu")
PROBABILITIES = (0.02, 0.3, 0.5, 0.87, 0.98)
DRAWS = 40_000
SIGMAS = 4.5


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gates_with(probabilities: tuple[float, ...], **relaxation: object) -> StaticGates:
    gates = StaticGates(len(probabilities), 0.5, Relaxation(**relaxation))  # type: ignore[arg-type]
    gates.set_probabilities(torch.tensor(probabilities))
    return gates


@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("backward", ["probability", "sample"])
def test_a_gate_is_open_with_its_probability(backward: str, temperature: float) -> None:
    z_BG = gates_with(PROBABILITIES, backward=backward, temperature=temperature).sample(DRAWS, generator())
    assert set(z_BG.unique().tolist()) == {0.0, 1.0}, "hard samples are exactly 0 or 1"
    for p, rate in zip(PROBABILITIES, z_BG.mean(0).tolist(), strict=True):
        assert abs(rate - p) <= SIGMAS * math.sqrt(p * (1 - p) / DRAWS)


def test_gates_and_images_are_independent() -> None:
    z_BG = gates_with((0.5, 0.5, 0.5, 0.5)).sample(DRAWS, generator()).detach() - 0.5
    between_gates = (z_BG.T @ z_BG / DRAWS - 0.25 * torch.eye(4)).abs().max()
    between_images = (z_BG[1:] * z_BG[:-1]).mean(0).abs().max()
    assert max(between_gates, between_images) <= SIGMAS * 0.25 / math.sqrt(DRAWS)


@pytest.mark.parametrize("logit", [-4.0, -0.7, 0.0, 2.5])
def test_backward_z_stands_for_the_probability(logit: float) -> None:
    logits = torch.full((64,), logit, requires_grad=True)
    draw(logits, logistic_noise((64,), CPU, generator()), Relaxation(0.3, True, "probability")).sum().backward()
    p = 1 / (1 + math.exp(-logit))
    torch.testing.assert_close(logits.grad, torch.full((64,), p * (1 - p)))


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_backward_z_stands_for_the_relaxed_sample(temperature: float, hard: bool) -> None:
    logits = torch.linspace(-3, 3, 64).requires_grad_()
    noise = logistic_noise((64,), CPU, generator())
    draw(logits, noise, Relaxation(temperature, hard, "sample")).sum().backward()
    s = torch.sigmoid((logits.detach() + noise) / temperature)
    torch.testing.assert_close(logits.grad, s * (1 - s) / temperature)


@pytest.mark.parametrize("threshold", [-1.5, 0.0, 2.0])
def test_decided_gates_learn_as_the_probability_seen_from_their_threshold(threshold: float) -> None:
    logits = torch.linspace(-3, 3, 64).requires_grad_()
    gates = decide(logits, threshold, learning=True)
    assert torch.equal(gates, (logits > threshold).float()), "0 or 1, exactly"
    gates.sum().backward()
    p = torch.sigmoid(logits.detach() - threshold)
    torch.testing.assert_close(logits.grad, p * (1 - p))
    assert not decide(logits, threshold).requires_grad


def test_soft_gates_are_the_relaxed_sample() -> None:
    logits, noise = torch.linspace(-3, 3, 64), logistic_noise((64,), CPU, generator())
    for temperature in (0.3, 1.0, 2.0):
        soft = draw(logits, noise, Relaxation(temperature, hard=False))
        torch.testing.assert_close(soft, torch.sigmoid((logits + noise) / temperature))
        assert torch.equal(soft > 0.5, draw(logits, noise, Relaxation(temperature)) > 0.5)
    assert (soft - 0.5).abs().max() < 0.5
    cold = draw(logits, noise, Relaxation(1e-4, hard=False))
    torch.testing.assert_close(cold, draw(logits, noise, Relaxation()), atol=1e-4, rtol=0)


def two_logit_sample(w_G2: Tensor, gumbel_G2: Tensor, temperature: float) -> Tensor:
    """The paper's form: the second entry of a softmax over two logits and their noise."""
    return torch.softmax((w_G2 + gumbel_G2) / temperature, 1)[:, 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_one_logit_draws_what_two_would(temperature: float) -> None:
    w_G2 = torch.randn(256, 2)
    gumbel_G2 = -torch.log(-torch.log(torch.rand(256, 2).clamp(1e-6, 1 - 1e-6)))
    difference, noise = w_G2[:, 1] - w_G2[:, 0], gumbel_G2[:, 1] - gumbel_G2[:, 0]
    soft = draw(difference, noise, Relaxation(temperature, hard=False))
    torch.testing.assert_close(soft, two_logit_sample(w_G2, gumbel_G2, temperature))
    assert torch.equal(draw(difference, noise, Relaxation(temperature)), (w_G2 + gumbel_G2).argmax(1).float())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_on_two_logits_is_sgd_on_their_difference_with_twice_the_rate_and_half_the_decay(momentum: float) -> None:
    lr, decay = 0.1, 0.02
    w_G2 = torch.randn(16, 2, dtype=torch.float64).requires_grad_()
    difference_G = (w_G2[:, 1] - w_G2[:, 0]).detach().clone().requires_grad_()
    price_G = torch.randn(16, dtype=torch.float64)
    two = torch.optim.SGD([w_G2], lr=lr, weight_decay=decay, momentum=momentum)
    one = torch.optim.SGD([difference_G], lr=2 * lr, weight_decay=decay / 2, momentum=momentum)
    for _ in range(20):
        noise = torch.randn(16, dtype=torch.float64)
        for logits, optimizer in ((w_G2[:, 1] - w_G2[:, 0], two), (difference_G, one)):
            optimizer.zero_grad()
            ((torch.sigmoid(logits + noise) * price_G).sum() - 1).square().backward()
            optimizer.step()
    torch.testing.assert_close(difference_G, w_G2[:, 1] - w_G2[:, 0])


def test_weight_decay_of_two_logits_pulls_p_to_a_half() -> None:
    """w0² + w1² = ½ ((w0 + w1)² + ln((1 − p) / p)²)."""
    w0, w1 = torch.randn(2, 1000, dtype=torch.float64) * 3
    p = torch.softmax(torch.stack([w0, w1]), 0)[1]
    torch.testing.assert_close(w0**2 + w1**2, 0.5 * ((w0 + w1) ** 2 + torch.log((1 - p) / p) ** 2))


def test_gates_are_float32_under_autocast_and_in_a_half_model() -> None:
    gates = gates_with(PROBABILITIES)
    exact = gates.sample(100, generator())
    with torch.autocast("cpu", dtype=torch.float16):
        under = gates.sample(100, generator())
        assert gates.probabilities().dtype == under.dtype == torch.float32
    assert torch.equal(exact, under)
    before = gates.logits.detach().clone()
    gates.half()
    assert gates.logits.dtype == torch.float32 and torch.equal(gates.logits, before)
    low = draw(before.half(), torch.zeros(1), Relaxation())
    assert low.dtype == torch.float32


def test_noise_is_finite_whatever_the_generator_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([0.0, 1.0, 1 - 2**-24])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: extremes.clone())
    noise = logistic_noise((3,), CPU, None)
    assert noise.isfinite().all() and noise.abs().max() <= 1.01 * abs(math.log(SMALLEST))


def test_the_same_generator_gives_the_same_gates() -> None:
    gates = gates_with(PROBABILITIES)
    assert torch.equal(gates.sample(8, generator(3)), gates.sample(8, generator(3)))
    assert not torch.equal(gates.sample(8, generator(3)), gates.sample(8, generator(4)))


@pytest.mark.parametrize("p", [1e-4, 0.05, 0.5, 0.95, 0.9999])
def test_probabilities_come_back_as_they_were_set(p: float) -> None:
    torch.testing.assert_close(gates_with((p,)).probabilities(), torch.tensor([p]))
    torch.testing.assert_close(StaticGates(1, p).probabilities(), torch.tensor([p]))


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"backward": "straight"}, "backward"),
    ],
)
def test_a_wrong_relaxation_is_refused(options: dict[str, object], place: str) -> None:
    with pytest.raises(headgate.HeadgateError, match=place):
        Relaxation(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [0.0, 1.0, -0.1, math.nan])
def test_a_gate_does_not_start_sure(p: float) -> None:
    with pytest.raises(headgate.HeadgateError, match=r"initial_probability=.*between 0 and 1"):
        StaticGates(4, p)
