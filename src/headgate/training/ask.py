"""What can be asked of a run that has come to its end: accuracy, files, milliseconds.

Each answer is plain data, for a table or for JSON. Trains nothing and changes nothing in the run's folder but what it
is told to write there.
"""

from __future__ import annotations

import shlex
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headgate.analysis.measure import (
    Timing,
    module_call,
    onnx_call,
    ratio,
    time_interleaved,
    timing_of,
    torch_threads,
)  # fmt: skip
from headgate.data.batches import Part, Split, check_seed, eval_batch_size
from headgate.data.sources import DataSet
from headgate.errors import FileError, HeadgateError, NotDecided
from headgate.exits.cascade import ExitModel
from headgate.gated import GatedModel
from headgate.graph.macs import count_macs
from headgate.inference.compact import without_torchs_own_warnings
from headgate.inference.export import export_onnx
from headgate.inference.shrink import with_folded_batchnorm
from headgate.storage import load, save
from headgate.training import checkpoint as checkpoints
from headgate.training.loop import measure
from headgate.training.prepare import Start, data_of, start_of, with_data_in
from headgate.training.run import BEFORE, NETWORKS, is_done, measured, recipe_in, result_in
from headgate.training.team import Team

TIMED_IMAGES = 60
BATCHES = (1, 32)
SWEEP_ROUNDS = 5
TAUS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999)
"""Close to 1 too: exits that lose nothing let go only of those who are surer than that."""


def open_run(folder: Path, data_dir: str | None = None) -> tuple[Start, DataSet]:
    """Where a run started from, and its data."""
    recipe = with_data_in(recipe_in(folder), data_dir)
    images = data_of(recipe)
    return start_of(recipe, images.shape), images


def _dense_is_trained(folder: Path) -> bool:
    """Whether the dense network is more than what the run started from, if it is to be trained at all."""
    if is_done(folder) or not recipe_in(folder).dense_epochs:
        return True
    return (folder / checkpoints.FILE).is_file() and checkpoints.read_checkpoint(folder).phase != "dense"


def _title(name: str, folder: Path) -> str:
    """What a network of a folder is called."""
    if name == "dense" and not _dense_is_trained(folder):
        return "dense, not trained yet"
    if name != "decided":
        return name
    return "before this tuning" if (folder / BEFORE).exists() else "decided, not tuned"


def _start(folder: Path) -> Start:
    """For what needs no data but the shape of an image, which a finished run has written down."""
    recipe = recipe_in(folder)
    return start_of(recipe, tuple(result_in(folder)["input_shape"]) if is_done(folder) else data_of(recipe).shape)


def network(folder: Path, name: str, start: Start) -> nn.Module:
    """One network of a run's folder."""
    if name not in NETWORKS:
        raise HeadgateError(f"there is no network {name!r}: a run has {', '.join(NETWORKS)}")
    path = folder / NETWORKS[name]
    if not path.is_file():
        there = [known for known, file in NETWORKS.items() if (folder / file).is_file()]
        remedy = (
            f"it is finished, and has {', '.join(there)}"
            if is_done(folder)
            else f"finish the run with `headgate train --resume {shlex.quote(str(folder))}`"
        )
        raise FileError(f"{folder} has no {NETWORKS[name]}: {remedy}")
    return load(path, start.architecture())


def _gated(folder: Path, start: Start, name: str | None = None) -> GatedModel:
    """A network whose gates can still be moved: the last one, unless another is named."""
    if start.recipe.exits:
        raise HeadgateError(f"{folder} has exits, and no strategies: move their thresholds with --sweep-tau")
    name = name or _last_gated(folder)
    gated = network(folder, name, start)
    if not isinstance(gated, GatedModel):
        raise HeadgateError(
            f"the {name} network of {folder} has no gates to decide: leave out --strategy and --sweep-tau"
        )
    return gated.eval()


def _last_gated(folder: Path) -> str:
    return "conditional" if (folder / NETWORKS["conditional"]).is_file() else "gated"


def movable(folder: Path, start: Start, name: str | None = None) -> GatedModel | ExitModel:
    """The network whose tau can be moved: with gates on channels, or with exits."""
    if start.recipe.exits and name in (None, "cascade"):
        exits = network(folder, "cascade", start).eval()
        assert isinstance(exits, ExitModel)
        return exits
    return _gated(folder, start, name)


def evaluate(
    folder: Path,
    strategy: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    of: str | None = None,
    sweep: bool = False,
    data_dir: str | None = None,
) -> list[dict[str, Any]]:
    """Accuracy and MACs: of every network of the run, or of the gated one under a strategy or over tau.

    `of` names one network of the run: "trained" is the one before calibration.
    """
    start, data = open_run(folder, data_dir)
    team = Team()
    dense_macs = count_macs(start.architecture(), start.example)
    rows: list[tuple[str, float, float]]
    milliseconds: dict[str, float] = {}
    if sweep:
        moved = movable(folder, start, of)
        points = moved.to(team.device).sweep_tau(Part(data.test), TAUS)
        rows = [(f"tau {point.tau:g}", point.accuracy, point.macs) for point in points]
        timings = sweep_milliseconds(moved.cpu(), data.test)
        milliseconds = {f"tau {tau:g}": timing.median_ms for tau, timing in timings.items()}
    elif strategy is not None:
        gated = _gated(folder, start, of).to(team.device)
        gated.strategy(strategy, **_with_generator(options or {}, team.device))
        rows = [(f"{of or _last_gated(folder)}, {strategy}", *measure(gated, data.test, team))]
    else:
        names = [name for name, file in NETWORKS.items() if (folder / file).is_file() and name != "trained"]
        there = {name: network(folder, name, start) for name in (names if of is None else [of])}
        rows = [
            (_title(name, folder), *measured(net.to(team.device), data.test, team, start.example))
            for name, net in there.items()
        ]
    return [
        {
            "network": name,
            "accuracy": share,
            "macs": macs,
            "macs_fraction": macs / dense_macs,
            "measured_on": "validation" if start.recipe.validation else "test",
            "images": len(data.test),
        }
        | ({"milliseconds": milliseconds[name]} if name in milliseconds else {})
        for name, share, macs in rows
    ]


def sweep_milliseconds(
    net: GatedModel | ExitModel, split: Split, taus: Sequence[float] = TAUS, rounds: int = SWEEP_ROUNDS
) -> dict[float, Timing]:
    """What an image takes at each tau, one at a time: the mean over some images, interleaved over taus.

    The network is that whose accuracy and MACs `sweep_tau` gives: every gate is open where p > tau, static ones too.
    """
    images = timed_images(split, TIMED_IMAGES).split(1)
    before = list(net.taus) if isinstance(net, ExitModel) else []
    try:
        timings = time_interleaved(_at_taus(net, images, taus), rounds)
    finally:
        if isinstance(net, ExitModel):
            net.taus = before
    return {tau: timing_of([ms / len(images) for ms in timings[f"{tau:g}"].samples_ms]) for tau in taus}


def timed_images(split: Split, count: int) -> Tensor:
    """So many images to take the time of, from all over a split: what one takes depends on the image."""
    batches = split.eval_batches(eval_batch_size(split), rank=0, processes=max(1, len(split) // count))
    more = torch.cat([images for images, _ in batches])  # as many or up to twice as many
    return more[torch.linspace(0, len(more) - 1, min(count, len(more))).long()]


def _at_taus(
    net: GatedModel | ExitModel, images: Sequence[Tensor], taus: Sequence[float]
) -> dict[str, Callable[[], None]]:
    """For each tau a pass over images, one by one, with the network that it makes: one of its own where some gates are
    static, else one whose tau is moved."""
    if isinstance(net, GatedModel) and net.gates.logits.numel():
        return {f"{tau:g}": _over(_small_at(net, tau, images[0]), images) for tau in taus}
    fast = net.compact(images[0], fold=False) if isinstance(net, GatedModel) else net
    run = _over(fast, images)
    moved = {tau: fast.taus_at(tau) for tau in taus} if isinstance(fast, ExitModel) else {}

    def at(tau: float) -> Callable[[], None]:
        def call() -> None:
            if isinstance(fast, ExitModel):
                fast.taus = moved[tau]
            else:
                fast.tau = tau
            run()

        return call

    return {f"{tau:g}": at(tau) for tau in taus}


def _small_at(gated: GatedModel, tau: float, image: Tensor) -> nn.Module:
    """The shrunk network that a threshold makes (the dense one where it closes nothing), or the compact one."""
    try:
        gated.strategy("threshold", tau=tau)
        return gated.shrink() if gated.dynamic is None else gated.compact(image)
    except NotDecided:
        return gated.strategy("always_on").shrink()
    finally:
        gated.strategy("calibrated")


def _with_generator(options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    given = dict(options)
    if "seed" in given:
        given["generator"] = torch.Generator(device).manual_seed(check_seed(given.pop("seed")))
    return given


def shrink(
    folder: Path, out: Path | None, onnx: Path | None, *, round_to: int = 1, fold_batchnorm: bool = False
) -> dict[str, Any]:
    """Write the run's smaller network as it was tuned; with `round_to`, one of rounder widths, whose weights are those
    before tuning.

    A conditional network has no smaller form that is a file of its own: it can be written as ONNX, which computes
    everything and masks. So it has two costs: as `conditional` what its images need, and as `onnx` what the file does.
    """
    for path in (out, onnx):
        if path is not None and not path.resolve().parent.is_dir():
            raise FileError(f"{path} can't be written: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise FileError(f"{path} is a folder: give the name of a file")
    if round_to < 1:
        raise HeadgateError(f"round_to={round_to}: widths become multiples of it, so it must be at least 1")
    start = _start(folder)
    if start.recipe.exits:
        raise HeadgateError(
            f"{folder} has exits, and nothing to shrink: "
            f"use headgate.load({str(folder / NETWORKS['cascade'])!r}, model)"
        )
    if start.recipe.kind == "dynamic":
        return _write_conditional(folder, start, out, onnx, round_to > 1 or fold_batchnorm)
    if (round_to > 1 or fold_batchnorm) and out is None and onnx is None:
        raise HeadgateError("another network than the run's needs a place of its own: give --out or --onnx")
    if round_to > 1:
        small = _gated(folder, start).shrink(round_to=round_to, fold_batchnorm=fold_batchnorm)
    else:
        small = network(folder, "shrunk", start)
        if fold_batchnorm:
            small = with_folded_batchnorm(small, _gated(folder, start).graph, start.example)
    files = []
    if out is not None:
        save(small, out)
        files.append(str(out))
    if onnx is not None:
        export_onnx(small, start.example, onnx)
        files.append(str(onnx))
    dense = network(folder, "dense", start)
    return {
        "files": files,
        "dense": _size(dense, start.example),
        "shrunk": _size(small, start.example),
        "tuned": round_to == 1 and start.recipe.tune_epochs > 0,
    }


def _write_conditional(
    folder: Path, start: Start, out: Path | None, onnx: Path | None, other_widths: bool
) -> dict[str, Any]:  # fmt: skip
    if out is not None or onnx is None or other_widths:
        raise HeadgateError(
            f"the gates of {folder} depend on the image, so there are no widths to shrink to: give --onnx for the "
            f"masked network as ONNX, or use headgate.load({str(folder / NETWORKS['conditional'])!r}, model).compact()"
        )
    gated = _gated(folder, start)
    masked = gated.compact().in_plain_operators()
    export_onnx(masked, start.example, onnx)
    return {
        "files": [str(onnx)],
        "dense": _size(network(folder, "dense", start), start.example),
        "conditional": {"macs": _conditional_macs(folder, gated, start), "parameters": _count(gated)},
        "onnx": {"macs": _macs_of_program(masked, start.example), "parameters": _count(gated)},
    }


def _conditional_macs(folder: Path, gated: GatedModel, start: Start) -> float:
    """The mean over the images that the run is judged by, from its result where there is one."""
    if is_done(folder):
        return float(result_in(folder)["macs"][_last_gated(folder)])
    team = Team()
    return measured(gated.to(team.device), data_of(start.recipe).test, team, start.example)[1]


def _macs_of_program(program: nn.Module, example: Tensor) -> int:
    """Of a network that was taken apart into operators: everything it computes, gate networks too."""
    with without_torchs_own_warnings():
        return count_macs(program, example)


def _size(net: nn.Module, example: Tensor) -> dict[str, int]:
    return {"macs": count_macs(net, example), "parameters": _count(net)}


def _count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def bench(
    folder: Path, batches: Sequence[int] | None, threads: int, rounds: int, data_dir: str | None = None
) -> list[dict[str, Any]]:  # fmt: skip
    """Milliseconds of the dense and the smaller network, interleaved, in PyTorch and ONNX Runtime where that works.

    A conditional network is compared in PyTorch, on images of its data: noise would open other channels.
    """
    threads = threads or torch.get_num_threads()
    recipe = recipe_in(folder)
    if recipe.exits or recipe.kind == "dynamic":
        return _bench_conditional(folder, batches, threads, rounds, data_dir)
    start, batches = _start(folder), batches or BATCHES
    nets = {"dense": network(folder, "dense", start).eval(), "small": network(folder, "shrunk", start).eval()}
    macs_ratio = count_macs(nets["dense"], start.example) / count_macs(nets["small"], start.example)
    rows = []
    with tempfile.TemporaryDirectory() as scratch, torch_threads(threads):
        exported = _exported(nets, start.example, Path(scratch))
        for batch in batches:
            x = torch.randn(batch, *start.example.shape[1:], generator=torch.Generator().manual_seed(0))
            calls = {f"PyTorch {name}": module_call(net, x) for name, net in nets.items()}
            calls |= {f"ONNX Runtime {name}": onnx_call(path, x, threads) for name, path in exported.items()}
            timings = time_interleaved(calls, rounds, settle=1)
            for engine in ("PyTorch", *(["ONNX Runtime"] if exported else [])):
                both = timings[f"{engine} dense"], timings[f"{engine} small"]
                rows.append(_bench_row(engine, batch, threads, *both, macs_ratio))
    return rows


def _bench_conditional(
    folder: Path, batches: Sequence[int] | None, threads: int, rounds: int, data_dir: str | None
) -> list[dict[str, Any]]:  # fmt: skip
    start, data = open_run(folder, data_dir)
    dense = network(folder, "dense", start).eval()
    small = network(folder, "cascade", start).eval() if start.recipe.exits else _gated(folder, start)
    assert isinstance(small, (GatedModel, ExitModel))
    rows = []
    batches = batches or [batch for batch in BATCHES if batch <= len(data.test)]
    if max(batches, default=1) > len(data.test):
        raise HeadgateError(f"batches of {max(batches)}: there are only {len(data.test)} images")
    with torch_threads(threads):
        for batch in batches:
            images = timed_images(data.test, max(batch, TIMED_IMAGES))
            parts = [part for part in images.split(batch) if len(part) == batch]
            with torch.no_grad():
                small(images)
            fewer = small.dense_macs / small.macs()
            quick = small.compact(parts[0]) if isinstance(small, GatedModel) else small
            timings = time_interleaved({"dense": _over(dense, parts), "small": _over(quick, parts)}, rounds, settle=1)
            a_batch = {
                name: timing_of([ms / len(parts) for ms in timing.samples_ms]) for name, timing in timings.items()
            }
            rows.append(_bench_row("PyTorch", batch, threads, a_batch["dense"], a_batch["small"], fewer))
    return rows


def _over(net: nn.Module, parts: Sequence[Tensor]) -> Callable[[], None]:
    """One pass over several batches: what an image takes depends on the image."""
    calls = [module_call(net, part) for part in parts]

    def call() -> None:
        for each in calls:
            each()

    return call


def _bench_row(engine: str, batch: int, threads: int, dense: Timing, small: Timing, fewer: float) -> dict[str, Any]:
    faster = ratio(dense, small)
    return {
        "engine": engine, "batch": batch, "threads": threads, "dense_ms": dense.median_ms,
        "small_ms": small.median_ms, "speed_up": faster.median, "spread": faster.iqr / 2, "macs_ratio": fewer,
    }  # fmt: skip


def _exported(nets: Mapping[str, nn.Module], example: Tensor, folder: Path) -> dict[str, Path]:
    """The networks as ONNX files; none where that can't be, for PyTorch's figures are worth having all the same."""
    paths = {name: folder / f"{name}.onnx" for name in nets}
    try:
        for name, net in nets.items():
            export_onnx(net, example, paths[name])
    except HeadgateError as error:
        warnings.warn(f"no figures of ONNX Runtime: {error}", stacklevel=3)
        return {}
    return paths
