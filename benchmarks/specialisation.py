"""Do gates that look at the image specialise on classes? Bits that a gate tells of the class, beside shuffled labels.

Takes the folder of a finished run whose gates depend on the image, and its test images. A gate that knows nothing of
classes tells about (classes − 1) / (2 · images · ln 2) bits by the accident of finite data; that is what the shuffled
labels show. Trains nothing.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from common import HERE, parser, without_folders
from rich.console import Console

from headgate.analysis.records import write_record
from headgate.analysis.specialisation import in_words, specialisation
from headgate.data.batches import Part
from headgate.gated import GatedModel
from headgate.training import ask
from headgate.training.run import RESULT

QUESTION = "Do gates that look at the image specialise on classes?"


@torch.no_grad()
def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    start, data = ask.open_run(options.run, options.data_dir)
    gated = ask.movable(options.run, start)
    assert isinstance(gated, GatedModel) and gated.dynamic is not None, "the gates of the run look at no image"
    opened, labels = [], []
    for images, labels_B in Part(data.test, 500 if options.quick else 0):
        gated(images)
        opened.append(gated.seen().gates_BG.expand(len(images), -1).numpy())
        labels.append(labels_B.numpy())
    found = specialisation(np.concatenate(opened), np.concatenate(labels), data.classes)
    names = [f"{mask.name}[{number}]" for mask in gated.graph.masks for number in range(mask.size)]
    telling = found.specialised_G
    words = in_words(
        found.rates_GC[telling], found.bits_G[telling], [n for n, t in zip(names, telling, strict=True) if t],
        data.class_names,
    )  # fmt: skip
    say = Console(highlight=False, soft_wrap=True)
    say.print(found.as_record())
    for line in words[:20]:
        say.print(line)
    result = json.loads((options.run / RESULT).read_text(encoding="utf-8"))
    recipe = without_folders(result["recipe"])
    results = {
        "numbers": found.as_record(), "words": words[:20], "accuracy": result["accuracy"],
        "macs_fraction": result["macs_fraction"], "recipe": recipe,
    }  # fmt: skip
    write_record(options.out, question=QUESTION, results=results, threads=options.threads, seeds=[recipe["seed"]])


def _options() -> Namespace:
    made = parser(QUESTION, "specialisation")
    made.set_defaults(out=HERE / "records" / "specialisation.json")
    made.add_argument("run", type=Path, help="folder of a finished run with gates that look at the image")
    made.add_argument("--data-dir", help="where the data is, if not where it was")
    return made.parse_args()


if __name__ == "__main__":
    main()
