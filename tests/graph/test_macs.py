"""Multiply-adds: by hand for small networks, by PyTorch's own counter for large ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headgate
from headgate.graph import macs as macs_module
from headgate.graph.macs import macs_by_layer
from headgate.models import import_torchvision
from tests.networks import NETWORKS, example
from tests.oracle import Net, independent_macs, weightless

models = import_torchvision().models
CLASSIFIERS = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18",
    "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t", "swin_v2_t", "vgg11", "vgg11_bn",
    "vit_b_16", "wide_resnet50_2",
]  # fmt: skip
"""The smallest of every family, and bottlenecks; `benchmarks/coverage.py` counts all of them."""

BY_HAND: list[tuple[str, nn.Module, tuple[int, ...], int]] = [
    ("convolution", nn.Conv2d(3, 8, 3), (3, 10, 12), 8 * 10 * 8 * 3 * 9),
    ("stride and padding", nn.Conv2d(3, 8, 3, stride=2, padding=1), (3, 8, 8), 4 * 4 * 8 * 3 * 9),
    ("groups", nn.Conv2d(8, 12, 3, padding=1, groups=4), (8, 5, 5), 25 * 12 * 2 * 9),
    ("depthwise", nn.Conv2d(8, 8, 3, padding=1, groups=8), (8, 5, 5), 25 * 8 * 9),
    ("one dimension", nn.Conv1d(4, 6, 5), (4, 20), 16 * 6 * 4 * 5),
    ("three dimensions", nn.Conv3d(2, 3, 2), (2, 4, 4, 4), 27 * 3 * 2 * 8),
    ("transposed", nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 5, 5), 25 * 4 * 6 * 9),
    ("linear", nn.Linear(7, 9), (7,), 63),
    ("linear on tokens", nn.Linear(7, 9), (5, 7), 5 * 63),
    ("norms and activations are free", nn.Sequential(nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 9)), (7,), 63),
    ("attention", Net(lambda n, x: n.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)), (5, 8),
     4 * 5 * 64 + 2 * 5 * 5 * 8),
    ("attention by keywords in another order",
     Net(lambda n, x: n.a(value=x[..., :4], key=x[..., :4], query=x)[0],
         a=nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True)), (5, 8), 2 * 5 * 64 + 2 * 5 * 4 * 8 + 2 * 5 * 5 * 8),
    ("fused attention", Net(lambda n, x: F.scaled_dot_product_attention(x, x, x)), (2, 5, 4), 2 * 2 * 5 * 5 * 4),
    ("matrix product", Net(lambda n, x: x @ x.transpose(1, 2)), (5, 4), 5 * 4 * 5),
    ("matrix times vector", Net(lambda n, x: x @ n.v, v=nn.Parameter(torch.ones(4))), (5, 4), 5 * 4),
    ("einsum", Net(lambda n, x: torch.einsum("bij,jk->bik", x, n.w), w=nn.Parameter(torch.ones(4, 3))), (5, 4), 5 * 4 * 3),
    ("a functional convolution", Net(lambda n, x: F.conv2d(x, n.w), w=nn.Parameter(torch.ones(6, 3, 1, 1))), (3, 4, 4), 16 * 18),
    ("a functional linear", Net(lambda n, x: F.linear(x, n.w), w=nn.Parameter(torch.ones(6, 3))), (3,), 18),
    ("image by image", Net(lambda n, x: torch.stack([n.a(image) for image in x]), a=nn.Conv2d(3, 8, 3)), (3, 11, 12),
     9 * 10 * 8 * 3 * 9),
    ("the first image", Net(lambda n, x: n.a(x[0])[None], a=nn.Conv2d(3, 8, 3)), (3, 10, 12), 8 * 10 * 8 * 3 * 9),
    ("transposed, image by image", Net(lambda n, x: torch.stack([n.a(image) for image in x]), a=nn.ConvTranspose1d(4, 6, 3)),
     (4, 5), 5 * 4 * 6 * 3),
    ("products, image by image", Net(lambda n, x: torch.stack([image @ image.T for image in x])), (5, 4), 5 * 4 * 5),
    ("one module used twice", Net(lambda n, x: n.a(n.a(x)), a=nn.Linear(4, 4)), (4,), 32),
    ("nothing to multiply", nn.ReLU(), (4,), 0),
]  # fmt: skip


@pytest.mark.parametrize(("model", "shape", "macs"), [row[1:] for row in BY_HAND], ids=[row[0] for row in BY_HAND])
@pytest.mark.parametrize("batch", [1, 3])
def test_macs_are_those_counted_by_hand(model: nn.Module, shape: tuple[int, ...], macs: int, batch: int) -> None:
    assert headgate.count_macs(model.eval(), torch.randn(batch, *shape)) == macs


def test_macs_by_layer_names_the_place() -> None:
    model = Net(
        lambda n, x: n.b(torch.matmul(n.a(x), n.w)),
        a=nn.Linear(4, 5),
        w=nn.Parameter(torch.ones(5, 3)),
        b=nn.Linear(3, 2),
    )
    macs = macs_by_layer(model, torch.randn(2, 4))
    assert (macs.pop("a"), macs.pop("b"), *macs.values()) == (20, 6, 15)


@pytest.mark.parametrize("name", NETWORKS)
def test_macs_of_a_small_network_are_those_of_the_flop_counter(name: str) -> None:
    case = NETWORKS[name]
    model = case.make().eval()
    assert headgate.count_macs(model, example(case)) == independent_macs(model, *example(case))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_macs_of_a_torchvision_model_are_those_of_the_flop_counter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(macs_module, "check_model", lambda model: None)  # counting needs no values
    options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with weightless():
        model = models.get_model(name, **options).eval().to("meta")
    size = 299 if name == "inception_v3" else 224
    x = torch.empty(1, 3, size, size, device="meta")
    assert headgate.count_macs(model, x) == independent_macs(model, x) > 0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = nn.Conv1d(3, 16, 3, padding=1), nn.GRU(16, 12, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.conv(x).transpose(1, 2))[0][:, -1]


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.one, self.two = nn.Parameter(torch.ones(5, 16)), nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.queries.expand(x.shape[0], -1, -1)) @ self.two(x).transpose(1, 2)


@pytest.mark.parametrize(
    ("model", "shape", "macs"),
    [
        (Recurrent(), (3, 10), 3 * 16 * 3 * 10 + 10 * 3 * 12 * 28),
        (Queries(), (9, 16), 5 * 16 * 32 + 9 * 16 * 32 + 5 * 9 * 32),
    ],
)
def test_what_is_made_for_every_image_but_not_of_it_counts_once(
    model: nn.Module, shape: tuple[int, ...], macs: int
) -> None:  # fmt: skip
    assert headgate.count_macs(model, torch.zeros(2, *shape)) == macs


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_gated_network_tells_its_own_macs(kind: str) -> None:
    case = NETWORKS["residual projection"]
    gated = headgate.gate(case.make(), example(case), kind=kind)
    with pytest.raises(headgate.ModelError, match=r"GatedModel can't be counted, .*ask gated.macs\(\)"):
        headgate.count_macs(gated, example(case))
    with pytest.raises(headgate.ModelError, match=r"GatedModel can't be counted"):
        headgate.count_macs(nn.Sequential(gated), example(case))
