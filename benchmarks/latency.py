"""How much of the saved arithmetic becomes saved time?

Networks shrunk to half their MACs against the dense ones, on a CPU: batch 1 and 32; PyTorch eager with and without
folded BatchNorm (folded on both sides), and ONNX Runtime; both forms of the residual stream; widths as decided and
rounded to 8; decisions drawn at random and spread evenly over the layers. All variants of a case are timed interleaved.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import math
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import INCOMPARABLE, decide_, independent_macs, make_network, parser, relative_difference, show
from rich.console import Console
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

import headgate
from headgate.analysis.measure import Timing, module_call, onnx_call, ratio, time_interleaved, torch_threads
from headgate.analysis.records import write_record

QUESTION = "How much faster is a network shrunk to half its MACs, and which stream form is faster?"
MODELS = ("resnet50", "cifar_resnet56")
BATCHES = (1, 32)
BACKENDS = ("eager", "eager, BN folded", "onnxruntime")
STREAMS = ("shared", "indexed")
DECISIONS = ("random", "uniform")
ROUNDINGS = (1, 8)
TARGET = 0.5
SAMPLE_MS = 50
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Small:
    """A shrunk network in both dressings, and how it came about."""

    decisions: str
    stream: str
    round_to: int
    plain: nn.Module
    folded: nn.Module
    macs: int

    @property
    def name(self) -> str:
        return f"{self.decisions}/{self.stream}/{self.round_to}"


def main() -> None:
    options = _options()
    names = ["cifar_resnet56"] if options.quick else options.models
    rows: list[Row] = []
    with torch_threads(options.threads):
        for name in names:
            rows += _network_rows(name, options)
    for name, batch in product(names, _batches(options)):
        chosen = [row for row in rows if (row["model"], row["batch"]) == (name, batch)]
        show(f"{name}, batch {batch}, {options.threads} threads", COLUMNS, [_cells(row) for row in chosen])
    streams = _stream_comparison(rows)
    Console(highlight=False).print("indexed / shared, geometric mean of the times:", streams)
    results = {"rows": rows, "indexed_over_shared": streams}
    write_record(options.out, question=QUESTION, results=results, threads=options.threads, seeds=[options.seed])


def _options() -> Namespace:
    made = parser(QUESTION, "latency", MODELS)
    made.add_argument("--rounds", type=int, default=15, help="rounds at batch 1; at batch 32 half as many")
    return made.parse_args()


def _batches(options: Namespace) -> tuple[int, ...]:
    return BATCHES[:1] if options.quick else BATCHES


# From a name to the networks to time.


def _network_rows(name: str, options: Namespace) -> list[Row]:
    dense, example = make_network(name, options.seed)
    folded = fuse(copy.deepcopy(dense))
    dense_macs = independent_macs(dense, example)
    smalls = _shrink_all(dense, example[:1], options)
    rows = []
    for batch, backend in product(_batches(options), BACKENDS):
        x = torch.randn(batch, *example.shape[1:], generator=torch.Generator().manual_seed(options.seed))
        rounds = 3 if options.quick else options.rounds if batch == 1 else math.ceil(options.rounds / 2)
        timings = _time(backend, dense, folded, smalls, x, rounds, options.threads)
        rows += [_row(name, batch, backend, small, dense_macs, timings) for small in smalls]
        Console(highlight=False).print(f"{name}, batch {batch}, {backend}: dense {timings['dense'].median_ms:.1f} ms")
        gc.collect()
    return rows


def _shrink_all(dense: nn.Module, x: Tensor, options: Namespace) -> list[Small]:
    smalls = []
    for decisions, stream in product(DECISIONS, STREAMS):
        gated = headgate.gate(dense, x, kind="static", target=TARGET, stream=stream)
        decide_(gated, decisions, options.seed)
        for round_to in ROUNDINGS[:1] if options.quick else ROUNDINGS:
            gated.project(round_to)
            plain = gated.shrink()
            folded = gated.shrink(fold_batchnorm=True)
            smalls.append(Small(decisions, stream, round_to, plain, folded, independent_macs(plain, x)))
    return smalls


# Timing.


def _time(
    backend: str, dense: nn.Module, folded: nn.Module, smalls: list[Small], x: Tensor, rounds: int, threads: int
) -> dict[str, Timing]:
    if backend == "eager":
        modules = {"dense": dense} | {small.name: small.plain for small in smalls}
        return _interleaved({name: module_call(module, x) for name, module in modules.items()}, rounds)
    if backend == "eager, BN folded":
        modules = {"dense": folded} | {small.name: small.folded for small in smalls}
        return _interleaved({name: module_call(module, x) for name, module in modules.items()}, rounds)
    modules = {"dense": dense} | {small.name: small.plain for small in smalls}
    with tempfile.TemporaryDirectory() as folder:
        calls = {
            name: _onnx(module, x, Path(folder) / f"{n}.onnx", threads)
            for n, (name, module) in enumerate(modules.items())
        }
        return _interleaved(calls, rounds)


def _onnx(module: nn.Module, x: Tensor, path: Path, threads: int) -> Callable[[], Any]:
    """Exports the module for exactly this batch; the exported file must compute the same."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), (x,), path, dynamo=True, verbose=False)
    call = onnx_call(path, x, threads)
    with torch.inference_mode():
        difference = relative_difference(torch.from_numpy(call()[0]), module(x))
    assert difference < 1e-3, f"the exported network differs by {difference if difference < INCOMPARABLE else 'shape'}"
    return call


def _interleaved(functions: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    functions["dense"]()
    start = time.perf_counter()
    functions["dense"]()
    once_ms = (time.perf_counter() - start) * 1000
    calls = max(1, round(SAMPLE_MS / once_ms))
    return time_interleaved(functions, rounds, warmup=1, calls=calls, settle=1 if once_ms < 500 else 0)


# The answer.


def _row(name: str, batch: int, backend: str, small: Small, dense_macs: int, timings: dict[str, Timing]) -> Row:
    speedup = ratio(timings["dense"], timings[small.name])
    mac_ratio = dense_macs / small.macs
    return {
        "model": name,
        "batch": batch,
        "backend": backend,
        "decisions": small.decisions,
        "stream": small.stream,
        "round_to": small.round_to,
        "mac_ratio": round(mac_ratio, 4),
        "dense": timings["dense"],
        "shrunk": timings[small.name],
        "speedup": speedup,
        "percent_of_mac_ratio": round(100 * speedup.median / mac_ratio, 1),
    }


COLUMNS = ["backend", "decisions", "stream", "round to", "dense ms", "shrunk ms", "MACs ÷", "time ÷", "±", "% of MACs"]


def _cells(row: Row) -> list[Any]:
    return [
        row["backend"],
        row["decisions"],
        row["stream"],
        row["round_to"],
        row["dense"].median_ms,
        row["shrunk"].median_ms,
        row["mac_ratio"],
        row["speedup"].median,
        row["speedup"].iqr / 2,
        row["percent_of_mac_ratio"],
    ]


def _stream_comparison(rows: list[Row]) -> dict[str, float]:
    """Per network, batch and backend: time with an indexed stream over time with a shared one, decided alike."""
    logs: dict[str, list[float]] = {}
    keyed = {
        tuple(row[key] for key in ("model", "batch", "backend", "decisions", "round_to", "stream")): row for row in rows
    }
    for (*case, stream), row in keyed.items():
        if stream == "indexed":
            quotient = ratio(row["shrunk"], keyed[(*case, "shared")]["shrunk"])
            logs.setdefault(", ".join(map(str, case[:3])), []).append(math.log(quotient.median))
    return {case: round(math.exp(sum(values) / len(values)), 3) for case, values in logs.items()}


if __name__ == "__main__":
    main()
