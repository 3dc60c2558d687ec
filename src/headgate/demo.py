"""The tour: a small ResNet on the embedded digits, dense → gated → shrunk, with a table at the end.

Everything a user does with the library, in the order they do it. Knows all that is below; nothing depends on it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from headgate.analysis.measure import module_call, onnx_call, ratio, time_interleaved, torch_threads
from headgate.data import digits
from headgate.data.batches import check_seed
from headgate.gates.budget import Budget
from headgate.gating import gate
from headgate.graph.macs import count_macs
from headgate.inference.export import export_onnx
from headgate.models.cifar_resnet import digits_resnet
from headgate.storage import load, save

IMAGE_SIZE = 16
WIDE = 120
"""Columns where there is no terminal to tell its width."""
BATCH_SIZE = 64
TARGET = 0.5
ROUND_TO = 8
"""Widths that are multiples of 8 fill the vector registers of today's CPUs."""


@dataclass(frozen=True)
class Schedule:
    """Epochs of each phase."""

    dense: int = 6
    gates: int = 12


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of images classified right."""
    images, labels = data.tensors
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train(
    model: nn.Module,
    loader: Iterable[Any],
    groups: Any,
    epochs: int,
    extra: Callable[[], Tensor | float],
    show: Callable[[str], None],
) -> None:
    """The user's own loop: cross entropy, plus whatever `extra` adds."""
    steps = epochs * len(loader)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], steps, pct_start=0.2)
    for _ in range(epochs):
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels) + extra()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        show(f"loss {float(loss.detach()):.3f}")


def run(out: Path, *, seed: int = 0, quick: bool = False) -> None:
    """The whole tour; files go to `out`."""
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=WIDE)
    torch.manual_seed(check_seed(seed))
    out.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(1, 1) if quick else Schedule()
    training, test = digits("train", IMAGE_SIZE), digits("test", IMAGE_SIZE)
    loader = DataLoader(training, BATCH_SIZE, shuffle=True, drop_last=True)
    example = torch.zeros(1, 1, IMAGE_SIZE, IMAGE_SIZE)
    started = time.perf_counter()
    model = digits_resnet()
    with _progress(console) as bars:
        show = _bar(bars, "train the dense network", schedule.dense)
        train(
            model,
            loader,
            [{"params": model.parameters(), "lr": 0.05, "weight_decay": 5e-4}],
            schedule.dense,
            lambda: 0.0,
            show,
        )

        gated = gate(model, example, target=TARGET, budget=Budget(TARGET, ramp_steps=schedule.gates * len(loader) // 2))
        show = _bar(bars, f"learn {gated.graph.gate_count} gates", schedule.gates)
        groups = gated.param_groups(lr=0.05, weight_decay=5e-4)
        train(
            gated,
            loader,
            groups,
            schedule.gates,
            gated.cost_loss,
            lambda text: show(f"{text}, cost {gated.budget.last_cost:.2f}"),
        )

        show = _bar(bars, "calibrate, shrink, save, export", 1)
        gated.calibrate(loader, round_to=ROUND_TO)
        small = gated.shrink()
        save(model, out / "dense.safetensors")
        save(gated, out / "gated.safetensors")
        save(small, out / "small.safetensors")
        small = load(out / "small.safetensors", digits_resnet())
        export_onnx(model, example, out / "dense.onnx")
        export_onnx(small, example, out / "small.onnx")
        show("done")
    rows = {
        "dense": (model, count_macs(model, example)),
        "gated": (gated, int(gated.macs())),
        "shrunk": (small, count_macs(small, example)),
    }
    _print_rows(console, rows, test, out, example)
    console.print(
        f"{time.perf_counter() - started:.0f} s in all. "
        f"In {out}/: small.safetensors, small.onnx, and the dense and gated networks."
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<34}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console,
    )  # fmt: skip


def _bar(bars: Progress, title: str, total: int) -> Callable[[str], None]:
    task = bars.add_task(title, total=total, note="")
    return lambda note: bars.update(task, advance=1, note=note)


def _print_rows(
    console: Console, rows: dict[str, tuple[nn.Module, int]], test: TensorDataset, out: Path, example: Tensor
) -> None:
    batch = torch.randn(64, *example.shape[1:])
    threads = torch.get_num_threads()
    calls = {name: module_call(model.eval(), batch) for name, (model, _) in rows.items()}
    calls |= {
        f"{name}, ONNX": onnx_call(out / f"{file}.onnx", batch, threads)
        for name, file in (("dense", "dense"), ("shrunk", "small"))
    }
    with torch_threads(threads):
        timings = time_interleaved(calls, rounds=30)
    table = Table(
        title=f"digits, {IMAGE_SIZE}×{IMAGE_SIZE}; ms for a batch of {len(batch)}, {threads} threads, interleaved",
        title_justify="left",
    )
    for column in ("network", "accuracy", "MACs", "weights", "file", "PyTorch", "ONNX Runtime"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name, (model, macs) in rows.items():
        file = out / {"dense": "dense.safetensors", "gated": "gated.safetensors", "shrunk": "small.safetensors"}[name]
        onnx = timings.get(f"{name}, ONNX")
        weights = sum(p.numel() for p in model.parameters())
        table.add_row(
            name, f"{accuracy(model, test):.2%}", f"{macs / 1e6:.2f} M", f"{weights / 1e3:.0f} k",
            f"{file.stat().st_size / 1024:.0f} kB", f"{timings[name].median_ms:.2f} ms",
            "–" if onnx is None else f"{onnx.median_ms:.2f} ms",
        )  # fmt: skip
    console.print(table)
    faster = ratio(timings["dense"], timings["shrunk"])
    faster_onnx = ratio(timings["dense, ONNX"], timings["shrunk, ONNX"])
    console.print(
        f"shrunk: {rows['dense'][1] / rows['shrunk'][1]:.2f}× fewer MACs, "
        f"{faster.median:.2f}× as fast in PyTorch, {faster_onnx.median:.2f}× in ONNX Runtime."
    )
