"""Decisions meet the target from below and within one gate; BatchNorm's statistics are those of the decided network."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headgate
from headgate.errors import HeadgateError, TargetError
from headgate.inference.calibrate import NEAR, inputs_of, labelled, least_decisions, meet_with_tau, rounded
from tests.networks import NETWORKS, Block, conv, example, head, pooled
from tests.oracle import Net, decide_, randn, randomize_

X = (3, 8, 8)


def network() -> nn.Module:
    return Net(
        lambda n, x: pooled(n, n.two(n.one(F.relu(n.norm(n.stem(x)))))),
        stem=conv(3, 12), norm=nn.BatchNorm2d(12), one=Block(12, 12), two=Block(12, 12), head=head(12),
    )  # fmt: skip


@given(
    seed=st.integers(0, 2**32 - 1), gates=st.sampled_from([1, 3, 40, 4000]), spread=st.floats(0.01, 8),
    shift=st.floats(-20, 20), share=st.floats(0, 1), near=st.sampled_from([0.0, 1e-6, 0.5, 0.99, 1.0]),
)  # fmt: skip
def test_the_threshold_is_the_lowest_that_meets_the_target(
    seed: int, gates: int, spread: float, shift: float, share: float, near: float
) -> None:
    draws = np.random.default_rng(seed)
    logits, costs = shift + spread * draws.standard_normal(gates), draws.random(gates)
    floor = 0.1
    tried: list[float] = []

    def macs_at(tau: float) -> float:
        tried.append(tau)
        return floor + float(costs[logits > logit_of(tau)].sum())

    target = floor + share * float(costs.sum())
    tau = meet_with_tau(macs_at, target, near=near)
    found = macs_at(tau)
    assert found <= target
    lower = macs_at(1 / (1 + np.exp(-(logit_of(tau) - 60 / 2**16)))) if 0 < tau < 1 else np.inf
    assert tau == 0 or lower > target or found >= (1 - NEAR) * target or logit_of(tau) < -29.9
    assert len(tried) < 60


def logit_of(tau: float) -> float:
    return float(np.log(tau / (1 - tau))) if 0 < tau < 1 else (np.inf if tau == 1 else -np.inf)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_a_threshold_is_found_in_few_passes(share: float) -> None:
    logits = np.random.default_rng(0).normal(1.3, 2.5, 50_000)
    tried = []

    def macs_at(tau: float) -> float:
        tried.append(tau)
        return float((logits > logit_of(tau)).mean())

    meet_with_tau(macs_at, share)
    assert len(tried) <= 10, "halving would take eighteen"


def test_a_target_below_what_must_be_computed_is_refused() -> None:
    with pytest.raises(TargetError, match=r"can't be reached.*costs 10"):
        meet_with_tau(lambda tau: 10.0 + (tau < 1), 9.0)
    assert meet_with_tau(lambda tau: 10.0 if tau == 1 else 11.0, 10.5) == 1.0
    assert meet_with_tau(lambda tau: 10.0, 11.0) == 0.0


def gated_network(**options: Any) -> headgate.GatedModel:
    torch.manual_seed(0)
    return headgate.gate(randomize_(network().eval()), randn(2, *X), **options).eval()


def set_random_(gated: headgate.GatedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gated.set_gate_probabilities(
        {name: torch.rand(p.shape, generator=generator) for name, p in gated.gate_probabilities().items()}
    )


# --------------------------------------------------------------------------------------------------------- projection


@pytest.mark.parametrize("stream", ["shared", "indexed"])
@pytest.mark.parametrize("granularity", ["channel", 3, "layer"])
def test_projection_meets_the_target_from_below_within_one_gate(granularity: Any, stream: str) -> None:
    gated = gated_network(target=1.0, granularity=granularity, stream=stream)
    for seed in range(12):
        set_random_(gated, seed)
        floor = gated.cost.decided_macs(least_decisions(gated.graph, gated._probabilities())) / gated.dense_macs
        gated.target = floor + (0.98 - floor) * (seed + 0.5) / 12
        budget = int(gated.target * gated.dense_macs)
        decisions = gated.project()._decide()
        assert gated.cost.decided_macs(decisions) <= budget
        for closed in np.flatnonzero(~decisions):
            assert gated.cost.decided_macs(with_open(decisions, closed)) > budget, (
                "a gate that still fits was left closed"
            )


def with_open(decisions: np.ndarray, gate: int) -> np.ndarray:
    more = decisions.copy()
    more[gate] = True
    return more


def test_projection_opens_the_likeliest() -> None:
    """No closed gate is likelier than an open one, but for those that would not fit."""
    gated = gated_network(target=0.5)
    for seed in range(8):
        set_random_(gated, seed)
        decisions, p = gated.project()._decide(), gated._probabilities()
        first_closed = p[~decisions].max()
        must = least_decisions(gated.graph, p)
        for gate in np.flatnonzero(decisions & (p < first_closed) & ~must):
            likelier = [other for other in np.flatnonzero(~decisions) if p[other] > p[gate]]
            without = decisions.copy()
            without[gate] = False
            budget = int(0.5 * gated.dense_macs)
            assert all(gated.cost.decided_macs(with_open(decisions, other)) > budget for other in likelier)


def test_equal_probabilities_are_spread_over_the_masks() -> None:
    gated = gated_network(target=0.5)
    decisions = gated.project()._decide()
    shares = [decisions[mask.gates].mean() for mask in gated.graph.masks]
    assert max(shares) - min(shares) < 0.2


def test_projection_changes_with_the_target_and_reaches_both_ends() -> None:
    gated = gated_network(target=1.0)
    set_random_(gated, 0)
    macs = []
    for target in (1.0, 0.8, 0.6, 0.4, 0.2):
        gated.target = target
        macs.append(gated.project().macs())
    assert macs[0] == gated.dense_macs and macs == sorted(macs, reverse=True) and len(set(macs)) == 5


@pytest.mark.parametrize("round_to", [2, 4, 8])
def test_rounded_decisions_open_multiples_and_the_likeliest(round_to: int) -> None:
    gated = gated_network(target=1.0)
    for seed in range(6):
        decide_(gated, 0.5, seed)
        before, p = gated._decide(), gated._probabilities()
        down = rounded(gated.graph, before, p, round_to)
        up = rounded(gated.graph, before, p, round_to, up=True)
        for mask in gated.graph.masks:
            count = before[mask.gates].sum()
            for found in (down, up):
                assert found[mask.gates].sum() % round_to == 0 or found[mask.gates].all()
            assert (up[mask.gates] >= before[mask.gates]).all()
            assert down[mask.gates].sum() <= max(count, min(round_to, mask.size))
            assert (count == 0) == (down[mask.gates].sum() == 0)


def test_round_to_below_one_is_refused() -> None:
    with pytest.raises(headgate.HeadgateError, match="round_to=0"):
        gated_network().project(round_to=0)


# ---------------------------------------------------------------------------------------------------------- BatchNorm


def batches(count: int = 5, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [(randn(size, *X, seed=seed) * 2 + 1, torch.zeros(size)) for seed in range(count)]


def decided(gated: headgate.GatedModel) -> headgate.GatedModel:
    set_random_(gated, 3)
    return gated


def test_calibration_averages_the_statistics_of_the_decided_network() -> None:
    """By hand: feed the batches, and average mean and variance of what each BatchNorm sees."""
    gated = decided(gated_network(target=0.6))
    gated.calibrate(batches(), batches=5)
    sums: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor]) -> None:
            sums.setdefault(name, []).append((args[0].mean((0, 2, 3)), args[0].var((0, 2, 3))))

        return hook

    norms = {name: module for name, module in gated.model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    handles = [module.register_forward_pre_hook(note(name)) for name, module in norms.items()]
    modes = [(module, module.training) for module in norms.values()]
    found = {name: (norm.running_mean.clone(), norm.running_var.clone()) for name, norm in norms.items()}
    gated.eval()
    with torch.no_grad():
        for norm in norms.values():
            norm.training, norm.momentum = True, 0.0
        for x, _ in batches():
            gated(x)
    for handle in handles:
        handle.remove()
    for norm, mode in modes:
        norm.training, norm.momentum = mode, 0.1
    for name, (mean, var) in found.items():
        torch.testing.assert_close(mean, torch.stack([mean for mean, _ in sums[name]]).mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(var, torch.stack([var for _, var in sums[name]]).mean(0), rtol=1e-4, atol=1e-5)


def test_calibration_changes_statistics_only() -> None:
    gated = decided(gated_network(target=0.6)).train()
    before = {name: value.clone() for name, value in gated.named_parameters()}
    norms = [module for module in gated.modules() if isinstance(module, nn.BatchNorm2d)]
    means = [norm.running_mean.clone() for norm in norms]
    assert gated.calibrate(batches(), batches=3) is gated
    assert all(torch.equal(before[name], value) for name, value in gated.named_parameters())
    assert not any(torch.equal(mean, norm.running_mean) for mean, norm in zip(means, norms, strict=True))
    assert gated.training and all(norm.training and norm.momentum == 0.1 for norm in norms)
    assert all(parameter.grad is None for parameter in gated.parameters())


def test_calibration_goes_through_a_short_loader_again_and_stops_in_a_long_one() -> None:
    seen: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for number, batch in enumerate(batches(3)):
                seen.append(number)
                yield batch

    decided(gated_network(target=0.6)).calibrate(Loader(), batches=7)
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    seen.clear()
    decided(gated_network(target=0.6)).calibrate(Loader(), batches=2)
    assert seen == [0, 1]


def test_calibration_takes_an_iterator_as_far_as_it_goes() -> None:
    one_pass = decided(gated_network(target=0.6))
    one_pass.calibrate(iter(batches(3)), batches=200)
    again = decided(gated_network(target=0.6))
    again.calibrate(batches(3), batches=3)
    for a, b in zip(one_pass.buffers(), again.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "loader",
    [[], iter([]), [(torch.randn(2, 5, 3),)], [{"label": 3}]],
    ids=["empty", "spent", "wrong shape", "no images"],
)
def test_a_calibration_that_fails_leaves_the_statistics(loader: Any) -> None:
    gated = decided(gated_network(target=0.6))
    before = {name: value.clone() for name, value in gated.model.state_dict().items()}
    with pytest.raises((headgate.HeadgateError, RuntimeError)):
        gated.calibrate(loader)
    assert all(torch.equal(before[name], value) for name, value in gated.model.state_dict().items())


def test_a_network_without_batchnorm_is_calibrated_too() -> None:
    case = NETWORKS["chunk"]
    gated = headgate.gate(case.make(), example(case), target=0.5).eval()
    assert gated.calibrate([example(case)[0]], batches=1).macs() <= gated.target * gated.dense_macs


@pytest.mark.parametrize(
    "batch",
    [
        randn(2, *X),
        (randn(2, *X), 0),
        [randn(2, *X)],
        {"image": randn(2, *X)},
        {"pixel_values": randn(2, *X), "labels": 1},
    ],
    ids=["tensor", "tuple", "list", "image", "pixel_values"],
)
def test_images_are_found_in_batches_of_many_kinds(batch: Any) -> None:
    assert torch.equal(inputs_of(batch)[0], randn(2, *X))


@pytest.mark.parametrize("batch", [3, "image", {"labels": 1}, (), ("a", "b")])
def test_a_batch_without_images_is_refused(batch: Any) -> None:
    with pytest.raises(headgate.HeadgateError, match=r"no images are found.*yield \(images, labels\)"):
        inputs_of(batch)


def test_after_calibration_the_shrunk_network_is_the_calibrated_one() -> None:
    gated = decided(gated_network(target=0.5)).calibrate(batches(), batches=5).eval()
    small = gated.shrink()
    x = randn(4, *X, seed=11)
    torch.testing.assert_close(small(x), gated(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_models_with_several_inputs_are_calibrated(kind: str) -> None:
    def forward(n: Any, x: Tensor, y: Tensor) -> Tensor:
        deep = F.relu(n.norm(n.c(F.relu(n.a(x)))))
        return n.head(torch.cat([deep.mean((2, 3)), F.relu(n.b(y))], 1))

    torch.manual_seed(0)
    net = Net(forward, a=conv(3, 8), c=conv(8, 8), norm=nn.BatchNorm2d(8), b=nn.Linear(4, 6), head=head(14))
    batches = [((randn(6, *X, seed=seed) + 3, randn(6, 4, seed=seed)), torch.arange(6) % 5) for seed in range(4)]
    gated = headgate.gate(randomize_(net), batches[0][0], target=0.6, kind=kind)
    before = gated.model.norm.running_mean.clone()
    gated.calibrate(batches, batches=4).eval()
    assert not torch.equal(gated.model.norm.running_mean, before)
    gated(*batches[0][0])
    assert gated.macs() <= 0.6 * gated.dense_macs * (1.2 if kind == "dynamic" else 1)
    assert gated.sweep_tau(batches, (0.5,))[0].accuracy >= 0


def test_further_inputs_of_a_batch_are_not_dropped() -> None:
    """(first, second, labels), as a TensorDataset gives them, is the same as ((first, second), labels)."""

    def forward(n: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        deep = F.relu(n.norm(n.c(F.relu(n.a(x if mask is None else x * mask)))))
        return n.head(deep.mean((2, 3)))  # type: ignore[no-any-return]

    def calibrated(loader: list[Any]) -> Tensor:
        torch.manual_seed(0)
        net = randomize_(Net(forward, a=conv(3, 8), c=conv(8, 8), norm=nn.BatchNorm2d(8), head=head(8)))
        gated = headgate.gate(net, (randn(1, *X), randn(1, *X)), target=0.9)
        gated.calibrate(loader, batches=2)
        gated.prime_(loader, 2)
        gated.sweep_tau(loader, (0.5,))
        return gated.model.norm.running_mean.clone()

    rows = [(randn(6, *X, seed=n), (randn(6, *X, seed=n + 9) > 0).float(), torch.arange(6) % 5) for n in range(2)]
    assert torch.equal(calibrated(list(rows)), calibrated([((x, mask), y) for x, mask, y in rows]))
    with pytest.raises(HeadgateError, match=r"takes 2 tensors.*\(first, second, labels\)"):
        calibrated([(x, y) for x, _, y in rows])


def test_every_image_counts_alike_in_statistics() -> None:
    gated = headgate.gate(gated_network(target=1.0).model, randn(1, *X), target=1.0)
    data = [randn(16, *X), randn(1, *X, seed=3) * 9, randn(3, *X, seed=4) + 2]
    one, other = copy.deepcopy(gated).calibrate(data, batches=3), gated.calibrate([torch.cat(data)], batches=1)
    first = next(name for name, module in gated.model.named_modules() if isinstance(module, nn.BatchNorm2d))
    means = [each.model.get_submodule(first).running_mean for each in (one, other)]
    torch.testing.assert_close(*means, rtol=1e-4, atol=1e-5)


def test_a_calibration_that_fails_decides_nothing() -> None:
    gated = gated_network(target=0.5).eval()
    before = gated.decisions.clone()
    with pytest.raises(HeadgateError, match="empty"):
        gated.calibrate([])
    assert torch.equal(gated.decisions, before) and gated._strategy.name == "threshold"


def test_batches_with_names_and_without_labels() -> None:
    images, labels = torch.zeros(2, 3, 4, 4), torch.tensor([0, 1])
    for batch in ((images, labels), [images, labels], {"image": images, "label": labels}):
        inputs, found = labelled(batch)
        assert inputs[0] is images and found is labels
    for batch in (images, (images,), {"image": images}):
        with pytest.raises(HeadgateError, match="give a loader of"):
            labelled(batch)
