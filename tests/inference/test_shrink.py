"""What shrink promises beside equality: dead blocks gone, round widths, folded norms, plain exportable networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headgate
from headgate.graph.layer_rules import Mixing
from headgate.inference import shrink as shrink_module
from tests.networks import NETWORKS, Block, conv, example, head, pooled
from tests.oracle import Net, decide_, difference, independent_macs, own_modules, randn, randomize_, same

X = (3, 8, 8)


def residual(**options: Any) -> headgate.GatedModel:
    model = Net(
        lambda n, x: pooled(n, n.two(n.one(F.relu(n.stem(x))))),
        stem=conv(3, 16), one=Block(16, 16), two=Block(16, 16), head=head(16),
    )  # fmt: skip
    return headgate.gate(randomize_(model.eval()), randn(2, *X), **{"target": 1.0, **options})


def close_(gated: headgate.GatedModel, *masks: str) -> headgate.GatedModel:
    chosen = {name: torch.full_like(p, float(name not in masks)) for name, p in gated.gate_probabilities().items()}
    gated.set_gate_probabilities(chosen)
    return gated.eval()


# ---------------------------------------------------------------------------------------------------- dead branches


@pytest.mark.parametrize(
    ("stream", "mask"), [("shared", "one.conv1"), ("indexed", "one.conv1"), ("indexed", "one.conv2")]
)
def test_a_block_whose_mask_is_closed_is_gone(stream: str, mask: str) -> None:
    gated = close_(residual(stream=stream), mask)
    small = gated.shrink()
    assert type(small.one) is nn.ReLU
    assert difference(gated(randn(3, *X)), small(randn(3, *X))) < 1e-5
    block = 2 * 64 * 16 * 16 * 9
    assert independent_macs(small, randn(1, *X)) == gated.macs() == gated.dense_macs - block


@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_closed_layers_are_gone_with_whole_branches(stream: str) -> None:
    gated = residual(granularity="layer", stream=stream)
    assert set(gated.gate_probabilities()) == {"one.bn2", "two.bn2"}
    small = close_(gated, "one.bn2", "two.bn2").shrink()
    assert not [name for name, _ in small.named_modules() if "conv1" in name or "bn" in name]
    assert difference(gated(randn(3, *X)), small(randn(3, *X))) < 1e-5


def block_in_a_branch(**options: Any) -> headgate.GatedModel:
    """A residual block whose result is itself added to something."""
    model = Net(
        lambda n, x: pooled(n, n.block(s := F.relu(n.stem(x))) + n.side(s)),
        stem=conv(3, 16), block=Block(16, 16), side=conv(16, 16, 1), head=head(16),
    )  # fmt: skip
    return headgate.gate(randomize_(model.eval()), randn(2, *X), **{"target": 1.0, **options}).eval()


@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_a_dead_block_inside_a_branch_takes_only_itself(stream: str) -> None:
    gated = close_(block_in_a_branch(stream=stream), "block.conv1")
    x = randn(3, *X)
    stem = F.relu(gated.model.stem(x))
    by_hand = gated.model.head((F.relu(stem) + gated.model.side(stem)).mean((2, 3)))
    assert difference(by_hand, gated(x)) < 1e-5
    assert difference(by_hand, gated.shrink()(x)) < 1e-5
    assert gated.macs() == gated.dense_macs - 2 * 64 * 16 * 16 * 9


@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_branches_inside_branches_can_all_be_gone(stream: str) -> None:
    gated = block_in_a_branch(stream=stream, granularity="layer")
    small = close_(gated, *gated.gate_probabilities()).shrink()
    assert difference(gated(randn(3, *X)), small(randn(3, *X))) < 1e-5
    assert gated.macs() == independent_macs(small, randn(1, *X))


def test_a_mask_that_must_not_die_keeps_its_likeliest_gate() -> None:
    gated = residual()
    p = {name: torch.full_like(p, 0.1) for name, p in gated.gate_probabilities().items()}
    p["stem"][5] = 0.2
    gated.set_gate_probabilities(p)
    assert gated.eval().shrink().stem.out_channels == 1
    assert gated._decide()[:16].nonzero()[0].tolist() == [5]


def test_a_dead_strided_block_leaves_its_shortcut() -> None:
    case = NETWORKS["residual projection"]
    gated = headgate.gate(randomize_(case.make().eval()), example(case), target=1.0)
    small = close_(gated, "block.conv1").shrink()
    batch = example(case, 3)
    assert difference(gated(*batch), small(*batch)) < 1e-5
    assert independent_macs(small, *batch) == gated.macs()
    assert not any(isinstance(module, nn.Conv2d) for name, module in small.named_modules() if name == "block.conv1")


# ------------------------------------------------------------------------------------------------------ round widths


def widths(small: nn.Module) -> list[tuple[int, int]]:
    """(width, dense width) of every layer but the head, the networks being 24 channels wide."""
    layers = [m for n, m in small.named_modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) and n != "head"]
    return [(m.out_channels, 24) for m in layers] + [(m.in_channels, 24) for m in layers[1:]]


WIDE: dict[str, Any] = {
    "chain": lambda: Net(
        lambda n, x: pooled(n, F.relu(n.b(F.relu(n.norm(n.a(x)))))), a=conv(3, 24), norm=nn.BatchNorm2d(24), b=conv(24, 24), head=head(24)
    ),
    "residual": lambda: Net(
        lambda n, x: pooled(n, n.two(n.one(F.relu(n.stem(x))))), stem=conv(3, 24), one=Block(24, 24), two=Block(24, 24), head=head(24)
    ),
    "transposed": lambda: Net(
        lambda n, x: pooled(n, F.relu(n.up(F.relu(n.a(x))))), a=conv(3, 24), up=nn.ConvTranspose2d(24, 24, 3), head=head(24)
    ),
    "flattened": lambda: Net(lambda n, x: n.head(F.relu(n.a(x)).flatten(1)), a=conv(3, 24), head=head(24 * 64)),
    "depthwise": lambda: Net(
        lambda n, x: pooled(n, F.relu(n.b(F.relu(n.d(n.a(x)))))), a=conv(3, 24), d=conv(24, 24, groups=24), b=conv(24, 24), head=head(24)
    ),
}  # fmt: skip


@pytest.mark.parametrize("granularity", ["channel", 3])
@pytest.mark.parametrize("stream", ["shared", "indexed"])
@pytest.mark.parametrize("name", WIDE)
def test_widths_are_rounded_up_and_the_output_stays(name: str, stream: str, granularity: Any, tmp_path: Path) -> None:
    model = randomize_(WIDE[name]().eval())
    gated = headgate.gate(model, randn(2, *X), target=1.0, stream=stream, granularity=granularity)  # type: ignore[arg-type]
    for seed in range(4):
        small = decide_(gated, (0.3, 0.6)[seed % 2], seed).shrink(round_to=8)
        assert [width for width, dense in widths(small) if width % 8 and width not in (dense, 3)] == []
        assert difference(gated(randn(3, *X)), small(randn(3, *X))) < 1e-4
        headgate.save(small, tmp_path / "x")
        assert same(small(randn(3, *X)), headgate.load(tmp_path / "x", WIDE[name]())(randn(3, *X)))


def test_decisions_can_be_rounded_down_within_the_target() -> None:
    gated = headgate.gate(randomize_(WIDE["residual"]().eval()), randn(2, *X), target=0.5)
    for seed in range(5):
        decide_(gated, 0.5, seed).project(round_to=8)
        small = gated.shrink(round_to=8)
        assert all(width % 8 == 0 or width == 3 for width, _ in widths(small))
        assert independent_macs(small, randn(1, *X)) == gated.macs() <= gated.target * gated.dense_macs


# ------------------------------------------------------------------------------------------------------ folded norms


FOLDED: dict[str, tuple[Any, tuple[int, ...], int]] = {
    # network, input, BatchNorms that must stay
    "behind convolutions": (lambda: NETWORKS["residual projection"].make(), X, 0),
    "behind a linear layer": (lambda: NETWORKS["MLP with BatchNorm1d"].make(), (10,), 0),
    "one dimension": (lambda: NETWORKS["one dimension"].make(), (3, 16), 0),
    "before convolutions": (lambda: NETWORKS["dense block"].make(), X, 3),
    "used twice": (lambda: NETWORKS["one norm used twice"].make(), X, 1),
    "of a convolution that is read elsewhere": (
        lambda: Net(lambda n, x: pooled(n, n.norm(y := n.a(x)) + n.b(y)), a=conv(3, 8), norm=nn.BatchNorm2d(8), b=conv(8, 8), head=head(8)),
        X, 1,
    ),
    "of a convolution that is an output": (
        lambda: Net(lambda n, x: (pooled(n, n.norm(y := n.a(n.z(x)))), y), z=conv(3, 8), a=conv(8, 8), norm=nn.BatchNorm2d(8), head=head(8)),
        X, 1,
    ),
    "over tokens, not features": (
        lambda: Net(lambda n, x: n.head(F.relu(n.norm(n.b(F.relu(n.a(x))))).mean(1)), a=nn.Linear(5, 12), b=nn.Linear(12, 7), norm=nn.BatchNorm1d(7), head=head(7)),
        (7, 5), 1,
    ),
    "without affine": (lambda: NETWORKS["BatchNorm without affine"].make(), X, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_folding_leaves_the_output_and_no_norm_behind_a_layer(name: str, tmp_path: Path) -> None:
    make, shape, left = FOLDED[name]
    batch = randn(3, *shape, seed=5)
    gated = decide_(headgate.gate(randomize_(make().eval()), randn(2, *shape), target=1.0), 0.6, 1)
    small = gated.shrink(fold_batchnorm=True)
    assert difference(gated(batch), small(batch)) < 1e-4
    assert sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in small.modules()) == left
    headgate.save(small, tmp_path / "x")
    assert same(small(batch), headgate.load(tmp_path / "x", make())(batch))


@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_folding_and_rounding_work_together(stream: str) -> None:
    gated = decide_(residual(stream=stream), 0.4, 3)
    small = gated.shrink(round_to=4, fold_batchnorm=True)
    assert difference(gated(randn(3, *X)), small(randn(3, *X))) < 1e-4


# ------------------------------------------------------------------------------------------------------------ plain


def test_a_shrunk_network_is_the_users_own_class_without_hooks_or_gates() -> None:
    gated = decide_(residual(), 0.5, 0)
    small = gated.shrink()
    assert type(small) is type(gated.model) and not small.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in small.modules())
    assert own_modules(small) == []
    assert all(p.requires_grad and not p.is_meta for p in small.parameters())


def test_a_shrunk_network_shares_no_memory_with_the_gated_one_and_trains() -> None:
    gated = decide_(residual(), 0.5, 0)
    small = gated.shrink()
    before = [p.clone() for p in gated.model.parameters()]
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    small.train()(randn(4, *X)).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, gated.model.parameters(), strict=True))


@pytest.mark.parametrize("stream", ["shared", "indexed"])
@pytest.mark.parametrize(
    "name", ["residual projection", "residual zero padding", "inverted bottleneck", "attention block"]
)
def test_a_shrunk_network_can_be_exported(name: str, stream: str) -> None:
    case = NETWORKS[name]
    gated = headgate.gate(randomize_(case.make().eval()), example(case), target=1.0, stream=stream)  # type: ignore[arg-type]
    small = decide_(gated, 0.4, 0).shrink()
    exported = torch.export.export(small, example(case)).module()
    batch = example(case, seed=9)
    assert difference(small(*batch), exported(*batch)) < 1e-6


def test_batchnorm_is_not_folded_into_layers_that_change_their_weight() -> None:
    class Standardized(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths = self.weight.flatten(1).norm(dim=1)
            return self._conv_forward(x, self.weight / lengths[:, None, None, None], self.bias)

    headgate.register_rule(Standardized, headgate.rules.Mixing())
    net = nn.Sequential(
        Standardized(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(96, 5)
    )  # fmt: skip
    gated = decide_(headgate.gate(randomize_(net).eval(), randn(1, 3, 8, 8), target=1.0), 0.5, 0)
    small = gated.shrink(fold_batchnorm=True)
    assert isinstance(small[1], nn.BatchNorm2d) and isinstance(small[4], nn.Identity)
    assert difference(gated(randn(2, 3, 8, 8)), small(randn(2, 3, 8, 8))) < 1e-4


@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_onnx_runtime_computes_the_same(stream: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    gated = decide_(residual(stream=stream), 0.5, 2)
    small = gated.shrink(fold_batchnorm=True)
    torch.onnx.export(small, (randn(1, *X),), tmp_path / "small.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "small.onnx"), providers=["CPUExecutionProvider"])
    x = randn(1, *X, seed=4)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert difference(gated(x), torch.from_numpy(found)) < 1e-4


def test_a_shrunk_network_can_be_gated_and_shrunk_again(tmp_path: Path) -> None:
    gated = decide_(residual(), 0.6, 1)
    small = gated.shrink()
    again = headgate.gate(small, randn(2, *X), target=1.0)
    assert again.dense_macs == independent_macs(small, randn(1, *X))
    assert difference(small(randn(3, *X)), again.eval().strategy("always_on")(randn(3, *X))) < 1e-6
    half = {"one.conv1": torch.arange(len(again.gate_probabilities()["one.conv1"])) % 2.0}
    again.set_gate_probabilities(half)
    smaller = again.strategy("threshold").shrink()
    assert difference(again(randn(3, *X)), smaller(randn(3, *X))) < 1e-4
    headgate.save(smaller, tmp_path / "x")
    assert same(smaller(randn(3, *X)), headgate.load(tmp_path / "x", residual().model)(randn(3, *X)))


def test_a_network_that_indexes_its_stream_is_not_gated_again() -> None:
    small = decide_(residual(stream="indexed"), 0.6, 1).shrink()
    with pytest.raises(headgate.ModelError, match="shrunk"):
        headgate.gate(small, randn(2, *X))


def test_a_parameter_of_two_modules_stays_one() -> None:
    case = NETWORKS["one parameter in two modules"]
    model = Net(lambda n, x: n.twins(F.relu(n.b(F.relu(n.a(x))))), a=conv(3, 6), b=conv(6, 6), twins=case.make())
    model.twins.a, model.twins.b = conv(6, 8), conv(6, 8)
    model.twins.b.weight = model.twins.a.weight
    gated = headgate.gate(randomize_(model.eval()), randn(2, *X), target=1.0)
    small = decide_(gated, 0.5, 0).shrink()
    assert small.twins.a.weight is small.twins.b.weight


# --------------------------------------------------------------------------------------------------- checked at every call


def test_a_wrong_rule_is_found_out_and_the_layer_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = decide_(residual(), 0.5, 0)
    honest = Mixing.edit

    def shifted(self: Mixing, module: Any, keep_in: Any, keep_out: Any) -> Any:
        if keep_in is not None and module is gated.graph.book.modules["two.conv1"]:
            keep_in = (keep_in + 1) % 16
        return honest(self, module, keep_in, keep_out)

    monkeypatch.setattr(Mixing, "edit", shifted)
    with pytest.raises(headgate.ShrinkMismatch, match=r"first at `two\.conv1`.*[Ff]reeze"):
        gated.shrink()


def test_a_network_whose_code_fails_when_it_is_smaller_is_refused_and_not_returned() -> None:
    def picky(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(n.a(x))
        if x.shape[1] < 3:
            raise RuntimeError("too narrow for me")
        return pooled(n, F.relu(n.b(x)))

    gated = headgate.gate(Net(picky, a=conv(3, 8), b=conv(8, 6), head=head(6)).eval(), randn(2, *X), target=1.0)
    close_(gated, "a")
    with pytest.raises(headgate.ShrinkMismatch, match="too narrow for me"):
        gated.shrink()


def test_difference_sees_shapes_and_nans() -> None:
    one = torch.tensor([1.0, 2.0])
    assert shrink_module.difference(one, one) == 0
    assert shrink_module.difference(one, torch.tensor([1.0, 2.2])) == pytest.approx(0.1)
    assert shrink_module.difference(one, torch.ones(3)) == np.inf
    assert shrink_module.difference(one, torch.tensor([1.0, np.nan])) == np.inf
    assert shrink_module.difference(torch.tensor([np.nan, 1.0]), torch.tensor([np.nan, 1.0])) == 0
