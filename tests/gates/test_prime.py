"""Primed gates: in the order of what the network loses without them, for what they cost."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headgate
from headgate.errors import HeadgateError
from headgate.gates.loudness import LOUDEST, QUIETEST, Loudness
from headgate.gates.prime import marginal_macs, primed_logits, worth
from tests.gates.test_dynamic import opinionated_, two_blocks
from tests.oracle import randn


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(randn(16, 3, 8, 8, seed=seed), torch.arange(16) % 5) for seed in range(count)]


def test_marginal_macs_are_what_closing_one_gate_saves() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8))
    shares = marginal_macs(gated.cost, gated._ledger)
    decisions = torch.ones(gated.graph.gate_count, dtype=torch.bool).numpy()
    for gate in range(0, gated.graph.gate_count, 5):
        decisions[gate] = False
        saved = gated.dense_macs - gated.cost.decided_macs(decisions)
        decisions[gate] = True
        assert float(shares[gate]) * gated.dense_macs == pytest.approx(saved, rel=1e-3)


def test_the_worth_of_a_gate_is_its_mean_squared_gradient() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8))
    (x, y), *_ = batches()
    gated.eval()

    def worth_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return worth(gated.model, gated._ledger, gated._board, [((x,), y)], gated._arguments)

    together = worth_of(x, y)
    for image in range(2):  # one image at a time, by the definition
        single = worth_of(x[image : image + 1], y[image : image + 1])
        z = torch.ones(1, gated.graph.gate_count, requires_grad=True)
        gated._board.draw = gated._ledger.draw(z)
        loss = F.cross_entropy(gated.model(x[image : image + 1]), y[image : image + 1])
        gated._board.draw = None
        (gradient,) = torch.autograd.grad(loss, z)
        torch.testing.assert_close(single, gradient[0].double() ** 2)
    each = [worth_of(x[i : i + 1], y[i : i + 1]) for i in range(16)]
    torch.testing.assert_close(together, torch.stack(each).mean(0), rtol=1e-3, atol=1e-9)


@torch.no_grad()
def test_channels_that_say_nothing_start_least_likely() -> None:
    model = two_blocks()
    block = next(module for module in model.modules() if hasattr(module, "conv2"))
    block.conv2.weight[:, 2] = 0  # nobody hears what inner channel 2 says
    gated = headgate.gate(model, randn(1, 3, 8, 8))
    with torch.enable_grad():
        gated.prime_(batches())
    name = next(mask.name for mask in gated.graph.masks if mask.name.endswith("conv1"))
    p = gated.gate_probabilities()[name]
    assert int(p.argmin()) == 2 and float(p[2]) < 0.5
    every = torch.cat(list(gated.gate_probabilities().values()))
    logits = torch.logit(every.double())
    assert float(logits.mean()) == pytest.approx(2.944, abs=0.05) and float(logits.std()) == pytest.approx(1.5, abs=0.1)


def test_spread_zero_starts_all_alike() -> None:
    logits, by_nat = primed_logits(torch.rand(9), torch.rand(9), 2.0, 0.0)
    torch.testing.assert_close(logits, torch.full((9,), 2.0))
    assert by_nat == 0
    assert primed_logits(torch.ones(4), torch.ones(4), 1.0, 3.0)[0].isfinite().all()


def test_gates_that_depend_on_the_input_start_from_there_too() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic").prime_(batches())
    static = headgate.gate(two_blocks(), randn(1, 3, 8, 8), stream="indexed").prime_(batches())
    gated.eval()(randn(4, 3, 8, 8))
    for name, p in gated.gate_probabilities().items():
        q = static.gate_probabilities()[name]
        torch.testing.assert_close(p if p.dim() == 1 else p.mean(0), q, atol=0.02, rtol=0)


@pytest.mark.parametrize("loudness", [0.0, 1.0])
def test_a_pass_before_priming_makes_no_difference(loudness: float) -> None:
    """All gates are open while their worth is found, whatever they have decided before."""
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic")
    used = opinionated_(copy.deepcopy(gated)).eval()
    used(randn(4, 3, 8, 8))
    for mine, its in zip(gated.dynamic.networks, used.dynamic.networks, strict=True):
        its.load_state_dict(mine.state_dict())
    gated.eval().prime_(batches(), loudness=loudness)
    used.prime_(batches(), loudness=loudness)
    for mine, its in zip(gated.dynamic.parameters(), used.dynamic.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_priming_changes_nothing_but_the_gates() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8)).train()
    before = {name: value.clone() for name, value in gated.model.state_dict().items()}
    gated.prime_(batches())
    assert gated.training and all(torch.equal(value, before[name]) for name, value in gated.model.state_dict().items())
    assert all(parameter.grad is None for parameter in gated.parameters())
    assert isinstance(gated.gates.logits, nn.Parameter)


def test_nonsense_is_refused() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8))
    with pytest.raises(HeadgateError, match="empty"):
        gated.prime_([])
    with pytest.raises(HeadgateError, match="probability"):
        gated.prime_(batches(), probability=1.0)


# ------------------------------------------------------------------------------------------------------ loudness


def heard_in(gated: headgate.GatedModel, given: list[tuple[torch.Tensor, torch.Tensor]]) -> Loudness:
    heard = Loudness(gated._ledger.count, gated.dynamic)
    worth(gated.eval().model, gated._ledger, gated._board, [((x,), y) for x, y in given], gated._arguments, heard)
    return heard


def energy_of(gated: headgate.GatedModel, image: torch.Tensor) -> torch.Tensor:
    """By the definition: the mean square of each tensor that a gate's mask is put on, gate by gate."""
    z = torch.ones(1, gated.graph.gate_count, requires_grad=True)
    squares: list[torch.Tensor] = []

    def hear(mask, tensor) -> None:  # type: ignore[no-untyped-def]
        factors = torch.cat([z, z.new_zeros(1, 1)], 1)[:, mask.gates]
        channels = 1 if mask.axis is None else tensor.shape[1]
        squares.append((factors.reshape(1, channels, 1, 1) * tensor.detach() ** 2).sum() * channels / tensor.numel())

    gated._board.draw, gated._board.hear = gated._ledger.draw(torch.ones_like(z)), hear
    gated.model(image[None])
    gated._board.draw = gated._board.hear = None
    return torch.autograd.grad(sum(squares), z)[0][0]


@pytest.mark.parametrize("granularity", ["channel", 2, "layer"])
def test_the_loudness_of_a_gate_is_the_energy_of_what_it_lets_through(granularity) -> None:  # type: ignore[no-untyped-def]
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", granularity=granularity)
    relative_BG = heard_in(gated, batches()).relative_BG(torch.arange(gated.graph.gate_count))
    energy_BG = torch.stack([energy_of(gated, image) for x, _ in batches() for image in x])
    wanted = (energy_BG / energy_BG.mean(0)).log().clamp(QUIETEST, LOUDEST)
    torch.testing.assert_close(relative_BG, wanted, atol=0.03, rtol=0)


def test_gates_are_taught_how_loud_their_channels_will_be() -> None:
    """A network that foretells it leaves much less to be surprised at than one that says the same of all images."""
    model = two_blocks()
    given = [(randn(64, 3, 8, 8, seed=seed) * torch.rand(64, 1, 1, 1) * 2, torch.arange(64) % 5) for seed in range(8)]
    gated = headgate.gate(model, randn(1, 3, 8, 8), kind="dynamic")
    heard = heard_in(gated, given[:6])
    gated.prime_(given[:6], spread=2.0, loudness=1.0)
    others, left, all_of_it = heard_in(gated, given[6:]), 0.0, 0.0
    for number, (network, group) in enumerate(zip(gated.dynamic.networks, gated._groups, strict=True)):
        with torch.no_grad():
            said_BN = network.eval()(others.seen_BC(number))
        wanted_BN = others.relative_BG(group.gates)
        said_BN, wanted_BN = said_BN - said_BN.mean(0), wanted_BN - wanted_BN.mean(0)
        by_nat = (said_BN * wanted_BN).sum() / wanted_BN.square().sum()
        assert by_nat > 0, "louder channels are likelier to be open"
        left += float((said_BN / by_nat - wanted_BN).square().sum())
        all_of_it += float(wanted_BN.square().sum())
    assert left < 0.6 * all_of_it
    assert heard.relative_BG(torch.arange(4)).shape == (6 * 64, 4)


def test_priming_by_loudness_is_repeatable_and_leaves_nothing_behind() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", static=["stem"]).train()
    first, second = (copy.deepcopy(gated).prime_(batches(), loudness=1.5) for _ in range(2))
    for one, other in zip(first.dynamic.parameters(), second.dynamic.parameters(), strict=True):
        assert torch.equal(one, other) and one.grad is None
    assert first.training and all(network.training for network in first.dynamic.networks)
    assert first._board.hear is None and first._board.decide is None and first._board.draw is None


@pytest.mark.parametrize("loudness", [-1.0, float("nan"), float("inf")])
def test_a_power_that_is_none_is_refused(loudness: float) -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic")
    with pytest.raises(HeadgateError, match="loudness"):
        gated.prime_(batches(), loudness=loudness)
