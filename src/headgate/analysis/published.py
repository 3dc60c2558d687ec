"""What others have published, as points of accuracy and MACs to stand beside a run's own; and what this package's own
benchmark of several methods has measured, marked as such.

Facts with their sources. Accuracy in per cent, MACs as a share of the dense network's. Knows nothing of runs, nor
whether a folder of that name really holds the data set.
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
    measured_here: bool = False
    """Whether the figure is of a record in `benchmarks/records` (a test compares the two)."""


PAPER = "Herrmann et al. 2020"
AIG, FPGM = "AIG (Veit & Belongie 2018)", "FPGM (He et al. 2019)"
RESNET50_GMACS = 4.028
"""Of the dense ResNet-50, as the paper counts them: shares of its rows, and of AIG's in it, are of this."""


def _imagenet(
    depth: int, who: str, fraction: float, accuracy: float, dense: float | None, conditional: bool = False
) -> Published:
    return Published(f"torchvision:resnet{depth}", "imagenet", who, round(fraction, 3), accuracy, dense, conditional)


IMAGENET = (  # as the paper's tables and text have them, but for DepGraph and DGNet, which came later
    _imagenet(50, f"{PAPER}, t = 0.5", 1 - 0.3768, 76.20, 76.13),
    _imagenet(50, f"{PAPER}, t = 0.4", 1 - 0.4339, 76.14, 76.13),
    _imagenet(50, f"{PAPER}, t = 0.3", 1 - 0.513, 75.56, 76.13),
    _imagenet(50, FPGM, 1 - 0.422, 75.59, 76.15),
    _imagenet(50, "AutoPruner (Luo & Wu 2018)", 1 - 0.4836, 74.76, 76.13),
    _imagenet(50, "DepGraph (Fang et al. 2023)", 2.00 / 4.12, 75.83, None),  # GMACs as their repository counts them
    _imagenet(50, f"{PAPER}, t = 0.5", 2.21 / RESNET50_GMACS, 76.30, 76.13, True),
    _imagenet(50, f"{PAPER}, t = 0.4", 1.94 / RESNET50_GMACS, 76.04, 76.13, True),
    _imagenet(50, f"{PAPER}, whole layers, t = 0.5", 2.72 / RESNET50_GMACS, 75.78, 76.13, True),
    _imagenet(50, f"{AIG}, t = 0.7", 3.26 / RESNET50_GMACS, 76.18, None, True),
    _imagenet(50, f"{AIG}, t = 0.6", 3.08 / RESNET50_GMACS, 75.78, None, True),
    _imagenet(50, f"{AIG}, t = 0.5", 2.91 / RESNET50_GMACS, 75.58, None, True),
    _imagenet(50, f"{AIG}, t = 0.4", 2.76 / RESNET50_GMACS, 75.25, None, True),
    _imagenet(50, "DGNet, channels and places (Li et al. 2021)", 1 - 0.597, 76.41, None, True),
    _imagenet(18, PAPER, 1 - 0.439, 68.88, 70.28),
    _imagenet(18, FPGM, 1 - 0.418, 68.34, 70.28),
    _imagenet(34, PAPER, 1 - 0.511, 72.78, 73.92),
    _imagenet(34, FPGM, 1 - 0.411, 72.54, 73.92),
)


def _peer(who: str, fraction: float, accuracy: float) -> Published:
    return Published("cifar_resnet20", "cifar10", who, fraction, accuracy, 91.73, measured_here=True)


PEERS = {  # by the method's name in the record
    "headgate": _peer("headgate, gates on channels", 0.4998, 90.34),
    "headgate+distill": _peer("headgate, gates on channels, distilled", 0.4999, 90.86),
    "torch-pruning": _peer("Torch-Pruning 1.6.1, group magnitude", 0.4996, 90.06),
    "torch-pruning+distill": _peer("Torch-Pruning 1.6.1, group magnitude, distilled", 0.4996, 90.38),
    "torch-pruning-sparse": _peer("Torch-Pruning 1.6.1, sparse learning", 0.4996, 89.63),
    "uniform-l1": _peer("L1, every block alike", 0.4996, 90.02),
    "fpgm": _peer("geometric median, every block alike", 0.4996, 90.05),
    "aig-layers": _peer("gates on whole blocks, AIG's loss", 0.4473, 87.83),
}
PEERS_HOW = "ten epochs from the same dense weights, mean of the record's seeds: benchmarks/records/cifar10_peers.json"
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
    Published("cifar_resnet110", "cifar10", AIG, 0.82, 94.24, 93.39, True),
    Published("cifar_resnet110", "cifar10", "SkipNet (Wang et al. 2018)", 0.50, 93.30, None, True),
    *IMAGENET,
    *PEERS.values(),
)


@dataclass(frozen=True)
class PublishedExits:
    """Published early exits: for each, the share of images that leave (%), accuracy of all and of those that leave.

    No MACs are given, so they are words and no point of a figure. `accuracy` is that of all exits together, as it
    follows from the rows.
    """

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


IMAGENET_FOLDERS = ("imagenet", "imagenet1k", "imagenet-1k", "imagenet2012", "ilsvrc2012", "ilsvrc")
"""What a folder with all of ImageNet is called, in small letters; others (imagenette) hold something else."""


def exits_published_for(model: str, data: str) -> tuple[PublishedExits, ...]:
    """The same for early exits."""
    asked = _model(model), _data(data)
    return tuple(each for each in PUBLISHED_EXITS if (each.model, each.data) == asked)


def published_for(model: str, data: str) -> tuple[Published, ...]:
    """What is known of a network on a data set, by their names in a recipe."""
    asked = _model(model), _data(data)
    return tuple(each for each in PUBLISHED if (each.model, each.data) == asked)


def _model(name: str) -> str:
    """One name for a network: timm's ResNets of these names are torchvision's."""
    source, _, network = name.rpartition(":")
    if source == "timm":
        return f"torchvision:{network.split('.')[0]}"
    return network if source == "headgate" else name


def _data(name: str) -> str:
    folder = name.removeprefix("folder:").rstrip("/").rpartition("/")[2]
    return "imagenet" if name.startswith("folder:") and folder.lower() in IMAGENET_FOLDERS else name
