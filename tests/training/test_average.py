from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import headgate
from headgate.cli import app
from headgate.errors import FileError, HeadgateError
from headgate.training.average import average, mean_of, time_of
from headgate.training.onward import onward
from headgate.training.run import RESULT, result_in
from headgate.training.start import Interrupted, go
from headgate.training.study import Look, study
from tests.training.runs import QUIET, run, same_weights
from tests.training.tiny import make


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("average") / "first"
    run(folder)
    return folder


@pytest.fixture(scope="module")
def second(first: Path) -> Path:
    folder = first.with_name("second")
    go(folder, onward(first, {"tune_epochs": 2, "tune_lr": 0.02}), QUIET, earlier=first)
    return folder


@pytest.fixture(scope="module")
def mean(first: Path, second: Path) -> Path:
    folder = first.with_name("mean")
    average([first, second], folder, QUIET)
    return folder


def small(folder: Path) -> nn.Module:
    return headgate.load(folder / "small.safetensors", make())


def test_its_weights_are_the_mean(first: Path, second: Path, mean: Path) -> None:
    for one, other, middle in zip(*(small(folder).parameters() for folder in (first, second, mean)), strict=True):
        torch.testing.assert_close(middle, (one + other) / 2)


def test_its_statistics_are_its_own(mean: Path) -> None:
    """Running means are those of the training images, under the averaged weights."""
    from headgate.training.loop import calibration_batches
    from headgate.training.prepare import data_of
    from headgate.training.run import recipe_in

    net = small(mean)
    norm = next(module for module in net.modules() if isinstance(module, nn.BatchNorm2d))
    seen: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda _, given: seen.append(given[0].mean((0, 2, 3))))
    recipe = recipe_in(mean)
    batches = list(calibration_batches(data_of(recipe).train, recipe))[: recipe.calibration_batches]
    with torch.no_grad():
        for images, _ in batches:
            net.eval()(images)
    expected = torch.stack([seen[number % len(seen)] for number in range(recipe.calibration_batches)]).mean(0)
    torch.testing.assert_close(norm.running_mean, expected, rtol=1e-4, atol=1e-5)


def test_it_is_a_run_like_any_other(first: Path, second: Path, mean: Path) -> None:
    result = result_in(mean)
    assert result["averaged"] == [result_in(first), result_in(second)]
    assert result["macs"] == result_in(second)["macs"]
    assert result["seconds"] == pytest.approx(result_in(second)["seconds"], abs=0.2), "the second counts the first in"
    assert result["accuracy"]["shrunk"] > 0.5
    assert CliRunner().invoke(app, ["evaluate", str(mean), "--json"]).exit_code == 0
    assert onward(mean, {"tune_epochs": 1}).tune_epochs == 1


def test_a_report_tells_how_it_came_about_and_no_folder(mean: Path) -> None:
    found = study(mean, Look(images=20, rounds=1, batches=(1,), threads=1))
    assert [line.split()[1] for line in found["command"].splitlines()] == ["train", "train", "average"]
    assert str(mean.parent) not in json.dumps(found)
    assert found["result"]["averaged"][1]["before"]["recipe"] == found["result"]["averaged"][0]["recipe"]


def test_the_same_runs_have_the_same_mean(first: Path, second: Path, mean: Path, tmp_path: Path) -> None:
    words = ["average", str(first), str(second), "--out", str(tmp_path / "again"), "--json", "--threads", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert same_weights(mean, tmp_path / "again")
    assert json.loads(done.stdout)["accuracy"] == result_in(mean)["accuracy"]


def test_measuring_can_be_interrupted(
    first: Path, second: Path, mean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headgate.training import run as runs

    def stopped(*words: object) -> None:
        raise Interrupted

    monkeypatch.setattr(runs, "measured", stopped)
    with pytest.raises(Interrupted):
        average([first, second], tmp_path / "run", QUIET)
    monkeypatch.undo()
    assert not (tmp_path / "run" / RESULT).exists()
    go(tmp_path / "run", None, QUIET)
    assert result_in(tmp_path / "run")["averaged"] == result_in(mean)["averaged"]


def test_what_has_no_mean(first: Path, second: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="at least two"):
        average([first], tmp_path / "mean", QUIET)
    with pytest.raises(HeadgateError, match="each of them once"):
        average([first, first], tmp_path / "mean", QUIET)
    with pytest.raises(FileError, match="holds a finished run"):
        average([first, second], first, QUIET)
    run(tmp_path / "other", seed=5)
    with pytest.raises(HeadgateError, match=r"other gates: only runs that were tuned on"):
        average([tmp_path / "other", second], tmp_path / "mean", QUIET)
    (tmp_path / "other" / "gated.safetensors").unlink()
    with pytest.raises(FileError, match=r"gated\.safetensors can't be read"):
        average([tmp_path / "other", second], tmp_path / "mean", QUIET)
    (tmp_path / "other" / RESULT).unlink()
    with pytest.raises(FileError, match="not finished"):
        average([tmp_path / "other", second], tmp_path / "mean", QUIET)
    assert not (tmp_path / "mean").exists()


def test_a_conditional_network_meets_its_target_again(tmp_path: Path) -> None:
    run(tmp_path / "first", kind="dynamic", target="0.7", gate_lr=0.02)
    go(tmp_path / "second", onward(tmp_path / "first", {"tune_lr": 0.02}), QUIET, earlier=tmp_path / "first")
    result = average([tmp_path / "first", tmp_path / "second"], tmp_path / "mean", QUIET)
    assert result["macs_fraction"]["conditional"] == pytest.approx(0.7, abs=0.03)
    nets = [headgate.load(tmp_path / name / "conditional.safetensors", make()) for name in ("first", "second", "mean")]
    for one, other, middle in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(middle, (one + other) / 2)


def test_time_that_runs_have_in_common_is_counted_once() -> None:
    begun = {"seconds": {"gates": 5.0, "tune": 10.0}}
    one = {"seconds": {"gates": 5.0, "tune": 13.0}, "before": begun}
    other = {"seconds": {"gates": 5.0, "tune": 17.0}, "before": begun}
    assert time_of([begun, one, other]) == {"gates": 5.0, "tune": 20.0}
    assert time_of([one, other]) == time_of([begun, one, other])


def test_a_mean_of_many() -> None:
    nets = [nn.Linear(2, 2) for _ in range(5)]
    expected = torch.stack([net.weight.detach().clone() for net in nets]).mean(0)
    torch.testing.assert_close(mean_of(nets).weight, expected)  # type: ignore[arg-type]
