"""How long does it take from a dense network to a checked one of half its MACs?

headgate: gate, decide, project on the budget, shrink with its check. Torch-Pruning 1.6.1: dependency graph, then global
pruning until half the MACs. In one run, interleaved; `gate()` alone in a column of its own; and whether the time grows
linearly with the depth of a ResNet. Random weights: nothing here depends on their values.
"""

from __future__ import annotations

import copy
import math
import signal
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import peers
import torch
from common import decide_, first_line, independent_macs, make_network, parser, show
from rich.console import Console
from torch import Tensor, nn

import headgate
from headgate.analysis.measure import Timing, ratio, time_interleaved, torch_threads
from headgate.analysis.records import write_record

QUESTION = "How many seconds from a dense network to one of half its MACs, beside Torch-Pruning 1.6.1?"
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
MODELS = (*RESNETS, "densenet201", "efficientnet_v2_l", "vit_b_16")
TARGET = 0.5
Row = dict[str, Any]


def main() -> None:
    options = _options()
    names = ["resnet18"] if options.quick else options.models
    rounds = 1 if options.quick else options.rounds
    rows = []
    with torch_threads(options.threads):
        for name in names:
            rows.append(_row(name, rounds, options))
            Console(highlight=False).print(_line(rows[-1]))
    show("seconds from dense to half the MACs", COLUMNS, [_cells(row) for row in rows])
    growth = _growth([row for row in rows if row["model"] in RESNETS])
    if growth:
        Console(highlight=False).print(f"ResNets: seconds ~ layers^k, {growth}")
    results = {"rows": rows, "growth_exponents_of_resnets": growth}
    write_record(options.out, question=QUESTION, results=results, threads=options.threads, seeds=[options.seed])


def _options() -> Namespace:
    made = parser(QUESTION, "tracing", MODELS)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--peer-limit", type=int, default=60, help="seconds after which Torch-Pruning's run is given up")
    made.add_argument("--importance", choices=["magnitude", "random"], default="magnitude", help="Torch-Pruning's")
    return made.parse_args()


def halve(model: nn.Module, x: Tensor, seed: int) -> nn.Module:
    """headgate's way: the given model stays as it is."""
    gated = headgate.gate(model, x, kind="static", target=TARGET)
    decide_(gated, "random", seed)
    return gated.shrink()


def _row(name: str, rounds: int, options: Namespace) -> Row:
    model, batch = make_network(name, options.seed)
    x = batch[:1]
    copies: dict[str, nn.Module] = {}
    made: dict[str, nn.Module] = {}

    def fresh_copy(side: str) -> None:
        copies[side] = copy.deepcopy(model)

    def ours() -> None:
        made["headgate"] = halve(copies["headgate"], x, options.seed)

    def theirs() -> None:
        made["torch_pruning"] = peers.prune_(copies["torch_pruning"], x, TARGET, importance=options.importance).model

    functions = {
        "headgate": ours,
        "gate": lambda: headgate.gate(copies["gate"], x, kind="static", target=TARGET),
        "torch_pruning": theirs,
    }
    row: Row = {"model": name, "layers": _layers(model)}
    for side in ("headgate", "torch_pruning"):  # once untimed: what is only done the first time, and whether it works
        fresh_copy(side)
        try:
            with _alarm(options.peer_limit if side == "torch_pruning" else 0):
                functions[side]()
        except Exception as error:
            if side == "headgate":
                raise
            row["torch_pruning_failed"] = first_line(error)
            del functions[side]
    timings = time_interleaved(functions, rounds, warmup=0, before=fresh_copy)
    dense_macs = independent_macs(model, x)
    row |= {f"{side}_fraction": round(independent_macs(small, x) / dense_macs, 4) for side, small in made.items()}
    return row | _seconds(timings)


@contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    """Give up after so many seconds (0: never)."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _seconds(timings: dict[str, Timing]) -> Row:
    seconds: Row = dict(timings)
    if "torch_pruning" in timings:
        seconds["torch_pruning_over_headgate"] = ratio(timings["torch_pruning"], timings["headgate"])
    return seconds


def _layers(model: nn.Module) -> int:
    return sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in model.modules())


def _growth(rows: Sequence[Row]) -> dict[str, float]:
    """The exponent k of seconds ~ layers^k, by least squares; 1 is linear, above 1 worse."""
    if len(rows) < 3:
        return {}
    layers = [math.log(row["layers"]) for row in rows]
    exponents = {}
    for side in ("gate", "headgate", "torch_pruning"):
        if all(side in row for row in rows):
            times = [math.log(row[side].median_ms) for row in rows]
            exponents[side] = round(float(np.polyfit(layers, times, 1)[0]), 2)
    return exponents


COLUMNS = ["model", "layers", "gate()", "headgate", "ms a layer", "left", "Torch-Pruning", "left", "times as long"]


def _cells(row: Row) -> list[Any]:
    theirs = row.get("torch_pruning")
    return [
        row["model"],
        row["layers"],
        _with_spread(row["gate"]),
        _with_spread(row["headgate"]),
        row["headgate"].median_ms / row["layers"],
        row.get("headgate_fraction"),
        row.get("torch_pruning_failed") if theirs is None else _with_spread(theirs),
        row.get("torch_pruning_fraction"),
        row["torch_pruning_over_headgate"].median if theirs is not None else None,
    ]


def _with_spread(timing: Timing) -> str:
    return f"{timing.median_ms / 1000:.2f} ± {timing.iqr_ms / 2000:.2f}"


def _line(row: Row) -> str:
    return f"{row['model']}: gate {_with_spread(row['gate'])} s, to the end {_with_spread(row['headgate'])} s"


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
