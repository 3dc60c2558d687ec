from __future__ import annotations

from pathlib import Path

import torch
import torch.multiprocessing as mp

from tests.two_processes import LOSSES, gates, gradient, work


def test_two_processes_have_the_gradient_of_the_joint_batch(tmp_path: Path) -> None:
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)
    for loss in LOSSES:
        joint = gradient(loss, gates())
        assert joint.abs().max() > 0
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{loss}{rank}.pt"), joint)
