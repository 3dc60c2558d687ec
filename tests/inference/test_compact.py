"""The compact network answers as the gated one does, whatever is open, for any number of images."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headgate
from headgate.errors import HeadgateError, NotDecided, ShrinkMismatch
from headgate.gates.dynamic import GateNetwork
from headgate.inference import compact as compact_module
from headgate.inference.export import export_onnx
from headgate.inference.kernel import native
from headgate.inference.kernel.prepared import Conv
from headgate.inference.lowering import rewrite
from headgate.inference.lowering.fate import ALWAYS, DEPENDS, NEVER, gates_over_all_images
from headgate.inference.lowering.masks import GateSite
from headgate.models import cifar_resnet20
from tests.gates.test_dynamic import opinionated_, sites_of, two_blocks
from tests.inference.test_random_networks import STEPS, Random
from tests.networks import NETWORKS, conv, example, residual
from tests.oracle import Net, difference, randn, randomize_

NOT_EXPORTED: set[str] = set()
CLOSE = 2e-5


def opinionated(make, inputs, **options) -> headgate.GatedModel:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    return opinionated_(headgate.gate(randomize_(make()), inputs, kind="dynamic", target=0.9, **options)).eval()


def assert_same(gated: headgate.GatedModel, fast: nn.Module, shape: tuple[int, ...], images: int, seed: int) -> None:
    x = randn(images, *shape, seed=seed)
    expected = gated(x)
    looked = [number for group in gated._groups for number in group.masks]
    p = torch.cat([gated._last.probabilities[number].reshape(-1) for number in looked])
    if 0 < fast.tau < 1 and bool(((p.logit() - torch.tensor(fast.tau).logit()).abs() < 1e-3).any()):
        return assert_same(gated, fast, shape, images, seed + 100)  # a gate on the edge: rounding decides
    assert difference(expected, fast(x)) < CLOSE


@pytest.mark.parametrize("name", NETWORKS)
def test_it_answers_as_the_gated_network_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = NETWORKS[name]
    monkeypatch.setattr(GateNetwork, "macs", 0)
    if not sites_of(name) or len(case.inputs) > 1:
        return
    gated = opinionated(case.make, example(case)[0])
    gated.gates.set_probabilities(torch.ones(gated._fixed.count))
    try:
        fast = gated.compact()
    except HeadgateError as error:
        assert "torch.export" in str(error) and name in NOT_EXPORTED, error  # the one thing that may be refused
        return
    assert name not in NOT_EXPORTED
    for images, seed in ((1, 5), (4, 6)):
        assert_same(gated, fast, case.inputs[0], images, seed)
    for tau in (0.0, 0.7, 0.9999):  # all open, fewer, all closed that may close
        fast.tau = tau
        assert_same(gated.strategy("threshold", tau=tau), fast, case.inputs[0], 3, 7)


@pytest.mark.parametrize(
    "options", [{"stream": "shared"}, {"granularity": "layer"}, {"granularity": 4}, {"static": ["layer1", "layer2.1"]}]
)
def test_every_form_of_gates(options: dict[str, object]) -> None:
    gated = opinionated(cifar_resnet20, randn(1, 3, 32, 32), **options)
    if "static" in options:
        names = [gated.graph.masks[number] for number in gated._fixed.masks]
        gated.set_gate_probabilities({mask.name: torch.rand(mask.size) for mask in names})
    fast = gated.compact()
    for images in (1, 5):
        assert_same(gated, fast, (3, 32, 32), images, images)
    quicker = [layer for layer, reason in fast.report.dense.items() if reason == compact_module.QUICKER]
    assert set(fast.report.dense) <= {"linear", *quicker}
    assert len(fast.report.fast) + len(quicker) >= 18


def test_what_is_closed_is_not_computed() -> None:
    """The kernel is handed exactly the gates of each image."""
    gated = opinionated(cifar_resnet20, randn(1, 3, 32, 32))
    fast = gated.compact()
    seen: list[tuple[int, int, int]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func in (torch.ops.headgate.masked_conv2d.default, torch.ops.headgate.masked_conv2d_add_.default):
                x, weight, _, in_mask, out_mask = args[:5]
                reads = weight.shape[1] * len(x) if in_mask is None else int(in_mask.sum())
                writes = weight.shape[0] * len(x) if out_mask is None else int(out_mask.sum())
                seen.append((reads, writes, weight.shape[0]))
            return func(*args, **(kwargs or {}))

    x = randn(1, 3, 32, 32, seed=4)
    with Watch(), torch.no_grad():
        fast.program(x)
    gated(x)
    gates = gated._last.gates_BG[0].bool().numpy()
    dead = {
        number
        for number, branch in enumerate(gated.graph.branches)
        if any(not gates[gated.graph.masks[m].gates].any() for m in branch.masks)
    }
    expected = []
    for item in gated.graph.costs:
        if item.name.startswith("layer"):
            lives = not dead.intersection(item.branches)
            expected.append(tuple(int(gates[side].sum()) * lives for side in (item.reads, item.writes)))
    found = [(reads * bool(writes), writes) for reads, writes, _ in seen]
    assert [w for _, w in found] == [w for _, w in expected]
    assert [r for (r, w) in found if w] == [r for (r, w) in expected if w]


def sure_(gated: headgate.GatedModel, open_gates: np.ndarray) -> None:
    """Make some gates the same for every image."""
    for site, network in zip(gated.dynamic.sites, gated.dynamic.networks, strict=True):
        start = 0
        with torch.no_grad():
            for number in site.masks:
                mask = gated.graph.masks[number]
                for gate in range(0, mask.size, 2):
                    network.head.weight[start + gate] = 0
                    network.head.bias[start + gate] = 5.0 if open_gates[mask.first + gate] else -5.0
                start += mask.size


def test_gates_that_never_change_are_folded_away() -> None:
    gated = opinionated(cifar_resnet20, randn(1, 3, 32, 32))
    open_gates = np.random.default_rng(0).random(gated.graph.gate_count) < 0.4
    sure_(gated, open_gates)
    fate = gates_over_all_images(gated.dynamic, gated.graph, gated._decide(), 0.5)
    for mask in gated.graph.masks:
        even = np.arange(mask.first, mask.gates.stop, 2)
        assert (fate[even] == np.where(open_gates[even], ALWAYS, NEVER)).all()
    fast = gated.compact()
    for images in (1, 4):
        assert_same(gated, fast, (3, 32, 32), images, images)
    widths = [
        buffer.shape[0]
        for name, buffer in fast.program.named_buffers()
        if name.endswith("_weight") and "compact" in name
    ]
    inner = next(mask for mask in gated.graph.masks if mask.name == "layer1.0.conv1")
    assert widths[0] == 16 - int((fate[inner.gates] == NEVER).sum()) < 16


def test_tau_moves_only_what_was_not_folded() -> None:
    gated = opinionated(two_blocks, randn(1, 3, 8, 8))
    network = gated.dynamic.networks[0]
    with torch.no_grad():
        network.head.weight[0], network.head.bias[0] = 0.0, 3.0  # sure at 0.5, closed at 0.99
    with pytest.raises(HeadgateError, match="fold=False"):
        gated.compact().tau = 0.99
    gated.gates.set_probabilities(torch.ones(gated._fixed.count))
    fast = gated.compact(fold=False)
    fast.tau = 0.99
    assert_same(gated.strategy("threshold", tau=0.99), fast, (3, 8, 8), 3, 1)


def test_a_network_whose_gates_are_all_sure_has_no_gate_networks() -> None:
    gated = opinionated(two_blocks, randn(1, 3, 8, 8))
    for network in gated.dynamic.networks:
        with torch.no_grad():
            network.head.weight.zero_()
            network.head.bias.copy_(torch.where(torch.arange(len(network.head.bias)) % 3 == 0, -4.0, 4.0))
    fast = gated.compact()
    assert not any(isinstance(module, GateSite) for module in fast.modules())
    for images in (1, 3):
        assert_same(gated, fast, (3, 8, 8), images, images)


def test_a_gate_is_only_sure_where_no_image_could_change_it() -> None:
    gated = opinionated(two_blocks, randn(1, 3, 8, 8))
    network = gated.dynamic.networks[0]
    with torch.no_grad():
        network.head.weight[0], network.head.bias[0] = -1.0, -3.0  # only ever lower
        network.head.weight[1], network.head.bias[1] = 1.0, -3.0  # closed as a rule, not always
        network.head.weight[2], network.head.bias[2] = 1.0, 3.0
    first = gated.graph.masks[gated.dynamic.sites[0].masks[0]].first
    fate = gates_over_all_images(gated.dynamic, gated.graph, gated._decide(), 0.5)
    assert fate[first : first + 3].tolist() == [NEVER, DEPENDS, ALWAYS]


def test_layers_that_are_quicker_densely_are_computed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = opinionated(cifar_resnet20, randn(1, 3, 32, 32))
    seconds = {Conv.by_kernel: 1.0, Conv.densely: 2.0}
    monkeypatch.setattr(compact_module, "_seconds", lambda call, given: seconds[call.__func__] if given else 1.0)
    assert not gated.compact().report.dense
    seconds[Conv.densely] = 0.5
    fast = gated.compact()
    assert len(fast.report.dense) == 18 and not fast.report.fast
    assert set(fast.report.dense.values()) == {"quicker than the kernel here"}
    for images in (1, 3):
        assert_same(gated, fast, (3, 32, 32), images, images)


@pytest.mark.parametrize("quickest", [7, 4, 1])
def test_batches_are_computed_in_the_parts_that_are_quickest(quickest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = opinionated(two_blocks, randn(1, 3, 6, 6))
    whole = gated.compact()
    assert whole.at_once is None, "one image has no parts"

    def seconds(call, given):  # type: ignore[no-untyped-def]
        return 1.0 if given else 0.5 if call.args[1] == quickest else 2.0

    monkeypatch.setattr(compact_module, "_seconds", seconds)
    fast = gated.compact(randn(7, 3, 6, 6))
    assert fast.at_once == (None if quickest == 7 else quickest)
    sizes: list[int] = []
    fast._quick.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    for images in (1, 4, 6, 9):
        sizes.clear()
        x = randn(images, 3, 6, 6, seed=images)
        assert difference(whole(x), fast(x)) < CLOSE
        assert sum(sizes) == images and max(sizes) == min(images, fast.at_once or images)
    assert difference(whole.watched(x)[0], fast.watched(x)[0]) < CLOSE


def test_what_is_not_returned_image_by_image_is_not_computed_in_parts() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_blocks()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.net(x)
            return y, y.mean(0)

    gated = opinionated(Mean, randn(1, 3, 6, 6))
    fast = gated.compact(randn(7, 3, 6, 6))
    assert fast.at_once is None
    x = randn(7, 3, 6, 6, seed=3)
    assert all(difference(a, b) < CLOSE for a, b in zip(gated(x), fast(x), strict=True))


def test_images_that_are_normalised_together_are_not_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_module, "PARTS_GAIN", 1e9)  # parts would always be the quickest
    gated = opinionated(lambda: Stem(Residual(between=nn.BatchNorm2d(8, track_running_stats=False))), SIZE)
    alike = torch.ones(7, 3, 8, 8)
    fast = gated.compact(alike)
    assert fast.at_once is None
    assert_same(gated, fast, (3, 8, 8), 7, 0)
    assert opinionated(two_blocks, SIZE).compact(alike).at_once == 1


def test_what_can_not_be_compact_is_told() -> None:
    static = headgate.gate(two_blocks(), randn(1, 3, 8, 8))
    with pytest.raises(NotDecided, match="shrink"):
        static.compact()
    gated = opinionated(two_blocks, randn(1, 3, 8, 8))
    with pytest.raises(NotDecided, match="draws gates"):
        gated.strategy("sample").compact()
    fast = gated.strategy("threshold").compact()
    with pytest.raises(HeadgateError, match="tau=2"):
        fast.tau = 2.0
    assert fast.train().training is False


def test_a_wrong_compact_network_is_never_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = opinionated(two_blocks, randn(1, 3, 8, 8))
    monkeypatch.setattr(rewrite, "fuse_conv_bn_weights", lambda w, b, *rest: (w, torch.zeros(len(w))))
    with pytest.raises(ShrinkMismatch, match="the compact network"):
        gated.compact()


@pytest.mark.parametrize("wrong", ["output", "gates"])
def test_nor_is_one_whose_gates_all_lie_at_the_threshold(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", target=0.9).eval()
    gated.strategy(
        "threshold", tau=float(gated.dynamic.networks[0].head.bias[0].detach().sigmoid())
    )  # nothing learned yet
    gated.compact()
    if wrong == "output":
        monkeypatch.setattr(compact_module.CompactModel, "forward", lambda self, x: self._quick(x) * 0 + 123)
    else:
        monkeypatch.setattr(compact_module, "threshold_logit", lambda tau: 1e9)
    with pytest.raises(ShrinkMismatch, match="output that differs" if wrong == "output" else "decides other gates"):
        (gated if wrong == "output" else gated.strategy("threshold", tau=0.4)).compact(fold=False)


@pytest.mark.parametrize("tau", [0.0, 1.0, 1 - 1e-9])
def test_gates_whose_p_is_0_or_1_in_float32_are_told_apart(tau: float) -> None:
    gated = opinionated(two_blocks, randn(1, 3, 8, 8))
    with torch.no_grad():
        for parameter in gated.dynamic.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 8)
    gated.strategy("threshold", tau=tau)
    x = randn(8, 3, 8, 8) * 3
    expected = gated(x)
    p = torch.cat([part.flatten() for part in gated.gate_probabilities().values()])
    assert float((p == 1).double().mean()) > 0.05
    assert difference(expected, gated.compact()(x)) < CLOSE


def test_outputs_of_any_form() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = two_blocks()
            self.aux = nn.Conv2d(3, 5, 3)

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"logits": self.body(x), "more": (self.aux(x).mean((2, 3)),)}

    gated = opinionated(Both, randn(1, 3, 8, 8))
    x = randn(4, 3, 8, 8)
    expected, found = gated(x), gated.compact()(x)
    assert found.keys() == {"logits", "more"} and isinstance(found["more"], tuple)
    assert difference(expected["logits"], found["logits"]) < CLOSE
    assert difference(expected["more"][0], found["more"][0]) < CLOSE


def test_the_plain_form_answers_the_same_in_onnx_too(tmp_path: Path) -> None:
    gated = opinionated(cifar_resnet20, randn(1, 3, 32, 32))
    open_gates = np.random.default_rng(0).random(gated.graph.gate_count) < 0.4
    sure_(gated, open_gates)
    fast = gated.compact()
    twin = fast.in_plain_operators()
    assert_same(gated, fast, (3, 32, 32), 3, 2)
    x = randn(3, 3, 32, 32, seed=2)
    assert difference(fast(x), twin(x)) < CLOSE
    names = {str(node.target) for node in twin.graph.nodes}
    assert not any("headgate." in name and "masked_conv" in name for name in names)
    export_onnx(twin, randn(1, 3, 32, 32), tmp_path / "masked.onnx")  # compares ONNX Runtime's answers
    assert (tmp_path / "masked.onnx").stat().st_size > 100_000


def test_a_compact_network_can_be_copied() -> None:
    gated = opinionated(two_blocks, randn(1, 3, 8, 8))
    fast = gated.compact()
    twin = copy.deepcopy(fast)
    x = randn(2, 3, 8, 8, seed=3)
    before = fast(x)
    fast.tau = 0.9
    assert torch.equal(twin(x), before) and twin.tau != fast.tau


def test_compact_networks_can_be_exported() -> None:
    fast = opinionated(two_blocks, randn(1, 3, 8, 8)).compact()
    x = randn(2, 3, 8, 8, seed=8)
    exported = torch.export.export(fast.program, (x,), strict=False).module()
    assert difference(fast(x), exported(x)) < CLOSE


def scaled_by_hand() -> nn.Module:
    def forward(n: Net, x: Tensor) -> Tensor:
        y = n.two(n.one(x).relu()).relu()
        return n.head(y.sum((2, 3)) / (x.shape[2] * x.shape[3]))

    return Net(forward, one=conv(3, 8), two=conv(8, 8), head=nn.Linear(8, 5))


def test_a_compiled_one_answers_the_same_and_only_for_sizes_it_knows() -> None:
    fast = opinionated(scaled_by_hand, randn(1, 3, 8, 8)).compact()
    compiled = torch.compile(fast, backend="eager", dynamic=False)
    x = randn(2, 3, 8, 8, seed=8)
    assert difference(fast(x), compiled(x)) < CLOSE
    with pytest.raises(Exception, match="has not seen images of this size|was made for images of"):
        compiled(randn(2, 3, 16, 16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_type_changes_nothing(dtype: torch.dtype) -> None:
    fast = opinionated(two_blocks, randn(1, 3, 8, 8)).compact()
    x, weight = randn(4, 3, 8, 8, seed=8), randn(5, 3, 3, 3)
    expected = fast(x)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(fast(x), expected)
        ones = [1, 1]
        operator = torch.ops.headgate.masked_conv2d(x, weight, None, None, None, None, ones, ones, ones, True)
        pooled = torch.ops.headgate.max_pool2d(x, [2, 2], [2, 2], [0, 0])
    finally:
        torch.set_default_dtype(before)
    assert operator.dtype == pooled.dtype == torch.float32
    torch.testing.assert_close(operator, F.conv2d(x, weight, padding=1).relu(), rtol=1e-4, atol=1e-5)
    assert torch.equal(pooled, F.max_pool2d(x, 2))


def test_gates_look_at_what_a_layer_is_given_not_at_what_it_makes_of_it_by_padding() -> None:
    case = NETWORKS["circular padding and dilation"]
    gated = opinionated(case.make, example(case)[0])
    fast = gated.compact(fold=False)
    padded = next(
        node for node in fast.program.graph.nodes if node.op == "call_module" and "gate_site_1" in node.target
    )
    x = randn(4, *case.inputs[0])
    _, gates_BG = fast.watched(x)
    gated(x)
    assert torch.equal(gates_BG, gated.seen().gates_BG) and "pad" not in padded.args[0].name


def flattened() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 5),
    )  # fmt: skip


def chunked() -> nn.Module:
    def forward(n: Net, x: torch.Tensor) -> torch.Tensor:
        a, b = n.stem(x).chunk(2, 1)
        return n.head(n.out(torch.cat([a, b + n.two(n.one(b).relu())], 1)).mean((2, 3)))

    return Net(
        forward, stem=nn.Sequential(conv(3, 16), nn.ReLU(inplace=True)), one=conv(8, 8), two=conv(8, 8),
        out=conv(16, 16), head=nn.Linear(16, 5),
    )  # fmt: skip


@pytest.mark.parametrize("make", [flattened, chunked])
def test_views_behind_operators_that_work_in_place(make: Callable[[], nn.Module]) -> None:
    """torch.export makes them anew inside the layer that reads them."""
    x = randn(6, 3, 8, 8) * torch.rand(6, 3, 1, 1, generator=torch.Generator().manual_seed(0)) * 3
    gated = opinionated_(headgate.gate(randomize_(make()), x, kind="dynamic", target=0.6)).calibrate([x], batches=1)
    assert difference(gated.eval()(x), gated.compact()(x)) < 1e-5


def test_masks_from_several_places_are_exported(tmp_path: Path) -> None:
    def forward(n: Net, x: torch.Tensor) -> torch.Tensor:
        a = n.a(x).relu()
        return n.o(n.c(torch.cat([a, n.b(a).relu()], 1)).relu())

    net = Net(forward, a=conv(3, 8), b=conv(8, 8), c=conv(16, 8), o=nn.Conv2d(8, 4, 1))
    x = randn(4, 3, 8, 8)
    gated = opinionated_(headgate.gate(randomize_(net), x, kind="dynamic", target=0.6)).calibrate([x], batches=1)
    assert export_onnx(gated.compact().in_plain_operators(), x, tmp_path / "n.onnx") < 1e-5


def test_a_compact_network_is_not_traced_and_checks_what_it_is_given() -> None:
    x = randn(4, 3, 8, 8)
    fast = opinionated_(headgate.gate(randomize_(flattened()), x, kind="dynamic", target=0.6)).eval().compact()
    for refused in (headgate.count_macs, headgate.gate):
        with pytest.raises(headgate.ModelError, match="can't be traced"):
            refused(fast, x)
    site = next(module for module in fast.modules() if isinstance(module, GateSite))
    with pytest.raises(HeadgateError, match="looks at 8 channels"):
        site(randn(2, 5, 4, 4))


def test_frames_in_the_batch_are_refused() -> None:
    def forward(n: Net, x: torch.Tensor) -> torch.Tensor:
        y = n.b(n.a(x.flatten(0, 1)).relu()).relu().mean((2, 3))
        return n.fc(y.view(*x.shape[:2], -1).mean(1))

    clips = randn(2, 3, 3, 8, 8)
    gated = headgate.gate(Net(forward, a=conv(3, 8), b=conv(8, 8), fc=nn.Linear(8, 5)), clips, kind="dynamic")
    with pytest.raises(HeadgateError, match="folded with something else"):
        gated.eval().compact()
    with pytest.raises(headgate.ModelError, match="folded with something else"):
        headgate.add_exits(gated.model, clips, at=["a"], target=0.9)


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[:, :8], "flatten": lambda x: x.flatten(2), "view": lambda x: x.view(x.shape[0], 16, -1),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, training=False),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_a_view_of_the_residual_keeps_it_alive(name: str, stream: str) -> None:
    """The sum must not take the place of a residual that is read again through a view."""

    def forward(n: Net, x: torch.Tensor) -> torch.Tensor:
        x = n.bn0(n.stem(x)).relu()
        side = KEPT[name](x)
        z = (n.bn2(n.b(n.bn1(n.a(x)).relu())) + x).relu()
        return n.fc(z.mean((2, 3)) + side.flatten(2).mean(2).repeat(1, 16 // side.shape[1]))

    net = Net(
        forward, stem=conv(3, 16), bn0=nn.BatchNorm2d(16), a=conv(16, 16), bn1=nn.BatchNorm2d(16), b=conv(16, 16),
        bn2=nn.BatchNorm2d(16), fc=nn.Linear(16, 5),
    )  # fmt: skip
    x = randn(5, 3, 8, 8)
    gated = headgate.gate(randomize_(net).eval(), x, kind="dynamic", target=0.9, stream=stream)
    opinionated_(gated).eval().strategy("threshold", tau=0.5)
    assert difference(gated(x), gated.compact()(x)) < 1e-5


def test_without_the_compiled_kernel_every_masked_layer_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(4, 3, 8, 8)
    gated = opinionated_(headgate.gate(randomize_(flattened()), x, kind="dynamic", target=0.6)).eval()
    by_kernel = gated.compact().report
    monkeypatch.setattr(native, "compiled", lambda: None)
    plain = gated.compact().report
    assert plain.fast == () and {*by_kernel.fast, *by_kernel.dense} == set(plain.dense)
    assert any("no compiled kernel" in reason for reason in plain.dense.values())


class Stem(nn.Module):
    """A convolution, then something, then classes."""

    def __init__(self, body: nn.Module, mean: Callable[[Tensor], Tensor] = lambda x: x.mean((2, 3))) -> None:
        super().__init__()
        self.stem, self.body, self.fc, self.mean = conv(3, 8), body, nn.Linear(8, 5), mean

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.fc(self.mean(self.body(F.relu(self.stem(x)))))
        return answer


class Residual(nn.Module):
    def __init__(self, act: bool = True, between: nn.Module | None = None, **options: object) -> None:
        super().__init__()
        self.c1, self.c2 = (nn.Conv2d(8, 8, 3, **{"padding": 1, **options}) for _ in range(2))  # type: ignore[arg-type]
        self.between = nn.Identity() if between is None else between
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = self.c2(F.relu(self.between(self.c1(x)))) + x
        return F.relu(y) if self.act else y


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = conv(8, 8), nn.Conv2d(8, 8, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.c2(F.relu(self.c1(x))) + F.max_pool2d(x, 2))


SIZE = randn(2, 3, 8, 8)


def test_images_of_another_size_are_computed_right_or_refused() -> None:
    free = opinionated(lambda: Stem(Residual()), SIZE)
    assert_same(free, free.compact(), (3, 11, 9), 3, 0)
    places = opinionated(lambda: Stem(Residual(), lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[3])), SIZE)
    for gated, size in ((places, 16), (opinionated(lambda: Stem(Halving()), SIZE), 9)):
        fast = gated.compact()
        for _ in range(2):
            with pytest.raises(HeadgateError, match=rf"made for images of \(3, 8, 8\).*\(3, {size}, {size}\)"):
                fast(randn(1, 3, size, size))
        assert_same(gated, fast, (3, 8, 8), 3, 0)


def test_threads_that_come_with_new_sizes() -> None:
    gated = opinionated(lambda: Stem(Residual()), SIZE)
    fast = gated.compact()
    images = [randn(2, 3, side, side) for side in (8, 9, 9, 10, 8, 11)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(fast, images))
    assert not torch.compiler.is_compiling()
    assert all(difference(gated(x), y) < CLOSE for x, y in zip(images, found, strict=True))


def test_only_what_was_recorded_is_remembered_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = opinionated(lambda: Stem(Residual()), SIZE)
    fast = gated.compact()
    record = compact_module._exported

    def fail(net: nn.Module, example: Tensor) -> None:
        raise HeadgateError("torch.export can't now")

    monkeypatch.setattr(compact_module, "_exported", fail)
    with pytest.raises(HeadgateError, match="would be wrong for"):
        fast(randn(2, 3, 9, 9))
    monkeypatch.setattr(compact_module, "_exported", record)
    monkeypatch.setattr(compact_module, "MOST_SIZES", 2)
    for side in (9, 10, 8):
        assert_same(gated, fast, (3, side, side), 2, side)
        assert len(fast._sizes._fits) <= 2


def test_a_residual_of_another_shape_is_never_written_to() -> None:
    layer = Conv(torch.zeros(8, 8, 3, 3), None, [2, 2], [1, 1], [1, 1], False, True, False)
    layer.layer = "c2"
    with pytest.raises(HeadgateError, match=r"`c2` gives \[1, 8, 5, 5\], but is added to \[1, 8, 4, 4\]"):
        layer(torch.zeros(1, 8, 9, 9), None, None, torch.zeros(1, 8, 4, 4))
    with pytest.raises(HeadgateError, match="fewer than its kernel"):
        Conv(torch.zeros(8, 8, 5, 5), None, [1, 1], [0, 0], [1, 1], False, False, False)(
            torch.zeros(1, 8, 3, 3), None, None, None
        )


def test_what_is_added_without_relu_is_rectified_by_the_next_block_that_has_one() -> None:
    def make() -> nn.Module:
        net = Stem(nn.Sequential(Residual(act=False), Residual(), Residual(act=False), Residual()))
        nn.init.constant_(net.body[0].c2.bias, -1)
        return net

    gated = opinionated(make, SIZE)
    gated.model.body[0].c2.bias.data.fill_(-1)
    fast = gated.compact()
    for seed in range(4):
        assert_same(gated, fast, (3, 8, 8), 5, seed)


@pytest.mark.parametrize("closed", ["all", "first"])
@pytest.mark.parametrize("options", [{}, {"stream": "shared"}, {"granularity": 4}, {"static": ["block.conv1"]}])
@pytest.mark.parametrize("projecting", [False, True])
def test_branches_that_are_closed_for_good(closed: str, options: dict[str, object], projecting: bool) -> None:
    """Whatever is closed for all images, what is decided elsewhere is decided as before."""
    make = (lambda: residual(lambda: nn.Conv2d(8, 12, 1, 2), 12, 2)) if projecting else two_blocks
    gated = opinionated(make, randn(1, 3, 6, 6), **options)
    if gated._fixed.count:
        gated.gates.set_probabilities(torch.zeros(gated._fixed.count))
    with torch.no_grad():
        for network in gated.dynamic.networks if closed == "all" else gated.dynamic.networks[:1]:
            network.head.weight.zero_()
            network.head.bias.fill_(-9.0)
    fast = gated.compact()
    for images in (1, 4):
        assert_same(gated, fast, (3, 6, 6), images, images)


def test_a_sum_of_a_layer_with_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1, self.c2 = conv(8, 8), conv(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.c2(torch.sigmoid(self.c1(x)))
            return F.relu(y + y + x)

    gated = opinionated(lambda: Stem(nn.Sequential(Twice(), Twice())), SIZE)
    assert_same(gated, gated.compact(), (3, 8, 8), 4, 0)


def test_statistics_of_the_batch_are_of_all_images() -> None:
    def make() -> nn.Module:
        return Stem(nn.Sequential(*(Residual(between=nn.BatchNorm2d(8, track_running_stats=False)) for _ in range(2))))

    gated = opinionated(make, SIZE)
    fast = gated.compact()
    assert "its BatchNorm averages over the batch" in fast.report.dense.values()
    assert_same(gated, fast, (3, 8, 8), 4, 0)


@pytest.mark.parametrize(
    ("padding", "options"), [("same", {}), ("valid", {"kernel_size": 1}), ("same", {"dilation": 2})]
)
def test_padding_in_words_is_computed_by_the_kernel(padding: str, options: dict[str, object]) -> None:
    def layer() -> nn.Module:
        return nn.Conv2d(8, 8, **{"kernel_size": 3, "padding": padding, **options})  # type: ignore[arg-type]

    gated = opinionated(lambda: Stem(nn.Sequential(layer(), nn.ReLU(), layer(), nn.ReLU())), SIZE)
    fast = gated.compact()
    assert not any("no kernel" in reason for layer, reason in fast.report.dense.items() if layer != "fc")
    assert_same(gated, fast, (3, 8, 8), 3, 0)


def test_all_gates_open_whatever_they_would_say() -> None:
    gated = opinionated(two_blocks, randn(1, 3, 6, 6))
    with torch.no_grad():
        for network in gated.dynamic.networks:
            network.head.bias.fill_(-200.0)
    gated.strategy("always_on")
    x = randn(3, 3, 6, 6)
    assert difference(gated(x), gated.compact()(x)) < CLOSE


def test_a_compact_network_holds_no_more_than_it_reads_and_can_not_be_changed() -> None:
    gated = opinionated(cifar_resnet20, randn(1, 3, 32, 32))
    fast = gated.compact()
    dense = sum(tensor.numel() for tensor in gated.model.parameters())
    held = {id(tensor): tensor.numel() for tensor in [*fast.parameters(), *fast.buffers()]}
    assert sum(held.values()) < 1.2 * dense
    for change in (
        lambda: fast.load_state_dict(fast.state_dict()), lambda: pickle.dumps(fast), fast.double, fast.half,
    ):  # fmt: skip
        with pytest.raises(HeadgateError, match="gated"):
            change()
    assert fast.float().to("cpu") is fast
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(fast)


def test_weights_may_be_moved_to_shared_memory() -> None:
    gated = opinionated(two_blocks, randn(1, 3, 8, 8))
    fast = gated.compact()
    x = randn(4, 3, 8, 8)
    before = fast(x)
    assert torch.equal(fast.share_memory()(x), before)
    sites = [module for module in fast.modules() if isinstance(module, GateSite)]
    for site in sites:
        site.head_bias.fill_(-1e9)  # where the weights are now is where the kernel reads them
    _, gates_BG = fast.watched(x)
    for number in (number for site in sites for number in site.site.masks):
        mask = gated.graph.masks[number]
        assert bool((gates_BG[:, mask.gates].sum(1) == (0 if mask.may_die else 1)).all())


class HandedOn(nn.Module):
    """A branch whose last module gives what it is given."""

    def __init__(self, last: nn.Module, act: Callable[[Tensor], Tensor], groups: int) -> None:
        super().__init__()
        self.a, self.b, self.last, self.act = conv(8, 8), conv(8, 8, groups=groups), last, act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.act(self.b(F.relu(self.a(x)))))


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("options", [{}, {"granularity": "layer"}])
def test_masks_behind_modules_that_do_nothing(
    groups: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GateNetwork, "macs", 0)
    ends = (nn.Identity(), lambda x: x), (nn.Dropout(), F.relu), (nn.Identity(), torch.sigmoid)
    gated = opinionated(lambda: Stem(nn.Sequential(*(HandedOn(*end, groups) for end in ends))), SIZE, **options)
    fast = gated.compact()
    assert_same(gated, fast, (3, 8, 8), 5, 0)
    assert not any(node.target is torch.ops.aten.clone.default for node in fast.program.graph.nodes)
    masked = [layer for layer, reason in fast.report.dense.items() if reason == "masked behind the module"]
    # the kernel's own zeros stay zeros up to a sigmoid
    assert masked == [f"body.{number}.last" for number in ((2,) if groups == 1 else range(3))]


def test_a_mask_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = opinionated(lambda: Stem(nn.Sequential(HandedOn(nn.Identity(), F.relu, 8))), SIZE)
    gated.compact()
    monkeypatch.setattr(compact_module, "marked", lambda net, graph: nullcontext())
    with pytest.raises(HeadgateError, match=r"`body.0.last`, whose output is masked, is not found"):
        gated.compact()


def test_layers_whose_results_nobody_uses() -> None:
    def forward(n: Net, x: Tensor) -> Tensor:
        y = n.one(n.stem(x).relu())
        n.unused(y)
        return n.head(n.two(y).mean((2, 3)))

    def make() -> nn.Module:
        unused = nn.Sequential(conv(8, 8), nn.ReLU(inplace=True), Residual(), conv(8, 4))
        return Net(forward, stem=conv(3, 8), one=Residual(), two=Residual(), unused=unused, head=nn.Linear(8, 5))

    gated = opinionated(make, SIZE)
    assert [site.layer for site in gated.dynamic.sites] == ["one.c1", "two.c1"]
    assert_same(gated, gated.compact(), (3, 8, 8), 4, 0)


@pytest.mark.parametrize("seed", range(8))
def test_networks_nobody_wrote(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GateNetwork, "macs", 0)
    drawn = random.Random(seed)
    steps = [(drawn.choice(STEPS), *(drawn.randrange(12) for _ in range(3))) for _ in range(drawn.randint(2, 7))]
    options = {"granularity": drawn.choice(["channel", "layer", 3]), "stream": drawn.choice(["shared", "indexed"])}
    try:
        gated = opinionated(lambda: Random(steps).eval(), SIZE, **options)
    except headgate.NothingToGate:
        return
    gated.gates.set_probabilities(torch.rand(gated._fixed.count))
    assert_same(gated, gated.compact(fold=drawn.random() < 0.5), (3, 8, 8), 4, seed)


def test_images_of_another_size_are_refused_where_layers_are_timed_too() -> None:
    with pytest.raises(HeadgateError, match="was made for images of"):
        opinionated(scaled_by_hand, randn(1, 3, 8, 8)).compact(randn(2, 3, 16, 16))


def test_models_and_images_that_compact_can_not_take_are_told() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_blocks()

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            answer: Tensor = self.net(x) * scale
            return answer

    with pytest.raises(HeadgateError, match="one tensor and nothing else"):
        opinionated(Scaled, (randn(1, 3, 6, 6), 2.0)).compact()
    gated = opinionated(Scaled, randn(1, 3, 6, 6))
    for images, words in (
        ([randn(1, 3, 6, 6)], "list"), (randn(2, 4, 6, 6), r"\(2, 4, 6, 6\)"), (randn(0, 3, 6, 6), "no image"),
    ):  # fmt: skip
        with pytest.raises(HeadgateError, match=words):
            gated.compact(images)
    fast = gated.compact()
    with pytest.raises(HeadgateError, match="tensor of images, got list"):
        fast([randn(1, 3, 6, 6)])
    assert_same(gated, fast, (3, 6, 6), 3, 0)
