"""Can one thread prepare CIFAR-10 batches faster than a small network learns from them?

A batch of 128 is gathered, padded, cropped, mirrored and normalised on one thread; beside it a whole training step of
ResNet-20, interleaved in one run. The images are random pixels, as many as CIFAR-10 has: the work does not depend on
what they show. At most 3 ms a batch is the aim.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from common import parser, show
from torch import Tensor
from training_cost import plain_step

from headgate.analysis.measure import ratio, time_interleaved, torch_threads
from headgate.analysis.records import write_record
from headgate.data.batches import NORMALIZATIONS, CropAndFlip, InMemory

QUESTION = "Can one thread prepare CIFAR-10 batches faster than a ResNet-20 learns from them?"
MODEL = "cifar_resnet20"
BATCH = 128
IMAGES = 50_000
AIM_MS = 3.0
PIPELINE, STEP = "crop, mirror, normalise", "training step"
Row = dict[str, Any]


def main() -> None:
    options = _options()
    rows = _rows(options)
    cells = [
        [row["work"], row["threads"], row["time"].median_ms, row["time"].iqr_ms, row["images_per_s"]] for row in rows
    ]
    show(f"a batch of {BATCH}, {MODEL}", ["work", "threads", "ms", "iqr", "images/s"], cells)
    share = ratio(rows[0]["time"], rows[1]["time"])
    print(f"preparing takes {share.median:.2%} of a step; aim, at most {AIM_MS} ms: {_met(rows[0])}")
    results = {
        "model": MODEL, "batch": BATCH, "images": IMAGES, "aim_ms": AIM_MS, "met": _met(rows[0]),
        "rows": rows, "preparing_over_step": share,
    }  # fmt: skip
    write_record(options.out, question=QUESTION, results=results, threads=options.threads, seeds=[options.seed])


def _options() -> Namespace:
    made = parser(QUESTION, "augmentation")
    made.add_argument("--rounds", type=int, default=15)
    return made.parse_args()


def _rows(options: Namespace) -> list[Row]:
    batches = endless_batches(options.seed)
    x, y = next(batches)
    work = {PIPELINE: lambda: next(batches), STEP: plain_step(MODEL, x, y, options.seed)}
    threads = {PIPELINE: 1, STEP: options.threads}
    with torch_threads(options.threads):
        timings = time_interleaved(
            work,
            3 if options.quick else options.rounds,
            warmup=2,
            calls=1 if options.quick else 4,
            settle=1,
            before=lambda name: torch.set_num_threads(threads[name]),
        )
    return [
        {"work": name, "threads": threads[name], "time": time, "images_per_s": round(BATCH / time.median_ms * 1000)}
        for name, time in timings.items()
    ]


def endless_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training batches of one epoch after the other."""
    randomness = np.random.default_rng(seed)
    pixels_NCHW = randomness.integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8)
    split = InMemory(pixels_NCHW, randomness.integers(0, 10, IMAGES), 10, NORMALIZATIONS["imagenet"], CropAndFlip())
    for epoch in count():
        yield from split.train_batches(BATCH, seed=seed, epoch=epoch)


def _met(pipeline: Row) -> bool:
    return bool(pipeline["time"].median_ms <= AIM_MS)


if __name__ == "__main__":
    main()
