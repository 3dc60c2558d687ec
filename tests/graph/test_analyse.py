"""What the channel graph says of a network: masks, ties, frozen names, granularity, streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headgate
from headgate.graph.grouping import components
from headgate.graph.labels import matching_axes, viewed
from headgate.models.cifar_resnet import CifarResNet
from tests.networks import NETWORKS, Block, conv, example, head, pooled
from tests.oracle import Net, decide_, difference, randn, randomize_

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


def test_masks_with_the_same_first_layer_have_names_of_their_own() -> None:
    """Half of `a`'s channels are added to `b`'s, the other half to `c`'s: two masks, and both can be set."""
    model = Net(
        lambda n, x: pooled(n, F.relu(n.d(F.relu(n.a(x) + torch.cat([n.b(x), n.c(x)], 1))))),
        a=conv(3, 8), b=conv(3, 4), c=conv(3, 4), d=conv(8, 6), head=head(6),
    )  # fmt: skip
    gated = headgate.gate(model.eval(), randn(1, *X), target=1.0)
    assert {name: len(p) for name, p in gated.gate_probabilities().items()} == {"a": 4, "a+c": 4, "d": 6}
    gated.set_gate_probabilities({"a+c": torch.tensor([1.0, 0, 0, 0]), "a": torch.ones(4), "d": torch.ones(6)})
    assert gated.eval().shrink().c.out_channels == 1


class Buffered(nn.Module):
    """Channels times a buffer, and what comes of it by a norm with buffers of its own."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 6), head(6)
        self.register_buffer("scale", torch.rand(8, 1, 1) + 0.5, persistent=persistent)
        self.register_buffer("mean", torch.rand(6), persistent=persistent)
        self.register_buffer("var", torch.rand(6) + 0.5, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(F.relu(self.a(x)) * self.scale)  # type: ignore[operator]
        return pooled(self, F.relu(F.batch_norm(x, self.mean, self.var)))  # type: ignore[arg-type]


def test_a_buffer_that_no_file_holds_freezes_what_it_meets() -> None:
    kept = headgate.gate(Buffered(True).eval(), randn(1, *X), target=1.0)
    assert set(kept.gate_probabilities()) == {"a", "b"}
    assert difference(decide_(kept, 0.5, 0)(randn(2, *X)), kept.shrink()(randn(2, *X))) < 1e-4
    graph = headgate.inspect(Buffered(False).eval(), randn(1, *X))
    assert not graph.masks
    assert "combines it with `scale`, a buffer that no state dict holds" in graph.frozen["a"]


def test_what_is_called_without_a_batch_is_frozen() -> None:
    """Image by image, there is nothing that says whose gates a call needs."""
    model = Net(
        lambda n, x: torch.stack([n.head(F.relu(n.b(image)).mean((1, 2))) for image in F.relu(n.a(x))]),
        a=conv(3, 8), b=conv(8, 6), head=head(6),
    )  # fmt: skip
    graph = headgate.inspect(model.eval(), randn(2, *X))
    assert not graph.masks and graph.dense_macs == headgate.count_macs(model, randn(2, *X))
    for layer in ("a", "b"):
        assert "`b` (Conv2d) is called without a batch" in graph.frozen[layer]


@pytest.mark.parametrize("length", [100, 101, 103, 202, 101 * 103])
def test_the_dimension_over_images_is_found_whatever_the_other_sizes(length: int) -> None:
    """Also where a sequence, its images last, is as long as a probe has images."""
    model = Net(
        lambda n, x: n.head(F.relu(n.b(F.relu(n.a(x.transpose(0, 1))))).mean(0)),
        a=nn.Linear(8, 16), b=nn.Linear(16, 8), head=nn.Linear(8, 5),
    )  # fmt: skip
    graph = headgate.inspect(model.eval(), randn(1, length, 8))
    assert {reader.layer: reader.batch_axis for reader in graph.readers} == {"b": 1, "head": 0}
    assert graph.dense_macs == length * 2 * 8 * 16 + 8 * 5


@pytest.mark.parametrize(("kind", "stream"), [("static", "indexed"), ("dynamic", "shared"), ("dynamic", "indexed")])
def test_a_stream_of_one_channel(kind: str, stream: str) -> None:
    model = Net(lambda n, x: n.two(n.one(n.stem(x))), stem=conv(1, 1), one=Block(1, 1), two=Block(1, 1))
    model.one.conv1, model.one.bn1, model.one.conv2 = conv(1, 8), nn.BatchNorm2d(8), conv(8, 1)
    model = randomize_(model.eval())
    gated = headgate.gate(model, randn(2, 1, 8, 8), kind=kind, stream=stream, target=1.0)  # type: ignore[arg-type]
    assert [mask.name for mask in gated.graph.masks] == ["one.conv1"]
    gated(randn(3, 1, 8, 8))
    if kind == "static":
        for share in (0.0, 0.5):
            small = decide_(gated, share, 0).shrink()
            assert difference(gated(randn(3, 1, 8, 8)), small(randn(3, 1, 8, 8))) < 1e-4


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


def test_a_graph_is_printed_as_a_table() -> None:
    graph = headgate.inspect(NETWORKS["residual identity"].make(), example(NETWORKS["residual identity"]))
    text = str(graph)
    assert len(text) < 2000 and len(repr(graph)) < 100
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert lines["block.conv1"].split()[1] == "Conv2d" and lines["block.conv1"].endswith("block.conv1")
    assert text.endswith(f"{graph.dense_macs:,} MACs)")
