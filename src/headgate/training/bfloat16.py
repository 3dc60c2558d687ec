"""Whether this processor survives bfloat16: tried in a process of its own, because where it does not, the process dies.

A processor may say that it has instructions which its hypervisor does not let it use; oneDNN then ends the whole
process with an illegal instruction, at the first product or in the first backward pass. Takes nothing, gives nothing,
or raises with what helps. Knows nothing of networks, recipes or GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from headgate.errors import HeadgateError

TRIAL = """
import torch
x = torch.randn(8, 16, 16, 16).bfloat16().requires_grad_()
for stride in (1, 2):
    torch.nn.functional.conv2d(x, x.detach()[:, :, :3, :3].clone().requires_grad_(), stride=stride).sum().backward()
matrix = torch.randn(64, 64).bfloat16()
matrix @ matrix
"""
"""What a network in training does, once, in small: products, convolutions with and without stride, their gradients."""
SECONDS = 120.0
LESS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""oneDNN without AMX, the newest of what processors have for bfloat16."""


def check_bfloat16() -> None:
    """Refuse to go on where bfloat16 would end this process."""
    died = _died({})
    if died is None:
        return
    remedy = "train with precision no"
    if _died(LESS) is None:
        remedy += " or, slower than it could be, with " + " ".join(f"{name}={value}" for name, value in LESS.items())
        remedy += " in the environment"
    raise HeadgateError(f"bfloat16 ends the process on this machine ({died} in a trial of it): {remedy}")


def _died(settings: Mapping[str, str]) -> str | None:
    """The signal that ended the trial, if one did."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", TRIAL], env={**os.environ, **settings}, capture_output=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):  # nothing is known then, and nothing is refused
        return None
    return signal.Signals(-ended.returncode).name if ended.returncode < 0 else None
