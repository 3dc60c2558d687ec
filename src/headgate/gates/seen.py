"""A forward pass that is over: which gates were open for which image, and what that cost, image by image and layer by
layer.

Plain values without gradients, for whoever wants to look. Knows a draw and its cost, nothing of models or of pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headgate.gates.cost import Cost
from headgate.gates.draws import Draw

# legend of axes: B images (1 where gates are the same for all), G gates, I layers that depend on gates


@dataclass(frozen=True)
class Seen:
    """What the gates of one pass did. Where they were decided alike for all images, there is one row for all."""

    gates_BG: Tensor
    """Whether each gate was open."""
    macs_B: Tensor
    """Multiply-adds of each image, gate networks included."""
    macs_by_layer: dict[str, float]
    """Multiply-adds an image of every layer, the mean over images; those of gate networks stand under `gates`."""


@torch.no_grad()
def seen(draw: Draw, cost: Cost) -> Seen:
    """What there is to say of a pass."""
    always, names, each_BI = cost.by_layer(draw)
    by_layer = {name: float(macs) for name, macs in always.items()}
    for name, share in zip(names, each_BI.double().mean(0).tolist(), strict=True):
        by_layer[name] = by_layer.get(name, 0.0) + share * cost.dense_macs
    order = {item.name: None for item in cost.graph.costs}
    ordered = {name: by_layer[name] for name in order}
    if cost.gates_macs:
        ordered["gates"] = float(cost.gates_macs)
    macs_B = cost.macs_B(draw).detach().double() * cost.dense_macs
    return Seen(draw.gates_BG.detach() > 0.5, macs_B, ordered)
