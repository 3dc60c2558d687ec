"""Which way of gating is better, and is every budget met? Variants of one recipe on CIFAR-10, run by run.

`--table budgets`: targets from .3 to .7. `--table granularity`: channels against whole blocks, and what masks on the
stream add to the inner ones, all at the same MACs. `--table conditional`: gates that look at the image against static
ones, and whole blocks with the batch loss against AIG's, with what sampling, thresholding and calibration make of each,
an ensemble, and milliseconds. `--table run_cost`: the wall time of a whole run to half the MACs
against dense training for as many epochs, side by side in two processes with as many cores each, so that what disturbs
the one disturbs the other. Runs are `headgate.training` runs in folders of their own: a
finished one is not run again, an interrupted one goes on; rows of an earlier record (`--kept`), which may be of another
machine, stand beside them. Knows nothing of other libraries.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from common import HERE, names_in, parser, show
from deciding import found_in
from rich.console import Console

from headgate.analysis.records import read_record, write_record
from headgate.gated import GatedModel
from headgate.graph.grouping import ChannelGraph
from headgate.models.names import build
from headgate.storage import load
from headgate.training import ask
from headgate.training.recipe import CHOICES, Recipe, looking, overridden, recipe_named
from headgate.training.start import Options, go, use_threads

QUESTIONS = {
    "budgets": "Is every target met, from below and within one gate?",
    "granularity": "Channels or whole blocks? And what do masks on the stream add to the inner ones?",
    "conditional": "Gates that look at the image or static ones? Batch loss or AIG's?",
    "run_cost": "How long is a whole run to half the MACs, beside dense training for as many epochs?",
}
STREAM_NORMS = ("bn1", *(f"layer{stage}.{block}.bn2" for stage in (1, 2, 3) for block in range(3)))
"""Frozen, they keep the stream of ResNet-20 whole: only inner channels have gates."""
TARGETS = ("0.3", "0.4", "0.5", "0.6", "0.7")
Row = dict[str, Any]
MAY_DIFFER = ("weights", "data_dir", "seed", "workers")
"""Fields of a recipe in which rows of one table need not agree."""


def variants(table: str, recipe: Recipe) -> dict[str, Recipe]:
    """Name → recipe."""
    if table == "budgets":
        return {f"target {target}": replace(recipe, target=target) for target in TARGETS}
    if table == "granularity":
        return {
            "channels, shared stream": replace(recipe, stream="shared"),
            "channels, indexed stream (all five masks)": replace(recipe, stream="indexed"),
            "channels, inner masks only": replace(recipe, frozen=STREAM_NORMS),
            "groups of 4 channels": replace(recipe, granularity="4"),
            "whole blocks": replace(recipe, granularity="layer"),
        }
    if table == "conditional":
        dynamic = looking(recipe)
        gate_epochs = max(1, recipe.epochs * 3 // 5)  # blocks, which nothing is known of at the start, need more
        blocks = replace(
            recipe, kind="dynamic", granularity="layer", gate_epochs=gate_epochs,
            tune_epochs=recipe.epochs - gate_epochs,
        )  # fmt: skip
        return {
            "static": recipe,
            "dynamic": dynamic,
            "dynamic, inner masks only": replace(dynamic, frozen=STREAM_NORMS),
            "dynamic blocks, batch loss": blocks,
            # as published: all blocks start alike. No name may hold a quote: torch.compile writes what follows
            # a script's --only into the code it makes
            "dynamic blocks, loss of AIG": replace(blocks, loss="per_gate", prime_batches=0),
        }
    return {"dense": replace(recipe, dense_epochs=recipe.epochs, gate_epochs=0, tune_epochs=0), "static": recipe}


def main() -> None:
    options = _options()
    use_threads(options.threads)
    base = overridden(
        recipe_named(options.recipe),
        {
            "weights": options.weights,
            "data_dir": options.data_dir,
            "validation": options.validation,
            "compile": options.compile,
            "precision": options.precision,
            **_epochs(options),
            **dict(_change(text) for text in options.set),
        },
    )
    rows = []
    chosen = variants(options.table, base)
    if unknown := [name for name in options.only if name not in chosen]:
        raise SystemExit(f"there is no variant {unknown[0]!r} in this table: choose from {'; '.join(chosen)}")
    if options.table == "run_cost" and not options.only:
        _side_by_side(chosen)
    for name, recipe in chosen.items():
        if options.only and name not in options.only:
            continue
        for seed in options.seeds:
            folder = Path(options.runs) / options.table / f"{name.replace(' ', '_').replace(',', '')}-s{seed}"
            rows.append(_row(name, replace(recipe, seed=seed), folder))
            Console(highlight=False).print(json.dumps(rows[-1]))
    if options.kept:
        rows = _with_kept(rows, options.kept, base, list(chosen))
    columns = [name for name in rows[0] if name not in ("strategies", "kept")]
    show(QUESTIONS[options.table], columns, [[row.get(column) for column in columns] for row in rows])
    results = {"rows": rows, "summary": _summary(rows), "recipe": base.to_json() | {"weights": None, "data_dir": None}}
    if options.table == "run_cost" and not options.only:
        results["static_over_dense"] = _ratio(rows)
    out = options.out or HERE / "records" / f"cifar10_{options.table}.json"
    seeds = sorted({row["seed"] for row in rows})
    write_record(out, question=QUESTIONS[options.table], results=results, threads=options.threads, seeds=seeds)


def _options() -> Namespace:
    made = parser("Variants of a recipe on CIFAR-10.", "cifar10_variants")
    made.set_defaults(out=None)
    made.add_argument("--table", choices=list(QUESTIONS), required=True)
    made.add_argument("--recipe", default="cifar10-resnet20-static")
    made.add_argument("--weights", help="safetensors file to start from")
    made.add_argument("--data-dir", help="folder that holds cifar10")
    made.add_argument("--runs", default="runs/cifar10_variants", help="folder for the runs")
    made.add_argument("--kept", type=Path, help="a record of the same recipe: its rows that are not run now are kept")
    made.add_argument("--only", action="append", default=[], help="a variant of the table; may be given several times")
    made.add_argument("--compile", action="store_true", help="torch.compile all phases")
    made.add_argument("--precision", choices=CHOICES["precision"], default="no", help="of all training steps")
    made.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change the recipe of all")
    made.add_argument("--validation", type=int, default=0)
    made.add_argument("--gate-epochs", type=int)
    made.add_argument("--tune-epochs", type=int)
    made.add_argument("--seeds", type=lambda text: [int(part) for part in names_in(text)], default=[0])
    return made.parse_args()


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or name not in (kinds := get_type_hints(Recipe)):
        raise SystemExit(f"--set {text}: write FIELD=VALUE, such as round_to=16, with a field of a recipe")
    return name, value if kinds[name] is str else json.loads(value)


def _epochs(options: Namespace) -> dict[str, int | None]:
    if options.quick:
        return {"gate_epochs": 1, "tune_epochs": 0}
    return {"gate_epochs": options.gate_epochs, "tune_epochs": options.tune_epochs}


def _with_kept(rows: list[Row], path: Path, recipe: Recipe, order: list[str]) -> list[Row]:
    """These rows and the others of an earlier record, each with the commit and the machine it is from."""
    record = read_record(path)
    said, now = record.results["recipe"], recipe.to_json()
    if other := [name for name in said if name not in MAY_DIFFER and said[name] != now.get(name)]:
        raise SystemExit(
            f"{path} is of another recipe: {other[0]} is {said[other[0]]!r} there, {now.get(other[0])!r} here"
        )
    origin = {"commit": record.commit.sha, "date": record.date, "cpu": record.cpu}
    there = {(row["variant"], row["seed"]) for row in rows}
    kept = [{"kept": origin} | row for row in record.results["rows"] if (row["variant"], row["seed"]) not in there]
    return sorted([*rows, *kept], key=lambda row: (order.index(row["variant"]), row["seed"]))


def _side_by_side(names: Iterable[str]) -> None:
    """Carry out the variants at the same time, each in a process of its own on its share of the cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    names = list(names)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, name in enumerate(names):
            own = set(cores[number :: len(names)])
            pin = partial(os.sched_setaffinity, 0, own) if own else None
            words = [sys.executable, *sys.argv, "--only", name, "--out", f"{folder}/{number}.json"]
            started.append(subprocess.Popen(words, preexec_fn=pin))
        ended = [process.wait() for process in started]
    if failed := [name for name, code in zip(names, ended, strict=True) if code]:
        raise SystemExit(f"{', '.join(failed)} did not come to an end: the same command goes on from here")


def _row(name: str, recipe: Recipe, folder: Path) -> Row:
    result_file = folder / "result.json"
    if not result_file.exists():
        fresh = not (folder / "recipe.json").exists()
        go(folder, recipe if fresh else None, Options(checkpoint_seconds=60))
    result = json.loads(result_file.read_text())
    last = ("shrunk" if recipe.kind == "static" else "conditional") if recipe.gate_epochs else "dense"
    row: Row = {
        "variant": name, "seed": recipe.seed, "accuracy": result["accuracy"][last],
        "macs_fraction": result["macs_fraction"][last], "seconds": round(sum(result["seconds"].values()), 1),
        "measured_on": result["measured_on"],
    }  # fmt: skip
    if not recipe.gate_epochs:
        return row
    return row | (_budget(recipe, folder) if recipe.kind == "static" else _strategies(folder))


def _strategies(folder: Path) -> Row:
    """Sampled and thresholded, before and after calibration; an ensemble; milliseconds. Kept beside the run."""
    path = folder / "strategies.json"
    if not path.exists():
        kept: Row = dict(found_in(folder))
        kept["milliseconds"] = ask.bench(folder, (1, 32), torch.get_num_threads(), 20)
        path.write_text(json.dumps(kept, indent=1))
    return {"strategies": json.loads(path.read_text())}


def _budget(recipe: Recipe, folder: Path) -> Row:
    """How far below its target the decided network is, beside the dearest closed gate that could still be opened."""
    gated = load(folder / "gated.safetensors", build(recipe.model))
    assert isinstance(gated, GatedModel)
    gap = gated.target - gated.eval().macs() / gated.dense_macs
    return {
        "gates": gated.graph.gate_count, "target": gated.target, "below_target": gap,
        "cheapest_gate": cheapest_gate(gated.graph, gated), "sampled_cost": gated.budget.last_cost,
        "polarised": round(gated.polarised(), 4),
    }  # fmt: skip


def cheapest_gate(graph: ChannelGraph, gated: GatedModel) -> float:
    """The least share of the MACs that one more open gate would add: the target is met within one gate below it."""
    decisions = gated.decisions.cpu().numpy()
    now = gated.cost.decided_macs(decisions)
    costs = []
    for number in (~decisions).nonzero()[0]:
        more = decisions.copy()
        more[number] = True
        costs.append((gated.cost.decided_macs(more) - now) / graph.dense_macs)
    return min(costs, default=0.0)


def _summary(rows: list[Row]) -> list[Row]:
    """Mean and sample standard deviation over seeds."""
    found = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        shares = [row["accuracy"] for row in rows if row["variant"] == name]
        spread = statistics.stdev(shares) if len(shares) > 1 else None
        found.append({"variant": name, "accuracy": statistics.mean(shares), "spread": spread, "seeds": len(shares)})
    return found


def _ratio(rows: list[Row]) -> Row:
    """Static over dense, seed by seed."""
    seconds = {(row["variant"], row["seed"]): row["seconds"] for row in rows}
    ratios = [seconds["static", seed] / seconds["dense", seed] for seed in dict.fromkeys(row["seed"] for row in rows)]
    return {"median": statistics.median(ratios), "ratios": ratios}


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
