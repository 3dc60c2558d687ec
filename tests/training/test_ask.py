from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import headgate
from headgate.cli import app
from headgate.models.cifar_resnet import CifarResNet
from headgate.training import ask as asking
from tests.gates.test_dynamic import opinionated_
from tests.oracle import difference, independent_macs
from tests.training.runs import TINY, run
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
    options = ["--runs", "2"] if strategy == "ensemble" else []
    (row,) = json.loads(ask("evaluate", str(folder), "--strategy", strategy, *options, "--json"))
    assert 0.1 < row["accuracy"] <= 1
    if strategy == "always_on":
        assert row["macs_fraction"] == pytest.approx(1)


@pytest.mark.parametrize("damage", ["{", "[]", "{}"])
def test_a_damaged_result_is_told_with_its_remedy(folder: Path, damage: str) -> None:
    kept = (folder / "result.json").read_text()
    (folder / "result.json").write_text(damage)
    try:
        for words in (["shrink", str(folder)], ["bench", str(folder)], ["train", "--tune-on", str(folder)]):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 1 and "is damaged" in done.output and "--resume" in done.output, done.output
    finally:
        (folder / "result.json").write_text(kept)


def test_a_seed_that_is_too_large(folder: Path) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(folder), "--strategy", "sample", "--seed", str(2**70)])
    assert done.exit_code == 1 and "from 0 to 2^63 - 1" in done.output


def test_folders_with_brackets_are_shown_as_they_are_called(folder: Path) -> None:
    other = folder.with_name("exp[v2]")
    folder.rename(other)
    try:
        assert "exp[v2]" in ask("evaluate", str(other))
    finally:
        other.rename(folder)


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


def test_a_network_with_folded_batchnorm_is_the_tuned_one(folder: Path, tmp_path: Path) -> None:
    ask("shrink", str(folder), "--out", str(tmp_path / "f.safetensors"), "--fold-batchnorm")
    folded = headgate.load(tmp_path / "f.safetensors", make())
    tuned = headgate.load(folder / "small.safetensors", make())
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in tuned.modules())
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(folded(x), tuned(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "--tau", "0.3"], "--tau goes with --strategy threshold"),
        (["evaluate", "--strategy", "threshold", "--runs", "3"], "--runs goes with --strategy ensemble"),
        (["evaluate", "--strategy", "ensemble", "--combine", "nonsense"], "combine"),
        (["shrink", "--round-to", "0", "--out", "x.safetensors"], "round_to=0"),
        (["shrink", "--onnx", "."], "is a folder"),
    ],
)
def test_options_that_say_nothing_are_refused(
    folder: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [words[0], str(folder), *words[1:]])
    assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.output


def test_bench_tells_what_it_can_where_onnx_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.warns(UserWarning, match="no figures of ONNX Runtime: .*no such operator"):
        rows = json.loads(ask("bench", str(folder), "--batch", "2", "--rounds", "2", "--threads", "1", "--json"))
    assert {row["engine"] for row in rows} == {"PyTorch"}


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
    (decided,) = json.loads(ask("evaluate", str(conditional), "--strategy", "threshold", "--json"))
    assert decided["network"] == "conditional, threshold"
    (dense,) = json.loads(ask("evaluate", str(conditional), "--of", "dense", "--json"))
    assert dense == rows["dense"]
    bench = ["bench", str(conditional), "--batch", "1", "--batch", "4", "--rounds", "2", "--threads", "1", "--json"]
    assert [row["batch"] for row in json.loads(ask(*bench))] == [1, 4]


def test_a_conditional_run_as_onnx_tells_what_images_need_and_what_the_file_computes(
    conditional: Path, tmp_path: Path
) -> None:
    file = tmp_path / "masked.onnx"
    written = ask("shrink", str(conditional), "--onnx", str(file))
    assert "conditional" in written and "masked, as ONNX" in written and file.is_file()
    made = json.loads(ask("shrink", str(conditional), "--onnx", str(file), "--json"))
    (row,) = json.loads(ask("evaluate", str(conditional), "--of", "conditional", "--json"))
    assert made["conditional"]["macs"] == pytest.approx(row["macs"])
    gated = headgate.load(conditional / "conditional.safetensors", make())
    assert made["conditional"]["macs"] < made["onnx"]["macs"] <= made["dense"]["macs"] + gated.dynamic.macs
    compact = gated.compact()
    assert made["onnx"]["macs"] == independent_macs(compact.in_plain_operators(), torch.zeros(1, 1, 8, 8))
    (conditional / "result.json").rename(tmp_path / "result.json")
    try:
        again = json.loads(ask("shrink", str(conditional), "--onnx", str(file), "--json"))
    finally:
        (tmp_path / "result.json").rename(conditional / "result.json")
    assert again["conditional"]["macs"] == pytest.approx(row["macs"])


@pytest.mark.parametrize(
    "options", [{"kind": "static"}, {"kind": "dynamic"}, {"kind": "dynamic", "static": ["layer2"]}]
)
def test_the_network_that_is_timed_at_a_tau_is_the_one_that_is_judged(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 1, 8, 8)
    gated = headgate.gate(make().eval(), x, target=0.7, **options)
    torch.nn.init.normal_(gated.gates.logits)
    if gated.dynamic is not None:
        opinionated_(gated)
    gated.calibrate([x], batches=1).eval()
    answers: list[torch.Tensor] = []
    monkeypatch.setattr(asking, "module_call", lambda net, image: lambda: answers.append(net(image).detach()))
    for tau, call in asking._at_taus(gated, x.split(1), (0.3, 0.5, 0.8)).items():
        answers.clear()
        call()
        expected = gated.strategy("threshold", tau=float(tau))(x)
        assert difference(torch.cat(answers), expected) < 1e-4


def test_a_run_with_exits_answers_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, exits=("layer1", "layer2"), tune_epochs=0, target="0.7", gate_lr=0.05)
    rows = {row["network"]: row for row in json.loads(ask("evaluate", str(folder), "--json"))}
    assert 0 < rows["cascade"]["macs_fraction"] < 1.1 and set(rows) == {"dense", "cascade"}
    bench = ["bench", str(folder), "--batch", "1", "--batch", "8", "--rounds", "2", "--threads", "1", "--json"]
    assert [row["batch"] for row in json.loads(ask(*bench))] == [1, 8]
    for words, message in (
        (["shrink", str(folder), "--onnx", str(tmp_path / "x.onnx")], "cascade.safetensors"),
        (["bench", str(folder), "--batch", "1", "--batch", "1000"], "there are only 360 images"),
        (["evaluate", str(folder), "--strategy", "threshold", "--tau", "0.3"], "--sweep-tau"),
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1 and message in result.stderr


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
        (["train", "digits-static", "--out", "a_file"], "a_file is a file"),
        (["train", "digits-static", "--out", "/proc/nowhere"], "can't be written"),
        (["train", "digits-static", "--seed", "99999999999999999999"], "2^63"),
        (["train", "digits-static", "--kind", "dynamic", "--round-to", "8"], "no widths to round"),
        (["train", "digits-static", "--target", "1000"], "can't be reached"),
        (["train", "digits-static", "--no-train-model"], "left out without exits"),
        (["train", "digits-static", "--exits", "layer1", "--tune-epochs", "0", "--frozen", "x"], "left out with exits"),
        (["train", "--model", "digits_resnet", "--dense-epochs", "0", "--gate-epochs", "0", "--tune-epochs", "0",
          "--weights", "w.safetensors", "--dry-run"], "w.safetensors"),
        (["train", "digits-static", "--distill", "0.5", "--teacher", f"{TINY}=w.safetensors"], "w.safetensors"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
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
    found = json.loads(ask("train", "digits-static", "--image-size", "8", "--dry-run", "--json"))
    assert [row["phase"] for row in found["phases"]] == ["dense", "gates", "tune"]
    assert found["by_processes"][0]["processes"] == 1 and found["by_processes"][0]["seconds"] > 0


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


def test_a_teacher_of_other_classes_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = "from headgate.models.cifar_resnet import CifarResNet\ndef {}():\n    return CifarResNet(1, {}, width=4)\n"
    Path("nets.py").write_text(
        lines.format("seven", "7, in_channels=1") + lines.format("coloured", "10, in_channels=3")
    )
    for name, net, message in (
        ("seven", CifarResNet(1, 7, in_channels=1, width=4), "gives (7,) scores an image, its student (10,)"),
        ("coloured", CifarResNet(1, 10, in_channels=3, width=4), "rejects images of shape"),
    ):
        save_file(net.state_dict(), f"{name}.safetensors")
        words = ["train", "digits-static", "--distill", "0.5", "--teacher", f"nets.py:{name}={name}.safetensors"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1 and message in result.stderr, result.output
    assert not Path("runs").exists()


def test_images_in_folders_may_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--data-dir` says where they are: at the start the folder around them, later the folder itself."""
    pytest.importorskip("PIL")
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 8), dtype=np.uint8)
    for split in ("train", "val"):
        for label in (0, 1):
            folder = tmp_path / "store" / "images" / split / str(label)
            folder.mkdir(parents=True)
            for number in range(8):
                Image.fromarray(pixels[label].transpose(1, 2, 0)).save(folder / f"{number}.png")
    net = tmp_path / "net.py"
    net.write_text(
        "from headgate.models.cifar_resnet import CifarResNet\ndef make():\n    return CifarResNet(1, 2, width=4)\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["train", "--model", f"{net}:make", "--image-size", "8", "--batch-size", "8", "--dense-epochs", "1"]
    words += ["--gate-epochs", "1", "--tune-epochs", "0", "--calibration-batches", "2"]
    for given in (
        ["--data", "folder:images", "--data-dir", str(tmp_path / "store")],
        ["--data", "folder:~/store/images"],
    ):
        ask(*words, *given, "--dry-run")
    run = tmp_path / "run"
    ask(*words, "--data", "folder:images", "--data-dir", str(tmp_path / "store"), "--out", str(run), "--quiet")
    assert json.loads((run / "recipe.json").read_text())["data"] == f"folder:{tmp_path / 'store' / 'images'}"
    (run / "result.json").unlink()  # as if it had been stopped
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    result = CliRunner().invoke(app, ["train", "--resume", str(run)])
    assert result.exit_code == 1 and "store" in result.stderr
    ask("train", "--resume", str(run), "--data-dir", str(tmp_path / "elsewhere" / "images"), "--quiet")
    assert (run / "result.json").is_file()
    ask("evaluate", str(run), "--data-dir", str(tmp_path / "elsewhere" / "images"))
