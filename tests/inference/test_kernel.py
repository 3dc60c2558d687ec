"""One contract for the compiled kernel, each of its instruction sets, and the plain twin."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headgate
from headgate.inference import kernel
from headgate.inference.kernel import masked_conv2d, native, plain, prepared
from headgate.inference.kernel.prepared import Conv, read_planes

SOURCE = Path(kernel.__file__).parent
COMPILER = shutil.which("g++")


def reference(
    x: Tensor, w: Tensor, b: Tensor | None, in_mask: Any, out_mask: Any, residual: Any, pairs: Any, relu: bool
) -> Tensor:
    if in_mask is not None:
        x = x * in_mask[:, :, None, None]
    y = F.conv2d(x.double(), w.double(), None if b is None else b.double(), *pairs)
    if out_mask is not None:
        y = y * out_mask[:, :, None, None]
    y = y if residual is None else y + residual
    return (y.relu() if relu else y).float()


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """A random convolution with random lists, also empty ones."""
    small = st.integers(1, 3)
    kernel_size = draw(st.sampled_from([(1, 1), (3, 3), (2, 5), (1, 3), (5, 5)]))
    stride, dilation = (draw(small), draw(small)), (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel_size, dilation, padding, strict=True)]
    size = [low + draw(st.integers(0, 18)) for low in least]
    images, inputs, outputs = draw(small), draw(st.integers(1, 20)), draw(st.integers(1, 20))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    rows = draw(st.sampled_from([images, 1]))
    share = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    mask = lambda channels: torch.rand(rows, channels, generator=generator) < share  # noqa: E731
    x = torch.randn(images, inputs, *size, generator=generator)
    if draw(st.booleans()):  # not contiguous
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    w = torch.randn(outputs, inputs, *kernel_size, generator=generator)
    shape = F.conv2d(x, w, None, stride, padding, dilation).shape
    return {
        "x": x, "w": w, "b": torch.randn(outputs, generator=generator) if draw(st.booleans()) else None,
        "in_mask": mask(inputs) if draw(st.booleans()) else None,
        "out_mask": mask(outputs) if draw(st.booleans()) else None,
        "residual": torch.randn(shape, generator=generator) if draw(st.booleans()) else None,
        "pairs": (stride, padding, dilation), "relu": draw(st.booleans()),
    }  # fmt: skip


def by_operator(case: dict[str, Any]) -> Tensor:
    stride, padding, dilation = case["pairs"]
    return masked_conv2d(
        case["x"], case["w"], case["b"], in_mask=case["in_mask"], out_mask=case["out_mask"],
        residual=case["residual"], stride=stride, padding=padding, dilation=dilation, relu=case["relu"],
    )  # fmt: skip


def by_twin(case: dict[str, Any]) -> Tensor:
    return plain.conv2d(
        case["x"],
        case["w"],
        case["b"],
        case["in_mask"],
        case["out_mask"],
        case["residual"],
        *case["pairs"],
        case["relu"],
    )


@pytest.mark.parametrize("implementation", [by_operator, by_twin])
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_only_the_open_channels_of_each_image(implementation: Any, case: dict[str, Any]) -> None:
    expected = reference(**{key: case[key] for key in case})
    torch.testing.assert_close(implementation(case), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", range(len(native.LEVELS)))
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_instruction_set(level: int, case: dict[str, Any]) -> None:
    expected = reference(**case)
    y = torch.full_like(expected, float("nan"))
    as_bytes = lambda mask: None if mask is None else mask.contiguous()  # noqa: E731
    native.conv2d(
        case["x"].contiguous(), case["w"], case["b"], as_bytes(case["in_mask"]), as_bytes(case["out_mask"]),
        case["residual"], *case["pairs"], case["relu"], y, level=level,
    )  # fmt: skip
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", range(len(native.LEVELS)))
@pytest.mark.parametrize(
    ("inputs", "outputs", "side", "size", "stride"),
    [
        (1, 7, 40, 1, 1),
        (500, 9, 13, 1, 1),
        (90, 40, 30, 1, 1),
        (450, 11, 14, 1, 2),
        (60, 20, 30, 3, 1),
        (70, 9, 15, 3, 2),
    ],
)
def test_lists_of_several_parts_and_runs(
    level: int, inputs: int, outputs: int, side: int, size: int, stride: int
) -> None:
    """Longer than the pixels of a part are near, and more runs than are computed together."""
    generator = torch.Generator().manual_seed(inputs)
    noise = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, w = noise(2, inputs, side, side), noise(outputs, inputs, size, size) / inputs**0.5
    pairs = (stride, stride), (size // 2, size // 2), (1, 1)
    in_mask = torch.rand(2, inputs, generator=generator) < 0.9
    in_mask[1, inputs // 2 :] = False
    out_mask = torch.rand(2, outputs, generator=generator) < 0.8
    bias, residual = noise(outputs), noise(*F.conv2d(x, w, None, *pairs).shape)
    expected = reference(x, w, bias, in_mask, out_mask, residual, pairs, True)
    y = torch.full_like(expected, float("nan"))
    native.conv2d(x, w, bias, in_mask, out_mask, residual, *pairs, True, y, level=level)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(case=cases(), rectified=st.booleans(), threads=st.integers(1, 3))
def test_adding_to_the_residual_in_its_place(case: dict[str, Any], rectified: bool, threads: int) -> None:
    residual = case["residual"]
    if residual is None:
        residual = torch.randn_like(reference(**case))
    residual = residual.abs() if rectified else residual
    expected = reference(**{**case, "residual": residual})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.ops.headgate.masked_conv2d_add_(
            case["x"], case["w"], case["b"], case["in_mask"], case["out_mask"], residual,
            *(list(pair) for pair in case["pairs"]), case["relu"], rectified,
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(residual, expected, rtol=1e-3, atol=1e-3)


@settings(max_examples=80, deadline=None)
@given(
    images=st.integers(1, 3), channels=st.integers(1, 20), size=st.integers(1, 9), seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), arriving=st.booleans(),
    threshold=st.sampled_from([-1e9, 0.0, 0.4, 1e9]),
)  # fmt: skip
def test_a_gate_network_and_its_twin(
    images: int, channels: int, size: int, seed: int, sizes: list[int], arriving: bool, threshold: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x = noise(images, channels, size, size + 1)
    trunk, head = (noise(16, channels), noise(16)), (noise(sum(sizes), 16), noise(sum(sizes)))
    mask = torch.rand(images, channels, generator=generator) < 0.6 if arriving else None
    immortal = [number % 2 for number in range(len(sizes))]
    groups = [*range(0, len(sizes), 2), -1, len(sizes) - 1, -1]
    means = x.mean((2, 3))
    expected = plain.gate_masks(means, mask, trunk, head, threshold, sizes, immortal, groups)
    found = torch.ops.headgate.gate_masks(x, mask, *trunk, *head, threshold, sizes, immortal, groups)
    logits = F.linear(torch.relu(F.linear(means if mask is None else means * mask, *trunk)), *head)
    if bool(((logits - threshold).abs() < 1e-4).any()):
        return  # rounding decides
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for number, part in enumerate(found):
        assert part.shape == (images, sizes[number])
    if threshold == 1e9 and len(sizes) > 1:
        assert not found[0].any(), "a group closes with its first member"


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(3, 12), st.integers(3, 12)),
    kernel_size=st.tuples(st.integers(1, 3), st.integers(1, 3)), stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padded=st.booleans(), seed=st.integers(0, 2**31), nan=st.booleans(),
)  # fmt: skip
def test_max_pooling(
    shape: tuple[int, ...], kernel_size: tuple[int, int], stride: tuple[int, int], padded: bool, seed: int, nan: bool
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if nan:
        x[0, 0, 1, 1] = float("nan")
    padding = [size // 2 if padded else 0 for size in kernel_size]
    expected = F.max_pool2d(x, kernel_size, stride, padding)
    found = torch.ops.headgate.max_pool2d(x, list(kernel_size), list(stride), padding)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)),
    tile=st.tuples(st.integers(1, 5), st.integers(1, 5)), seed=st.integers(0, 2**31), nan=st.booleans(),
)  # fmt: skip
def test_what_an_exit_reads(shape: tuple[int, ...], tile: tuple[int, int], seed: int, nan: bool) -> None:
    """Means, and rectified means over tiles, are those of the plain twin: also where tiles do not fill the plane."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if nan and x.numel():
        x[0, 0, 0, 0] = float("nan")
    scale, shift = torch.randn(2, shape[1], generator=generator)
    tile = min(tile[0], shape[2]), min(tile[1], shape[3])
    found, expected = read_planes(x, scale, shift, tile), plain.read_planes(x, scale, shift, tile)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_the_kernel_was_compiled_where_there_is_a_compiler() -> None:
    assert (native.compiled() is not None) == (COMPILER is not None)
    assert headgate.kernel_level() in ("plain", *native.LEVELS)


def test_address_sanitizer_finds_nothing(tmp_path: Path) -> None:
    assert COMPILER is not None, "the test machine has g++"
    program = tmp_path / "check"
    build = [COMPILER, "-O0", "-std=gnu++17", "-ffp-contract=fast", "-fopenmp", "-fsanitize=address,undefined"]
    source = Path(__file__).with_name("kernel_check.cpp")
    subprocess.run([*build, "-I", str(SOURCE), str(source), "-o", str(program)], check=True, capture_output=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stdout + done.stderr


def test_without_the_compiled_kernel_the_twin_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(2, 4, 5, 5), torch.randn(3, 4, 3, 3)
    mask = torch.tensor([[True, False, True, True], [False, False, True, False]])
    expected = masked_conv2d(x, w, in_mask=mask)
    monkeypatch.setattr(native, "compiled", lambda: None)
    torch.testing.assert_close(masked_conv2d(x, w, in_mask=mask), expected, rtol=1e-4, atol=1e-4)
    assert native.kernel_level() == "plain"


def test_other_precisions_are_the_twins() -> None:
    x, w = torch.randn(1, 2, 4, 4, dtype=torch.float64), torch.randn(2, 2, 1, 1, dtype=torch.float64)
    assert masked_conv2d(x, w).dtype == torch.float64


def test_a_library_of_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = native.compiled.__wrapped__
    assert find().headgate_version() == native.VERSION
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    with pytest.warns(RuntimeWarning, match="of another version.*Install headgate again"):
        assert find() is None
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert find() is None, "where nothing was compiled, nothing is said"


def test_images_with_more_places_than_32_bits_can_tell() -> None:
    channels, side = 65, 5793
    assert channels * side**2 > 2**31
    no_reserve = 0x4000  # pages that are not read take no memory; mmap.MAP_NORESERVE of later Pythons, on Linux
    memory = mmap.mmap(-1, 4 * channels * side**2, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    x = torch.frombuffer(memory, dtype=torch.float32).view(1, channels, side, side)
    x[0, -1, 1000, 2000] = 3
    last = torch.arange(channels)[None] == channels - 1
    y = masked_conv2d(x, torch.full((1, channels, 1, 1), 2.0), in_mask=last, stride=(1000, 1000))
    assert y.shape == (1, 1, 6, 6) and y[0, 0, 1, 2] == 6 and int(y.count_nonzero()) == 1


def test_what_is_too_large_for_the_kernel_is_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_of_now = native.compiled()
    assert kernel_of_now is not None

    def asked(channels: int, side: int) -> int:
        numbers = (ctypes.c_int64 * 15)(1, channels, side, side, 0, side, side, 3, 3, 1, 1, 1, 1, 1, 1)
        nothing = None, None, None, None, None, None, 0, None, 0
        answer: int = kernel_of_now.headgate_conv2d(*nothing, ctypes.addressof(numbers), 0, 0, 1, -1)
        return answer

    assert asked(65, 5793) == 1 and asked(2**28, 1) == 1 and asked(64, 56) == 0

    x, w, residual = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3), torch.randn(2, 4, 5, 5)
    given = x, w, None, torch.rand(2, 4) < 0.5, torch.rand(2, 4) < 0.5
    expected = plain.conv2d(*given, residual, (1, 1), (1, 1), (1, 1), True)
    layer = Conv(w, None, [1, 1], [1, 1], [1, 1], True, True, False)

    class TooLarge:
        @staticmethod
        def headgate_conv2d(*_: Any) -> int:
            return 1

    monkeypatch.setattr(native, "compiled", lambda: TooLarge)
    layer._call = TooLarge
    pairs = [1, 1], [1, 1], [1, 1]
    in_place = residual.clone()
    torch.ops.headgate.masked_conv2d_add_(*given, in_place, *pairs, True, False)
    answers = torch.ops.headgate.masked_conv2d(*given, residual, *pairs, True), in_place
    assert all(torch.equal(answer, expected) for answer in answers)
    assert torch.equal(layer(x, *given[3:], residual), expected)


def test_a_layer_remembers_only_so_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_SHAPES", 3)
    layer = Conv(torch.randn(3, 2, 1, 1), None, [1, 1], [0, 0], [1, 1], False, False, False)
    for images in (1, 2, 3, 4, 5, 1):
        x = torch.randn(images, 2, 4, 4)
        torch.testing.assert_close(layer(x, None, None, None), F.conv2d(x, layer.weight))
        assert len(layer._shapes) <= 3


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4, 3, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return masked_conv2d(x, self.weight, in_mask=x.mean((2, 3)) > 0, padding=(1, 1), relu=True)


def test_export_sees_the_operator() -> None:
    net, x = Masked(), torch.randn(2, 4, 6, 6)
    exported = torch.export.export(net, (x,))
    assert any("masked_conv2d" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), net(x))


def test_the_operator_passes_torchs_own_checks() -> None:
    x, w = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 3, 3)
    mask = torch.rand(2, 4) < 0.5
    arguments = (x, w, None, mask, None, None, [1, 1], [1, 1], [1, 1], True)
    torch.library.opcheck(
        torch.ops.headgate.masked_conv2d.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_mask": torch.ones(2, 5)}, "in_mask"), ({"out_mask": torch.ones(3, 3)}, "out_mask"),
        ({"residual": torch.zeros(1)}, "residual"), ({"padding": (0, 0)}, "smaller than the kernel"),
        ({"bias": torch.ones(1)}, r"the bias is \(1,\), which does not fit 3 output channels"),
        ({"bias": torch.ones(1, 3)}, "the bias"), ({"stride": (1, 0)}, r"stride=\[1, 0\]"),
        ({"padding": (-1, 1)}, r"padding=\[-1, 1\]"), ({"dilation": (0, 1)}, r"dilation=\[0, 1\]"),
        ({"x": torch.randn(4)}, "takes images"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(headgate.HeadgateError, match=message):
        masked_conv2d(**{"x": torch.randn(2, 4, 2, 2), "weight": torch.randn(3, 4, 3, 3), "padding": (1, 1), **change})


def test_a_bias_that_does_not_fit_is_not_read_past_its_end_in_place_either() -> None:
    x, w, y = torch.randn(2, 4, 2, 2), torch.randn(3, 4, 1, 1), torch.zeros(2, 3, 2, 2)
    with pytest.raises(headgate.HeadgateError, match="the bias"):
        torch.ops.headgate.masked_conv2d_add_(x, w, torch.ones(1), None, None, y, [1, 1], [0, 0], [1, 1], True, False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kernel_size", "stride", "padding", "message"),
    [
        ([3, 3], [2, 2], [0, 0], r"images of \(2, 2\) are smaller than the kernel \(3, 3\)"),
        ([2, 2], [0, 1], [0, 0], "stride"), ([0, 1], [1, 1], [0, 0], "kernel"), ([2, 2], [1, 1], [-1, 0], "padding"),
        ([2, 2], [1, 1], [2, 0], "more than half"),
    ],
)  # fmt: skip
def test_a_pooling_that_does_not_fit_is_said(
    kernel_size: list[int], stride: list[int], padding: list[int], message: str, device: str
) -> None:
    with pytest.raises(headgate.HeadgateError, match=message):
        torch.ops.headgate.max_pool2d(torch.ones(1, 1, 2, 2, device=device), kernel_size, stride, padding)
