"""The residual networks for 32×32 images: ResNet-20, -32, -44, -56 and -110.

A network is a 3×3 stem, three stages of ``blocks_per_stage`` blocks each (widths ``width``, ``2·width``, ``4·width``,
the second and third stage at half the resolution of the one before), a global average and a linear layer. Where the
width changes, the shortcut takes every second pixel and pads with zero channels, so it has no parameters.

Parameter names are those of the public CIFAR-10 weights (``conv1 bn1 layer1..layer3 linear``), which load strictly.
This module knows nothing of gates, of data or of where weights come from.
"""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from headgate.errors import ModelError

__all__ = [
    "CifarResNet",
    "ZeroPadShortcut",
    "cifar_resnet20",
    "cifar_resnet32",
    "cifar_resnet44",
    "cifar_resnet56",
    "cifar_resnet110",
    "digits_resnet",
]


class ZeroPadShortcut(nn.Module):
    """Takes every ``stride``-th pixel and centres the input channels among ``out_channels``, the others being zero."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        if out_channels < in_channels:
            raise ModelError(f"a zero-padding shortcut cannot narrow {in_channels} channels to {out_channels}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.stride = stride
        self.pad_before = (out_channels - in_channels) // 2
        self.pad_after = out_channels - in_channels - self.pad_before

    def forward(self, x_NCHW: Tensor) -> Tensor:
        every_nth = x_NCHW[:, :, :: self.stride, :: self.stride]
        return F.pad(every_nth, (0, 0, 0, 0, self.pad_before, self.pad_after))

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, stride={self.stride}"


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions whose result is added to the stream."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels, stride=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        keeps_shape = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if keeps_shape else ZeroPadShortcut(in_channels, out_channels, stride)

    def forward(self, stream: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(stream)))
        return F.relu(self.shortcut(stream) + self.bn2(self.conv2(inner)))


class CifarResNet(nn.Module):
    """A CIFAR ResNet of depth ``6 * blocks_per_stage + 2``."""

    def __init__(self, blocks_per_stage: int, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> None:
        super().__init__()
        if min(blocks_per_stage, num_classes, in_channels, width) < 1:
            raise ModelError(
                "CifarResNet needs at least one block per stage, class, input channel and channel of width, "
                f"got {blocks_per_stage=}, {num_classes=}, {in_channels=}, {width=}"
            )
        self.conv1 = _conv3x3(in_channels, width, stride=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(blocks_per_stage, width, width, stride=1)
        self.layer2 = _stage(blocks_per_stage, width, 2 * width, stride=2)
        self.layer3 = _stage(blocks_per_stage, 2 * width, 4 * width, stride=2)
        self.linear = nn.Linear(4 * width, num_classes)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        stream = F.relu(self.bn1(self.conv1(x_NCHW)))
        stream = self.layer3(self.layer2(self.layer1(stream)))
        return self.linear(stream.mean(dim=(2, 3)))


def cifar_resnet20(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    return CifarResNet(3, num_classes, in_channels)


def cifar_resnet32(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    return CifarResNet(5, num_classes, in_channels)


def cifar_resnet44(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    return CifarResNet(7, num_classes, in_channels)


def cifar_resnet56(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    return CifarResNet(9, num_classes, in_channels)


def cifar_resnet110(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    return CifarResNet(18, num_classes, in_channels)


def digits_resnet() -> CifarResNet:
    """A small wide one for the embedded digits (one channel, 16×16)."""
    return CifarResNet(1, in_channels=1, width=32)


def _stage(blocks: int, in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    named_blocks: OrderedDict[str, nn.Module] = OrderedDict()
    named_blocks["0"] = ResidualBlock(in_channels, out_channels, stride)
    for index in range(1, blocks):
        named_blocks[str(index)] = ResidualBlock(out_channels, out_channels, stride=1)
    return nn.Sequential(named_blocks)


def _conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
