"""A channel graph as rows that people and programs can read: one for each layer that costs something.

Knows the graph; knows nothing of terminals.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, Mask


@dataclass(frozen=True)
class LayerRow:
    """A layer: what it is, what it costs an image, the masks on its two sides, and why it has none behind it."""

    name: str
    kind: str
    out_shape: tuple[int, ...]
    macs: int
    share: float
    masks_in: tuple[str, ...]
    masks_out: tuple[str, ...]
    gates_out: int
    reason: str | None


def layer_rows(graph: ChannelGraph) -> list[LayerRow]:
    """The rows, in the order of the forward pass."""
    total = max(graph.dense_macs, 1)
    rows = []
    for item in graph.costs:
        masks_in, masks_out = _masks(graph, item.reads), _masks(graph, item.writes)
        around = [graph.masks[number] for branch in item.branches for number in graph.branches[branch].masks]
        masks_out += [mask for mask in around if mask.kind == "branch" and mask not in masks_out]
        gates = 0 if item.writes is None else len(np.unique(item.writes[item.writes != ALWAYS_OPEN]))
        rows.append(
            LayerRow(
                item.name,
                item.kind,
                item.out_shape,
                item.macs,
                item.macs / total,
                tuple(mask.name for mask in masks_in),
                tuple(mask.name for mask in masks_out),
                gates + sum(mask.kind == "branch" for mask in masks_out),
                None if masks_out else graph.frozen.get(item.name),
            )
        )
    return rows


def _masks(graph: ChannelGraph, gates: NDArray[np.int64] | None) -> list[Mask]:
    if gates is None:
        return []
    used = np.unique(gates[gates != ALWAYS_OPEN])
    starts = np.array([mask.first for mask in graph.masks])
    numbers = sorted(set((np.searchsorted(starts, used, side="right") - 1).tolist()))
    return [graph.masks[number] for number in numbers]


def as_text(graph: ChannelGraph) -> str:
    """The whole table, in columns."""
    lines = [("layer", "type", "MACs", "share", "gates", "mask, or why there is none")]
    for row in layer_rows(graph):
        note = ", ".join(row.masks_out) or row.reason or "nothing to gate"
        lines.append((row.name, row.kind, f"{row.macs:,}", f"{row.share:.1%}", str(row.gates_out or "–"), note))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    text = "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line[:-1], widths, strict=True))
        )
        + f"  {line[-1]}"
        for line in lines
    )
    return f"{text}\n{graph!r}"


def as_json(graph: ChannelGraph, name: str) -> dict[str, Any]:
    """The whole table as plain data."""
    return {
        "model": name,
        "macs": graph.dense_macs,
        "gates": graph.gate_count,
        "masks": len(graph.masks),
        "gateable_fraction": graph.gateable_fraction,
        "granularity": graph.granularity,
        "stream": graph.stream,
        "removable_branches": [gated.branch.name for gated in graph.branches],
        "layers": [asdict(row) for row in layer_rows(graph)],
    }
