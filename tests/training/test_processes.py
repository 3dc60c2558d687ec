from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import RECIPE, options_of, start_process

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def together(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    prefix = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *prefix, *words], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def test_two_processes_train_as_one_with_the_joint_batch(tmp_path: Path) -> None:
    for processes in (1, 2):
        done = together(processes, "-m", "tests.training.joint_batch", str(tmp_path))
        assert done.returncode == 0, done.stderr
    one, two = load_file(tmp_path / "1.safetensors"), load_file(tmp_path / "2.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_whole_run_in_two_processes(tmp_path: Path, launched: None) -> None:
    folder = tmp_path / "run"
    process = start_process(*options_of(RECIPE), "--out", str(folder), prefix=TORCHRUN)
    _, complaint = process.communicate(timeout=180)
    assert process.returncode == 0, complaint
    assert (folder / "result.json").exists()
    assert '"processes": 2' in (folder / "result.json").read_text()


def test_nan_in_two_processes_ends_both_with_a_message(tmp_path: Path, launched: None) -> None:
    words = [*options_of(RECIPE), "--dense-lr", "1e30", "--out", str(tmp_path / "run")]
    process = start_process(*words, prefix=TORCHRUN)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "the loss became" in complaint


IDLE = """
from torch import nn
from headgate.models.cifar_resnet import CifarResNet

def make():
    net = CifarResNet(1, in_channels=1, width=8)
    net.auxiliary = nn.Linear(3, 3)
    return net
"""


def test_a_parameter_outside_of_the_loss_is_told(tmp_path: Path, launched: None) -> None:
    (tmp_path / "idle.py").write_text(IDLE)
    words = options_of(replace(RECIPE, model=f"{tmp_path / 'idle.py'}:make"))
    process = start_process(*words, "--out", str(tmp_path / "run"), prefix=TORCHRUN)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "takes no part in the loss" in complaint and "requires_grad_(False)" in complaint


def test_a_dead_process_ends_the_run(tmp_path: Path, launched: None) -> None:
    folder = tmp_path / "run"
    words = [*options_of(RECIPE), "--gate-epochs", "500", "--out", str(folder), "--checkpoint-seconds", "0"]
    process = start_process(*words, prefix=TORCHRUN)
    while process.poll() is None and not (folder / "checkpoint.safetensors").exists():
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "SIGKILL" in complaint or "Signal 9" in complaint
