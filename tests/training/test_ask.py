from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import headgate
from headgate.cli import app
from tests.training.runs import run
from tests.training.tiny import make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("asked") / "run"
    run(made)
    return made


def ask(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_evaluate_agrees_with_the_runs_own_result(folder: Path) -> None:
    rows = {row["network"]: row for row in json.loads(ask("evaluate", str(folder), "--json"))}
    result = json.loads((folder / "result.json").read_text())
    for name in ("dense", "gated", "shrunk"):
        assert rows[name]["accuracy"] == result["accuracy"][name]
        assert rows[name]["macs"] == result["macs"][name]


@pytest.mark.parametrize("strategy", ["threshold", "calibrated", "sample", "always_on", "ensemble"])
def test_every_strategy_can_be_evaluated(folder: Path, strategy: str) -> None:
    (row,) = json.loads(ask("evaluate", str(folder), "--strategy", strategy, "--runs", "2", "--json"))
    assert 0.1 < row["accuracy"] <= 1
    if strategy == "always_on":
        assert row["macs_fraction"] == pytest.approx(1)


def test_a_sweep_costs_less_with_a_higher_tau(folder: Path) -> None:
    macs = [row["macs"] for row in json.loads(ask("evaluate", str(folder), "--sweep-tau", "--json"))]
    assert macs == sorted(macs, reverse=True) and macs[0] > macs[-1]


def test_the_table_is_readable(folder: Path) -> None:
    text = ask("evaluate", str(folder))
    assert "dense" in text and "shrunk" in text and "%" in text


def test_shrink_writes_what_loads(folder: Path, tmp_path: Path) -> None:
    import onnxruntime

    made = json.loads(
        ask(
            "shrink",
            str(folder),
            "--out",
            str(tmp_path / "s.safetensors"),
            "--onnx",
            str(tmp_path / "s.onnx"),
            "--json",
        )
    )
    small = headgate.load(tmp_path / "s.safetensors", make())
    x = torch.randn(3, 1, 8, 8)
    assert made["shrunk"]["macs"] == headgate.count_macs(small, x[:1]) <= made["dense"]["macs"] / 2
    session = onnxruntime.InferenceSession(str(tmp_path / "s.onnx"))
    (answers,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(answers), small(x).detach(), rtol=1e-3, atol=1e-4)


def test_rounded_widths_are_made_from_the_gated_network(folder: Path, tmp_path: Path) -> None:
    ask("shrink", str(folder), "--out", str(tmp_path / "r.safetensors"), "--round-to", "8")
    small = headgate.load(tmp_path / "r.safetensors", make())
    assert {module.out_channels % 8 for module in small.modules() if isinstance(module, torch.nn.Conv2d)} == {0}


def test_another_network_needs_a_place_of_its_own(folder: Path) -> None:
    before = (folder / "small.safetensors").read_bytes()
    result = CliRunner().invoke(app, ["shrink", str(folder), "--round-to", "8"])
    assert result.exit_code == 1 and "--out" in result.stderr
    assert "wrote" not in ask("shrink", str(folder))
    assert (folder / "small.safetensors").read_bytes() == before


def test_bench_tells_ratios(folder: Path) -> None:
    rows = json.loads(ask("bench", str(folder), "--batch", "2", "--rounds", "2", "--threads", "1", "--json"))
    assert {row["engine"] for row in rows} == {"PyTorch", "ONNX Runtime"}
    for row in rows:
        assert row["macs_ratio"] >= 2 and row["speed_up"] > 0


@pytest.fixture(scope="module")
def conditional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("asked") / "conditional"
    run(made, kind="dynamic", target="0.7", gate_epochs=2, gate_lr=0.02)
    return made


def test_a_conditional_run_answers_too(conditional: Path, tmp_path: Path) -> None:
    rows = {row["network"]: row for row in json.loads(ask("evaluate", str(conditional), "--json"))}
    result = json.loads((conditional / "result.json").read_text())
    assert rows["conditional"]["accuracy"] == result["accuracy"]["conditional"]
    assert rows["conditional"]["macs"] == pytest.approx(result["macs"]["conditional"])
    swept = json.loads(ask("evaluate", str(conditional), "--sweep-tau", "--json"))
    assert [row["macs"] for row in swept] == sorted((row["macs"] for row in swept), reverse=True)
    assert all(row["milliseconds"] > 0 for row in swept)
    assert "ms an image" in ask("evaluate", str(conditional), "--sweep-tau")
    (sampled,) = json.loads(ask("evaluate", str(conditional), "--of", "trained", "--strategy", "sample", "--json"))
    assert sampled["network"] == "trained, sample"
    bench = ["bench", str(conditional), "--batch", "1", "--batch", "4", "--rounds", "2", "--threads", "1", "--json"]
    assert [row["batch"] for row in json.loads(ask(*bench))] == [1, 4]
    written = ask("shrink", str(conditional), "--onnx", str(tmp_path / "masked.onnx"))
    assert "conditional" in written and (tmp_path / "masked.onnx").is_file()


def test_a_run_with_exits_answers_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, exits=("layer1", "layer2"), tune_epochs=0, target="0.7", gate_lr=0.05)
    rows = {row["network"]: row for row in json.loads(ask("evaluate", str(folder), "--json"))}
    assert 0 < rows["cascade"]["macs_fraction"] < 1.1 and set(rows) == {"dense", "cascade"}
    bench = ["bench", str(folder), "--batch", "1", "--batch", "8", "--rounds", "2", "--threads", "1", "--json"]
    assert [row["batch"] for row in json.loads(ask(*bench))] == [1, 8]
    result = CliRunner().invoke(app, ["shrink", str(folder), "--onnx", str(tmp_path / "x.onnx")])
    assert result.exit_code == 1 and "cascade.safetensors" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shrink"], "compact()"), (["evaluate", "--of", "dense", "--strategy", "sample"], "no gates"),
        (["evaluate", "--of", "other"], "there is no network"),
    ],
)  # fmt: skip
def test_what_a_conditional_run_can_not_do(conditional: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [words[0], str(conditional), *words[1:]])
    assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "nowhere"], "is no run"), (["shrink", "nowhere"], "is no run"), (["bench", "nowhere"], "is no run"),
        (["train"], "names no model"), (["train", "cifar10-resnet57-static"], "did you mean"),
        (["train", "--resume", "nowhere"], "is no run"), (["train", "digits-static", "--resume", "x"], "leave out"),
        (["train", "cifar10-resnet20-static", "--data-dir", "nowhere"], "headgate data cifar10"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert message in result.stderr and "Traceback" not in result.output


def test_every_field_of_a_recipe_is_an_option() -> None:
    import dataclasses

    from headgate.training.recipe import Recipe

    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["train", "--help"]).stdout
    for field in dataclasses.fields(Recipe):
        assert field.name == "name" or f"--{field.name.replace('_', '-')}" in text, field.name


def test_a_dry_run_leaves_nothing_and_tells_time_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = ask("train", "digits-static", "--image-size", "8", "--dry-run")
    assert "ms a step" in text and "GB of memory" in text and "2 processes" in text
    assert list(tmp_path.iterdir()) == []


def test_recipes_are_listed() -> None:
    assert "cifar10-resnet56-static" in ask("recipes")
    assert json.loads(ask("recipes", "--json"))["imagenet-resnet50-static"]["batch_size"] == 256


def test_a_network_that_a_finished_run_does_not_have(folder: Path) -> None:
    result = CliRunner().invoke(app, ["evaluate", str(folder), "--of", "conditional", "--sweep-tau"])
    assert result.exit_code == 1 and "it is finished, and has" in result.output and "--resume" not in result.output


def test_places_that_are_not_there_are_told_before_the_work(folder: Path, tmp_path: Path) -> None:
    for option in ("--out", "--onnx"):
        result = CliRunner().invoke(app, ["shrink", str(folder), option, str(tmp_path / "no" / "file.onnx")])
        assert result.exit_code == 1 and "there is no folder" in result.output
