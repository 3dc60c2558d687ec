"""The contract of every rule: whatever is decided, the shrunk network computes what the gated one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headgate
from headgate.graph.relayout import ZeroBranch
from tests.networks import NETWORKS, Case, example
from tests.oracle import decide_, difference, independent_macs, own_modules, randomize_, same

OPEN_SHARES = (0.5, 0.8, 0.2, 0.0)
"""Of the gates, for one decision each; 0 leaves only what must not close, so every branch that may die does."""


def network(case: Case) -> nn.Module:
    return randomize_(case.make().eval())


def gated_network(case: Case, **options: Any) -> headgate.GatedModel:
    return headgate.gate(network(case), example(case), **{"target": 1.0, **options})


def ways() -> list[tuple[str, str, Any]]:
    """Every network with the streams and granularities that make a difference to it."""
    found: list[tuple[str, str, Any]] = []
    for name, case in NETWORKS.items():
        streams = ("shared", "indexed") if case.branches else ("shared",)
        sizes = ((("channel", 3) if case.gated else ()), (("layer",) if case.branches else ()))
        found += [(name, stream, size) for stream in streams for size in (*sizes[0], *sizes[1])]
    return found


@pytest.mark.parametrize(("name", "stream", "granularity"), ways())
def test_shrunk_equals_gated(name: str, stream: str, granularity: Any, tmp_path: Path) -> None:
    case = NETWORKS[name]
    gated = gated_network(case, stream=stream, granularity=granularity)
    batch = example(case, batch=3, seed=7)
    for seed, open_share in enumerate(OPEN_SHARES):
        decide_(gated, open_share, seed)
        small = gated.shrink()
        with torch.no_grad():
            expected, found = gated(*batch), small(*batch)
        assert difference(expected, found) < 1e-4
        assert gated.macs() == independent_macs(small, *batch)
        if open_share in (OPEN_SHARES[0], OPEN_SHARES[-1]):
            assert gated.macs() == headgate.count_macs(small, batch)
            headgate.save(small, tmp_path / "small.safetensors")
            loaded = headgate.load(tmp_path / "small.safetensors", case.make())
            with torch.no_grad():
                assert same(found, loaded(*batch))


@pytest.mark.parametrize("name", [name for name, case in NETWORKS.items() if not case.branches])
def test_without_branches_there_are_no_gates_on_whole_layers(name: str) -> None:
    case = NETWORKS[name]
    with pytest.raises(headgate.NothingToGate, match="no channel of this model can be gated"):
        headgate.gate(network(case), example(case), granularity="layer")


@pytest.mark.parametrize("name", NETWORKS)
def test_gating_and_shrinking_leave_the_model_as_it_was(name: str) -> None:
    case = NETWORKS[name]
    model = network(case)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    identities = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    modes = [module.training for module in model.modules()]
    try:
        decide_(headgate.gate(model, example(case), target=1.0), 0.5, 0).shrink()
    except headgate.NothingToGate:
        assert not case.gated
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert identities == [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    assert modes == [module.training for module in model.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", NETWORKS)
def test_what_can_be_gated_is_gated_and_the_rest_has_its_reason(name: str) -> None:
    case = NETWORKS[name]
    graph = headgate.inspect(network(case), example(case))
    assert set(case.gated.split()) <= {mask.name for mask in graph.masks}
    for layer, reason in {**case.frozen, "head": "is an output of the model"}.items():
        assert reason in graph.frozen[layer]
    whole = headgate.inspect(network(case), example(case), granularity="layer")
    assert set(case.branches.split()) <= {mask.name for mask in whole.masks}


@pytest.mark.parametrize("name", [name for name, case in NETWORKS.items() if case.plain and case.gated])
def test_with_a_shared_stream_the_shrunk_network_is_plain(name: str) -> None:
    gated = decide_(gated_network(NETWORKS[name]), 0.4, 0)
    small = gated.shrink()
    assert all(isinstance(small.get_submodule(own), ZeroBranch) for own in own_modules(small))
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in gated.model.parameters())


@pytest.mark.parametrize("name", [name for name, case in NETWORKS.items() if case.gated])
def test_training_reaches_every_gate(name: str) -> None:
    """Gates are 0/1 in training, the cost falls on all of them, and the weights still learn."""
    case = NETWORKS[name]
    gated = gated_network(case, target=0.99, budget=headgate.Budget.paper(0.99)).train()
    output = gated(*example(case, batch=4))
    task = sum(tensor.square().mean() for tensor in torch.utils._pytree.tree_leaves(output))
    (task + gated.cost_loss()).backward()
    assert set(gated._last.gates_BG.unique().tolist()) <= {0.0, 1.0}
    assert (gated.gates.logits.grad != 0).all()
    assert all(p.grad is not None for p in gated.model.parameters())
