"""Which networks can be made smaller, and does the smaller one compute what it should?

All classification models of torchvision, headgate's CIFAR ResNets and a user's own zero-padding ResNet: gate → random
decisions at half the MACs → shrink → the gated model's output → save → load → the same output → MACs counted
independently. Torch-Pruning 1.6.1 on the same networks in the same table.

Every network and side runs in a process of its own with a time limit. Rows are kept in records/.partial as they come,
so an interrupted run goes on where it stopped; headgate's rows count as done only while its source is unchanged.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import peers
import torch
from common import (
    HERE,
    RECORDS,
    decide_,
    first_line,
    full_name,
    independent_macs,
    make_network,
    names_in,
    parser,
    relative_difference,
    show,
)
from rich.console import Console

import headgate
from headgate.analysis.records import write_record
from headgate.errors import HeadgateError, TargetError
from headgate.models._torchvision import import_torchvision
from headgate.models.names import load_named

QUESTION = "Which networks can be halved, is the result right, and can Torch-Pruning 1.6.1 do it?"
OWN = ("cifar_resnet20", "cifar_resnet56", "lambda_resnet20")
QUICK = ("resnet18", "cifar_resnet20", "lambda_resnet20")
SIDES = ("headgate", "torch-pruning")
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9)
TOLERANCE = 1e-4
Row = dict[str, Any]


def main() -> None:
    options = _options()
    if options.one:
        _work(*options.one, options)
        return
    names = list(QUICK) if options.quick else options.models or [*torchvision_classifiers(), *OWN]
    rows = _all_rows(names, options)
    _show(names, rows)
    summary = _summary(names, rows)
    results = {"summary": summary, "rows": [{"model": name, **rows[name]} for name in names]}
    write_record(options.out, question=QUESTION, results=results, threads=options.threads, seeds=[options.seed])
    Console().print(summary)


def torchvision_classifiers() -> list[str]:
    models = import_torchvision().models
    return list(models.list_models(module=models))


def _options() -> Namespace:
    made = parser(QUESTION, "coverage")
    made.add_argument("--models", type=names_in, help="names, separated by commas; all if not given")
    made.add_argument("--sides", type=names_in, default=list(SIDES), help="whose rows to compute")
    made.add_argument("--timeout", type=float, default=600, help="seconds for one network and side")
    made.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    made.add_argument("--one", nargs=3, metavar=("SIDE", "MODEL", "FILE"), help="compute one row (for the run itself)")
    return made.parse_args()


# The run: one process a row.


def _all_rows(names: list[str], options: Namespace) -> dict[str, dict[str, Row]]:
    store = RECORDS / ".partial" / "coverage.jsonl"
    if options.fresh:
        store.unlink(missing_ok=True)
    done = _stored(store)
    console = Console(highlight=False, soft_wrap=True)
    for number, name in enumerate(names, 1):
        for side in options.sides:
            key = _key(side, name, options)
            if key not in done or done[key].get("timeout_seconds", options.timeout) < options.timeout:
                done[key] = _in_a_process(side, name, options)
                _store(store, key, done[key])
            console.print(f"{number}/{len(names)} {name}, {side}: {_status(done[key])}")
    missing: Row = {"status": "not run"}
    return {name: {side: done.get(_key(side, name, options), missing) for side in SIDES} for name in names}


def _in_a_process(side: str, name: str, options: Namespace) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--one", side, name, str(file)]
        command += ["--seed", str(options.seed), "--threads", str(options.threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        try:
            done = subprocess.run(
                command, env=environment, timeout=options.timeout, stderr=subprocess.PIPE, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            reason = f"not done after {options.timeout:.0f} s"
            return {"status": "timeout", "reason": reason, "timeout_seconds": options.timeout}
        if not file.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"status": "crashed", "reason": f"exit {done.returncode}: {last[:300]}"}
        return json.loads(file.read_text())


def _work(side: str, name: str, file: str, options: Namespace) -> None:
    torch.set_num_threads(options.threads)
    row = {"headgate": headgate_row, "torch-pruning": torch_pruning_row}[side](name, options.seed)
    tidy = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}
    Path(file).write_text(json.dumps(tidy))


def _stored(store: Path) -> dict[str, Row]:
    if not store.exists():
        return {}
    rows = [json.loads(line) for line in store.read_text().splitlines()]
    return {row["key"]: row["row"] for row in rows}


def _store(store: Path, key: str, row: Row) -> None:
    store.parent.mkdir(parents=True, exist_ok=True)
    (store.parent / ".gitignore").write_text("*\n")
    with store.open("a") as lines:
        lines.write(json.dumps({"key": key, "row": row}) + "\n")


def _key(side: str, name: str, options: Namespace) -> str:
    source = _source_fingerprint() if side == "headgate" else "1.6.1"
    return f"{side} {name} seed {options.seed} source {source}"


def _source_fingerprint() -> str:
    """Changes when a file of headgate changes that can change a row."""
    digest = hashlib.sha256()
    source = HERE.parent / "src" / "headgate"
    files = [path for folder in ("graph", "gates", "inference", "models") for path in (source / folder).rglob("*.py")]
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# headgate's side.


def headgate_row(name: str, seed: int) -> Row:
    """ok, refused (an error that says why), WRONG (with what differs) or crashed."""
    model, x = make_network(name, seed)
    row: Row = {"dense_macs": independent_macs(model, x), "parameters": sum(p.numel() for p in model.parameters())}
    checks: dict[str, bool] = {}
    try:
        row["gateable_share"] = float(headgate.inspect(model, x[:1]).gateable_fraction)
        gated = _gate_at_lowest(model, x, seed, row)
        shrunk, y = _shrink_and_check(gated, x, row, checks)
        del gated, model
        gc.collect()
        row["difference_loaded"] = _difference_after_loading(name, shrunk, x, y)
        checks["output of the loaded model differs"] = row["difference_loaded"] <= TOLERANCE
    except HeadgateError as error:
        status, reason = "refused", first_line(error)
    except Exception as error:  # a crash is a result of this benchmark
        status, reason = "crashed", first_line(error)
    else:
        status, reason = "ok", None
    wrong = [check for check, passed in checks.items() if not passed]
    return {**row, "status": "WRONG" if wrong else status, "reason": "; ".join(wrong) or reason}


def _shrink_and_check(
    gated: Any, x: torch.Tensor, row: Row, checks: dict[str, bool]
) -> tuple[torch.nn.Module, torch.Tensor]:
    """The shrunk model and its output; what was checked on the way goes into `checks`, what was measured into `row`."""
    start = time.perf_counter()
    shrunk = gated.shrink().eval()
    row["seconds"] += time.perf_counter() - start
    with torch.no_grad():
        y_gated, y_shrunk = gated(x), shrunk(x)
    counted = independent_macs(shrunk, x)
    row["reached"] = counted / row["dense_macs"]
    row["output_spread"] = relative_difference(y_gated[:1], y_gated[1:])
    row["difference"] = relative_difference(y_shrunk, y_gated)
    checks |= {
        "dense MACs are miscounted": gated.dense_macs == row["dense_macs"],
        "gated.macs() is not what the shrunk model needs": round(float(gated.macs())) == counted,
        "count_macs disagrees with the independent count": headgate.count_macs(shrunk, x[:1]) == counted,
        "more MACs than the target": counted <= row["target"] * row["dense_macs"],
        "with all gates open the output is not the dense one": row["difference_open"] <= TOLERANCE,
        "output of the shrunk model differs": row["difference"] <= TOLERANCE,
    }
    return shrunk, y_shrunk


def _gate_at_lowest(model: torch.nn.Module, x: torch.Tensor, seed: int, row: Row) -> Any:
    """Gated and decided at half the MACs, or at the first higher target that can be reached."""
    for target in TARGETS:
        try:
            start = time.perf_counter()
            gated = headgate.gate(model, x[:1], kind="static", target=target)
            row["gate_seconds"] = time.perf_counter() - start
            row["difference_open"] = _difference_when_open(gated, model, x)
            start = time.perf_counter()
            decide_(gated, "random", seed)
            row["seconds"] = row["gate_seconds"] + time.perf_counter() - start
        except TargetError as error:
            row["target_note"] = first_line(error)
            if target == TARGETS[-1]:
                raise
        else:
            row["target"] = target
            return gated
    raise AssertionError("the last target returns or raises")


@torch.no_grad()
def _difference_when_open(gated: Any, model: torch.nn.Module, x: torch.Tensor) -> float:
    gated.set_gate_probabilities({name: torch.ones_like(p) for name, p in gated.gate_probabilities().items()})
    return relative_difference(gated.eval()(x), model(x))


@torch.no_grad()
def _difference_after_loading(name: str, shrunk: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.safetensors"
        headgate.save(shrunk, path)
        del shrunk
        loaded = headgate.load(path, load_named(full_name(name)).model)
    return relative_difference(loaded.eval()(x), y)


# Torch-Pruning's side.


def torch_pruning_row(name: str, seed: int) -> Row:
    """ok if half the MACs are reached, ranking globally or else locally, by a network that runs; else failed, why."""
    model, x = make_network(name, seed)
    row: Row = {"dense_macs": independent_macs(model, x)}
    reasons = []
    for ranking in ("global", "local"):
        try:
            _prune_and_check(model, x, ranking, row)
        except Exception as error:  # any error is a result of this benchmark
            reasons.append(f"{ranking}: {first_line(error)}")
            gc.collect()
            continue
        return {**row, "ranking": ranking, "status": "ok", "reason": "; ".join(reasons) or None}
    return {**row, "status": "failed", "reason": "; ".join(reasons)}


def _prune_and_check(model: torch.nn.Module, x: torch.Tensor, ranking: str, row: Row) -> None:
    small = copy.deepcopy(model)
    start = time.perf_counter()
    pruned = peers.prune_(small, x, ranking=ranking)
    row["seconds"] = time.perf_counter() - start
    with torch.no_grad():
        if small(x).shape != model(x).shape:
            raise RuntimeError(f"output shape {tuple(small(x).shape)} instead of {tuple(model(x).shape)}")
    if not pruned.reached:
        raise RuntimeError(f"stops at {pruned.fraction:.2f} of the MACs")
    row["reached"] = independent_macs(small, x) / row["dense_macs"]
    row["difference_from_zeroed_twin"] = peers.difference_from_zeroed_twin(lambda: copy.deepcopy(model), x, ranking)
    try:
        row["survives_pickle"] = peers.survives_pickle(small, x)
    except Exception as error:  # lambdas, for example
        row["survives_pickle"] = False
        row["pickle_note"] = first_line(error)


# The answer.


def _summary(names: list[str], rows: dict[str, dict[str, Row]]) -> Row:
    classifiers = [name for name in names if name not in OWN]
    summary: Row = {}
    for side in SIDES:
        for title, chosen in (("torchvision", classifiers), ("others", [name for name in names if name in OWN])):
            statuses = [rows[name][side]["status"] for name in chosen]
            counts = {status: statuses.count(status) for status in sorted(set(statuses))}
            summary[f"{side}, {title}"] = {"of": len(chosen), **counts}
    return summary


def _show(names: list[str], rows: dict[str, dict[str, Row]]) -> None:
    columns = ["model", "GMACs", "gateable", "headgate", "left", "s", "Torch-Pruning", "left", "= twin", "s"]
    table = []
    for name in names:
        ours, theirs = rows[name]["headgate"], rows[name]["torch-pruning"]
        twin = theirs.get("difference_from_zeroed_twin")
        macs = ours.get("dense_macs", theirs.get("dense_macs"))
        table.append(
            [
                name,
                None if macs is None else macs / 1e9,
                ours.get("gateable_share"),
                _status(ours),
                ours.get("reached"),
                ours.get("seconds"),
                _status(theirs),
                theirs.get("reached"),
                None if twin is None else twin <= TOLERANCE,
                theirs.get("seconds"),
            ]
        )
    show("gate → half the MACs → shrink → save → load, checked", columns, table)


def _status(row: Row) -> str:
    reason = "" if row["status"] == "ok" or not row.get("reason") else f": {row['reason'][:70]}"
    return row["status"] + reason


if __name__ == "__main__":
    main()
