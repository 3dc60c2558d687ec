"""What the benchmarks share: a command line, networks whose outputs mean something, decisions, an independent count.

Knows nothing of other libraries (see peers.py) and holds no question of its own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headgate.models.names import load_named
from headgate.training.repeat import without_folders as file_names_only

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records"
USER_RESNET = f"{os.path.relpath(HERE / 'user_resnet.py')}:lambda_resnet20"

INCOMPARABLE = 1e9
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def parser(question: str, name: str, models: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    made = argparse.ArgumentParser(description=question, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    if models:
        made.add_argument("--models", type=names_in, default=",".join(models), help="names, separated by commas")
    made.add_argument("--out", type=Path, default=RECORDS / f"{name}.json", help="the record to write")
    made.add_argument("--quick", action="store_true", help="few rounds and the smallest case: does it run?")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--seed", type=int, default=0)
    return made


def without_folders(recipe: dict[str, Any]) -> dict[str, Any]:
    """A run's recipe for a record: no folder of this machine."""
    teacher = recipe.get("teacher")
    return recipe | {
        "weights": Path(recipe["weights"] or "").name, "data_dir": None,
        "teacher": None if teacher is None else file_names_only(teacher),
    }  # fmt: skip


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def full_name(name: str) -> str:
    """`resnet50` is torchvision's, `cifar_…` is headgate's; anything with a colon is taken as it is."""
    if ":" in name or name.startswith("cifar_"):
        return name
    return USER_RESNET if name == "lambda_resnet20" else f"torchvision:{name}"


def make_network(name: str, seed: int, batch: int = 2) -> tuple[nn.Module, Tensor]:
    """The network in eval mode, randomised so that an error anywhere shows in its output, and a random batch."""
    torch.manual_seed(seed)
    named = load_named(full_name(name))
    x = torch.randn(batch, *named.example_input.shape[1:], generator=torch.Generator().manual_seed(seed))
    return randomize_(named.model.eval(), x, seed), x


@torch.no_grad()
def randomize_(model: nn.Module, x: Tensor, seed: int) -> nn.Module:
    """Gives every norm, bias and scale a value of its own; BatchNorm's statistics are those of `x`, then disturbed.

    Fresh networks hide mistakes: BatchNorm is the identity, ConvNeXt's layer scales are 1e-6, a ViT's head is zero, and
    AlexNet's output hardly depends on its input.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            _randomize_parameter_(module, name, parameter, generator)
    if not any(isinstance(module, NORMS) for module in model.modules()):  # nothing else keeps the signal alive
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
    batchnorms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [module.momentum for module in batchnorms]
    for module in batchnorms:
        module.train().momentum = 1.0
    if batchnorms:
        model(x)
    for module, momentum in zip(batchnorms, momenta, strict=True):
        module.eval().momentum = momentum
        spread = module.running_var.sqrt()
        module.running_mean += 0.2 * spread * torch.randn(spread.shape, generator=generator)
        module.running_var *= torch.empty_like(spread).uniform_(0.7, 1.4, generator=generator)
    return model


def _randomize_parameter_(module: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if isinstance(module, NORMS) and name == "weight":
        parameter.uniform_(0.5, 1.5, generator=generator)
    elif "bias" in name and parameter.dim() == 1:
        parameter.normal_(0, 0.1, generator=generator)
    elif parameter.abs().max() < 1e-4:  # layer scales, zero heads, class tokens
        fan_in = parameter[0].numel() if isinstance(module, (nn.Linear, nn.Conv2d)) else 4
        parameter.normal_(0, fan_in**-0.5, generator=generator)


def decide_(gated: Any, how: str, seed: int) -> None:
    """Sets the gates' probabilities and projects them on the target.

    `random`: every gate draws its own. `uniform`: every mask keeps about the same share of its channels.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = {}
    for name, p in gated.gate_probabilities().items():
        if how == "random":
            chosen[name] = torch.rand(p.shape, generator=generator)
        elif how == "uniform":
            ranks = torch.randperm(p.numel(), generator=generator).reshape(p.shape)
            chosen[name] = (ranks + torch.rand((), generator=generator)) / p.numel()
        else:
            raise ValueError(f"decisions are 'random' or 'uniform', not {how!r}")
    gated.set_gate_probabilities(chosen)
    gated.project()
    gated.eval()


@torch.no_grad()
def independent_macs(model: nn.Module, x: Tensor) -> int:
    """MACs for one image by PyTorch's own counter, which counts two operations a MAC.

    Fused attention on a CPU is invisible to the counter, so attention is computed by plain matrix products here.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(x[:1])
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    flops = counter.get_total_flops()
    assert flops % 2 == 0, "every MAC counts twice"
    return flops // 2


def relative_difference(y: Tensor, reference: Tensor) -> float:
    """Largest difference in units of the reference's largest value; `INCOMPARABLE` if shapes differ or NaN occurs."""
    if y.shape != reference.shape or not (y.isfinite().all() and reference.isfinite().all()):
        return INCOMPARABLE
    return ((y - reference).abs().max() / reference.abs().max().clamp_min(1e-12)).item()


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table; the first column is left-aligned, numbers stand right."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else _cell(cell) for cell in row))
    console = Console()
    Console(width=console.width if console.is_terminal else 180).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
