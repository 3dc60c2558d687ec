"""The processes of a run: one, or several on this machine and others. A thin layer over `accelerate`.

Gives what the loop needs of it: devices, autocast, the averaged gradient, and agreement. Whatever makes one process
stop must stop all of them at the same step, or the others would wait for ever. Knows nothing of gates or data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from headgate.errors import HeadgateError
from headgate.training.bfloat16 import check_bfloat16


def _accelerate() -> Any:
    try:
        import accelerate
    except ImportError as error:
        raise HeadgateError("training needs the extra `train`: pip install 'headgate[train]'") from error
    return accelerate


class Team:
    """This process and the others."""

    def __init__(self, precision: str = "no") -> None:
        no_gpu = not torch.accelerator.is_available()
        if precision == "fp16" and no_gpu:
            raise HeadgateError("precision fp16 needs a GPU: use no, or bf16 where the processor has it")
        if precision == "bf16" and no_gpu:
            check_bfloat16()
        self.accelerator = _accelerate().Accelerator(mixed_precision=precision, cpu=no_gpu)
        self.rank = int(self.accelerator.process_index)
        self.processes = int(self.accelerator.num_processes)
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if self.processes != launched:
            raise HeadgateError(
                f"{launched} processes were launched, but accelerate sees {self.processes}: each would train alone. "
                "Look at its settings (`accelerate env`, ACCELERATE_* in the environment)"
            )
        self.device: torch.device = self.accelerator.device
        self._prepared: nn.Module | None = None

    @property
    def main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    def prepare(self, net: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """The network and its optimizer, ready for several processes and the chosen precision."""
        prepared = self.accelerator.prepare(net, optimizer)
        self._prepared = prepared[0]
        return prepared[0], prepared[1]

    def release(self) -> None:
        """Forget prepared networks: a phase is over, and what follows computes in full precision again."""
        if self._prepared is not None:
            self.accelerator.unwrap_model(self._prepared, keep_fp32_wrapper=False, keep_torch_compile=False)
        self._prepared = None
        self.accelerator.free_memory()

    def backward(self, loss: Tensor) -> None:
        """Gradients, averaged over the processes."""
        self.accelerator.backward(loss)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set in any process."""
        if self.processes == 1:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes.tolist()]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over the processes."""
        if self.processes == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return [float(value) for value in sums.tolist()]

    def wait(self) -> None:
        """Until all processes are here."""
        if self.processes > 1:
            self.accelerator.wait_for_everyone()
