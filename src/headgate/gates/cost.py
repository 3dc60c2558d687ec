"""What the open gates cost, and the losses that pull that cost to a target.

Every layer costs `macs × share of open inputs × share of open outputs`, and nothing where a branch around it is dead.
`Cost.macs_B` is that sum, image by image, differentiable in the gates; `Cost.decided_macs` is the same for one set of
decisions, in exact integers. Three losses by name: "macs" (the default), "activation" (every gate counts the same),
"per_gate" (AIG's, with a target rate for each gate). Knows nothing of budgets over time: see `budget.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.gates.draws import Draw
from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, CostItem, Decisions

LOSSES = ("macs", "activation", "per_gate")
Rates: TypeAlias = float | Sequence[float] | Mapping[str, float] | Tensor | np.ndarray
"""Target rates of gates: one for all, one a mask in order, or by the masks' names."""


class Cost:
    """The cost of a network as a function of its gates."""

    def __init__(self, graph: ChannelGraph, gates_macs: int = 0) -> None:
        self.graph = graph
        self.dense_macs = graph.dense_macs
        self.gates_macs = gates_macs
        """Of the gates themselves, where networks compute them: in every figure."""
        self._always_macs = gates_macs + sum(item.macs for item in graph.costs if not _depends(item))
        self._items = [item for item in graph.costs if _depends(item)]
        rows = [_row(gates, graph.gate_count) for item in self._items for gates in (item.reads, item.writes)]
        self._matrix = _sparse(rows, graph.gate_count + 1)
        self._macs = torch.tensor([item.macs / self.dense_macs for item in self._items], dtype=torch.float32)
        self._branches = sorted({branch for item in self._items for branch in item.branches})

    def macs_B(self, draw: Draw) -> Tensor:
        """Multiply-adds of each image, as a share of the dense network's, differentiable in the gates."""
        with torch.autocast(draw.gates_BG.device.type, enabled=False):
            return self._macs_B(draw)

    def _macs_B(self, draw: Draw) -> Tensor:
        return self._each_BI(draw).sum(1) + self._always_macs / self.dense_macs

    def by_layer(self, draw: Draw) -> tuple[dict[str, int], list[str], Tensor]:
        """The same layer by layer: multiply-adds of those that no gate has a say in, and for the others their names and
        each image's share of the dense network's multiply-adds."""
        always = {item.name: item.macs for item in self.graph.costs if not _depends(item)}
        return always, [item.name for item in self._items], self._each_BI(draw)

    def _each_BI(self, draw: Draw) -> Tensor:
        gates_BG = draw.gates_BG.float()
        ones = gates_BG.new_ones(len(gates_BG), 1)
        if self._matrix.device != gates_BG.device:
            self._matrix, self._macs = self._matrix.to(gates_BG.device), self._macs.to(gates_BG.device)
        shares = torch.sparse.mm(self._matrix, torch.cat([gates_BG, ones], 1).t()).t()
        shares = shares.reshape(len(gates_BG), len(self._items), 2)
        return self._macs * shares[..., 0] * shares[..., 1] * self._alive(draw)

    def _alive(self, draw: Draw) -> Tensor:
        """For every cost item, 1 where the branches around it live; a branch's own gate passes gradients."""
        alive = draw.gates_BG.new_ones(len(draw.gates_BG), len(self._items))
        if not self._branches:
            return alive
        columns = [alive[:, :1]]
        for number in self._branches:
            mask = self.graph.masks[self.graph.branches[number].masks[0]]
            column = (
                draw.gates_BG[:, mask.first : mask.first + 1]
                if mask.kind == "branch"
                else draw.alive_BN[:, number : number + 1]
            )
            columns.append(column)
        table = torch.cat(columns, 1)
        depth = max(len(item.branches) for item in self._items)
        for level in range(depth):
            place = [
                self._branches.index(item.branches[level]) + 1 if level < len(item.branches) else 0
                for item in self._items
            ]
            alive = alive * table.index_select(1, torch.tensor(place, device=table.device))
        return alive

    def decided_macs(self, decisions: Decisions) -> int:
        """Multiply-adds an image under these decisions, exactly."""
        dead = set(dead_branches(self.graph, decisions))
        extended = np.append(decisions, True)
        total = self.gates_macs
        for item in self.graph.costs:
            if dead.intersection(item.branches):
                continue
            macs = item.macs
            for gates in (item.reads, item.writes):
                if gates is not None:
                    macs = macs * int(extended[gates].sum()) // len(gates)
            total += macs
        return total


def dead_branches(graph: ChannelGraph, decisions: Decisions) -> tuple[int, ...]:
    """Branches one of whose masks is all closed."""
    return tuple(
        number
        for number, gated in enumerate(graph.branches)
        if any(not decisions[graph.masks[mask].gates].any() for mask in gated.masks)
    )


def _depends(item: CostItem) -> bool:
    return bool(item.branches) or any(
        gates is not None and (gates != ALWAYS_OPEN).any() for gates in (item.reads, item.writes)
    )


def _row(gates: np.ndarray | None, gate_count: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns and values of one row: the share of its places that each gate stands for."""
    if gates is None:
        return np.array([gate_count]), np.array([1.0])
    columns, counts = np.unique(np.where(gates == ALWAYS_OPEN, gate_count, gates), return_counts=True)
    return columns, counts / len(gates)


def _sparse(rows: Sequence[tuple[np.ndarray, np.ndarray]], columns: int) -> Tensor:
    if not rows:
        return torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (0, columns))
    where = np.concatenate([np.stack([np.full(len(cols), number), cols]) for number, (cols, _) in enumerate(rows)], 1)
    values = np.concatenate([values for _, values in rows])
    matrix = torch.sparse_coo_tensor(
        torch.from_numpy(where),
        torch.from_numpy(values).float(),
        (len(rows), columns),
        is_coalesced=True,
        check_invariants=False,
    )
    return matrix


def over_processes(local: Tensor) -> Tensor:
    """A batch mean over all processes, whose gradient, averaged over processes, is that of the joint batch.

    Squaring each process's own mean would add the variance between processes to the loss.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return local
    mean = local.detach().clone()
    dist.all_reduce(mean)
    return local + (mean / dist.get_world_size() - local.detach())


def activation_rate(draw: Draw) -> Tensor:
    """The paper's activation rate of a batch: the share of gates that are open, over gates and images."""
    return draw.gates_BG.mean()


def per_gate_loss(draw: Draw, rates_G: Tensor) -> Tensor:
    """AIG's loss: the squared distance of each gate's own activation rate from its target rate, summed over gates."""
    return (over_processes(draw.gates_BG.mean(0)) - rates_G.to(draw.gates_BG)).square().sum()


def target_rates(graph: ChannelGraph, rates: Rates) -> Tensor:
    """A target rate for every gate: one for all, one a mask in order, or by the masks' names."""
    if isinstance(rates, (Tensor, np.ndarray)):
        rates = rates.tolist()
    if isinstance(rates, Mapping):
        missing = {mask.name for mask in graph.masks} ^ set(rates)
        if missing:
            raise HeadgateError(f"target rates and masks differ in {sorted(missing)[:5]}: give one rate for each mask")
        each = [_rate(rates[mask.name]) for mask in graph.masks]
    elif isinstance(rates, Sequence) and not isinstance(rates, str):
        if len(rates) != len(graph.masks):
            raise HeadgateError(f"{len(rates)} target rates for {len(graph.masks)} masks: give one rate for each mask")
        each = [_rate(rate) for rate in rates]
    else:
        each = [_rate(rates)] * len(graph.masks)
    return torch.tensor(each).repeat_interleave(torch.tensor([mask.size for mask in graph.masks]))


def _rate(given: Any) -> float:
    rate = given.item() if isinstance(given, Tensor) and given.dim() == 0 else given
    if not isinstance(rate, Real) or isinstance(rate, bool) or not 0 <= float(rate) <= 1:
        raise HeadgateError(f"{given!r} is no target rate: it is a share of images, a number between 0 and 1")
    return float(rate)
