"""Timing several things in one run, so that a noisy machine disturbs them all alike.

Takes callables by name and gives a `Timing` for each, its samples paired by round: `ratio(a, b)` divides round by round
before it takes the median. Also makes such callables from a PyTorch module or an ONNX file, on a set number of threads.
Knows nothing of gates, of graphs, or of where the numbers are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headgate.errors import HeadgateError

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median over rounds, the interquartile range, and the sample of every round in order."""

    median_ms: float
    iqr_ms: float
    samples_ms: tuple[float, ...]

    def as_record(self) -> dict[str, float | int]:
        return {"median_ms": _short(self.median_ms), "iqr_ms": _short(self.iqr_ms), "rounds": len(self.samples_ms)}


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times one timing is another: the median of the per-round quotients and their interquartile range."""

    median: float
    iqr: float
    samples: tuple[float, ...]

    def as_record(self) -> dict[str, float | int]:
        return {"median": _short(self.median), "iqr": _short(self.iqr), "rounds": len(self.samples)}


def time_interleaved(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmup: int = 1,
    *,
    calls: int = 1,
    settle: int = 0,
    before: Callable[[str], Any] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Timing]:
    """Times every function once a round, for `rounds` rounds, after `warmup` untimed rounds.

    A sample is the mean of `calls` calls in a row, preceded by `settle` untimed ones that refill the caches the other
    functions emptied. The order turns by one place a round, so that nobody always follows the same neighbour.
    `before(name)` runs untimed ahead of each sample.
    """
    if not functions:
        raise HeadgateError("nothing to time: give at least one function")
    if rounds < 1 or calls < 1 or warmup < 0 or settle < 0:
        raise HeadgateError(f"cannot time with {rounds=}, {calls=}, {warmup=}, {settle=}: at least 1, 1, 0, 0")
    names = list(functions)
    samples_ms: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if before is not None:
                before(name)
            sample_ms = _sample_ms(functions[name], calls, settle if turn >= 0 else 0, clock)
            if turn >= 0:
                samples_ms[name].append(sample_ms)
    return {name: timing_of(samples_ms[name]) for name in names}


def timing_of(samples_ms: Sequence[float]) -> Timing:
    """The `Timing` of samples in milliseconds, in the order of the rounds."""
    return Timing(statistics.median(samples_ms), interquartile_range(samples_ms), tuple(samples_ms))


def ratio(a: Timing, b: Timing) -> Ratio:
    """a / b, round by round. Both must come from the same `time_interleaved` call."""
    if len(a.samples_ms) != len(b.samples_ms):
        raise HeadgateError(
            f"timings of {len(a.samples_ms)} and {len(b.samples_ms)} rounds cannot be paired: "
            "time both in one call of time_interleaved"
        )
    quotients = tuple(x / y for x, y in zip(a.samples_ms, b.samples_ms, strict=True))
    return Ratio(statistics.median(quotients), interquartile_range(quotients), quotients)


def interquartile_range(samples: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return upper - lower


@contextlib.contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """PyTorch works on `threads` threads inside."""
    if threads < 1:
        raise HeadgateError(f"cannot compute on {threads} threads: at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def module_call(module: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """One forward pass of `module` (put in eval mode) on `x`, in inference mode, on the threads then set."""
    module.eval()

    @torch.inference_mode()
    def call() -> Any:
        return module(x)

    return call


def onnx_call(path: str | Path, x: torch.Tensor, threads: int) -> Callable[[], Any]:
    """One run of the ONNX file's first output on `x`, on `threads` threads of ONNX Runtime's CPU provider.

    The threads stop spinning when a run ends, since otherwise they would take the processor from what is timed next.
    """
    session = onnx_session(path, threads)
    feed = {session.get_inputs()[0].name: x.detach().cpu().numpy()}
    names = [session.get_outputs()[0].name]
    return lambda: session.run(names, feed)


def onnx_session(path: str | Path, threads: int) -> Any:
    """An ONNX Runtime session on `threads` threads."""
    try:
        import onnxruntime
    except ImportError as error:
        raise HeadgateError("onnxruntime is not installed: pip install 'headgate[onnx]'") from error
    if threads < 1:
        raise HeadgateError(f"cannot compute on {threads} threads: at least 1")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def latency(
    modules: Mapping[str, nn.Module],
    x: torch.Tensor,
    *,
    threads: int,
    rounds: int = 15,
    warmup: int = 2,
    calls: int = 1,
    settle: int = 1,
) -> dict[str, Timing]:
    """Milliseconds a forward pass of each module on the batch `x`, interleaved."""
    functions = {name: module_call(module, x) for name, module in modules.items()}
    with torch_threads(threads):
        return time_interleaved(functions, rounds, warmup, calls=calls, settle=settle)


def onnx_latency(
    paths: Mapping[str, str | Path],
    x: torch.Tensor,
    *,
    threads: int,
    rounds: int = 15,
    warmup: int = 2,
    calls: int = 1,
    settle: int = 1,
) -> dict[str, Timing]:
    """Milliseconds a run of each ONNX file on the batch `x`, interleaved."""
    functions = {name: onnx_call(path, x, threads) for name, path in paths.items()}
    return time_interleaved(functions, rounds, warmup, calls=calls, settle=settle)


def _sample_ms(function: Callable[[], Any], calls: int, settle: int, clock: Clock) -> float:
    for _ in range(settle):
        function()
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) * 1000 / calls


def _short(value: float) -> float:
    return float(f"{value:.5g}")
