"""Published figures, and our own among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.analysis.published import PEERS, PUBLISHED, PUBLISHED_EXITS, exits_published_for, published_for
from headgate.analysis.records import read_record

PEERS_RECORD = Path(__file__).parents[2] / "benchmarks" / "records" / "cifar10_peers.json"


def test_what_was_measured_here_is_as_its_record_says() -> None:
    results = read_record(PEERS_RECORD).results
    rows = {row["method"]: row for row in results["rows"]}
    dense = 100 * rows.pop("dense")["accuracy"]
    assert rows.keys() == PEERS.keys(), "a record that changes takes PEERS in analysis/published.py with it"
    for method, row in rows.items():
        point = PEERS[method]
        assert (point.model, point.data) == (results["model"], "cifar10") and point.measured_here
        shown = point.accuracy, point.macs_fraction, point.dense_accuracy
        assert shown == pytest.approx((100 * row["accuracy"], row["macs_fraction"], dense), abs=5e-3), method
        assert row["epochs"] == 10 and row["cells"], "PEERS_HOW says so"


def test_every_point_is_a_share_and_a_percentage_and_stands_there_once() -> None:
    assert all(0.2 < each.macs_fraction < 1 and 60 < each.accuracy < 100 for each in PUBLISHED)
    assert len(set(PUBLISHED)) == len(PUBLISHED)
    assert {each.measured_here for each in PUBLISHED if each.model != "cifar_resnet20"} == {False}


@pytest.mark.parametrize("folder", ["imagenet", "ImageNet", "ILSVRC2012", "imagenet-1k"])
def test_imagenet_is_known_by_the_name_of_its_folder(folder: str) -> None:
    found = published_for("torchvision:resnet50", f"folder:{folder}")
    assert len(found) == 14 and published_for("timm:resnet50.a1_in1k", f"folder:{folder}") == found
    for depth in (18, 34):
        assert any("Herrmann" in each.who for each in published_for(f"torchvision:resnet{depth}", f"folder:{folder}"))


@pytest.mark.parametrize(
    "model, data",
    [
        ("torchvision:resnet50", "folder:imagenette"),
        ("torchvision:resnet50", "folder:tiny-imagenet"),
        ("torchvision:resnet50", "imagenet-1k"),
        ("mine.py:resnet50", "folder:imagenet"),
        ("torchvision:resnet101", "folder:imagenet"),
        ("mine.py:cifar_resnet56", "cifar10"),
    ],
)
def test_nothing_is_known_of_other_networks_or_data(model: str, data: str) -> None:
    assert published_for(model, data) == ()


def test_names_can_be_spelled_out() -> None:
    assert published_for("headgate:cifar_resnet56", "cifar10") == published_for("cifar_resnet56", "cifar10") != ()


def test_the_cascades_accuracy_follows_from_its_rows() -> None:
    (found,) = exits_published_for("cifar_densenet100", "cifar10")
    assert found in PUBLISHED_EXITS
    together = sum(share * right for _, share, _, right in found.rows) / 100
    assert together == pytest.approx(found.accuracy, abs=0.01) and found.rows[-1][2] == found.accuracy_of_last
