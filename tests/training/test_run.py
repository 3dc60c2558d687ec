from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import headgate
from headgate.errors import FileError, HeadgateError, NonFiniteLoss
from headgate.gated import GatedModel
from headgate.inference import files
from headgate.training import ask, loop
from headgate.training import checkpoint as checkpoints
from headgate.training.journal import read_log
from headgate.training.loop import Interrupted
from headgate.training.prepare import _teacher_named, data_of
from headgate.training.recipe import RECIPES
from headgate.training.run import recipe_in
from headgate.training.start import Options, go, only_user
from tests.training.runs import QUIET, RECIPE, TINY, options_of, run, same_weights, start_process
from tests.training.tiny import make, two_layers

EVERY_STEP = Options(quiet=True, checkpoint_seconds=0)


def stop_at_(monkeypatch: pytest.MonkeyPatch, phase_name: str, step: int) -> None:
    """Send this process a Ctrl-C after a step."""
    obey = loop._obey

    def stop(phase, around, loss, last_of_phase=False):  # type: ignore[no-untyped-def]
        if (phase.name, phase.step) == (phase_name, step):
            os.kill(os.getpid(), signal.SIGINT)
        obey(phase, around, loss, last_of_phase)

    monkeypatch.setattr(loop, "_obey", stop)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder


def test_a_run_meets_its_target_from_below(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    assert result["macs_fraction"]["shrunk"] <= 0.5
    assert result["macs_fraction"]["shrunk"] > 0.45
    assert result["macs"]["gated"] == result["macs"]["shrunk"]
    small = headgate.load(whole / "small.safetensors", make())
    assert headgate.count_macs(small, torch.zeros(1, 1, 8, 8)) == result["macs"]["shrunk"]


def test_a_run_learns(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    assert result["accuracy"]["shrunk"] > 0.5
    assert result["images"] == 360 and result["measured_on"] == "test"


def test_the_log_tells_the_whole_story(whole: Path) -> None:
    lines = read_log(whole / "log.jsonl")
    kinds = [line["kind"] for line in lines if line["kind"] != "step"]
    assert kinds == ["start", "epoch", "epoch", "gates", "epoch", "gates", "decided", "epoch", "end"]
    gates = [line for line in lines if line["kind"] == "epoch" and line["phase"] == "gates"]
    assert {"loss", "accuracy", "cost", "cost_decided", "polarised", "goal"} <= gates[-1].keys()


def test_the_same_run_twice_has_the_same_weights(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "again")
    assert same_weights(whole, tmp_path / "again")
    run(tmp_path / "other", seed=1)
    assert not same_weights(whole, tmp_path / "other", "dense.safetensors")


@pytest.mark.parametrize("stop_at", [("dense", 4), ("gates", 11), ("gates", 15), ("tune", 1), ("tune", 10)])
def test_an_interrupted_run_ends_with_the_same_bits(
    whole: Path, tmp_path: Path, stop_at: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    obey = loop._obey
    stop_at_(monkeypatch, *stop_at)
    with pytest.raises(Interrupted):
        run(tmp_path / "run")
    monkeypatch.setattr(loop, "_obey", obey)
    torch.manual_seed(99)
    go(tmp_path / "run", None, EVERY_STEP)
    assert same_weights(whole, tmp_path / "run")
    done = [
        (line["phase"], line["epoch"]) for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "epoch"
    ]
    assert len(done) == len(set(done)) == 4  # nothing logged twice, nothing missing


def test_a_compiled_run_ends_with_the_same_bits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headgate.save(two_layers(), tmp_path / "dense.safetensors")
    changes = {
        "model": TINY.replace(":make", ":two_layers"), "weights": str(tmp_path / "dense.safetensors"),
        "compile": True, "distill": 0.5, "mix": 0.4, "dense_epochs": 0, "gate_epochs": 1,
    }  # fmt: skip
    real = torch.compile

    def compiled(net: torch.nn.Module, **options: Any) -> Any:
        """Gates take minutes to compile, and what stops here is the phase after them."""
        return real(net, **options | ({"backend": "aot_eager"} if isinstance(net, headgate.GatedModel) else {}))

    monkeypatch.setattr(torch, "compile", compiled)
    run(tmp_path / "whole", **changes)
    obey = loop._obey
    stop_at_(monkeypatch, "tune", 3)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", **changes)
    monkeypatch.setattr(loop, "_obey", obey)
    go(tmp_path / "run", None, EVERY_STEP)
    assert same_weights(tmp_path / "whole", tmp_path / "run")
    assert not any(
        "_orig_mod" in name for name in headgate.load(tmp_path / "run" / "small.safetensors", two_layers()).state_dict()
    )


def test_compiling_without_a_compiler_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(HeadgateError, match=r"compile=True.*install a C\+\+ compiler"):
        run(tmp_path / "run", compile=True)


DYNAMIC = {"kind": "dynamic", "target": "0.7", "gate_lr": 0.02, "gate_epochs": 3}


@pytest.fixture(scope="module")
def conditional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose gates depend on the image."""
    folder = tmp_path_factory.mktemp("conditional") / "run"
    run(folder, **DYNAMIC)
    return folder


def test_a_conditional_run_meets_its_target(conditional: Path) -> None:
    result = json.loads((conditional / "result.json").read_text())
    assert set(result["accuracy"]) == {"dense", "gated", "conditional"}
    # the threshold was found on training images, this is about others
    assert 0.5 < result["macs_fraction"]["conditional"] < 0.72
    net = headgate.load(conditional / "conditional.safetensors", make())
    assert isinstance(net, headgate.GatedModel) and net.dynamic is not None
    assert result["accuracy"]["conditional"] > 0.5
    assert not (conditional / "small.safetensors").exists()


@pytest.mark.parametrize("stop_at", [("gates", 11), ("tune", 4)])
def test_an_interrupted_conditional_run_ends_with_the_same_bits(
    conditional: Path, tmp_path: Path, stop_at: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    obey = loop._obey
    stop_at_(monkeypatch, *stop_at)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", **DYNAMIC)
    monkeypatch.setattr(loop, "_obey", obey)
    torch.manual_seed(99)
    go(tmp_path / "run", None, EVERY_STEP)
    assert same_weights(conditional, tmp_path / "run", "conditional.safetensors")


def test_gates_that_learn_while_weights_are_tuned_go_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = DYNAMIC | {"tune_gate_lr": 0.01, "gate_epochs": 1}
    run(tmp_path / "whole", **learning)
    obey = loop._obey
    stop_at_(monkeypatch, "tune", 4)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", **learning)
    monkeypatch.setattr(loop, "_obey", obey)
    torch.manual_seed(99)
    go(tmp_path / "run", None, EVERY_STEP)
    assert same_weights(tmp_path / "whole", tmp_path / "run", "conditional.safetensors")
    nets = [
        headgate.load(tmp_path / "run" / name, make()) for name in ("decided.safetensors", "conditional.safetensors")
    ]
    before, after = ([p.detach() for p in net.dynamic.parameters()] for net in nets)  # type: ignore[union-attr]
    assert not all(torch.equal(own, other) for own, other in zip(before, after, strict=True)), "they learned"
    tuning = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line.get("phase") == "tune"]
    assert all("cost" in line for line in tuning if line["kind"] == "epoch")


def test_tuning_a_conditional_network_leaves_its_gates_alone(conditional: Path) -> None:
    before = headgate.load(conditional / "decided.safetensors", make())
    after = headgate.load(conditional / "conditional.safetensors", make())
    assert isinstance(before, headgate.GatedModel) and isinstance(after, headgate.GatedModel)
    gates, others = before.dynamic.state_dict(), after.dynamic.state_dict()
    assert all(torch.equal(gates[name], others[name]) for name in gates)
    assert not torch.equal(next(before.model.parameters()), next(after.model.parameters()))


def test_killed_at_any_moment(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*options_of(RECIPE), "--out", str(folder), "--checkpoint-seconds", "0", "--quiet", "--threads", "1"]
    kills = 0
    resume = ["--resume", str(folder), "--checkpoint-seconds", "0", "--quiet", "--threads", "1"]
    for delay in (0.15, 0.4, 0.8):
        process = start_process(*words)
        seen = _mark(folder)
        while process.poll() is None and _mark(folder) == seen:  # until it has written something new
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        process.communicate()
        kills += 1
        if (folder / "recipe.json").exists():
            words = resume
    process = start_process(*words)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 0, complaint
    assert kills == 3
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run(tmp_path / "undisturbed")
    finally:
        torch.set_num_threads(threads)
    assert same_weights(tmp_path / "undisturbed", folder)
    assert not list(folder.glob(".checkpoint*"))


def _mark(folder: Path) -> float:
    path = folder / "checkpoint.safetensors"
    return path.stat().st_mtime if path.exists() else 0.0


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_process(
        *options_of(RECIPE), "--gate-epochs", "200", "--out", str(folder), "--checkpoint-seconds", "0"
    )
    while process.poll() is None and not (folder / "checkpoint.safetensors").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, complaint = process.communicate(timeout=60)
    assert process.returncode == 130, complaint
    assert f"headgate train --resume {folder}" in complaint
    assert "\x1b" not in said  # no terminal, no control characters


DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import headgate.training.start as start, headgate.training.loop as loop
from pathlib import Path
obey = loop._obey
def full(phase, around, loss, last_of_phase=False):
    if (phase.name, phase.step) == ("gates", 13):
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    obey(phase, around, loss, last_of_phase)
loop._obey = full
try:
    start.go(Path(sys.argv[1]), None, start.Options(quiet=True, checkpoint_seconds=0))
except Exception as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(type(error).__name__, error)
"""


def test_a_full_disk_loses_nothing(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    folder = tmp_path / "run"
    obey = loop._obey
    stop_at_(monkeypatch, "gates", 10)
    with pytest.raises(Interrupted):
        run(folder)
    monkeypatch.setattr(loop, "_obey", obey)
    done = subprocess.run(
        [sys.executable, "-c", DISK, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith("FileError"), done.stdout + done.stderr
    assert "free some space" in done.stdout
    assert checkpoints.read_checkpoint(folder).step == 12
    go(folder, None, EVERY_STEP)
    assert same_weights(whole, folder)


def test_a_corrupt_checkpoint_is_refused(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    run(folder, tune_epochs=0)
    (folder / "result.json").unlink()
    path = folder / "checkpoint.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-3])
    with pytest.raises(FileError, match="damaged"):
        go(folder, None, EVERY_STEP)
    path.write_bytes((whole / "small.safetensors").read_bytes())
    with pytest.raises(FileError, match="no checkpoint"):
        go(folder, None, EVERY_STEP)
    path.write_bytes(b"\x80\x04pickle pickle pickle")
    with pytest.raises(FileError, match="pickle"):
        go(folder, None, EVERY_STEP)


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", tune_epochs=0)
    (tmp_path / "run" / "result.json").unlink()
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    (tmp_path / "run" / "recipe.json").write_text(json.dumps({**recipe, "target": "0.4"}))
    with pytest.raises(FileError, match="another recipe"):
        go(tmp_path / "run", None, EVERY_STEP)


def test_a_checkpoint_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    files.write(tmp_path / checkpoints.FILE, {}, {"kind": "checkpoint", "version": 99})
    with pytest.raises(FileError, match="version 99"):
        checkpoints.read_checkpoint(tmp_path)


def test_a_used_folder_and_a_finished_run_are_refused(whole: Path) -> None:
    with pytest.raises(FileError, match=r"holds a finished run: choose another folder with --out"):
        run(whole)
    (whole / "result.json").rename(whole / "kept.json")
    try:
        with pytest.raises(FileError, match=r"not empty: go on with that run by `headgate train --resume"):
            run(whole)
    finally:
        (whole / "kept.json").rename(whole / "result.json")
    with pytest.raises(FileError, match="is done"):
        go(whole, None, EVERY_STEP)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is no run"):
        go(tmp_path, None, EVERY_STEP)


def test_nan_ends_the_run_and_names_the_step(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match="phase 'dense'"):
        run(tmp_path / "run", dense_lr=1e30, dense_epochs=3)


def test_distillation_changes_the_run_and_not_its_target(tmp_path: Path, whole: Path) -> None:
    result = run(tmp_path / "run", distill=0.7)
    assert 0.45 < result["macs_fraction"]["shrunk"] <= 0.5
    assert not same_weights(whole, tmp_path / "run")


def test_another_teacher(tmp_path: Path, whole: Path) -> None:
    from safetensors.torch import save_file

    save_file(make().state_dict(), tmp_path / "teacher.safetensors")
    run(tmp_path / "run", distill=0.5, teacher=f"{TINY}={tmp_path / 'teacher.safetensors'}")
    run(tmp_path / "own", distill=0.5)
    assert same_weights(whole, tmp_path / "run", "dense.safetensors")
    assert not same_weights(tmp_path / "own", tmp_path / "run")


def test_squeezing_on_the_way_keeps_target_and_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SQUEEZE_EVERY", 3)
    changes = {"gate_epochs": 4, "gate_lr": 0.5, "squeeze_below": 0.3}
    squeezed = []
    squeeze_ = headgate.GatedModel.squeeze_

    def watched(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        squeezed.append(squeeze_(self, *args, **kwargs))
        return squeezed[-1]

    monkeypatch.setattr(headgate.GatedModel, "squeeze_", watched)
    result = run(tmp_path / "whole", **changes)
    assert any(squeezed)
    assert 0.45 < result["macs_fraction"]["shrunk"] <= 0.5
    obey = loop._obey
    stop_at_(monkeypatch, "gates", 40)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", **changes)
    monkeypatch.setattr(loop, "_obey", obey)
    go(tmp_path / "run", None, EVERY_STEP)
    assert same_weights(tmp_path / "whole", tmp_path / "run")


def test_validation_leaves_the_test_set_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path / "run", validation=200)
    assert result["measured_on"] == "validation" and result["images"] == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "names no model"), ({"target": "2"}, "at most 1"), ({"target": "60X"}, "no number of MACs"),
        ({"data": "nonsense"}, "nonsense"), ({"weights": "missing.safetensors"}, "no such weights"),
        ({"weights": "pretrained"}, "no pretrained weights"), ({"granularity": "pixel"}, "granularity"),
        ({"dense_epochs": 0}, "random weights"), ({"target": "1"}, "nothing to learn"), ({"seed": -1}, "seed"),
        ({"frozen": ("nolayer",)}, "nolayer"), ({"loss": "foo"}, "loss"), ({"round_to": 0}, "round_to"),
        ({"distill": 0.5, "teacher": "nowhere.safetensors"}, "no such weights"), ({"image_size": 7}, "enlarged"),
        ({"distill_temperature": 0.0}, "distill_temperature"), ({"calibration_batches": 0}, "calibration_batches"),
        ({"model": "cifar_resnet20"}, "rejects images"), ({"precision": "fp16"}, "needs a GPU"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_recipe_is_said(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(HeadgateError, match=message):
        run(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()  # nothing is in the way of the next try


def test_a_run_goes_on_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    stop_at_(monkeypatch, "gates", 5)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", model="tiny.py:make")
    monkeypatch.undo()
    (tmp_path / "run").rename(tmp_path / "moved")
    go(tmp_path / "moved", None, EVERY_STEP)
    assert same_weights(whole, tmp_path / "moved")


def test_other_data_is_refused_when_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at_(monkeypatch, "dense", 5)
    with pytest.raises(Interrupted):
        run(tmp_path / "run")
    found = checkpoints.read_checkpoint(tmp_path / "run")
    found.rest["conditions"]["images"] = 1  # type: ignore[index]
    checkpoints.write_checkpoint(tmp_path / "run", found)
    with pytest.raises(FileError, match="began with 1 training images"):
        go(tmp_path / "run", None, EVERY_STEP)


def test_two_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at_(monkeypatch, "dense", 5)
    with pytest.raises(Interrupted):
        run(tmp_path / "run")
    with only_user(tmp_path / "run"), pytest.raises(FileError, match="in use"):
        go(tmp_path / "run", None, EVERY_STEP)


def test_a_resumed_epoch_is_reported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    stop_at_(monkeypatch, "gates", 15)
    with pytest.raises(Interrupted):
        run(tmp_path / "run")
    monkeypatch.undo()
    go(tmp_path / "run", None, EVERY_STEP)
    epochs = [
        [(line["loss"], line["accuracy"]) for line in read_log(folder / "log.jsonl") if line["kind"] == "epoch"]
        for folder in (whole, tmp_path / "run")
    ]
    assert epochs[0] == epochs[1]


def test_layer_gates_and_the_per_gate_loss_run_too(tmp_path: Path) -> None:
    result = run(tmp_path / "run", granularity="layer", loss="per_gate", rate="0.3", target="0.75")
    assert result["macs_fraction"]["shrunk"] <= 0.75


def test_a_dense_run_is_a_run_too(tmp_path: Path) -> None:
    result = run(tmp_path / "run", gate_epochs=0, tune_epochs=0)
    assert result["accuracy"].keys() == {"dense"}
    with pytest.raises(HeadgateError, match="gate_epochs"):
        run(tmp_path / "other", gate_epochs=0, tune_epochs=1)


def test_the_embedded_recipe_is_what_the_demo_trains() -> None:
    assert RECIPES["digits-static"].model == "digits_resnet"


def test_a_run_can_start_from_what_the_network_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"prime_batches": 3, "prime_spread": 2.0}
    run(tmp_path / "whole", **changes)
    obey = loop._obey
    stop_at_(monkeypatch, "gates", 5)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", **changes)
    monkeypatch.setattr(loop, "_obey", obey)
    go(tmp_path / "run", None, EVERY_STEP)
    assert same_weights(tmp_path / "whole", tmp_path / "run")
    run(tmp_path / "alike")
    assert not same_weights(tmp_path / "whole", tmp_path / "alike", "gated.safetensors")


def test_priming_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prime = GatedModel.prime_

    def slowly(self: GatedModel, *given: Any, **options: Any) -> GatedModel:
        time.sleep(1.0)
        return prime(self, *given, **options)

    monkeypatch.setattr(GatedModel, "prime_", slowly)
    result = run(tmp_path / "run", prime_batches=1, gate_epochs=1, tune_epochs=0)
    assert result["seconds"]["gates"] > 1.0


def test_a_dense_network_that_is_not_trained_yet_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obey = loop._obey

    def stop(phase: loop.Phase, around: loop.Surroundings, loss: float, last_of_phase: bool = False) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_obey", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run")
    assert [row["network"] for row in ask.evaluate(tmp_path / "run")] == ["dense, not trained yet"]
    monkeypatch.setattr(loop, "_obey", obey)
    go(tmp_path / "run", None, QUIET)
    assert "dense" in [row["network"] for row in ask.evaluate(tmp_path / "run")]


def test_a_conditional_network_is_looked_at_while_it_is_tuned(tmp_path: Path) -> None:
    run(tmp_path / "run", kind="dynamic", validation=200, gate_epochs=1, tune_epochs=2)
    epochs = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "epoch"]
    assert [line["phase"] for line in epochs if "validation_accuracy" in line] == ["dense", "tune", "tune"]


LEAVING = {"exits": ("layer1", "layer2"), "tune_epochs": 0, "target": "0.7", "gate_epochs": 3, "gate_lr": 0.05}


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose images can leave early."""
    folder = tmp_path_factory.mktemp("cascade") / "run"
    run(folder, **LEAVING)
    return folder


def test_a_run_with_exits_ends_with_its_table(cascade: Path) -> None:
    result = json.loads((cascade / "result.json").read_text())
    table = result["exits"]
    assert [row["name"] for row in table["rows"]] == ["layer1", "layer2", "last"]
    assert sum(row["share"] for row in table["rows"]) == pytest.approx(1)
    assert table["accuracy"] == pytest.approx(result["accuracy"]["cascade"])
    assert table["macs_fraction"] == pytest.approx(result["macs_fraction"]["cascade"], rel=1e-4)
    assert result["macs_fraction"]["cascade"] < 0.8, "thresholds are those of the training images"
    assert result["accuracy"]["cascade"] > 0.3
    net = headgate.load(cascade / "cascade.safetensors", make())
    assert isinstance(net, headgate.ExitModel)


def test_thresholds_of_exits_are_set_on_images_as_they_are(cascade: Path) -> None:
    recipe = recipe_in(cascade)
    batches = loop.plain_batches(data_of(recipe).train, recipe)
    net = headgate.load(cascade / "cascade.safetensors", make())
    assert isinstance(net, headgate.ExitModel)
    assert net.table(batches).macs_fraction <= net.target
    again = list(net.taus)
    assert net.calibrate(batches).taus == pytest.approx(again, abs=1e-6)
    assert len(batches) >= recipe.calibration_batches * recipe.batch_size // 2


def test_an_interrupted_run_with_exits_ends_with_the_same_bits(
    cascade: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obey = loop._obey
    stop_at_(monkeypatch, "gates", 14)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", **LEAVING)
    monkeypatch.setattr(loop, "_obey", obey)
    torch.manual_seed(99)
    go(tmp_path / "run", None, EVERY_STEP)
    assert same_weights(cascade, tmp_path / "run", "cascade.safetensors")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
def test_a_compiled_run_with_exits_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for the whole step, gates and classifiers included; with a backend that leaves operators as they are,
    so that not even rounding differs."""
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda net, **options: real(net, backend="aot_eager", fullgraph=True, **options)
    )
    changes = {**LEAVING, "gate_epochs": 1, "train_model": False}
    run(tmp_path / "plain", **changes)
    run(tmp_path / "compiled", **changes, compile=True)
    assert same_weights(tmp_path / "plain", tmp_path / "compiled", "cascade.safetensors")


def test_exits_are_checked_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="at names `layer9`"):
        run(tmp_path / "run", **{**LEAVING, "exits": ("layer9",)})
    with pytest.raises(HeadgateError, match="tune_epochs"):
        run(tmp_path / "run", **{**LEAVING, "tune_epochs": 1})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("teacher", "model", "weights"),
    [
        ("w.safetensors", "", "w.safetensors"), ("cifar_resnet56=a=b/w.safetensors", "cifar_resnet56", "a=b/w.safetensors"),
        ("timm:resnet18.a1_in1k=w", "timm:resnet18.a1_in1k", "w"), ("a=b/nets.py:big=w", "a=b/nets.py:big", "w"),
        ("=a=b/w", "", "a=b/w"),
    ],
)  # fmt: skip
def test_a_teacher_has_a_name_and_a_file(teacher: str, model: str, weights: str) -> None:
    assert _teacher_named(teacher) == (model, weights)
