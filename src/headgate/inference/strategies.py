"""How gates are decided when a network is used, not trained.

| name | gates |
| --- | --- |
| threshold | open where p > tau; reproducible |
| calibrated | the decisions that `calibrate` or `project` made to meet the target |
| sample | drawn, from a generator if one is given |
| always_on | all open |
| ensemble | several sampled passes, their answers combined |

Knows probabilities and decisions; knows nothing of networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headgate.errors import HeadgateError

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "threshold": ("tau",), "calibrated": (), "sample": ("generator",), "always_on": (),
    "ensemble": ("runs", "combine", "generator"),
}  # fmt: skip
"""The strategies, and what each can be told."""


@dataclass(frozen=True)
class Strategy:
    """One way to decide gates, with its options."""

    name: str = "threshold"
    tau: float = 0.5
    generator: torch.Generator | None = None
    runs: int = 5
    combine: Literal["mean", "vote"] = "mean"

    def __post_init__(self) -> None:
        if self.name not in OPTIONS:
            raise HeadgateError(f"strategy {self.name!r} is unknown: use one of {', '.join(OPTIONS)}")
        if not 0 <= self.tau <= 1:
            raise HeadgateError(
                f"tau={self.tau}: a gate is open where its probability is above tau, so tau lies in 0..1"
            )
        if self.runs < 1:
            raise HeadgateError(f"runs={self.runs}: an ensemble needs at least one run")
        if self.combine not in ("mean", "vote"):
            raise HeadgateError(f'combine={self.combine!r}: use "mean" (of probabilities) or "vote" (majority)')

    @property
    def sampled(self) -> bool:
        """Whether gates are drawn."""
        return self.name in ("sample", "ensemble")


def combine(outputs: list[Tensor], how: Literal["mean", "vote"]) -> Tensor:
    """One answer from several runs' logits (axis 1: classes): log of the mean probability, or of the votes' share."""
    stacked = torch.stack([output.float() for output in outputs])
    if how == "mean":
        return stacked.log_softmax(2).logsumexp(0) - torch.log(torch.tensor(float(len(outputs))))
    votes = torch.nn.functional.one_hot(stacked.argmax(2), stacked.shape[2]).float().movedim(-1, 2).mean(0)
    # equal votes are settled by the mean probability, which stays far below one vote
    return torch.log(votes + 1e-3 * stacked.softmax(2).mean(0) / len(outputs))
