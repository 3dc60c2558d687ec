"""What the channel graph says of a network: masks, ties, frozen names, granularity, streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headgate
from headgate.graph.grouping import components
from headgate.graph.labels import matching_axes, viewed
from headgate.models.cifar_resnet import CifarResNet
from tests.networks import NETWORKS, example
from tests.oracle import randn

X = (3, 8, 8)


def resnet() -> nn.Module:
    return CifarResNet(2, width=8).eval()


def masks(**options: Any) -> dict[str, int]:
    return {mask.name: mask.size for mask in headgate.inspect(resnet(), randn(1, *X), **options).masks}


def test_a_shared_stream_has_one_mask_for_all_that_add_to_it() -> None:
    graph = headgate.inspect(resnet(), randn(1, *X))
    stream = graph.masks[0]
    assert stream.name == "conv1" and {"layer1.0.conv2", "layer1.1.conv2"} <= set(stream.layers)
    assert sum(mask.size for mask in graph.masks) == graph.gate_count == 8 + 2 * 8 + 8 + 2 * 16 + 16 + 2 * 32


def test_an_indexed_stream_has_a_mask_for_every_reader_and_writer() -> None:
    """The paper's masks of a block: on what conv1 reads, between the convolutions, on what the block adds."""
    found = masks(stream="indexed")
    for block in ("layer1.0", "layer1.1", "layer2.1", "layer3.1"):
        assert {f"{block}.conv1.input", f"{block}.conv1", f"{block}.conv2"} <= set(found)
    assert found["layer1.0.conv1.input"] == found["layer1.0.conv2"] == 8


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_a_number_gates_runs_of_so_many_channels(size: int) -> None:
    found, single = masks(granularity=size), masks()
    for name, gates in single.items():
        if (runs := -(-gates // size)) > 1:
            assert found[name] == runs
        else:
            assert name not in found


def test_whole_branches_have_one_gate_each() -> None:
    assert masks(granularity="layer") == {f"layer{stage}.{block}.bn2": 1 for stage in (1, 2, 3) for block in (0, 1)}


@pytest.mark.parametrize("granularity", ["channel", "layer"])
@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_frozen_modules_are_left_alone(stream: str, granularity: str) -> None:
    frozen = ["layer1.0", "layer2.1.conv1"]
    gated = headgate.gate(resnet(), randn(1, *X), target=1.0, frozen=frozen, stream=stream, granularity=granularity)  # type: ignore[arg-type]
    gated.set_gate_probabilities({name: torch.zeros_like(p) for name, p in gated.gate_probabilities().items()})
    small = gated.eval().shrink()
    for name in ("layer1.0.conv1", "layer1.0.conv2", "layer2.1.conv1"):
        layer, dense = small.get_submodule(name), resnet().get_submodule(name)
        assert isinstance(layer, nn.Conv2d) and layer.weight.shape == dense.weight.shape
    if granularity == "channel":
        assert "`layer1.0` is frozen by the user" in gated.graph.frozen["layer1.0.conv1"]


def test_all_frozen_is_nothing_to_gate() -> None:
    with pytest.raises(headgate.NothingToGate, match="frozen by the user"):
        headgate.gate(resnet(), randn(1, *X), frozen=["conv1", "layer1", "layer2", "layer3"])


def test_the_share_of_macs_with_gates() -> None:
    graph = headgate.inspect(resnet(), randn(1, *X))
    assert graph.gateable_fraction == 1.0
    whole = headgate.inspect(resnet(), randn(1, *X), granularity="layer")
    blocks = sum(item.macs for item in whole.costs if item.name.startswith("layer"))
    assert whole.gateable_fraction == pytest.approx(blocks / whole.dense_macs)


@pytest.mark.parametrize("name", ["an unknown operator", "LayerNorm", "one parameter in two modules"])
def test_a_reason_names_the_place(name: str) -> None:
    case = NETWORKS[name]
    reason = headgate.inspect(case.make(), example(case)).frozen["a"]
    assert {"an unknown operator": "networks.py:", "LayerNorm": "`norm`", "one parameter in two modules": "`b`"}[
        name
    ] in reason


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_the_graph_does_not_depend_on_the_batch(batch: int) -> None:
    """Also where the batch is as large as a number of channels."""
    one, other = (headgate.inspect(resnet(), randn(size, *X)) for size in (3, batch))
    assert one.dense_macs == other.dense_macs and one.masks == other.masks
    assert np.array_equal(one.atom_gate, other.atom_gate)


def test_the_graph_is_the_same_every_time() -> None:
    one, other = (headgate.inspect(resnet(), randn(2, *X), stream="indexed") for _ in range(2))
    assert one.masks == other.masks and np.array_equal(one.atom_gate, other.atom_gate)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((2, 8, 3), (2, 24)),
        ((2, 24), (2, 8, 3)),
        ((2, 8, 3, 3), (2, 8, 9)),
        ((4, 6), (2, 2, 3, 2)),
        ((5,), (5, 1, 1)),
        ((1, 4), (4,)),
    ],
)
def test_labels_move_as_the_tensor_does(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Label every place by itself: the view of the labels is the view of the tensor."""
    labels = np.arange(np.prod(old)).reshape(old)
    assert np.array_equal(np.broadcast_to(viewed(labels, old, new), new), labels.reshape(new))
    pairs = matching_axes(old, new)
    assert [axis for axes, _ in pairs for axis in axes] == list(range(len(old)))
    assert all(np.prod([old[a] for a in left]) == np.prod([new[a] for a in right]) for left, right in pairs)


def test_tied_channels_are_one_class() -> None:
    """Against a plain walk over the ties, for random ones."""
    random = np.random.default_rng(0)
    for _ in range(50):
        count = int(random.integers(1, 30))
        ties = [
            tuple(random.integers(0, count, (2, int(random.integers(1, 5))))) for _ in range(int(random.integers(0, 8)))
        ]
        parent = list(range(count))

        def root(atom: int, parent: list[int] = parent) -> int:
            return atom if parent[atom] == atom else root(parent[atom], parent)

        for first, second in ties:
            for a, b in zip(first, second, strict=True):
                low, high = sorted((root(int(a)), root(int(b))))
                parent[high] = low
        assert components(count, ties).tolist() == [root(atom) for atom in range(count)]
