"""Networks small enough to train in a second."""

from torch import nn

from headgate.models.cifar_resnet import CifarResNet

input_shape = (1, 1, 8, 8)


def make() -> CifarResNet:
    return CifarResNet(1, in_channels=1, width=8)


def two_layers() -> nn.Sequential:
    """Even smaller: for what takes long by the layer, such as compiling."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
