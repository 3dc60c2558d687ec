"""DenseNet-BC for 32×32 images: three dense blocks, with 1×1 bottlenecks and halving transitions between them.

A layer reads everything its block has computed so far (BatchNorm, ReLU, 1×1 to four growths, BatchNorm, ReLU, 3×3 to
one growth) and appends its output. Parameter names are those of the public CIFAR-10 weights (``conv1``,
``block1..block3`` of ``layer.0..``, ``trans1 trans2``, ``bn1 fc``), which load strictly. Knows nothing of gates, exits,
data or of where weights come from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate.errors import ModelError

BOTTLENECK = 4


class DenseLayer(nn.Module):
    """Appends ``growth`` channels to what it reads."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, BOTTLENECK * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        return torch.cat([x, new], 1)


class DenseBlock(nn.Module):
    """``layers`` dense layers in a row."""

    def __init__(self, layers: int, in_channels: int, growth: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(DenseLayer(in_channels + number * growth, growth) for number in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class Transition(nn.Module):
    """Half the channels, half the resolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv1(F.relu(self.bn1(x))), 2)


class CifarDenseNet(nn.Module):
    """A DenseNet-BC of ``depth`` layers (6n + 4) and any growth."""

    def __init__(self, depth: int = 100, growth: int = 12, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        layers, rest = divmod(depth - 4, 6)
        if rest or layers < 1 or min(growth, num_classes, in_channels) < 1:
            raise ModelError(
                f"a DenseNet-BC has 6n + 4 layers (40, 100, 190) and a growth of at least 1, got {depth=}, {growth=}, "
                f"{num_classes=}, {in_channels=}"
            )
        width = 2 * growth
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.block1 = DenseBlock(layers, width, growth)
        width += layers * growth
        self.trans1 = Transition(width, width // 2)
        width //= 2
        self.block2 = DenseBlock(layers, width, growth)
        width += layers * growth
        self.trans2 = Transition(width, width // 2)
        width //= 2
        self.block3 = DenseBlock(layers, width, growth)
        width += layers * growth
        self.bn1 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x = self.trans1(self.block1(self.conv1(x_NCHW)))
        x = self.block3(self.trans2(self.block2(x)))
        y: Tensor = self.fc(F.relu(self.bn1(x)).mean(dim=(2, 3)))
        return y


def cifar_densenet100() -> CifarDenseNet:
    """DenseNet-BC-100-12."""
    return CifarDenseNet(100, 12)


def cifar_densenet40() -> CifarDenseNet:
    """DenseNet-BC-40-12."""
    return CifarDenseNet(40, 12)
