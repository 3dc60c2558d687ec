"""`headgate evaluate`, `headgate shrink`, `headgate bench`: what can be asked of a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headgate.cli.common import friendly_errors, print_json, print_table
from headgate.errors import HeadgateError

RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.")]
OPTIONS: dict[str, dict[str, Any]] = {
    "threshold": {"tau": 0.5}, "sample": {"seed": 0}, "ensemble": {"runs": 5, "combine": "mean", "seed": 0},
}  # fmt: skip
"""Of the strategies that have some."""
TITLES = {"onnx": "masked, as ONNX"}
"""Of networks whose names say too little."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def evaluate(
    run: RunFolder,
    strategy: Annotated[
        str | None, typer.Option(help="threshold, calibrated, sample, always_on or ensemble (default: all networks).")
    ] = None,
    of: Annotated[
        str | None, typer.Option(help="One network: dense, trained (before calibration), gated, decided, shrunk, …")
    ] = None,
    tau: Annotated[float | None, typer.Option(help="For the threshold strategy (default: 0.5).")] = None,
    runs: Annotated[int | None, typer.Option(help="For ensembles: sampled runs (default: 5).")] = None,
    combine: Annotated[str | None, typer.Option(help="For ensembles: mean or vote (default: mean).")] = None,
    seed: Annotated[int | None, typer.Option(help="For the sample and ensemble strategies (default: 0).")] = None,
    sweep: Annotated[bool, typer.Option("--sweep-tau", help="A table over tau: accuracy, MACs, milliseconds.")] = False,
    data_dir: Annotated[str | None, typer.Option(help="Where the data is, if not where it was.")] = None,
    as_json: AsJson = False,
) -> None:
    """Accuracy and MACs of a run's networks, or of its gated network under another strategy."""
    from headgate.training import ask

    with friendly_errors():
        if sweep and strategy is not None:
            raise HeadgateError("--sweep-tau moves tau, so it goes without --strategy")
        options = _options_of(strategy, {"tau": tau, "runs": runs, "combine": combine, "seed": seed})
        rows = ask.evaluate(run, strategy, options, of=of, sweep=sweep, data_dir=data_dir)
    if as_json:
        print_json(rows)
    else:
        timed = ["ms an image"] if rows and "milliseconds" in rows[0] else []
        cells = [
            [
                row["network"], f"{row['accuracy']:.2%}", f"{row['macs']:,.0f}", f"{row['macs_fraction']:.2%}",
                *([f"{row['milliseconds']:.2f}"] if timed else []),
            ]
            for row in rows
        ]  # fmt: skip
        title = f"{run}: {rows[0]['measured_on']} images" if rows else str(run)
        print_table(title, ["network", "accuracy", "MACs", "of dense", *timed], cells)


def _options_of(strategy: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """What was given to a strategy; what says nothing to it is refused."""
    given = {name: value for name, value in given.items() if value is not None}
    of_this = OPTIONS.get(strategy or "", {})
    for name in given.keys() - of_this.keys():
        meant = " or ".join(known for known, options in OPTIONS.items() if name in options)
        raise HeadgateError(f"--{name} goes with --strategy {meant}")
    return of_this | given


def shrink(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="Where to write the shrunk network (.safetensors).")] = None,
    onnx: Annotated[Path | None, typer.Option(help="Also write an ONNX file.")] = None,
    round_to: Annotated[
        int, typer.Option(help="Widths that are multiples of this; the weights are then those before tuning.")
    ] = 1,
    fold_batchnorm: Annotated[bool, typer.Option("--fold-batchnorm", help="Fold BatchNorm into convolutions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the smaller network of a run: safetensors, and ONNX on request."""
    from headgate.training import ask

    with friendly_errors():
        made = ask.shrink(run, out, onnx, round_to=round_to, fold_batchnorm=fold_batchnorm)
    if as_json:
        print_json(made)
        return
    dense = made["dense"]["macs"]
    rows = [
        [TITLES.get(name, name), f"{size['macs']:,.0f}", f"{size['macs'] / dense:.1%}", f"{size['parameters']:,}"]
        for name, size in made.items()
        if name not in ("files", "tuned")
    ]
    print_table(str(run), ["network", "MACs", "of dense", "parameters"], rows)
    typer.echo("\n".join(f"wrote {file}" for file in made["files"]) or f"it is in {run / 'small.safetensors'}")
    if round_to > 1:
        typer.echo("Its weights are those before tuning: for a tuned network of such widths, train with --round-to.")


def bench(
    run: RunFolder,
    batch: Annotated[list[int] | None, typer.Option(help="Batch sizes (default: 1 and 32).")] = None,
    threads: Annotated[int, typer.Option(help="Threads; 0: as many as torch takes.")] = 0,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 20,
    data_dir: Annotated[
        str | None,
        typer.Option(help="Where the data is, if not where it was (what depends on images is timed on some)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Milliseconds of the dense and the smaller network, in PyTorch and (if installed) ONNX Runtime."""
    from headgate.training import ask

    with friendly_errors():
        if rounds < 1 or any(size < 1 for size in batch or ()):
            raise HeadgateError("bench needs at least one round and batches of at least one image")
        rows = ask.bench(run, batch, threads, rounds, data_dir)
    if as_json:
        print_json(rows)
        return
    cells = [
        [
            row["engine"], str(row["batch"]), f"{row['dense_ms']:.2f}", f"{row['small_ms']:.2f}",
            f"{row['speed_up']:.2f} ± {row['spread']:.2f}", f"{row['macs_ratio']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["engine", "batch", "dense ms", "small ms", "times as fast", "fewer MACs"]
    print_table(f"{run}: median of {rounds} interleaved rounds", columns, cells)
