"""Layers that run in one call of the kernel give what they give one by one, bit for bit."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import headgate
from headgate.inference.compact import CompactModel
from headgate.inference.kernel import native, tape
from headgate.inference.kernel.prepared import Conv
from headgate.inference.kernel.tape import ConvStep, Steps
from headgate.models import cifar_resnet20
from tests.gates.test_dynamic import two_blocks
from tests.inference.test_compact import opinionated
from tests.networks import NETWORKS, conv, example
from tests.oracle import randn

pytestmark = pytest.mark.skipif(native.compiled() is None, reason="there is no compiled kernel without a compiler")
SIZE = randn(1, 3, 8, 8)


def steps_of(fast: CompactModel) -> list[Steps]:
    return [module for module in fast._quick.modules() if isinstance(module, Steps)]


def watched(steps: Steps) -> list[bool]:
    """Whether each call from now on was carried out one by one."""
    calls: list[bool] = []
    forward, one_by_one = steps.forward, steps.one_by_one

    def noted(*given: Tensor) -> list[Tensor]:
        calls.append(False)
        return forward(*given)

    def noted_too(*given: Tensor) -> list[Tensor]:
        calls[-1] = True
        return one_by_one(*given)

    steps.forward, steps.one_by_one = noted, noted_too  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("options", [{}, {"stream": "shared"}, {"granularity": "layer"}])
@pytest.mark.parametrize(
    "name",
    [
        "residual identity", "residual projection", "residual zero padding", "residual pre-activation", "two branches added",
        "dense block", "chunk", "channels last", "in place",
    ],
)  # fmt: skip
def test_joined_layers_are_the_layers(name: str, options: dict[str, Any]) -> None:
    case = NETWORKS[name]
    try:
        fast = opinionated(case.make, example(case)[0], **options).compact()
    except headgate.HeadgateError as error:
        assert options and "gate" in str(error), "without a branch to close there is no such gate"
        return
    for images in (1, 3):
        x = randn(images, *case.inputs[0], seed=images)
        for apart in (False, True):
            fast._arrange_(set(), apart)
            both = [tree_leaves(program(x.clone())) for program in (fast._layers, fast._quick)]
            assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


def test_a_network_is_a_few_calls() -> None:
    fast = opinionated(cifar_resnet20, randn(1, 3, 32, 32)).compact()
    left = [module for module in fast._quick.modules() if isinstance(module, Conv)]
    joined = [step for steps in steps_of(fast) for step in steps.steps if isinstance(step, ConvStep)]
    convs = [module for module in fast._layers.modules() if isinstance(module, Conv)]
    assert len(steps_of(fast)) <= 3 and not left and len(joined) == len(convs) >= 17


def test_layers_that_are_computed_densely_part_the_others() -> None:
    fast = opinionated(cifar_resnet20, randn(1, 3, 32, 32)).compact()
    x = randn(2, 3, 32, 32)
    before = fast(x)
    convs = [module for module in fast._layers.modules() if isinstance(module, Conv)]
    fast._arrange_({convs[4], convs[5]})
    joined = [step.layer for steps in steps_of(fast) for step in steps.steps if isinstance(step, ConvStep)]
    assert set(convs) - set(joined) >= {convs[4], convs[5]} and len(joined) >= len(convs) - 4
    torch.testing.assert_close(fast(x), before, rtol=1e-4, atol=1e-4)


def test_what_is_returned_stays_as_it_is() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_blocks()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found = self.net(x)
            return found, found * 2

    fast = opinionated(Features, SIZE).compact()
    first, second = randn(2, 3, 8, 8, seed=1), randn(2, 3, 8, 8, seed=2)
    kept = fast(first)
    copies = [each.clone() for each in kept]
    fast(second)
    assert all(torch.equal(*pair) for pair in zip(kept, copies, strict=True))
    assert torch.equal(first, randn(2, 3, 8, 8, seed=1)), "nor is what was given written to"


def test_memory_is_used_again() -> None:
    fast = opinionated(cifar_resnet20, randn(1, 3, 32, 32)).compact()
    fast(randn(1, 3, 32, 32))
    ((written,),) = steps_of(fast)[0]._tapes.values()
    assert written is not None
    activation = 16 * 32 * 32 * 4
    assert activation <= written.inside_bytes < 2 * activation, "three blocks with an inner activation each"


def test_threshold_and_shape_have_tapes_of_their_own() -> None:
    gated = opinionated(two_blocks, SIZE)
    fast = gated.strategy("threshold", tau=0.5).compact(fold=False)
    for tau in (0.5, 0.3, 0.9, 0.5):
        fast.tau = tau
        gated.strategy("threshold", tau=tau)
        for images in (1, 4):
            x = randn(images, 3, 8, 8, seed=images)
            torch.testing.assert_close(fast(x), gated(x), rtol=1e-4, atol=1e-4)
    assert len(steps_of(fast)[0]._tapes) == 3, "images apart are all of one shape"
    fast._arrange_(set(), apart=False)
    fast(randn(1, 3, 8, 8)), fast(randn(4, 3, 8, 8))
    assert len(steps_of(fast)[0]._tapes) == 2


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_images_that_go_through_apart(threads: int) -> None:
    fast = opinionated(cifar_resnet20, randn(1, 3, 32, 32)).compact()
    x = randn(7, 3, 32, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        answers = []
        for apart in (False, True):
            fast._arrange_(set(), apart)
            answers.append(fast(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*answers)


def test_where_weights_are_few_images_go_through_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = opinionated(two_blocks, SIZE)
    assert all(steps.apart for steps in steps_of(gated.compact()))
    monkeypatch.setattr(tape, "FEW_BYTES", 0)
    assert not any(steps.apart for steps in steps_of(gated.compact()))


class Sliced(nn.Module):
    """A block that reads one half of the channels: memory with gaps between images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c = conv(3, 16), conv(8, 8), conv(8, 8), conv(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.relu(self.stem(x)).chunk(2, 1)
        return self.c(torch.cat([first, second + self.b(torch.relu(self.a(second)))], 1)).mean((2, 3))


@pytest.mark.parametrize("apart", [False, True])
def test_images_with_gaps_between_them(apart: bool) -> None:
    gated = opinionated(Sliced, SIZE)
    fast = gated.compact()
    fast._arrange_(set(), apart)
    for images in (2, 5):
        x = randn(images, 3, 8, 8, seed=images)
        torch.testing.assert_close(fast(x), gated(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("apart", [False, True])
def test_slices_of_larger_tensors_are_given(apart: bool) -> None:
    fast = opinionated(two_blocks, SIZE).compact()
    fast._arrange_(set(), apart)
    steps = steps_of(fast)[0]
    for slices in ((slice(None), slice(0, 8)), (slice(None, None, 2), slice(0, 8))):
        whole = [
            torch.cat([each, each], 1).repeat(2, 1, 1, 1)
            for each in _given(steps, randn(4, 8, 8, 8))
            if each.dim() == 4
        ]
        twins = [each.clone() for each in whole]
        masks = [each for each in _given(steps, randn(4, 8, 8, 8)) if each.dim() != 4]
        both = [[each[slices] for each in given] + masks for given in (whole, twins)]
        results = [steps(*both[0]), steps.one_by_one(*both[1])]
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert all(torch.equal(*pair) for pair in zip(whole, twins, strict=True)), "what lies between is not touched"


def test_defaults_of_torch_change_nothing() -> None:
    fast = opinionated(two_blocks, SIZE).compact()
    x = randn(2, 3, 8, 8)
    expected = fast(x)
    steps_of(fast)[0]._tapes.clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(fast(x), expected) and fast(x).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("apart", [False, True])
def test_masks_of_other_images_are_told(apart: bool) -> None:
    layer = Conv(torch.randn(4, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, False, False)
    steps = Steps([ConvStep(layer, 0, 1, None, None, 2), ConvStep(layer, 2, None, None, None, 3)], 2, [3])
    steps.apart = apart
    with pytest.raises(headgate.HeadgateError, match="2 rows of images, but masks of 3"):
        steps(randn(2, 4, 8, 8), torch.ones(3, 4, dtype=torch.bool))


def test_padding_that_is_too_large_for_the_kernel_is_the_twins() -> None:
    layer = Conv(torch.randn(2, 64, 3, 3), None, [1, 1], [3000, 3000], [3000, 3000], False, False, False)
    steps = Steps([ConvStep(layer, 0, None, None, None, 1)], 1, [1])
    x = randn(1, 64, 4, 4)
    torch.testing.assert_close(steps(x)[0], torch.nn.functional.conv2d(x, layer.weight, None, 1, 3000, 3000))


@pytest.mark.parametrize("why", ["not contiguous", "no image", "too large", "no tape left"])
def test_where_no_tape_can_be_used_layers_are_called_one_by_one(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = opinionated(two_blocks, SIZE).compact()
    steps = steps_of(fast)[0]
    x = randn(0 if why == "no image" else 2, 8, 8, 8)
    expected = steps.one_by_one(*_given(steps, x))
    if why == "too large":
        monkeypatch.setattr(tape, "MOST_BYTES", 0)
    elif why == "no tape left":
        monkeypatch.setattr(tape, "MOST_TAPES", 0)
    given = _given(steps, x)
    if why == "not contiguous":
        given = [each.transpose(2, 3).contiguous().transpose(2, 3) if each.dim() == 4 else each for each in given]
    calls = watched(steps)
    for one, other in zip(steps(*given), expected, strict=True):
        assert torch.equal(one, other)
    assert calls == [why != "no tape left"]


def _given(steps: Steps, x: Tensor) -> list[Tensor]:
    """Images for what layers read or add to, open masks for the rest."""
    masks = {step.in_mask for step in steps.steps if isinstance(step, ConvStep)}
    masks |= {step.out_mask for step in steps.steps if isinstance(step, ConvStep)}
    return [torch.ones(1, 8, dtype=torch.bool) if number in masks else x.clone() for number in range(steps.given)]


def test_tensors_that_were_moved_are_read_where_they_are_now() -> None:
    fast = opinionated(two_blocks, SIZE).compact()
    x = randn(2, 3, 8, 8)
    before = fast(x)
    ((written,),) = steps_of(fast)[0]._tapes.values()
    assert written is not None and written.is_right
    fast.share_memory()
    assert not written.is_right
    assert torch.equal(fast(x), before)


def test_a_copy_writes_tapes_of_its_own() -> None:
    fast = opinionated(two_blocks, SIZE).compact()
    x = randn(2, 3, 8, 8)
    before = fast(x)
    twin = copy.deepcopy(fast)
    assert not steps_of(twin)[0]._tapes and {*_layers(twin)}.isdisjoint(_layers(fast))
    assert {*_layers(twin)} <= set(twin._layers.modules())
    del fast
    assert torch.equal(twin(x), before)


def _layers(fast: CompactModel) -> list[object]:
    return [step.layer for steps in steps_of(fast) for step in steps.steps]


def test_threads_do_not_disturb_each_other() -> None:
    fast = opinionated(cifar_resnet20, randn(1, 3, 32, 32)).compact()
    images = [randn(1 + seed % 3, 3, 32, 32, seed=seed) for seed in range(24)]
    alone = [fast(x) for x in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(fast, images))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
