"""Small networks of a user's own, one for each rule: what must be gated in them, what must be frozen, and why.

Every network ends in a layer called `head`, which is never gated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import Net

IMAGE = (3, 8, 8)


def conv(inputs: int, outputs: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, **{"padding": size // 2, **options})


def pooled(net: Any, x: Tensor) -> Tensor:
    return net.head(x.mean((2, 3)))


def head(inputs: int) -> nn.Linear:
    return nn.Linear(inputs, 5)


@dataclass(frozen=True)
class Case:
    """A network, the shapes of its inputs (without the batch), and what is expected of its gates."""

    make: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...] = (IMAGE,)
    gated: str = ""
    """Layers that must have gates on their own outputs, separated by spaces (shared stream, single channels)."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Layers that must be frozen, and what the reason must say."""
    branches: str = ""
    """Branches that can be closed as a whole."""
    plain: bool = True
    """Whether a network with a shared stream must shrink without modules of headgate's own (dead branches apart)."""


class Block(nn.Module):
    """The residual block of the paper: two convolutions, and a shortcut of any kind."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, stride=stride, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class PreActivation(nn.Module):
    """A block whose norms come first, so that the stream itself is never normed or rectified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width), conv(width, width)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


class ZeroPad(nn.Module):
    """The parameter-free shortcut: every second pixel, zero channels on both sides."""

    def __init__(self, amount: int) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.amount, self.amount))


class SqueezeExcite(nn.Module):
    """Channels scaled by numbers computed from their means, with linear layers."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width = x.shape[:2]
        scale = self.up(F.relu(self.down(x.mean((2, 3)))))
        return x * torch.sigmoid(scale).view(batch, width, 1, 1)


class DropPath(nn.Module):
    """Stochastic depth: drops the branch of an image in training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.empty(len(x), 1, 1, 1, device=x.device, dtype=x.dtype).bernoulli_(0.8) / 0.8


class Shuffle(nn.Module):
    """ShuffleNet's channel shuffle, as its authors wrote it."""

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


class AttentionBlock(nn.Module):
    """A transformer's block: attention and MLP, each normed and added."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Twins(nn.Module):
    """Two convolutions with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(3, 8), head(8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self, F.relu(self.a(x)) + F.relu(self.b(x.flip(3))))


class OwnWeight(nn.Module):
    """A convolution as a function, its weight a parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight, self.head = conv(3, 8), nn.Parameter(torch.randn(8, 8, 3, 3) / 8), head(8)

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self, F.relu(F.conv2d(F.relu(self.first(x)), self.weight, padding=1)))


class LayerScale(nn.Module):
    """A branch times a parameter, one number a channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2, self.scale = conv(width, 12), conv(12, width), nn.Parameter(torch.randn(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.conv2(F.gelu(self.conv1(x)))


class Auxiliary(nn.Module):
    """A second head that runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head, self.extra = conv(3, 8), conv(8, 8), head(8), head(8)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.a(x))
        final = pooled(self, F.relu(self.b(x)))
        return (final, self.extra(x.mean((2, 3)))) if self.training else final


class TwoNames(nn.Module):
    """Modules as attributes and in a list, as is often written; the forward code takes them from the list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.block, self.last = conv(3, 8), nn.BatchNorm2d(8), Block(8, 8), conv(8, 6)
        self.stages = nn.ModuleList([self.stem, self.norm, nn.ReLU(), self.block, self.last])
        self.head = head(6)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return pooled(self, F.relu(x))


def residual(shortcut: Callable[[], nn.Module] | None = None, width: int = 8, stride: int = 1) -> nn.Module:
    """A stem, a block with that shortcut, a block without."""
    block = Block(8, width, stride, None if shortcut is None else shortcut())
    return Net(
        lambda n, x: pooled(n, n.last(n.block(F.relu(n.norm(n.stem(x)))))),
        stem=conv(3, 8), norm=nn.BatchNorm2d(8), block=block, last=Block(width, width), head=head(width),
    )  # fmt: skip


def two_convs(between: Callable[[Any, Tensor], Tensor], width: int = 8, reads: int | None = None, **parts: Any) -> Any:
    """`a`, something between, `b`, the head: the something is what a case is about."""
    return Net(
        lambda n, x: pooled(n, F.relu(n.b(between(n, n.a(x))))),
        a=conv(3, width), b=conv(width if reads is None else reads, 6), head=head(6), **parts,
    )  # fmt: skip


def tied_split(n: Any, x: Tensor) -> Tensor:
    left, right = n.a(x).chunk(2, 1)
    return pooled(n, F.relu(n.b(left * torch.sigmoid(right))))


def unequal_split(n: Any, x: Tensor) -> Tensor:
    left, right = n.a(x).split([4, 8], 1)
    return n.head(torch.cat([F.relu(n.b(left)).mean((2, 3)), F.relu(n.c(right)).mean((2, 3))], 1))


def alias_then_read(n: Any, x: Tensor) -> Tensor:
    x = n.a(x)
    x.flatten(2).mul_(2)
    return pooled(n, F.relu(n.b(x)))


def inplace(n: Any, x: Tensor) -> Tensor:
    x = F.relu(n.a(x), inplace=True)
    y = n.b(x)
    y += x
    return pooled(n, n.c(y.mul_(0.5)).relu_())


def dense_block(n: Any, x: Tensor) -> Tensor:
    x = n.stem(x)
    x = torch.cat([x, n.a(F.relu(n.norm_a(x)))], 1)
    x = torch.cat([x, n.b(F.relu(n.norm_b(x)))], 1)
    return pooled(n, F.relu(n.norm_c(x)))


def unet(n: Any, x: Tensor) -> Tensor:
    x = F.relu(n.down1(x))
    y = F.relu(n.down2(F.max_pool2d(x, 2)))
    return n.head(F.relu(n.merge(torch.cat([x, F.relu(n.up(y))], 1))))


def spatial_attention(n: Any, x: Tensor) -> Tensor:
    x = F.relu(n.a(x))
    return pooled(n, F.relu(n.b(x * torch.sigmoid(n.gate(x)))))


def self_product(n: Any, x: Tensor) -> Tensor:
    flat = n.a(x).flatten(2)
    return pooled(n, F.relu(n.b((flat @ (flat.transpose(1, 2) @ flat).softmax(-1)).view(-1, 8, 8, 8))))


def mlp(n: Any, x: Tensor) -> Tensor:
    return n.head(F.relu(n.norm(n.b(F.gelu(n.a(x))))))


def channels_last(n: Any, x: Tensor) -> Tensor:
    y = n.down(F.gelu(n.up(n.norm(n.depthwise(x).permute(0, 2, 3, 1)))))
    return x + y.permute(0, 3, 1, 2)


def mobile(n: Any, x: Tensor) -> Tensor:
    y = F.hardswish(n.norm1(n.expand(x)))
    y = F.hardswish(n.norm2(n.depthwise(y)))
    return x + n.norm3(n.project(n.excite(y)))


def stacked(n: Any, x: Tensor) -> Tensor:
    return pooled(n, torch.stack([F.relu(n.a(x)), F.relu(n.b(x))]).sum(0))


def seq(*layers: nn.Module) -> Callable[[], nn.Module]:
    """A Sequential with names `0`, `1`, …, and `head` for the last."""

    def make() -> nn.Module:
        made = nn.Sequential()
        for number, layer in enumerate(layers):
            made.add_module("head" if number == len(layers) - 1 else str(number), layer)
        return made

    return make


NETWORKS: dict[str, Case] = {
    # ------------------------------------------------------------------------------------------ residual streams
    "residual identity": Case(
        residual, gated="stem block.conv1 last.conv1", branches="block.bn2 last.bn2"
    ),
    "residual projection": Case(
        lambda: residual(lambda: nn.Sequential(conv(8, 12, 1, stride=2), nn.BatchNorm2d(12)), 12, 2),
        gated="stem block.conv1 block.conv2 last.conv1", branches="block.bn2 last.bn2",
    ),
    "residual zero padding": Case(
        lambda: residual(lambda: ZeroPad(4), 16, 2),
        gated="stem block.conv1 block.conv2 last.conv1", branches="block.bn2 last.bn2", plain=False,
    ),
    "residual zero padding by a lambda": Case(
        lambda: residual(lambda: Net(lambda n, x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))), 16, 2),
        gated="stem block.conv1 block.conv2 last.conv1", branches="block.bn2 last.bn2", plain=False,
    ),
    "residual strided by pooling": Case(
        lambda: residual(lambda: nn.AvgPool2d(2), 8, 2),
        gated="stem block.conv1 last.conv1", branches="block.bn2 last.bn2",
    ),
    "residual pre-activation": Case(
        lambda: Net(
            lambda n, x: pooled(n, F.relu(n.norm(n.two(n.one(n.stem(x)))))),
            stem=conv(3, 8), one=PreActivation(8), two=PreActivation(8), norm=nn.BatchNorm2d(8), head=head(8),
        ),
        gated="stem one.conv1 two.conv1", branches="one.conv2 two.conv2",
    ),
    "two branches added": Case(
        lambda: Net(
            lambda n, x: pooled(n, (s := F.relu(n.stem(x))) + F.relu(n.a(s)) + n.c(F.relu(n.b(s)))),
            stem=conv(3, 8), a=conv(8, 8, 1), b=conv(8, 6), c=conv(6, 8), head=head(8),
        ),
        gated="stem b", branches="a c",
    ),
    "layer scale": Case(
        lambda: Net(
            lambda n, x: pooled(n, n.block(n.stem(x))), stem=conv(3, 8), block=LayerScale(8), head=head(8)
        ),
        gated="stem block.conv1", branches="block.conv2",
    ),
    "stochastic depth": Case(
        lambda: Net(
            lambda n, x: pooled(n, F.relu((s := F.relu(n.stem(x))) + n.drop(n.b(F.relu(n.a(s)))))),
            stem=conv(3, 8), a=conv(8, 6), b=conv(6, 8), drop=DropPath(), head=head(8),
        ),
        gated="stem a", branches="drop",
    ),
    # ------------------------------------------------------------------------------------- structure of channels
    "concatenation": Case(
        lambda: Net(
            lambda n, x: pooled(n, F.relu(n.c(torch.cat([n.a(x), F.relu(n.b(x)), x], 1)))),
            a=conv(3, 6), b=conv(3, 10), c=conv(19, 8), head=head(8),
        ),
        gated="a b c",
    ),
    "dense block": Case(
        lambda: Net(
            dense_block,
            stem=conv(3, 8), a=conv(8, 6), b=conv(14, 6), norm_a=nn.BatchNorm2d(8), norm_b=nn.BatchNorm2d(14),
            norm_c=nn.BatchNorm2d(20), head=head(20),
        ),
        gated="stem a b",
    ),
    "U-Net": Case(
        lambda: Net(
            unet, down1=conv(3, 8), down2=conv(8, 12), up=nn.ConvTranspose2d(12, 8, 2, 2), merge=conv(16, 6),
            head=conv(6, 4, 1),
        ),
        gated="down1 down2 up merge",
    ),
    "chunk": Case(lambda: Net(tied_split, a=conv(3, 16), b=conv(8, 6), head=head(6)), gated="a b"),
    "split in unequal parts": Case(
        lambda: Net(unequal_split, a=conv(3, 12), b=conv(4, 6), c=conv(8, 6), head=head(12)),
        gated="b c", frozen={"a": "does not work with fewer channels"},
    ),
    "split by a fixed size": Case(
        lambda: two_convs(lambda n, x: torch.mul(*x.split(8, 1)), 16, 8), gated="b", frozen={"a": "fewer channels"}
    ),
    "slices of channels": Case(
        lambda: two_convs(lambda n, x: x[:, :8] + x[:, 8:], 16, 8), gated="b", frozen={"a": "aten.slice.Tensor"}
    ),
    "the first channel": Case(
        lambda: two_convs(lambda n, x: F.relu(x) * torch.sigmoid(x[:, :1])), gated="a b"
    ),
    "the last two channels": Case(
        lambda: two_convs(lambda n, x: F.relu(x[:, -2:]), 8, 2), gated="b"
    ),
    "every second channel": Case(
        lambda: two_convs(lambda n, x: F.relu(x[:, ::2]), 8, 4), gated="b"
    ),
    "one channel selected": Case(
        lambda: two_convs(lambda n, x: F.relu(x) + x[:, 3].unsqueeze(1)), gated="b"
    ),
    "flatten before linear": Case(
        lambda: Net(
            lambda n, x: n.head(F.relu(n.fc(n.pool(F.relu(n.a(x))).flatten(1)))),
            a=conv(3, 8), pool=nn.MaxPool2d(2), fc=nn.Linear(128, 12), head=head(12),
        ),
        gated="a fc",
    ),
    "view before linear": Case(
        lambda: Net(lambda n, x: n.head(F.relu(n.a(x)).view(len(x), -1)), a=conv(3, 6), head=head(384)), gated="a"
    ),
    "view with a fixed width": Case(
        lambda: Net(
            lambda n, x: n.head(F.relu(n.b(F.relu(n.a(x)))).reshape(-1, 384)),
            a=conv(3, 8), b=conv(8, 6), head=head(384),
        ),
        gated="a", frozen={"b": "fewer channels"},
    ),
    "channel shuffle": Case(
        lambda: two_convs(lambda n, x: n.shuffle(F.relu(x)), shuffle=Shuffle()), gated="a b"
    ),
    "channel shuffle module": Case(
        lambda: two_convs(lambda n, x: n.shuffle(F.relu(x)), shuffle=nn.ChannelShuffle(2)), gated="a b"
    ),
    "stack and sum": Case(
        lambda: Net(stacked, a=conv(3, 8), b=conv(3, 8), head=head(8)), gated="a"
    ),
    "channels last": Case(
        lambda: Net(
            lambda n, x: pooled(n, n.block(n.stem(x))), stem=conv(3, 8), head=head(8),
            block=Net(
                channels_last, depthwise=conv(8, 8, groups=8), norm=nn.LayerNorm(8), up=nn.Linear(8, 16),
                down=nn.Linear(16, 8),
            ),
        ),
        gated="block.up", frozen={"stem": "`block.norm` (LayerNorm)"}, branches="block.down",
    ),
    "pixel shuffle": Case(
        lambda: two_convs(lambda n, x: F.pixel_shuffle(x, 2), 16, 4), gated="b", frozen={"a": ""}
    ),
    # --------------------------------------------------------------------------------------------- grouped layers
    "groups, whole ones go": Case(
        lambda: Net(
            lambda n, x: pooled(n, F.relu(n.b(F.relu(n.g(F.relu(n.a(x))))))),
            a=conv(3, 16), g=conv(16, 24, groups=8), b=conv(24, 6), head=head(6),
        ),
        gated="a b",
    ),
    "groups, places in each go": Case(
        lambda: Net(
            lambda n, x: pooled(n, F.relu(n.b(F.relu(n.g(F.relu(n.a(x))))))),
            a=conv(3, 16), g=conv(16, 12, groups=2), b=conv(12, 6), head=head(6),
        ),
        gated="a g b",
    ),
    "groups on the image": Case(
        lambda: Net(
            lambda n, x: pooled(n, F.relu(n.b(F.relu(n.g(x))))), g=conv(3, 12, groups=3), b=conv(12, 6), head=head(6)
        ),
        gated="g b",
    ),
    "depthwise": Case(
        lambda: two_convs(lambda n, x: F.relu(n.d(F.relu(x))), d=conv(8, 8, groups=8)), gated="a b"
    ),
    "depthwise with a multiplier": Case(
        lambda: two_convs(lambda n, x: F.relu(n.d(F.relu(x))), 8, 16, d=conv(8, 16, groups=8)), gated="a b"
    ),
    "grouped stream": Case(
        lambda: Net(
            lambda n, x: pooled(n, (s := F.relu(n.stem(x))) + n.c(F.relu(n.g(F.relu(n.a(s)))))),
            stem=conv(3, 8), a=conv(8, 12, 1), g=conv(12, 12, groups=3), c=conv(12, 8, 1), head=head(8),
        ),
        gated="stem a g", branches="c",
    ),
    "inverted bottleneck": Case(
        lambda: Net(
            lambda n, x: pooled(n, n.block(F.relu6(n.stem(x)))), stem=conv(3, 8), head=head(8),
            block=Net(
                mobile, expand=conv(8, 16, 1), norm1=nn.BatchNorm2d(16), depthwise=conv(16, 16, groups=16),
                project=conv(16, 8, 1), norm2=nn.BatchNorm2d(16), excite=SqueezeExcite(16, 4), norm3=nn.BatchNorm2d(8),
            ),
        ),
        gated="stem block.expand block.excite.down", branches="block.norm3",
    ),
    # ------------------------------------------------------------------------------------- norms and activations
    "squeeze and excitation": Case(
        lambda: two_convs(lambda n, x: n.excite(F.relu(x)), excite=SqueezeExcite(8, 4)), gated="a excite.down b"
    ),
    "squeeze and excitation by convolutions": Case(
        lambda: two_convs(
            lambda n, x: x * n.up(F.silu(n.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid(),
            down=conv(8, 4, 1), up=conv(4, 8, 1),
        ),
        gated="a down b",
    ),
    "spatial attention": Case(
        lambda: Net(spatial_attention, a=conv(3, 8), gate=conv(8, 1), b=conv(8, 6), head=head(6)), gated="a b"
    ),
    "BatchNorm": Case(lambda: two_convs(lambda n, x: F.relu(n.norm(x)), norm=nn.BatchNorm2d(8)), gated="a b"),
    "BatchNorm without affine": Case(
        lambda: two_convs(lambda n, x: F.relu(n.norm(x)), norm=nn.BatchNorm2d(8, affine=False)), gated="a b"
    ),
    "GroupNorm": Case(lambda: two_convs(lambda n, x: F.relu(n.norm(x)), 12, norm=nn.GroupNorm(4, 12)), gated="a b"),
    "GroupNorm of one group": Case(
        lambda: two_convs(lambda n, x: F.relu(n.norm(x)), norm=nn.GroupNorm(1, 8)),
        gated="b", frozen={"a": "hang together"},
    ),
    "LayerNorm": Case(
        lambda: two_convs(lambda n, x: F.relu(n.norm(x)), norm=nn.LayerNorm([8, 8, 8])),
        gated="b", frozen={"a": "`norm` (LayerNorm) normalises over all its channels"},
    ),
    "InstanceNorm": Case(
        lambda: two_convs(lambda n, x: F.relu(n.norm(x)), norm=nn.InstanceNorm2d(8, affine=True)), gated="a b"
    ),
    "InstanceNorm with statistics": Case(
        lambda: two_convs(
            lambda n, x: F.relu(n.norm(x)), norm=nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        ),
        gated="a b",
    ),
    "PReLU, one slope": Case(lambda: two_convs(lambda n, x: n.act(x), act=nn.PReLU()), gated="a b"),
    "PReLU, a slope a channel": Case(lambda: two_convs(lambda n, x: n.act(x), act=nn.PReLU(8)), gated="a b"),
    "local response norm": Case(
        lambda: two_convs(lambda n, x: n.norm(x), norm=nn.LocalResponseNorm(3)),
        gated="b", frozen={"a": "`norm` (LocalResponseNorm)"},
    ),
    "dropout": Case(
        lambda: two_convs(lambda n, x: n.drop(F.dropout(x, 0.2, n.training)), drop=nn.Dropout2d(0.3)), gated="a b"
    ),
    "activations of many kinds": Case(
        lambda: two_convs(
            lambda n, x: F.hardtanh(F.elu(x)) + F.softplus(x) * x.tanh() - x.exp().clamp(max=2)
            + F.leaky_relu(x).abs().sqrt()
        ),
        gated="a b",
    ),
    "softmax over channels": Case(
        lambda: two_convs(lambda n, x: x.softmax(1)), gated="b", frozen={"a": "mixes channels"}
    ),
    "normalised over channels": Case(
        lambda: two_convs(lambda n, x: F.normalize(x, dim=1)), gated="b", frozen={"a": ""}
    ),
    # ------------------------------------------------------------------------------------------------- pixels
    "pooling": Case(
        lambda: two_convs(lambda n, x: F.adaptive_max_pool2d(F.avg_pool2d(F.max_pool2d(x, 3, 1, 1), 2), 3)), gated="a b"
    ),
    "pooled to the largest value": Case(
        lambda: Net(
            lambda n, x: n.head(n.a(x).amax((2, 3)) + n.b(x).mean((-2, -1))), a=conv(3, 8), b=conv(3, 8), head=head(8)
        ),
        gated="a",
    ),
    "upsampling": Case(
        lambda: two_convs(
            lambda n, x: F.interpolate(n.up(x), size=(8, 8), mode="bilinear"),
            up=nn.Upsample(scale_factor=2, mode="nearest"),
        ),
        gated="a b",
    ),
    "padding of pixels": Case(
        lambda: two_convs(lambda n, x: F.pad(F.pad(x, (1, 1, 0, 2)), (1, 1, 1, 1), mode="reflect")), gated="a b"
    ),
    "transposed convolution": Case(
        lambda: two_convs(lambda n, x: F.relu(n.up(F.relu(x))), 8, 10, up=nn.ConvTranspose2d(8, 10, 3, stride=2)),
        gated="a up b",
    ),
    "grouped transposed convolution": Case(
        lambda: two_convs(lambda n, x: F.relu(n.up(F.relu(x))), 8, 10, up=nn.ConvTranspose2d(8, 10, 3, groups=2)),
        gated="b", frozen={"a": "has no channel rule"},
    ),
    "circular padding and dilation": Case(
        lambda: two_convs(lambda n, x: F.relu(n.c(x)), c=conv(8, 8, padding=2, dilation=2, padding_mode="circular")),
        gated="a c b",
    ),
    "one dimension": Case(
        seq(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(8, 6, 3), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 5)),
        ((3, 16),), gated="0 4",
    ),
    "three dimensions": Case(
        seq(nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 6, 1), nn.ReLU(),
            nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 5)),
        ((2, 6, 6, 6),), gated="0 4",
    ),
    # --------------------------------------------------------------------------------- linear layers, attention
    "MLP with BatchNorm1d": Case(
        lambda: Net(mlp, a=nn.Linear(10, 12), b=nn.Linear(12, 8), norm=nn.BatchNorm1d(8), head=head(8)),
        ((10,),), gated="a b",
    ),
    "gated MLP": Case(
        lambda: Net(
            lambda n, x: n.head(x + n.down(F.silu(n.gate(x)) * n.up(x))),
            gate=nn.Linear(10, 12), up=nn.Linear(10, 12), down=nn.Linear(12, 10), head=head(10),
        ),
        ((10,),), gated="gate", branches="down",
    ),
    "attention block": Case(
        lambda: Net(
            lambda n, x: n.head(n.block(n.embed(x)).mean(1)),
            embed=nn.Linear(6, 8), block=AttentionBlock(8, 12), head=head(8),
        ),
        ((7, 6),), gated="block.mlp.0", frozen={"embed": "LayerNorm"}, branches="block.mlp.2",
    ),
    "PyTorch's encoder layer": Case(
        lambda: Net(
            lambda n, x: n.head(n.layer(n.embed(x)).mean(1)),
            embed=nn.Linear(6, 8), layer=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), head=head(8),
        ),
        ((7, 6),), gated="layer.linear1",
    ),
    "attention by hand": Case(
        lambda: Net(
            lambda n, x: n.head(F.scaled_dot_product_attention(*n.qkv(n.embed(x)).chunk(3, -1)).mean(1)),
            embed=nn.Linear(6, 8), qkv=nn.Linear(8, 24), head=head(8),
        ),
        ((7, 6),), gated="embed", frozen={"qkv": ""},
    ),
    "embedding": Case(
        lambda: Net(
            lambda n, x: n.head(F.relu(n.a(n.table(x.long().clamp(0, 3)))).mean(1)),
            table=nn.Embedding(4, 6), a=nn.Linear(6, 8), head=head(8),
        ),
        ((7,),), gated="a",
    ),
    "product of features": Case(
        lambda: Net(self_product, a=conv(3, 8), b=conv(8, 6), head=head(6)), gated="b", frozen={"a": ""}
    ),
    # ------------------------------------------------------------------------------------------ ways of writing
    "in place": Case(
        lambda: Net(inplace, a=conv(3, 8), b=conv(8, 8), c=conv(8, 6), head=head(6)), gated="a c", branches="b"
    ),
    "in place on a view that is read again": Case(
        lambda: Net(alias_then_read, a=conv(3, 8), b=conv(8, 6), head=head(6)),
        gated="b", frozen={"a": "overwrites a tensor that is read again"},
    ),
    "one module used twice": Case(
        lambda: Net(
            lambda n, x: pooled(n, F.relu(n.b(F.relu(n.b(F.relu(n.a(x))))))), a=conv(3, 8), b=conv(8, 8), head=head(8)
        ),
        gated="a",
    ),
    "modules under two names": Case(TwoNames, gated="stem block.conv1 last", branches="block.bn2"),
    "one norm used twice": Case(
        lambda: Net(
            lambda n, x: pooled(n, F.relu(n.norm(n.b(F.relu(n.norm(n.a(x))))))),
            a=conv(3, 8), b=conv(8, 8), norm=nn.BatchNorm2d(8), head=head(8),
        ),
        gated="a",
    ),
    "one parameter in two modules": Case(Twins, frozen={"a": "shares a parameter with `b`"}, branches="a"),
    "a convolution as a function": Case(OwnWeight, frozen={"first": "has no channel rule"}),
    "a weight that is computed": Case(
        lambda: two_convs(lambda n, x: F.relu(n.c(x)), c=nn.utils.parametrizations.weight_norm(conv(8, 8))),
        gated="b", frozen={"a": "has no channel rule"},
    ),
    "an unknown operator": Case(
        lambda: two_convs(lambda n, x: torch.sinc(x)), gated="b", frozen={"a": "aten.sinc.default"}
    ),
    "a head for training only": Case(Auxiliary, gated="a b"),
    "several inputs": Case(
        lambda: Net(
            lambda n, x, y: n.head(torch.cat([F.relu(n.a(x)).mean((2, 3)), F.relu(n.b(y))], 1)),
            a=conv(3, 8), b=nn.Linear(4, 6), head=head(14),
        ),
        (IMAGE, (4,)), gated="a b",
    ),
    "outputs in a tuple": Case(
        lambda: Net(
            lambda n, x: ((y := F.relu(n.b(F.relu(n.a(x))))), n.head(y.mean((2, 3)))),
            a=conv(3, 8), b=conv(8, 6), head=head(6),
        ),
        gated="a", frozen={"b": "is an output of the model"},
    ),
    "outputs in a dict": Case(
        lambda: Net(
            lambda n, x: {"scores": pooled(n, y := F.relu(n.b(F.relu(n.a(x))))), "features": [y.mean((2, 3))]},
            a=conv(3, 8), b=conv(8, 6), head=head(6),
        ),
        gated="a", frozen={"b": "is an output of the model"},
    ),
    "padding 'valid' in a strided branch": Case(
        lambda: Net(
            lambda n, x: pooled(n, F.avg_pool2d(s := F.relu(n.stem(x)), 2) + n.b(F.relu(n.a(s)))),
            stem=conv(3, 8), a=conv(8, 6, 2, stride=2, padding="valid"), b=conv(6, 8), head=head(8),
        ),
        gated="stem a",
    ),
    "constants along channels": Case(
        lambda: two_convs(lambda n, x: x * torch.arange(8.0).view(8, 1, 1)), gated="b", frozen={"a": "fixed channels"}
    ),
    "a constant for all channels": Case(
        lambda: two_convs(lambda n, x: (x - 0.5) / math.sqrt(2) + torch.full((1, 1, 1, 1), 0.1)), gated="a b"
    ),
}  # fmt: skip


def example(case: Case, batch: int = 2, seed: int = 1) -> tuple[Tensor, ...]:
    """A batch of inputs for a case."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, *shape, generator=generator) for shape in case.inputs)
