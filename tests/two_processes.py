"""What one of two processes does in `gates/test_processes.py`: half of a batch, and gradients averaged over both."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import headgate
from headgate.gates.budget import Budget

LOSSES = ("macs", "activation", "per_gate")


def gated_model(loss: str) -> headgate.GatedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    return headgate.gate(model, torch.randn(1, 3, 6, 6), target=0.5, budget=Budget.paper(0.5), loss=loss).train()


def gates() -> Tensor:
    return (torch.rand(8, 16, generator=torch.Generator().manual_seed(5)) < 0.6).float()


def gradient(loss: str, z_BG: Tensor) -> Tensor:
    """Of the cost loss of these gates, with respect to each gate's probability."""
    gated = gated_model(loss)
    shift_G = torch.zeros(z_BG.shape[1], requires_grad=True)
    gated._last = gated._ledger.draw(z_BG + shift_G)
    gated.cost_loss().backward()
    return shift_G.grad


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        for loss in LOSSES:
            mine = gradient(loss, gates()[4 * rank : 4 * rank + 4])
            dist.all_reduce(mine)
            torch.save(mine / 2, Path(folder) / f"{loss}{rank}.pt")
        dist.barrier()  # who leaves while the other still talks is aborted now and then
    finally:
        dist.destroy_process_group()
    os._exit(0)  # threads of gloo's that outlive the group abort a process that ends by itself, now and then
