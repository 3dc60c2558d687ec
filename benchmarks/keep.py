"""Take a finished run's network into the zoo: its file, and a record of where it comes from.

    python benchmarks/keep.py runs/cifar10-resnet56-static cifar10-resnet56-static-0.47

The record holds the network's answers to a fixed input too, so that a test can tell whether it still computes them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from common import without_folders

from headgate.analysis.records import commit_of, write_text
from headgate.models.names import load_named
from headgate.storage import load
from headgate.trained import zoo_folder
from headgate.training.run import NETWORKS


def main() -> None:
    made = argparse.ArgumentParser(description="Take a finished run's network into the zoo.")
    made.add_argument("run", type=Path)
    made.add_argument("name")
    options = made.parse_args()
    result = json.loads((options.run / "result.json").read_text())
    if result["measured_on"] != "test":
        raise SystemExit("this run held training images out: the zoo takes runs measured on the test set")
    recipe = result["recipe"]
    last = next(name for name in ("shrunk", "conditional", "cascade") if name in result["accuracy"])
    target = zoo_folder() / f"{options.name}.safetensors"
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(options.run / NETWORKS[last], target)
    named = load_named(recipe["model"])
    with torch.no_grad():
        answers = load(target, named.model).eval()(named.example_input)[0].tolist()
    commit = commit_of(Path.cwd())
    record: dict[str, Any] = {
        "model": recipe["model"], "data": recipe["data"], "accuracy": result["accuracy"][last],
        "dense_accuracy": result["accuracy"]["dense"], "images": result["images"],
        "macs": result["macs"][last], "macs_fraction": result["macs_fraction"][last],
        "parameters": result["parameters"][last], "seconds": result["seconds"], "threads": result["threads"],
        "versions": result["versions"], "cpu": result["cpu"], "commit": commit.sha,
        "recipe": without_folders(recipe), "before": earlier_runs(result, last),
        "answers": [round(value, 5) for value in answers],
    } | ({"exits": result["exits"]} if "exits" in result else {})  # fmt: skip
    if "averaged" in result:
        record["averaged"] = [reached(each, last) | {"before": earlier_runs(each, last)} for each in result["averaged"]]
    write_text(target.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    print(f"{target.name}: {record['accuracy']:.2%} at {record['macs_fraction']:.2%} of the MACs")


def earlier_runs(result: dict[str, Any], last: str) -> list[dict[str, Any]]:
    """The runs that `--tune-on` went on from, the newest first: what they reached, and by which recipe."""
    found = []
    while result := result.get("before", {}):
        found.append(reached(result, last))
        found += result.get("adopted", {}).get("before", [])
    return found


def reached(result: dict[str, Any], last: str) -> dict[str, Any]:
    """What a run came to, and by which recipe."""
    return {"accuracy": result["accuracy"][last], "recipe": without_folders(result["recipe"])}


if __name__ == "__main__":
    main()
