"""What others have published, as points of accuracy and MACs to stand beside a run's own.

Facts with their sources; nothing here was measured by this package. Accuracy in per cent, MACs as a share of the dense
network's. Knows nothing of runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published result."""

    model: str
    data: str
    who: str
    macs_fraction: float
    accuracy: float
    dense_accuracy: float | None
    """Of the network they started from, where it is given."""
    conditional: bool = False
    """Whether what is computed depends on the image."""


PAPER = "Herrmann et al. 2020"
PUBLISHED = (
    Published("cifar_resnet56", "cifar10", PAPER, 0.50, 93.31, 93.86),
    Published("cifar_resnet56", "cifar10", "AMC (He et al. 2018)", 0.50, 91.9, 92.8),
    Published("cifar_resnet56", "cifar10", "DepGraph, group L1 (Fang et al. 2023)", 0.47, 92.93, 93.53),
    Published("cifar_resnet56", "cifar10", "Torch-Pruning, BatchNorm scales", 0.47, 93.29, 93.53),
    Published("cifar_resnet56", "cifar10", "DepGraph, sparse learning (Fang et al. 2023)", 0.47, 93.77, 93.53),
    Published("cifar_resnet56", "cifar10", "ResRep (Ding et al. 2021)", 0.47, 93.71, 93.71),
    Published("cifar_resnet56", "cifar10", "DPM on DepGraph", 0.46, 94.13, 93.53),
    Published("cifar_resnet56", "cifar10", "FTWT (Elkerdawy et al. 2022)", 0.34, 92.63, 93.66, True),
    Published("cifar_resnet110", "cifar10", PAPER, 0.65, 94.36, 93.39, True),
    Published("cifar_resnet110", "cifar10", "LRF", 0.37, 94.34, None),
    Published("cifar_resnet110", "cifar10", "AIG (Veit & Belongie 2018)", 0.82, 94.24, 93.39, True),
    Published("cifar_resnet110", "cifar10", "SkipNet (Wang et al. 2018)", 0.50, 93.30, None, True),
)


@dataclass(frozen=True)
class PublishedExits:
    """Published early exits: for each, the share of images that leave (%), accuracy of all and of those that leave."""

    model: str
    data: str
    who: str
    rows: tuple[tuple[str, float, float, float], ...]
    accuracy: float
    accuracy_of_last: float


PUBLISHED_EXITS = (
    PublishedExits(
        "cifar_densenet100", "cifar10", PAPER,
        (("block1", 28.71, 81.36, 96.37), ("block2", 11.56, 93.35, 98.53), ("last", 59.74, 94.19, 92.63)), 94.40, 94.19,
    ),
)  # fmt: skip


def exits_published_for(model: str, data: str) -> tuple[PublishedExits, ...]:
    """The same for early exits."""
    return tuple(each for each in PUBLISHED_EXITS if (each.model, each.data) == (model, data))


def published_for(model: str, data: str) -> tuple[Published, ...]:
    """What is known of a network on a data set."""
    return tuple(each for each in PUBLISHED if (each.model, each.data) == (model, data))
