"""Does the budget control work at any number of gates, without tuning? And the paper's plain loss beside it.

The same few settings for every network, from 16 gates on whole blocks to tens of thousands on channels. Images and
labels are random: the question is whether the cost follows its ramp to the target, not whether the network learns.
Reported: the sampled cost when the ramp ends and at the end, the thresholded cost, and the decided one.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from common import parser, show
from rich.console import Console

import headgate
from headgate.analysis.records import write_record
from headgate.models.names import load_named

QUESTION = "Is the target reached at any number of gates, without tuning?"
CASES = (
    ("torchvision:resnet50", "layer", "shared"),
    ("cifar_resnet20", "channel", "shared"),
    ("cifar_resnet56", "channel", "shared"),
    ("torchvision:resnet50", "channel", "shared"),
    ("torchvision:efficientnet_v2_s", "channel", "shared"),
    ("torchvision:resnet152", "channel", "indexed"),
)
LOSSES = ("control", "paper")
TARGET, LR, RAMP = 0.5, 0.01, 0.6
Row = dict[str, Any]


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    cases = CASES[1:2] if options.quick else [case for case in CASES if not options.only or case[0] in options.only]
    if not cases:
        raise SystemExit(
            f"--only {', '.join(options.only)}: choose from {', '.join(sorted({case[0] for case in CASES}))}"
        )
    steps = 10 if options.quick else options.steps
    rows = []
    for model, granularity, stream in cases:
        for control in options.loss or LOSSES:
            rows.append(_row(model, granularity, stream, control, steps, options))
            Console(highlight=False).print(rows[-1])
            write_record(options.out, question=QUESTION, results=rows, threads=options.threads, seeds=[options.seed])
    columns = list(rows[0])
    show(QUESTION, columns, [[row[column] for column in columns] for row in rows])


def _options() -> Namespace:
    made = parser(QUESTION, "many_gates")
    made.add_argument("--steps", type=int, default=150)
    made.add_argument("--batch", type=int, default=16)
    made.add_argument("--only", action="append", default=[], help="a model of the table; may be given several times")
    made.add_argument("--loss", action="append", choices=LOSSES, help="of these two; may be given several times")
    return made.parse_args()


def _row(model: str, granularity: Any, stream: Any, control: str, steps: int, options: Namespace) -> Row:
    torch.manual_seed(options.seed)
    net = load_named(model).model
    x = torch.randn(1, 3, 32, 32)
    budget = (
        headgate.Budget(TARGET, ramp_steps=round(RAMP * steps))
        if control == "control"
        else headgate.Budget.paper(TARGET)
    )
    gated = headgate.gate(net, x, target=TARGET, granularity=granularity, stream=stream, budget=budget)
    optimizer = torch.optim.SGD(gated.param_groups(lr=LR, weight_decay=1e-4), momentum=0.9)
    costs = []
    for _ in range(steps):
        images, labels = torch.randn(options.batch, 3, 32, 32), torch.randint(0, 10, (options.batch,))
        (F.cross_entropy(gated(images), labels) + gated.cost_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        costs.append(gated.budget.last_cost or 0.0)
    tail = sorted(costs[-max(1, steps // 10) :])
    thresholded = gated.thresholded_macs() / gated.dense_macs
    gated.eval().project()
    return {
        "model": model, "gates": gated.graph.gate_count, "granularity": granularity, "stream": stream, "loss": control,
        "cost_at_ramp_end": round(costs[min(round(RAMP * steps), steps - 1)], 4),
        "cost_at_end": round(tail[len(tail) // 2], 4), "thresholded": round(thresholded, 4),
        "decided": gated.macs() / gated.dense_macs,
    }  # fmt: skip


if __name__ == "__main__":
    main()
