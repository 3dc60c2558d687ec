"""Where a run stands, in one file: enough to go on as if nothing had happened.

Weights, gates, optimizer and position in one safetensors file with JSON in its header, written beside and then renamed,
so that a kill at any moment leaves the last whole one. Random numbers are not in it: every step's are drawn from the
run's seed and the step's number. Knows tensors and numbers, nothing of what a phase does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from headgate.errors import FileError
from headgate.inference.files import read, remove_scratch, write

FILE = "checkpoint.safetensors"
VERSION = 1
ANEW = f"A run whose {FILE} was removed begins anew"
NET, OPTIMIZER = "net.", "optimizer."


@dataclass(frozen=True)
class Checkpoint:
    """A position in a run; at the start of a phase there are no tensors yet."""

    phase: str
    step: int
    recipe: Mapping[str, Any]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent in each phase so far."""
    log_position: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    """What the network and the optimizer hold besides tensors."""


def taken(
    net: nn.Module, optimizer: Optimizer, *, phase: str, step: int, recipe: Mapping[str, Any],
    seconds: Mapping[str, float], log_position: int, conditions: Mapping[str, int], totals: Mapping[str, float],
    scaler: Mapping[str, Any] | None = None,
) -> Checkpoint:  # fmt: skip
    """The checkpoint of a network in training and its optimizer."""
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in net.state_dict().items():
        if isinstance(value, Tensor):
            tensors[NET + name] = value
        else:
            extra[name] = value
    state = optimizer.state_dict()
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{index}.{key}"] = value
            elif value is not None:
                numbers.setdefault(str(index), {})[key] = value
    rest = {
        "extra": extra,
        "optimizer": {"numbers": numbers, "groups": state["param_groups"]},
        "conditions": dict(conditions),
        "totals": dict(totals),
        "scaler": None if scaler is None else dict(scaler),
    }
    return Checkpoint(phase, step, recipe, dict(seconds), log_position, tensors, rest)


def restore_net_(checkpoint: Checkpoint, net: nn.Module) -> None:
    """Put a checkpoint's weights back. The network may change its parameters: make the optimizer afterwards."""
    state = {name[len(NET) :]: value for name, value in checkpoint.tensors.items() if name.startswith(NET)}
    try:
        net.load_state_dict({**state, **checkpoint.rest["extra"]})
    except RuntimeError as error:
        problem = str(error).splitlines()[-1].strip()
        raise FileError(f"the checkpoint is of another network than the recipe's: {problem}") from error


def restore_optimizer_(checkpoint: Checkpoint, optimizer: Optimizer) -> None:
    """Put a checkpoint's momenta and the like back."""
    saved = checkpoint.rest["optimizer"]
    entries: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in saved["numbers"].items()}
    for name, value in checkpoint.tensors.items():
        if name.startswith(OPTIMIZER):
            index, key = name[len(OPTIMIZER) :].split(".", 1)
            entries.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": entries, "param_groups": saved["groups"]})


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the folder's checkpoint; whatever goes wrong, the last one stays."""
    remove_scratch(folder / FILE)
    write(
        folder / FILE,
        checkpoint.tensors,
        {
            "kind": "checkpoint", "version": VERSION, "phase": checkpoint.phase, "step": checkpoint.step,
            "recipe": dict(checkpoint.recipe), "seconds": dict(checkpoint.seconds),
            "log_position": checkpoint.log_position, "rest": dict(checkpoint.rest),
        },
    )  # fmt: skip


def read_checkpoint(folder: Path) -> Checkpoint:
    """The folder's checkpoint, all of it verified."""
    path = folder / FILE
    try:
        tensors, data = read(path)
    except FileError as error:
        raise FileError(f"{error}. {ANEW}") from error
    if data.get("kind") != "checkpoint":
        raise FileError(f"{path} holds a network, no checkpoint: it is no file of a run")
    if data.get("version") != VERSION:
        written = f"{path} is a checkpoint of version {data.get('version')}, this headgate reads {VERSION}"
        raise FileError(f"{written}: go on with the one that wrote it")
    missing = {"phase", "step", "recipe", "seconds", "log_position", "rest"} - data.keys()
    if missing:
        raise FileError(f"{path} lacks {sorted(missing)}: it is no whole checkpoint. {ANEW}")
    return Checkpoint(
        data["phase"], data["step"], data["recipe"], data["seconds"], data["log_position"], tensors, data["rest"]
    )
