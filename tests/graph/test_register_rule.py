"""A layer of the user's own: unknown it is seen through or freezes; with a rule it is gated and shrunk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headgate
from headgate.graph.layer_rules import LAYER_RULES, rule_for
from tests.networks import conv, head, pooled
from tests.oracle import Net, decide_, difference, independent_macs, randn, randomize_, same

X = (3, 8, 8)


class OwnConv(nn.Module):
    """A 1×1 convolution by an operator without a rule."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, 1, 1) / in_channels)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias)


class OwnKernel(nn.Module):
    """The same with other names and the input channels first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, outputs) / inputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bihw,io->bohw", x, self.kernel)


class OwnScale(nn.Module):
    """A number and a shift a channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gain, self.shift = nn.Parameter(torch.randn(1, width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(x) * self.gain[0, :, None, None] + self.shift[:, None, None]


class OwnGain(nn.Module):
    """A number a channel, by an operator without a rule."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(x) * self.gain[:, None, None]


class OwnPool(nn.Module):
    """A number a channel, and fewer pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2) * self.weight[:, None, None]


class OwnCentre(nn.Module):
    """Channels less their mean: what is closed is missing there."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class OwnActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(x)


class OwnMix(nn.Module):
    """Mixes channels in a way no table knows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(x) + x.flip(1)


class Louder(nn.BatchNorm2d):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(super().forward(x))


class Renamed(nn.Conv2d):
    """A subclass that computes the same."""


@pytest.fixture(autouse=True)
def forget_() -> Iterator[None]:
    before = dict(LAYER_RULES)
    yield
    LAYER_RULES.clear()
    LAYER_RULES.update(before)


def network(own: nn.Module) -> nn.Module:
    return randomize_(
        Net(
            lambda n, x: pooled(n, F.relu(n.b(n.own(F.relu(n.a(x)))))),
            a=conv(3, 8),
            own=own,
            b=conv(8, 6),
            head=head(6),
        ).eval()
    )


RULES = {
    "mixing": (lambda: OwnConv(8, 8), headgate.rules.Mixing(groups_attribute=None), {"a", "own", "b"}),
    "mixing with names of its own": (
        lambda: OwnKernel(8, 8),
        headgate.rules.Mixing(
            in_dims={"kernel": 0}, out_dims={"kernel": 1}, in_attribute=None, out_attribute=None, groups_attribute=None
        ),
        {"a", "own", "b"},
    ),
    "elementwise": (OwnActivation, headgate.rules.Elementwise(), {"a", "b"}),
    "opaque": (OwnMix, headgate.rules.Opaque("turns the order of channels"), {"b"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_registered_layer_is_gated_and_shrunk(name: str, tmp_path: Path) -> None:
    make, rule, gated_layers = RULES[name]
    own = make()
    before = {mask.name for mask in headgate.inspect(network(own), randn(2, *X)).masks}
    assert before == {"b"}, "without a rule it freezes what it touches"
    headgate.register_rule(type(own), rule)
    model = network(own)
    gated = headgate.gate(model, randn(2, *X), target=1.0)
    assert set(gated.gate_probabilities()) == gated_layers
    for seed in range(3):
        small = decide_(gated, 0.5, seed).shrink()
        assert difference(gated(randn(3, *X)), small(randn(3, *X))) < 1e-4
        headgate.save(small, tmp_path / "x")
        assert same(small(randn(3, *X)), headgate.load(tmp_path / "x", network(make()))(randn(3, *X)))
        if name.startswith("mixing"):
            assert gated.macs() == independent_macs(small, randn(1, *X))
        assert difference(gated(randn(3, *X)), gated.shrink(round_to=4)(randn(3, *X))) < 1e-4


def test_a_registered_layer_with_a_number_a_channel_is_shrunk(tmp_path: Path) -> None:
    headgate.register_rule(OwnGain, headgate.rules.PerChannel(tensors=("gain",), attribute="width"))
    gated = headgate.gate(network(OwnGain(8)), randn(2, *X), target=1.0)
    assert set(gated.gate_probabilities()) == {"a", "b"}
    small = decide_(gated, 0.5, 0).shrink()
    assert small.own.width == len(small.own.gain) == small.a.out_channels < 8
    assert difference(gated(randn(3, *X)), small(randn(3, *X))) < 1e-4


def test_a_registered_layer_may_change_the_number_of_pixels() -> None:
    """What a norm of PyTorch's is spared in a trace, a layer of the user's own is not."""
    headgate.register_rule(OwnPool, headgate.rules.PerChannel(tensors=("weight",), attribute=None))
    model = network(OwnPool(8))
    assert headgate.count_macs(model, randn(2, *X)) == independent_macs(model, randn(2, *X))
    gated = headgate.gate(model, randn(2, *X), target=1.0)
    small = decide_(gated, 0.5, 0).shrink()
    assert gated.macs() == independent_macs(small, randn(1, *X)) < gated.dense_macs
    assert difference(gated(randn(3, *X)), small(randn(3, *X))) < 1e-4


def test_a_rule_that_does_not_fit_freezes() -> None:
    """OwnScale has a tensor with channels in its second dimension, which this rule does not mention."""
    headgate.register_rule(OwnScale, headgate.rules.PerChannel(tensors=("shift",), attribute="width"))
    graph = headgate.inspect(network(OwnScale(8)), randn(2, *X))
    assert "`own` (OwnScale) does not work with fewer channels" in graph.frozen["a"]


def test_a_wrong_rule_is_found_out_before_anybody_relies_on_it() -> None:
    headgate.register_rule(OwnCentre, headgate.rules.PerChannel(tensors=(), attribute=None))
    gated = headgate.gate(network(OwnCentre()), randn(2, *X), target=1.0)
    with pytest.raises(headgate.ShrinkMismatch, match="own"):
        decide_(gated, 0.5, 0).shrink()


def test_a_subclass_with_the_same_forward_has_its_bases_rule() -> None:
    assert rule_for(Renamed(3, 4, 1)) is rule_for(nn.Conv2d(3, 4, 1)) is not None
    assert rule_for(Louder(4)) is None, "one that computes something else is not guessed at"
    graph = headgate.inspect(network(Louder(8)), randn(2, *X))
    assert "in `own`" in graph.frozen["a"] and "has no channel rule" in graph.frozen["a"]


@pytest.mark.parametrize(
    ("layer", "rule", "says"),
    [
        (nn.ReLU(), headgate.rules.Elementwise(), "takes a module class"),
        (int, headgate.rules.Elementwise(), "takes a module class"),
        (OwnActivation, "elementwise", "is no rule: use headgate.rules.Mixing"),
        (OwnActivation, headgate.rules.Elementwise, "is no rule"),
    ],
)
def test_wrong_registrations_are_refused(layer: object, rule: object, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        headgate.register_rule(layer, rule)  # type: ignore[arg-type]
