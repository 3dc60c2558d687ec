from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import headgate
from headgate.cli import app
from headgate.errors import FileError, HeadgateError
from headgate.trained import zoo_entries, zoo_folder
from headgate.training import ask
from headgate.training.adopt import adopt, recipe_of
from headgate.training.onward import onward
from headgate.training.recipe import Recipe
from headgate.training.repeat import commands
from headgate.training.start import go
from tests.training.runs import QUIET, run, same_weights

Made = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What a run of somebody else's left: a network, its record, the weights it started from."""
    folder = tmp_path_factory.mktemp("adopt")
    result = run(folder / "theirs")
    shutil.copyfile(folder / "theirs" / "small.safetensors", folder / "net.safetensors")
    save_file(load_file(folder / "theirs" / "dense.safetensors"), folder / "start.safetensors")
    record = {
        "recipe": result["recipe"], "seconds": result["seconds"], "accuracy": result["accuracy"]["shrunk"], "before": []
    }  # fmt: skip
    return folder, record


@pytest.fixture(scope="module")
def adopted(published: Made) -> Path:
    folder, record = published
    adopt(folder / "run", folder / "net.safetensors", record, str(folder / "start.safetensors"), QUIET)
    return folder / "run"


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_it_is_measured_as_it_was(published: Made, adopted: Path) -> None:
    theirs, ours = result_of(published[0] / "theirs"), result_of(adopted)
    for name in ("shrunk", "dense"):
        assert ours["accuracy"][name] == theirs["accuracy"][name] and ours["macs"][name] == theirs["macs"][name]
    assert ours["seconds"] == theirs["seconds"]
    assert ours["adopted"]["name"] == "net" and ours["adopted"]["accuracy"] == theirs["accuracy"]["shrunk"]


@pytest.mark.parametrize("name", zoo_entries())
def test_every_network_of_the_zoo_has_a_recipe_to_be_a_run_of(name: str, tmp_path: Path) -> None:
    record = json.loads((zoo_folder() / f"{name}.json").read_text())
    found = recipe_of(record, str(tmp_path / "start.safetensors"), str(tmp_path))
    assert (found.model, found.target) == (record["model"], record["recipe"]["target"])
    assert (found.teacher, found.data_dir) == (None, str(tmp_path))


def test_it_can_be_asked_like_any_run(adopted: Path) -> None:
    rows = ask.evaluate(adopted)
    assert {row["network"] for row in rows} == {"dense", "shrunk"}


def test_it_can_be_tuned_on(published: Made, adopted: Path) -> None:
    later = published[0] / "later"
    result = go(later, onward(adopted, {"tune_epochs": 1}), QUIET, earlier=adopted)
    assert result is not None and result["before"] == result_of(adopted)
    assert not same_weights(adopted, later) and not (later / "gated.safetensors").exists()
    lines = commands(Recipe.from_json(result["recipe"]), result)
    assert lines[0] == "headgate zoo net --weights start.safetensors --out net"
    assert lines[1].startswith("headgate train --tune-on net --")


def test_what_was_never_gated_is_refused(published: Made, tmp_path: Path) -> None:
    folder, record = published
    plain = {**record, "recipe": {**record["recipe"], "gate_epochs": 0, "tune_epochs": 0}}
    with pytest.raises(HeadgateError, match="no gates behind it"):
        adopt(tmp_path / "run", folder / "net.safetensors", plain, str(folder / "start.safetensors"), QUIET)
    assert not (tmp_path / "run").exists()


def test_a_network_that_is_gone_leaves_no_folder_half_filled(published: Made, tmp_path: Path) -> None:
    folder, record = published
    with pytest.raises(FileError, match="nothing is lost"):
        adopt(tmp_path / "run", folder / "gone.safetensors", record, str(folder / "start.safetensors"), QUIET)
    assert not list((tmp_path / "run").iterdir())


def test_the_command_line_lists_the_zoo_and_makes_runs(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["zoo", "--json"])
    assert set(json.loads(listed.stdout)) == set(headgate.zoo_entries())
    assert "digits-resnet-static-0.5" in CliRunner().invoke(app, ["zoo"]).stdout
    missing = CliRunner().invoke(app, ["zoo", "digits-resnet-static-0.5"])
    assert missing.exit_code == 1 and "give --weights" in missing.output
    unknown = CliRunner().invoke(app, ["zoo", "digits-resnet-static-0.4", "--weights", "x"])
    assert unknown.exit_code == 1 and "did you mean" in unknown.output
    from headgate.models.names import build

    start = tmp_path / "start.safetensors"
    save_file(build("digits_resnet").state_dict(), start)
    words = ["zoo", "digits-resnet-static-0.5", "--weights", str(start), "--out", str(tmp_path / "run"), "--quiet"]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 0, made.output
    record = headgate.zoo_entries()["digits-resnet-static-0.5"].record
    assert result_of(tmp_path / "run")["accuracy"]["shrunk"] == pytest.approx(record["accuracy"])
