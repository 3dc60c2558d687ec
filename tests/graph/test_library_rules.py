"""Layers of other libraries: known by name, or seen through operator by operator."""

import pytest
import torch
from timm.layers import BatchNormAct2d, Conv2dSame
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

import headgate
from tests.oracle import difference, randomize_


class Versioned(nn.Module):
    """A module that, like torchvision's MNASNet, wants the version that comes with a state dict."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 5, 3))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):  # type: ignore[no-untyped-def]
        if local_metadata.get("version") != 2:
            raise ValueError("no version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


CASES = {
    "timm's BatchNorm with an activation": lambda: nn.Sequential(
        nn.Conv2d(3, 12, 3), BatchNormAct2d(12), nn.Conv2d(12, 12, 3), BatchNormAct2d(12), nn.Conv2d(12, 5, 1)
    ),
    "timm's convolution with TensorFlow's padding": lambda: nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.ReLU(), Conv2dSame(12, 12, 3, stride=2), nn.ReLU(), nn.Conv2d(12, 5, 1)
    ),
    "torchvision's frozen BatchNorm": lambda: nn.Sequential(
        nn.Conv2d(3, 12, 3), FrozenBatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 5, 1)
    ),
    "a module that asks for a version": Versioned,
}


@pytest.mark.parametrize("name", CASES)
def test_layers_of_other_libraries_are_gated_and_shrunk(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = randomize_(CASES[name]().eval())
    gated = headgate.gate(model, torch.randn(2, 3, 11, 11), target=0.6)
    assert gated.graph.gateable_fraction == 1
    gated.set_gate_probabilities({mask: torch.rand(len(p)) for mask, p in gated.gate_probabilities().items()})
    small = gated.project().eval().shrink()
    x = torch.randn(3, 3, 11, 11)
    assert difference(gated(x), small(x)) < 1e-4
    assert gated.macs() == headgate.count_macs(small, x) <= 0.6 * gated.dense_macs
    headgate.save(small, tmp_path / "small.safetensors")
    assert difference(small(x), headgate.load(tmp_path / "small.safetensors", CASES[name]())(x)) == 0
