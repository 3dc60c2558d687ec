"""What does it cost to decide gates that look at the image? Sampled and thresholded, before and after calibration and
tuning; what an ensemble gains, and its price; tau moved over the trained network; milliseconds beside the MACs.

Takes the folder of a finished conditional run. Trains nothing. `found_in` is what other tables of runs ask it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import parser, show, without_folders

from headgate.analysis.records import write_record
from headgate.training import ask
from headgate.training.run import RESULT
from headgate.training.start import use_threads

QUESTION = "What does it cost to decide gates that look at the image?"
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trained, sampled": ("trained", "sample", {"seed": 0}),
    "trained, thresholded": ("trained", "threshold", {"tau": 0.5}),
    "calibrated, sampled": ("gated", "sample", {"seed": 0}),
    "calibrated, thresholded": ("gated", "calibrated", {}),
    "tuned, sampled": ("conditional", "sample", {"seed": 0}),
    "tuned, thresholded": ("conditional", "calibrated", {}),
    "tuned, ensemble of 5": ("conditional", "ensemble", {"runs": 5, "seed": 0}),
}
"""Name → the network of the run, the strategy and its options."""


def main() -> None:
    options = _options()
    use_threads(options.threads)
    rows = found_in(options.run, options.data_dir)
    show(QUESTION, ["gates", "accuracy", "of the MACs"], [[name, *pair] for name, pair in rows.items()])
    batches, rounds = ((1,), 2) if options.quick else ((1, 8, 32), 20)
    milliseconds = ask.bench(options.run, batches, options.threads, rounds, options.data_dir)
    timed = ["batch", "dense_ms", "small_ms", "speed_up", "spread", "macs_ratio"]
    show("Milliseconds, dense and compact()", timed, [[row[name] for name in timed] for row in milliseconds])
    sweep = ask.evaluate(options.run, of="conditional", sweep=True, data_dir=options.data_dir)
    show("tau moved", list(sweep[0]), [list(row.values()) for row in sweep])
    result = json.loads((options.run / RESULT).read_text(encoding="utf-8"))
    recipe = without_folders(result["recipe"])
    results = {
        "rows": rows, "milliseconds": milliseconds, "sweep": sweep, "accuracy": result["accuracy"],
        "macs_fraction": result["macs_fraction"], "seconds": result["seconds"], "recipe": recipe,
    }  # fmt: skip
    write_record(options.out, question=QUESTION, results=results, threads=options.threads, seeds=[recipe["seed"]])


def found_in(folder: Path, data_dir: str | None = None) -> dict[str, list[float]]:
    """Accuracy and share of the MACs of everything that is asked, by name."""
    found = {
        name: ask.evaluate(folder, strategy, given, of=of, data_dir=data_dir)[0]
        for name, (of, strategy, given) in ASKED.items()
    }
    return {name: [row["accuracy"], row["macs_fraction"]] for name, row in found.items()}


def _options() -> Namespace:
    made = parser(QUESTION, "deciding")
    made.add_argument("run", type=Path, help="folder of a finished conditional run")
    made.add_argument("--data-dir", help="folder that holds its data, if that has moved")
    return made.parse_args()


if __name__ == "__main__":
    main()
