"""Networks to gate: the CIFAR ResNets, and everything that has a name in torchvision, timm or a file of one's own."""

from headgate.models._torchvision import import_torchvision
from headgate.models.cifar_resnet import (
    CifarResNet,
    ZeroPadShortcut,
    cifar_resnet20,
    cifar_resnet32,
    cifar_resnet44,
    cifar_resnet56,
    cifar_resnet110,
)
from headgate.models.names import NamedModel, build, example_input, load_named

__all__ = [
    "CifarResNet",
    "NamedModel",
    "ZeroPadShortcut",
    "build",
    "cifar_resnet20",
    "cifar_resnet32",
    "cifar_resnet44",
    "cifar_resnet56",
    "cifar_resnet110",
    "example_input",
    "import_torchvision",
    "load_named",
]
