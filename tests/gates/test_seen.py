"""What a pass that is over tells: it agrees with what the pass was charged, image by image and layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headgate
from headgate.errors import NotDecided
from headgate.graph.macs import macs_by_layer
from headgate.models import cifar_resnet20
from tests.gates.test_dynamic import opinionated_, two_blocks
from tests.networks import NETWORKS
from tests.oracle import randn, randomize_

X = (3, 8, 8)


def dynamic_net() -> headgate.GatedModel:
    return opinionated_(headgate.gate(two_blocks(), randn(1, *X), kind="dynamic", target=0.9)).eval()


def test_layers_and_images_add_up_to_the_cost_of_the_pass() -> None:
    gated = dynamic_net()
    gated(randn(7, *X) * 2)
    seen = gated.seen()
    assert seen.gates_BG.shape == (7, gated.graph.gate_count) and seen.macs_B.shape == (7,)
    assert float(seen.macs_B.mean()) == pytest.approx(gated.macs(), rel=1e-6)
    assert sum(seen.macs_by_layer.values()) == pytest.approx(gated.macs(), rel=1e-6)
    assert seen.macs_by_layer["gates"] == gated.cost.gates_macs
    assert len(set(seen.macs_B.tolist())) > 1


def test_with_all_gates_open_every_layer_costs_what_it_costs_without_gates() -> None:
    model = randomize_(cifar_resnet20())
    gated = headgate.gate(model, randn(1, 3, 32, 32), target=0.9).eval()
    with pytest.raises(NotDecided, match="call the model first"):
        gated.seen()
    gated.strategy("always_on")(randn(2, 3, 32, 32))
    found = gated.seen().macs_by_layer
    assert {name: round(macs) for name, macs in found.items()} == macs_by_layer(model, randn(1, 3, 32, 32))


def test_the_layers_of_the_shrunk_network_cost_what_was_seen() -> None:
    gated = headgate.gate(randomize_(cifar_resnet20()), randn(1, 3, 32, 32), target=0.9).eval()
    generator = torch.Generator().manual_seed(0)
    some = {name: torch.rand(p.shape, generator=generator) for name, p in gated.gate_probabilities().items()}
    gated.set_gate_probabilities(some)
    gated(randn(1, 3, 32, 32))
    seen = {name: round(macs) for name, macs in gated.seen().macs_by_layer.items()}
    small = macs_by_layer(gated.shrink(), randn(1, 3, 32, 32))
    assert {name: macs for name, macs in seen.items() if macs} == {name: small[name] for name in seen if seen[name]}
    assert sum(small.values()) == sum(seen.values())


def test_a_histogram_counts_every_gate_once() -> None:
    gated = headgate.gate(NETWORKS["BatchNorm"].make(), randn(2, *X), target=1.0)
    gated.set_gate_probabilities(
        {"a": torch.tensor([0.01, 0.04, 0.06, 0.5, 0.5, 0.94, 0.96, 1.0]), "b": torch.zeros(6)}
    )
    assert gated.histogram(4) == [9, 0, 2, 3]
    assert sum(gated.histogram()) == gated.graph.gate_count


def test_where_gates_depend_on_the_image_the_histogram_is_that_of_the_last_batch() -> None:
    gated = dynamic_net()
    with pytest.raises(NotDecided, match="histogram"):
        gated.histogram()
    gated(randn(5, *X))
    assert sum(gated.histogram()) == 5 * gated.graph.gate_count
    assert isinstance(gated.dynamic, nn.Module)
