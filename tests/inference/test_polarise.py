"""Gates that all images agree on are decided for good: these images are answered as before, without these gates."""

from __future__ import annotations

import pytest
import torch

import headgate
from headgate.errors import HeadgateError, NotDecided
from headgate.inference.lowering.masks import GateSite
from tests.gates.test_dynamic import opinionated_, two_blocks
from tests.oracle import difference, randn


def leaning(shift: float) -> headgate.GatedModel:
    """Some gates that lean to one side so far that no image changes them, though their weights could."""
    gated = opinionated_(headgate.gate(two_blocks(), randn(1, 3, 6, 6), kind="dynamic", target=0.9)).eval()
    with torch.no_grad():
        for network in gated.dynamic.networks:
            network.head.bias[::3] += shift
            network.head.bias[1::3] -= shift
    return gated


@pytest.mark.parametrize("shift", [0.0, 50.0])
def test_images_that_agree_are_answered_as_before(shift: float) -> None:
    gated = leaning(shift)
    loader = [randn(16, 3, 6, 6, seed=seed) for seed in range(3)]
    before = [gated(x) for x in loader]
    said = torch.cat([gated.compact(fold=False).watched(x)[1] for x in loader])
    agreed = int(((said.all(0)) | (~said).all(0)).sum()) - gated._fixed.count
    found = gated.polarise_([(x, torch.zeros(16)) for x in loader])
    assert abs(found - agreed) <= 2 and (found > 0 or not shift)
    assert all(torch.equal(expected, gated(x)) for expected, x in zip(before, loader, strict=True))
    fast = gated.compact()
    assert fast.folded == (found > 0)
    deciding = sum(len(site.numbers) for site in fast.modules() if isinstance(site, GateSite))
    assert deciding < said.shape[1] or not shift
    for seed in range(5):
        x = randn(4, 3, 6, 6, seed=100 + seed)
        assert difference(gated(x), fast(x)) < 2e-5


def test_what_has_nothing_to_agree_on_is_told() -> None:
    with pytest.raises(NotDecided, match="shrink"):
        headgate.gate(two_blocks(), randn(1, 3, 6, 6)).polarise_([randn(1, 3, 6, 6)])
    gated = leaning(0.0)
    with pytest.raises(HeadgateError, match="empty"):
        gated.polarise_([])
    with pytest.raises(NotDecided, match="draws"):
        gated.strategy("sample").polarise_([randn(1, 3, 6, 6)])
