"""A processor on which bfloat16 ends the process is found out before anything begins."""

from __future__ import annotations

import pytest
import torch

from headgate.errors import HeadgateError
from headgate.training import bfloat16
from headgate.training.team import Team

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_WITH_AMX = f"import os\nif 'ONEDNN_MAX_CPU_ISA' not in os.environ:\n    {DIES}"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def test_a_processor_that_dies_is_told_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "TRIAL", DIES_WITH_AMX)
    with pytest.raises(HeadgateError, match=r"SIGILL.*precision no or.*ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        Team("bf16")


def test_a_remedy_that_does_not_help_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "TRIAL", DIES)
    with pytest.raises(HeadgateError, match="train with precision no$"):
        Team("bf16")


@pytest.mark.parametrize("trial", ["pass", "raise SystemExit(1)", "import time; time.sleep(60)"])
def test_only_a_process_that_a_signal_ended_counts(monkeypatch: pytest.MonkeyPatch, trial: str) -> None:
    monkeypatch.setattr(bfloat16, "TRIAL", trial)
    monkeypatch.setattr(bfloat16, "SECONDS", 1.0)
    bfloat16.check_bfloat16()


def test_no_trial_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "TRIAL", DIES)
    assert Team("no").main


def test_the_trial_itself_runs() -> None:
    """In float32, which every processor has: its shapes fit, and it needs nothing but torch."""
    names: dict[str, object] = {}
    exec(bfloat16.TRIAL.replace(".bfloat16()", ""), names)
    x = names["x"]
    assert isinstance(x, torch.Tensor) and x.grad is not None and x.grad.isfinite().all()
