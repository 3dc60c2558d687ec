"""Early exit: who leaves where, how right they are, and does time fall as the MACs do?

Takes the folder of a finished run with exits (such as `headgate train cifar10-densenet100-exits`) and its test images.
Thresholds for other budgets are found on training images. Milliseconds of the cascade and of the plain network, image
by image and in batches, are taken in turns on the same images, and stand beside the MACs of just these images. Trains
nothing.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import HERE, parser, show, without_folders
from rich.console import Console

from headgate.analysis.measure import module_call, ratio, time_interleaved, timing_of, torch_threads
from headgate.analysis.records import write_record
from headgate.data.batches import Part
from headgate.errors import TargetError
from headgate.exits.cascade import ExitModel
from headgate.memory import keep_memory
from headgate.training import ask
from headgate.training.loop import plain_batches
from headgate.training.run import RESULT

QUESTION = "Who leaves early, how right are they, and does time fall as the MACs do?"
TARGETS = (0.99, 0.98, 0.97, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
BATCHES = (1, 64)
ROUNDS_OF_BATCHES = 3
"""Times as many rounds for batches, which take a third of the time: what is left of the noise is then alike."""
Row = dict[str, Any]


def main() -> None:
    options = _options()
    keep_memory()
    start, data = ask.open_run(options.run, options.data_dir)
    exits = ask.movable(options.run, start)
    assert isinstance(exits, ExitModel), "the run has no exits"
    dense = ask.network(options.run, "dense", start).eval()
    own = list(exits.taus)
    watched = exits.watch(Part(data.test, options.images))
    table = exits.table_of(watched)
    show(
        f"exits of {options.run.name}", ["exit", "leave", "right, of all", "right, of these", "MACs"],
        [[row.name, row.share, row.accuracy_of_all, row.accuracy_of_selected, row.macs] for row in table.rows],
    )  # fmt: skip
    seen = exits.watch(plain_batches(data.train, start.recipe))
    budgets = []
    for target in TARGETS:
        try:
            exits.calibrate_on(seen, target)
        except TargetError:
            break
        reached = exits.table_of(watched)
        budgets.append({"target": target, "taus": list(exits.taus)} | _short(asdict(reached)))
    exits.taus = own
    columns = ["target", "macs_fraction", "accuracy", "gained", "lost", "shares"]
    show("thresholds moved for other budgets", columns, [[row[name] for name in columns] for row in budgets])
    timings = [_timed(exits, dense, data.test, batch, options) for batch in ((1,) if options.quick else BATCHES)]
    for row in timings:
        Console(highlight=False).print(row)
    result = json.loads((options.run / RESULT).read_text(encoding="utf-8"))
    recipe = without_folders(result["recipe"])
    results = {
        "dense_accuracy": result["accuracy"]["dense"], "table": asdict(table), "budgets": budgets, "timings": timings,
        "recipe": recipe, "seconds": result["seconds"],
    }  # fmt: skip
    write_record(options.out, question=QUESTION, results=results, threads=options.threads, seeds=[recipe["seed"]])


def _options() -> Namespace:
    made = parser(QUESTION, "cifar10_exits")
    made.set_defaults(out=HERE / "records" / "cifar10_exits.json")
    made.add_argument("run", type=Path, help="folder of a finished run with exits")
    made.add_argument("--data-dir", help="where the data is, if not where it was")
    made.add_argument("--images", type=int, default=0, help="of the test images; 0: all")
    made.add_argument("--timed", type=int, default=256, help="images to time")
    made.add_argument(
        "--rounds", type=int, default=9, help=f"of images alone; batches get {ROUNDS_OF_BATCHES} times as many"
    )
    return made.parse_args()


def _short(table: Row) -> Row:
    shares = [row["share"] for row in table["rows"]]
    return {
        "shares": shares,
        **{name: table[name] for name in ("accuracy", "accuracy_of_last", "macs_fraction", "gained", "lost")},
    }


def _timed(exits: ExitModel, dense: torch.nn.Module, split: Any, batch: int, options: Namespace) -> Row:
    """The plain network and the cascade over the same images; the MACs are those of these images."""
    count = max(batch, 16 if options.quick else options.timed)
    images = ask.timed_images(split, count)
    parts = [part for part in images.split(batch) if len(part) == batch]
    exits.eval()
    with torch.no_grad():
        macs = sum(_macs(exits, part) for part in parts) / len(parts)
    calls = {name: [module_call(net, part) for part in parts] for name, net in (("dense", dense), ("cascade", exits))}

    def over(name: str) -> Any:
        return lambda: [call() for call in calls[name]]

    rounds = options.rounds if batch == 1 else ROUNDS_OF_BATCHES * options.rounds
    with torch_threads(options.threads):
        found = time_interleaved({name: over(name) for name in calls}, 2 if options.quick else rounds)
    each = {name: timing_of([ms / len(parts) / batch for ms in found[name].samples_ms]) for name in found}
    slower = ratio(found["cascade"], found["dense"])
    saved_macs = 1 - macs / exits.dense_macs
    return {
        "batch": batch, "images": len(parts) * batch, "macs_fraction": macs / exits.dense_macs,
        "time_fraction": slower.as_record(), "dense_ms": each["dense"].as_record(),
        "cascade_ms": each["cascade"].as_record(),
        "time_saved_of_macs_saved": (1 - slower.median) / saved_macs if saved_macs else None,
    }  # fmt: skip


def _macs(exits: ExitModel, part: torch.Tensor) -> float:
    exits(part)
    return exits.macs()


if __name__ == "__main__":
    main()
