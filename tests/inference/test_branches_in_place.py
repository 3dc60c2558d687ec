"""A branch that is gone leaves the stream as it was: whatever works in place, or weighs what is added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headgate
from tests.networks import conv, head, pooled
from tests.oracle import Net, difference, randn, randomize_, same

X = (3, 16, 16)


class Branchy(nn.Module):
    """Two convolutions with an activation between, added to what `combine` makes of it and of the block's input."""

    def __init__(self, combine: Callable[[Any, Tensor, Tensor], Tensor], act: nn.Module, **parts: nn.Module) -> None:
        super().__init__()
        self.c1, self.n1, self.act = conv(8, 6), nn.BatchNorm2d(6), act
        self.c2, self.n2 = conv(6, 8), nn.BatchNorm2d(8)
        for name, part in parts.items():
            setattr(self, name, part)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self, x, self.n2(self.c2(self.act(self.n1(self.c1(x))))))


class Pair(nn.Module):
    """A branch that returns more than a tensor, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = conv(8, 6), conv(6, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.relu(self.c2(F.relu(self.c1(x)))) * 0.5, None


class AddsPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pair(x)[0]


def projection(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.silu(y + block.down(x))


def overwrite_and_look_back(net: Any, x: Tensor) -> Tensor:
    """What the first block gives is overwritten while what it was given is still needed."""
    given = F.silu(net.stem(x))
    return pooled(net, F.silu(net.after(net.block(given)), inplace=True) + given)


def straight(net: Any, x: Tensor) -> Tensor:
    return pooled(net, net.block(F.silu(net.stem(x))))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "SiLU in place": lambda: Branchy(projection, nn.SiLU(inplace=True), down=nn.Conv2d(8, 8, 1)),
    "ReLU in place": lambda: Branchy(projection, nn.ReLU(inplace=True), down=nn.Conv2d(8, 8, 1)),
    "SiLU": lambda: Branchy(projection, nn.SiLU(), down=nn.Conv2d(8, 8, 1)),
    "dropout in place": lambda: Branchy(projection, nn.Dropout(inplace=True), down=nn.Conv2d(8, 8, 1)),
    "half of the input": lambda: Branchy(lambda n, x, y: torch.add(y, x, alpha=0.5), nn.ReLU()),
    "half of the branch": lambda: Branchy(lambda n, x, y: torch.add(x, y, alpha=0.5), nn.ReLU()),
    "the input less the branch": lambda: Branchy(lambda n, x, y: x - y, nn.ReLU()),
    "a branch that gives a tuple": AddsPair,
}


def network(block: str) -> nn.Module:
    return randomize_(Net(straight, stem=conv(3, 8), block=BLOCKS[block](), head=head(8)).eval())


def looking_back() -> nn.Module:
    plain = [Branchy(lambda n, x, y: x + y, nn.ReLU()) for _ in range(2)]
    return randomize_(
        Net(overwrite_and_look_back, stem=conv(3, 8), block=plain[0], after=plain[1], head=head(8)).eval()
    )


NETWORKS = {name: lambda name=name: network(name) for name in BLOCKS} | {"overwritten behind a block": looking_back}


def closed(name: str, granularity: str, stream: str) -> headgate.GatedModel:
    """The network with all closed that may die."""
    gated = headgate.gate(NETWORKS[name](), randn(2, *X), target=1.0, granularity=granularity, stream=stream)  # type: ignore[arg-type]
    p = torch.full((gated.graph.gate_count,), 0.99)
    for mask in gated.graph.masks:
        if mask.may_die:
            p[mask.gates] = 1e-30
    gated.gates.set_probabilities(p)
    return gated.eval()


@pytest.mark.parametrize("stream", ["shared", "indexed"])
@pytest.mark.parametrize("granularity", ["channel", "layer"])
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "the input less the branch"])
def test_without_its_dead_branches_a_network_computes_the_same(
    name: str, granularity: str, stream: str, tmp_path: Path
) -> None:
    gated, x = closed(name, granularity, stream), randn(3, *X)
    assert gated.graph.branches and any(mask.may_die for mask in gated.graph.masks)
    with torch.no_grad():
        expected = gated(x)
        small = gated.shrink()
        assert difference(expected, small(x)) < 1e-5
        headgate.save(small, tmp_path / "small.safetensors")
        assert same(small(x), headgate.load(tmp_path / "small.safetensors", NETWORKS[name]())(x))
        assert gated.squeeze_(least_gain=-1)
        assert difference(expected, gated(x)) < 1e-5
    assert headgate.count_macs(small, x) == gated.macs()


def test_what_works_in_place_in_training_only_leaves_the_stream_alone() -> None:
    gated, x = closed("dropout in place", "layer", "shared").train(), randn(3, *X)
    expected = gated(x)
    assert gated.squeeze_(least_gain=-1)
    assert difference(expected, gated(x)) < 1e-5


def test_what_is_subtracted_is_no_branch() -> None:
    assert not headgate.inspect(network("the input less the branch"), randn(2, *X)).branches
