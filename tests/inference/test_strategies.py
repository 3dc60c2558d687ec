"""Ways to decide gates in use: reproducible, changeable at run time, and combined as they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headgate
from headgate.inference.strategies import combine
from tests.networks import NETWORKS, example
from tests.oracle import randn, randomize_

X = (3, 8, 8)
CASE = NETWORKS["residual projection"]


def dense() -> nn.Module:
    torch.manual_seed(0)
    return randomize_(CASE.make().eval())


def gated_network(seed: int = 0) -> headgate.GatedModel:
    gated = headgate.gate(dense(), example(CASE), target=1.0).eval()
    generator = torch.Generator().manual_seed(seed)
    gated.set_gate_probabilities(
        {name: torch.rand(p.shape, generator=generator) for name, p in gated.gate_probabilities().items()}
    )
    return gated


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_threshold_is_the_default_and_reproducible() -> None:
    gated = gated_network()
    x = randn(4, *X)
    torch.manual_seed(1)
    first = gated(x)
    torch.manual_seed(2)
    assert torch.equal(first, gated(x)) and torch.equal(first, gated.strategy("threshold", tau=0.5)(x))
    p = torch.cat(list(gated.gate_probabilities().values()))
    assert torch.equal(gated._last.gates_BG[0], (p > 0.5).float())


def test_an_image_does_not_depend_on_its_batch() -> None:
    gated = gated_network()
    x = randn(4, *X)
    torch.testing.assert_close(gated(x)[2:3], gated(x[2:3]))


def test_a_higher_tau_costs_less() -> None:
    gated = gated_network()
    costs = []
    for tau in (0.0, 0.2, 0.4, 0.6, 0.8, 0.95):
        gated.strategy("threshold", tau=tau)(randn(2, *X))
        costs.append(gated.macs())
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == len(costs)
    assert costs[0] == gated.dense_macs


def test_always_on_is_the_dense_model_exactly() -> None:
    gated = gated_network().strategy("always_on")
    x = randn(4, *X)
    assert torch.equal(gated(x), dense()(x))
    assert gated.macs() == gated.dense_macs == headgate.count_macs(dense(), x)


def test_samples_come_from_the_generator() -> None:
    gated = gated_network()
    x = randn(4, *X)
    first = gated.strategy("sample", generator=generator(1))(x)
    macs = gated.macs()
    assert torch.equal(first, gated.strategy("sample", generator=generator(1))(x)) and macs == gated.macs()
    assert not torch.equal(first, gated.strategy("sample", generator=generator(2))(x))
    assert len(gated._last.gates_BG) == 4, "every image has gates of its own"


def test_sampling_in_use_leaves_the_global_generator_alone() -> None:
    gated = gated_network().strategy("sample", generator=generator(1))
    before = torch.get_rng_state()
    gated(randn(2, *X))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("runs", [1, 4])
def test_an_ensemble_is_the_mean_of_the_probabilities(runs: int) -> None:
    gated = gated_network()
    x = randn(4, *X)
    one_by_one, macs = sampled_runs(gated, x, runs)
    joint = gated.strategy("ensemble", runs=runs, generator=generator(7))(x)
    torch.testing.assert_close(joint.softmax(1), torch.stack([y.softmax(1) for y in one_by_one]).mean(0))
    assert gated.macs() == pytest.approx(macs)


def sampled_runs(gated: headgate.GatedModel, x: Tensor, runs: int) -> tuple[list[Tensor], float]:
    gated.strategy("sample", generator=generator(7))
    outputs, macs = [], 0.0
    for _ in range(runs):
        outputs.append(gated(x))
        macs += gated.macs()
    return outputs, macs


def test_an_ensemble_votes() -> None:
    gated = gated_network()
    x = randn(16, *X)
    one_by_one, _ = sampled_runs(gated, x, 7)
    answers = gated.strategy("ensemble", runs=7, combine="vote", generator=generator(7))(x).argmax(1)
    votes = torch.stack([y.argmax(1) for y in one_by_one])
    for image in range(16):
        counts = torch.bincount(votes[:, image], minlength=5)
        assert counts[answers[image]] == counts.max()


def test_combining_by_hand() -> None:
    a, b, c = (torch.tensor([row]).log() for row in ([0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.5, 0.2, 0.3]))
    torch.testing.assert_close(combine([a, b, c], "mean").exp(), torch.tensor([[0.4, 1.3 / 3, 0.5 / 3]]))
    assert combine([a, b, c], "mean").argmax() == 1, "the mean follows the sure one"
    assert combine([a, b, c], "vote").argmax() == 0, "the vote follows the many"
    assert combine([a, b], "vote").argmax() == 1, "equal votes are settled by the mean"


def test_votes_are_counted_place_by_place() -> None:
    """Class scores of every pixel: the classes stay where they were."""
    scores = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    voted = combine([scores, scores, -scores], "vote")
    assert voted.shape == scores.shape
    assert torch.equal(voted.argmax(1), scores.argmax(1))


def test_sweeping_tau_gives_accuracy_and_cost_and_changes_nothing() -> None:
    gated = gated_network().train()
    gated.eval()
    x = randn(12, *X)
    labels = gated.strategy("threshold", tau=0.5)(x).argmax(1)
    gated.strategy("threshold", tau=0.7).train()
    rows = gated.sweep_tau([(x[:6], labels[:6]), (x[6:], labels[6:])], taus=(0.2, 0.5, 0.9))
    assert [row.tau for row in rows] == [0.2, 0.5, 0.9]
    assert rows[1].accuracy == 1.0
    for row in rows:
        gated.eval().strategy("threshold", tau=row.tau)
        assert row.macs == gated.macs() and row.macs_fraction == row.macs / gated.dense_macs
        assert row.accuracy == pytest.approx(float((gated(x).argmax(1) == labels).float().mean()))
    gated.strategy("threshold", tau=0.7).train()
    gated.sweep_tau([(x, labels)], taus=(0.5,))
    assert gated.training and gated._strategy.tau == 0.7


def test_activation_rates_are_the_papers() -> None:
    gated = gated_network()
    gated.strategy("sample", generator=generator(3))(randn(8, *X))
    z_BG = gated._last.gates_BG.detach()
    of_batch, of_gates = gated.activation_rates()
    assert of_batch == pytest.approx(float(z_BG.sum()) / z_BG.numel())
    assert list(of_gates) == list(gated.gate_probabilities())
    torch.testing.assert_close(torch.cat(list(of_gates.values())), z_BG.sum(0) / len(z_BG))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("treshold", {}, "strategy 'treshold' is unknown: use one of threshold"),
        ("threshold", {"tau": 1.5}, "tau=1.5"),
        ("threshold", {"tau": float("nan")}, "tau=nan"),
        ("ensemble", {"runs": 0}, "runs=0"),
        ("ensemble", {"combine": "median"}, "combine='median'"),
        ("sample", {"seed": 3}, "does not take"),
    ],
)
def test_wrong_strategies_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    gated = gated_network()
    with pytest.raises(headgate.HeadgateError, match=says):
        gated.strategy(name, **options)
    gated(randn(2, *X))


def test_an_ensemble_needs_class_scores() -> None:
    case = NETWORKS["outputs in a dict"]
    gated = headgate.gate(case.make(), example(case), target=1.0).eval().strategy("ensemble")
    with pytest.raises(headgate.HeadgateError, match="no single tensor"):
        gated(*example(case))
