"""The contract of squeezing: with the gates that are left, the stand-in computes what the dense network computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headgate
from tests.inference.test_shrunk_equals_gated import gated_network, ways
from tests.networks import NETWORKS, example
from tests.oracle import difference


def close_some_(gated: headgate.GatedModel, share: float, seed: int) -> None:
    """As if training had closed some gates for good, and was undecided about the others."""
    random = np.random.default_rng(seed)
    p = torch.tensor(random.uniform(0.2, 0.9, gated.graph.gate_count), dtype=torch.float32)
    p[torch.from_numpy(random.random(len(p)) < share)] = 0.001
    gated.gates.set_probabilities(p)


def is_random(gated: headgate.GatedModel) -> bool:
    """Dropout draws other numbers for other shapes."""
    return any("Drop" in type(module).__name__ for module in gated.modules())


@pytest.mark.parametrize(("name", "stream", "granularity"), ways())
def test_squeezed_equals_gated(name: str, stream: str, granularity: Any) -> None:
    case = NETWORKS[name]
    gated = gated_network(case, stream=stream, granularity=granularity)
    batch = example(case, batch=3, seed=7)
    for share in (0.5, 0.9):  # the second squeezes what was squeezed already
        close_some_(gated, share, seed=3)
        if not gated.squeeze_(least_gain=-1):
            continue
        small_eval, small_train = outputs(gated.eval(), batch), outputs(gated.train(), batch)
        macs = gated.thresholded_macs()
        probabilities = gated.gates.probabilities().clone()
        state = gated.unsqueeze_().state_dict()
        assert torch.equal(gated.gates.probabilities(), probabilities)
        assert difference(outputs(gated.eval(), batch), small_eval) < 1e-4
        if not is_random(gated):
            assert difference(outputs(gated.train(), batch), small_train) < 1e-4
        assert gated.thresholded_macs() == macs
        assert state.keys() == gated_network(case, stream=stream, granularity=granularity).state_dict().keys()


@pytest.mark.parametrize(("name", "stream", "granularity"), ways())
def test_a_mask_closed_for_good_takes_its_branch_along(name: str, stream: str, granularity: Any) -> None:
    """Each mask that may die dies alone: the branches it belongs to disappear, and nothing else changes."""
    case = NETWORKS[name]
    batch = example(case, batch=3, seed=7)
    graph = gated_network(case, stream=stream, granularity=granularity).graph
    for mask in [mask for mask in graph.masks if mask.may_die]:
        gated = gated_network(case, stream=stream, granularity=granularity)
        p = torch.full((gated.graph.gate_count,), 0.7)
        p[mask.gates] = 0.001
        gated.gates.set_probabilities(p)
        assert gated.squeeze_(least_gain=-1)
        small = outputs(gated.eval(), batch), outputs(gated.train(), batch)
        gated.unsqueeze_()
        assert difference(outputs(gated.eval(), batch), small[0]) < 1e-4, mask.name
        if not is_random(gated):
            assert difference(outputs(gated.train(), batch), small[1]) < 1e-4, mask.name


@torch.no_grad()
def outputs(gated: headgate.GatedModel, batch: tuple[Any, ...]) -> Any:
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in gated.state_dict().items() if isinstance(value, torch.Tensor)}
    result = gated(*batch)
    gated.load_state_dict(state, strict=False)  # BatchNorm's statistics as before
    return result


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)
    )


def trained(squeeze: bool, steps: int = 6) -> headgate.GatedModel:
    gated = headgate.gate(small_net(), torch.zeros(1, 3, 8, 8), target=0.5, budget=headgate.Budget(0.5, ramp_steps=4))
    p = torch.full((gated.graph.gate_count,), 0.7)
    p[[0, 3, 9]] = 1e-30
    gated.gates.set_probabilities(p)
    gated.gates.close_(p < 0.1)
    optimizer = torch.optim.SGD(gated.param_groups(lr=0.05, weight_decay=0.0), momentum=0.9)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    for step in range(steps):
        torch.manual_seed(step)
        (gated(x).square().mean() + gated.cost_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if squeeze and step == 2:
            assert gated.squeeze_(0.02, optimizer, least_gain=0)
            assert gated.model[0].out_channels == 6 and gated.model[3].out_channels == 5  # type: ignore[index]
    return gated


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    """Same draws, same momentum: what is left learns the same, squeezed or not."""
    plain, squeezed = trained(False), trained(True).unsqueeze_()
    for (name, a), (_, b) in zip(plain.named_parameters(), squeezed.named_parameters(), strict=True):
        if name == "model.0.weight":
            a, b = a[[1, 2, 4, 5, 6, 7]], b[[1, 2, 4, 5, 6, 7]]
        if name == "model.3.weight":
            a, b = a[[0, 2, 3, 4, 5]][:, [1, 2, 4, 5, 6, 7]], b[[0, 2, 3, 4, 5]][:, [1, 2, 4, 5, 6, 7]]
        if name.startswith(("model.1", "model.3.bias", "model.0.bias", "model.6")):
            continue  # what belongs to closed channels drifts apart; it is never seen
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def test_gates_closed_for_good_stay_closed_whatever_the_target() -> None:
    gated = trained(True)
    gated.target = 1.0
    gated.eval().project()
    assert not gated.decisions[[0, 3, 9]].any() and int(gated.decisions.sum()) == gated.graph.gate_count - 3


def test_saving_in_the_middle_does_not_end_the_training(tmp_path: Any) -> None:
    gated = trained(True)
    optimizer = gated._optimizer
    assert optimizer is not None
    headgate.save(gated, tmp_path / "gated.safetensors")
    assert gated.model[0].out_channels == 6  # type: ignore[index]
    loaded = headgate.load(tmp_path / "gated.safetensors", small_net())
    assert loaded.model[0].out_channels == 8
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(loaded(x), gated.eval()(x))
    before = {name: p.detach().clone() for name, p in gated.named_parameters()}
    (gated.train()(torch.randn(4, 3, 8, 8)).square().mean() + gated.cost_loss()).backward()
    optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in gated.named_parameters() if name != "model.0.bias")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert optimizer.state[parameter]["momentum_buffer"].shape == parameter.shape


def test_the_network_behind_moves_too() -> None:
    gated = trained(True).double()
    gated.unsqueeze_()
    assert gated.eval()(torch.randn(2, 3, 8, 8, dtype=torch.float64)).dtype == torch.float64


def test_squeezing_for_little_gain_is_not_done() -> None:
    gated = headgate.gate(small_net(), torch.zeros(1, 3, 8, 8), target=0.5)
    assert not gated.squeeze_()
    assert gated.model[0].out_channels == 8  # type: ignore[index]


def test_what_needs_the_dense_network_gets_it_back() -> None:
    for use in (
        lambda gated: gated.shrink(),
        lambda gated: gated.strategy("always_on"),
        lambda gated: gated.calibrate([torch.randn(4, 3, 8, 8)], batches=1),
    ):
        gated = trained(True)
        use(gated)
        assert gated.model[0].out_channels == 8  # type: ignore[index]


def test_a_squeezed_state_goes_into_a_fresh_gated_network() -> None:
    gated = trained(True)
    fresh = headgate.gate(small_net(), torch.zeros(1, 3, 8, 8), target=0.5)
    fresh.load_state_dict(gated.state_dict())
    x = torch.randn(4, 3, 8, 8)
    assert fresh.model[0].out_channels == 6  # type: ignore[index]
    torch.testing.assert_close(fresh.eval()(x), gated.eval()(x))


def numbers_of(gated: headgate.GatedModel, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """What is in the optimizer's groups, by name."""
    names = {parameter: name for name, parameter in gated.named_parameters()}
    return [sorted(names[parameter] for parameter in group["params"]) for group in optimizer.param_groups]


def two_groups() -> tuple[headgate.GatedModel, torch.optim.Optimizer]:
    """Weights with decay, biases without, as is usual; the first convolution is not trained at all."""
    gated = trained(False, steps=1)
    named = [(name, weight) for name, weight in gated.model.named_parameters() if not name.startswith("0.")]
    groups = [
        {"params": [weight for name, weight in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [weight for name, weight in named if name.endswith("bias")]},
        {"params": gated.gate_parameters()},
    ]
    return gated, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def test_every_parameter_stays_in_its_own_group() -> None:
    gated, optimizer = two_groups()
    dense = numbers_of(gated, optimizer)
    assert gated.squeeze_(0.02, optimizer, least_gain=0)
    assert numbers_of(gated, optimizer) == dense
    gated.unsqueeze_()
    assert numbers_of(gated, optimizer) == dense


def test_parameters_of_a_branch_that_died_come_back_to_their_group() -> None:
    case = NETWORKS["residual identity"]
    gated = gated_network(case, stream="shared", granularity="channel")
    optimizer = torch.optim.SGD(gated.param_groups(lr=0.1))
    dense = numbers_of(gated, optimizer)
    mask = next(mask for mask in gated.graph.masks if mask.may_die)
    p = torch.full((gated.graph.gate_count,), 0.7)
    p[mask.gates] = 0.001
    gated.gates.set_probabilities(p)
    assert gated.squeeze_(optimizer=optimizer, least_gain=-1)
    assert len(numbers_of(gated, optimizer)[0]) < len(dense[0])
    p[gated.graph.masks[0].first] = 0.001
    gated.gates.set_probabilities(p)
    gated.squeeze_(optimizer=optimizer, least_gain=-1)
    gated.unsqueeze_()
    assert numbers_of(gated, optimizer) == dense


def test_the_optimizer_goes_on_with_a_state_that_is_loaded() -> None:
    gated, optimizer = two_groups()
    dense = numbers_of(gated, optimizer)
    assert gated.squeeze_(0.02, optimizer, least_gain=0)
    gated.load_state_dict(gated.state_dict())
    assert numbers_of(gated, optimizer) == dense
