from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headgate
from headgate.cli import app
from headgate.errors import FileError, HeadgateError
from headgate.training.journal import read_log
from headgate.training.onward import onward
from headgate.training.start import Interrupted, go
from tests.training.runs import QUIET, RECIPE, run, same_weights
from tests.training.tiny import make


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onward") / "earlier"
    run(folder)
    return folder


@pytest.fixture(scope="module")
def later(earlier: Path) -> Path:
    folder = earlier.with_name("later")
    go(folder, onward(earlier, {"tune_epochs": 2, "tune_lr": 0.02}), QUIET, earlier=earlier)
    return folder


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_the_network_is_the_same_with_other_weights(earlier: Path, later: Path) -> None:
    before, after = (headgate.load(folder / "small.safetensors", make()) for folder in (earlier, later))
    assert [p.shape for p in before.parameters()] == [p.shape for p in after.parameters()]
    assert same_weights(earlier, later, "gated.safetensors") and not same_weights(earlier, later)


def test_the_result_counts_from_the_dense_network_on(earlier: Path, later: Path) -> None:
    first, second = result_of(earlier), result_of(later)
    assert second["before"] == first
    assert second["macs"] == first["macs"] and second["accuracy"]["dense"] == first["accuracy"]["dense"]
    assert second["seconds"]["gates"] == first["seconds"]["gates"]
    assert second["seconds"]["tune"] > first["seconds"]["tune"]


def test_the_log_has_the_gates_and_the_last_tuning(earlier: Path, later: Path) -> None:
    epochs = [(line["phase"], line["epoch"]) for line in read_log(later / "log.jsonl") if line["kind"] == "epoch"]
    assert epochs == [("dense", 1), ("gates", 1), ("gates", 2), ("tune", 1), ("tune", 2)]


def test_images_come_in_another_order(earlier: Path) -> None:
    assert onward(earlier, {}).seed == RECIPE.seed + 1
    assert onward(earlier, {"seed": 7}).seed == 7


def test_the_earlier_run_is_left_as_it_is(earlier: Path, later: Path) -> None:
    assert not (earlier / "before.json").exists() and result_of(earlier)["recipe"]["tune_epochs"] == 1


def test_it_can_be_interrupted(earlier: Path, later: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headgate.training import loop

    step, steps = loop.train_step, []

    def stopped(*words: object) -> object:
        steps.append(1)
        if len(steps) == 5:
            raise Interrupted
        return step(*words)  # type: ignore[arg-type]

    recipe = onward(earlier, {"tune_epochs": 2, "tune_lr": 0.02})
    monkeypatch.setattr(loop, "train_step", stopped)
    with pytest.raises(Interrupted):
        go(tmp_path / "run", recipe, QUIET, earlier=earlier)
    go(tmp_path / "run", None, QUIET)
    assert same_weights(tmp_path / "run", later)
    assert result_of(tmp_path / "run")["before"] == result_of(earlier)


def test_conditional_networks_are_tuned_on_too(tmp_path: Path) -> None:
    run(tmp_path / "first", kind="dynamic")
    result = go(tmp_path / "second", onward(tmp_path / "first", {}), QUIET, earlier=tmp_path / "first")
    assert result is not None and "conditional" in result["accuracy"]
    assert not same_weights(tmp_path / "first", tmp_path / "second", "conditional.safetensors")


@pytest.mark.parametrize("name", ["gate_lr", "target", "model", "gate_epochs", "granularity"])
def test_fields_of_the_gates_are_refused(earlier: Path, name: str) -> None:
    with pytest.raises(HeadgateError, match=f"--{name.replace('_', '-')}"):
        onward(earlier, {name: "1"})


def test_a_run_without_such_a_network_is_refused(tmp_path: Path, earlier: Path) -> None:
    with pytest.raises(FileError, match="no run"):
        onward(tmp_path, {})
    (tmp_path / "recipe.json").write_text((earlier / "recipe.json").read_text())
    with pytest.raises(FileError, match=r"not finished.*--resume"):
        onward(tmp_path, {})
    (tmp_path / "result.json").write_text((earlier / "result.json").read_text())
    with pytest.raises(HeadgateError, match="no network to go on with"):
        onward(tmp_path, {})
    with pytest.raises(HeadgateError, match="--tune-epochs"):
        onward(earlier, {"tune_epochs": 0})


def test_a_folder_that_was_not_filled_is_no_run(tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between copying and the first checkpoint, a run must not begin again at its gates."""
    from headgate.training import start

    def dies(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "take_over", dies)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", onward(earlier, {}), QUIET, earlier=earlier)
    with pytest.raises(FileError, match="no run"):
        go(tmp_path / "run", None, QUIET)


def test_by_command(earlier: Path) -> None:
    code, output = command("train", "--tune-on", str(earlier), "--tune-epochs", "1", "--seed", "9", "--quiet")
    assert code == 0 and "shrunk" in output
    found = result_of(earlier.with_name("earlier-on"))["recipe"]
    assert (found["tune_epochs"], found["seed"], found["target"]) == (1, 9, RECIPE.target)


@pytest.mark.parametrize("more", [["digits-static"], ["--dry-run"], ["--resume", "runs/other"]])
def test_what_has_no_sense_beside_it_is_refused(earlier: Path, more: list[str]) -> None:
    code, output = command("train", "--tune-on", str(earlier), *more)
    assert code == 1 and "--tune-on has the recipe of its run" in output


def command(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(words))
    return found.exit_code, " ".join(found.output.split())


def test_data_that_moved_is_found(tmp_path: Path, earlier: Path) -> None:
    folder = tmp_path / "photos"
    shutil.copytree(earlier, folder)
    recipe = json.loads((folder / "recipe.json").read_text()) | {"data": "folder:/old/photos"}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    assert onward(folder, {"data_dir": "/new/photos"}).data == "folder:/new/photos"


def test_neither_start_weights_nor_the_gates_in_training_are_needed(tmp_path: Path, earlier: Path) -> None:
    shutil.copytree(earlier, tmp_path / "earlier")
    (tmp_path / "earlier" / "trained.safetensors").unlink()
    recipe = onward(tmp_path / "earlier", {"weights": "/gone/start.safetensors"})
    assert go(tmp_path / "later", recipe, QUIET, earlier=tmp_path / "earlier") is not None


def test_after_a_failed_start_the_folder_is_empty(tmp_path: Path, earlier: Path) -> None:
    shutil.copytree(earlier, tmp_path / "earlier")
    (tmp_path / "earlier" / "gated.safetensors").unlink()
    recipe = onward(tmp_path / "earlier", {})
    for _ in range(2):
        with pytest.raises(FileError, match=r"can't be copied"):
            go(tmp_path / "later", recipe, QUIET, earlier=tmp_path / "earlier")


def test_evaluate_says_what_came_before(earlier: Path, later: Path) -> None:
    from headgate.training import ask

    assert "decided, not tuned" in [row["network"] for row in ask.evaluate(earlier)]
    assert "before this tuning" in [row["network"] for row in ask.evaluate(later)]


def test_the_folder_one_stands_in(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headgate.cli.train import _default_folder

    monkeypatch.chdir(earlier)
    assert _default_folder(None, Path(".")) == earlier.with_name("earlier-on")


def test_ctrl_c_outside_of_training_says_how_to_go_on(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headgate.training import run as running

    def stopped(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "measured", stopped)
    code, output = command("train", "--tune-on", str(earlier), "--out", str(tmp_path / "run"), "--quiet")
    assert code == 130 and f"headgate train --resume {tmp_path / 'run'}" in output
