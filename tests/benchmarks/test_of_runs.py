"""The benchmarks that look at a finished run: they run, and their records say what the run's own networks say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.runs import run

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def record_of(script: str, folder: Path, out: Path) -> dict:  # type: ignore[type-arg]
    words = [sys.executable, str(FOLDER / script), str(folder), "--quick", "--threads", "1", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    text = out.read_text(encoding="utf-8")
    assert str(folder.parent) not in text
    return json.loads(text)["results"]  # type: ignore[no-any-return]


def test_exits(tmp_path: Path) -> None:
    result = run(tmp_path / "run", exits=("layer1", "layer2"), tune_epochs=0, target="0.8")
    found = record_of("cifar10_exits.py", tmp_path / "run", tmp_path / "exits.json")
    assert found["table"]["accuracy"] == pytest.approx(result["accuracy"]["cascade"])
    assert [row["target"] for row in found["budgets"]][:4] == [0.99, 0.98, 0.97, 0.95]
    macs = [row["macs_fraction"] for row in found["budgets"]]
    assert macs == sorted(macs, reverse=True)
    (timed,) = found["timings"]
    assert timed["batch"] == 1 and timed["cascade_ms"]["median_ms"] > 0 and 0 < timed["macs_fraction"] < 1.1


@pytest.fixture(scope="module")
def conditional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose gates depend on the image."""
    folder = tmp_path_factory.mktemp("conditional") / "run"
    run(folder, kind="dynamic", gate_epochs=1)
    return folder


def test_specialisation(conditional: Path, tmp_path: Path) -> None:
    result = json.loads((conditional / "result.json").read_text())
    found = record_of("specialisation.py", conditional, tmp_path / "bits.json")
    assert found["numbers"]["images"] == 360 and found["accuracy"] == result["accuracy"]
    assert found["numbers"]["mean_bits"] > found["numbers"]["mean_bits_shuffled"] > 0


def test_deciding(conditional: Path, tmp_path: Path) -> None:
    result = json.loads((conditional / "result.json").read_text())
    found = record_of("deciding.py", conditional, tmp_path / "deciding.json")
    tuned, ensemble = found["rows"]["tuned, thresholded"], found["rows"]["tuned, ensemble of 5"]
    assert tuned == pytest.approx([result[name]["conditional"] for name in ("accuracy", "macs_fraction")])
    assert ensemble[1] == pytest.approx(5 * found["rows"]["tuned, sampled"][1], rel=0.05), (
        "five passes, five times the price"
    )
    assert found["rows"]["calibrated, thresholded"][0] == pytest.approx(result["accuracy"]["gated"])
    (timed,) = found["milliseconds"]
    assert timed["batch"] == 1 and timed["small_ms"] > 0
    macs = [row["macs_fraction"] for row in found["sweep"]]
    assert len(macs) > 3 and macs[0] > macs[-1] and all(0 <= row["accuracy"] <= 1 for row in found["sweep"])
