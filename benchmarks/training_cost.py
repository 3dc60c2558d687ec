"""What does a gated training step cost beside a plain one?

CIFAR ResNet-56, batch 128: forward, cross-entropy (plus `cost_loss()`), backward, SGD step. Plain, and gated with
either form of the residual stream, interleaved in one run. At most 1.15 times the plain step is the aim.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import full_name, parser, show
from torch import Tensor

import headgate
from headgate.analysis.measure import ratio, time_interleaved, torch_threads
from headgate.analysis.records import write_record
from headgate.models.names import load_named

QUESTION = "How many times a plain training step does a gated one take?"
MODELS = ("cifar_resnet56",)
STREAMS = ("shared", "indexed")
AIM = 1.15
Row = dict[str, Any]


def main() -> None:
    options = _options()
    rows = []
    with torch_threads(options.threads):
        for name in options.models:
            rows += _rows(name, options)
    cells = [[row["model"], row["step"], row["time"].median_ms, row["time"].iqr_ms, *_ratio_cells(row)] for row in rows]
    show(
        f"a training step, batch {_batch(options)}", ["model", "step", "ms", "iqr", "× plain", "iqr", f"≤ {AIM}"], cells
    )
    results = {"batch": _batch(options), "aim": AIM, "rows": rows}
    write_record(options.out, question=QUESTION, results=results, threads=options.threads, seeds=[options.seed])


def _options() -> Namespace:
    made = parser(QUESTION, "training_cost", MODELS)
    made.add_argument("--rounds", type=int, default=20)
    return made.parse_args()


def _batch(options: Namespace) -> int:
    return 16 if options.quick else 128


def _rows(name: str, options: Namespace) -> list[Row]:
    generator = torch.Generator().manual_seed(options.seed)
    shape = load_named(full_name(name)).example_input.shape[1:]
    x = torch.randn(_batch(options), *shape, generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    steps = {"plain": plain_step(name, x, y, options.seed)}
    steps |= {f"gated, {stream} stream": gated_step(name, stream, x, y, options.seed) for stream in STREAMS}
    timings = time_interleaved(steps, 3 if options.quick else options.rounds, warmup=2)
    return [
        {"model": name, "step": step, "time": timing, "over_plain": ratio(timing, timings["plain"])}
        for step, timing in timings.items()
    ]


def plain_step(name: str, x: Tensor, y: Tensor, seed: int) -> Callable[[], None]:
    torch.manual_seed(seed)
    model = load_named(full_name(name)).model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gated_step(name: str, stream: str, x: Tensor, y: Tensor, seed: int) -> Callable[[], None]:
    torch.manual_seed(seed)
    model = load_named(full_name(name)).model
    gated = headgate.gate(model, x[:1], kind="static", granularity="channel", target=0.5, stream=stream).train()
    optimizer = torch.optim.SGD(gated.param_groups(lr=0.1, weight_decay=1e-4), momentum=0.9)

    def step() -> None:
        (F.cross_entropy(gated(x), y) + gated.cost_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ratio_cells(row: Row) -> list[Any]:
    if row["step"] == "plain":
        return [None, None, None]
    return [row["over_plain"].median, row["over_plain"].iqr, row["over_plain"].median <= AIM]


if __name__ == "__main__":
    main()
