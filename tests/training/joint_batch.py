"""What each process does in `test_processes.py`: three steps on its share of every batch; process 0 writes the weights.

The noise of the gates is that of the joint batch, each process taking its images' rows, so that one process with the
whole batch must end with the same weights.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import headgate
import headgate.gates.static as static
from headgate.data.sources import open_data
from headgate.gates.budget import Budget
from headgate.training.journal import SilentJournal
from headgate.training.loop import Interrupted, Surroundings, accuracy, begin, run_phase
from headgate.training.team import Team
from tests.training.runs import RECIPE

BATCH = 32
STEPS = 3


def without_batchnorm() -> nn.Module:
    """BatchNorm has statistics of its own in each process, which is as everywhere, but not what is tested here."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )


def main(out: Path) -> None:
    torch.set_num_threads(1)
    team = Team()
    calls = []

    def joint_noise(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
        calls.append(1)
        uniform = torch.rand(BATCH, shape[1], generator=torch.Generator().manual_seed(len(calls)))
        noise = torch.logit(uniform.clamp(1e-6, 1 - 1e-6))
        return noise[team.rank :: team.processes]

    static.logistic_noise = joint_noise  # type: ignore[assignment]
    data = open_data("digits", size=8, augment=False)
    gated = headgate.gate(without_batchnorm(), torch.zeros(1, 1, 8, 8), target=0.5, budget=Budget(0.5, ramp_steps=2))
    phase = begin("gates", gated, replace(RECIPE, batch_size=BATCH))
    around = Surroundings(
        replace(RECIPE, batch_size=BATCH), data.train, team, SilentJournal(), wants_stop=lambda: phase.step == STEPS
    )
    with contextlib.suppress(Interrupted):
        run_phase(phase, around)
    share = accuracy(gated, data.test, team)
    if team.main:
        tensors = {name: p.detach().clone() for name, p in gated.named_parameters()}
        save_file(
            {**tensors, "accuracy": torch.tensor(share, dtype=torch.float64)}, out / f"{team.processes}.safetensors"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
