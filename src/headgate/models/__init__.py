"""Networks to gate: CIFAR ResNets and DenseNets, and all that torchvision, timm or a file of yours has a name for."""

from headgate.models._torchvision import import_torchvision
from headgate.models.cifar_densenet import CifarDenseNet, cifar_densenet40, cifar_densenet100
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
    "CifarDenseNet",
    "CifarResNet",
    "NamedModel",
    "ZeroPadShortcut",
    "build",
    "cifar_densenet40",
    "cifar_densenet100",
    "cifar_resnet20",
    "cifar_resnet32",
    "cifar_resnet44",
    "cifar_resnet56",
    "cifar_resnet110",
    "example_input",
    "import_torchvision",
    "load_named",
]
