"""Gates that look at the image, though all images tell them the same: decided for good.

What is written into their networks is what `lowering.fate` reads as "always" or "never", so that a compact network, and
its ONNX file, are without these gates. Knows gate networks; knows nothing of images.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headgate.gates.dynamic import DynamicGates, GateNetwork
from headgate.graph.grouping import ChannelGraph
from headgate.graph.sites import gates_at

SURE = 30.0
"""A logit whose probability is 0 or 1 in float32."""


@torch.no_grad()
def decide_for_good_(
    dynamic: DynamicGates, graph: ChannelGraph, always_G: NDArray[np.bool_], never_G: NDArray[np.bool_]
) -> int:
    """Let these gates be open, and these closed, whatever the image; how many of them look at it."""
    count = 0
    for site, network in zip(dynamic.sites, dynamic.networks, strict=True):
        assert isinstance(network, GateNetwork)
        numbers = gates_at(site, graph)
        for told_G, logit in ((always_G, SURE), (never_G, -SURE)):
            rows = torch.from_numpy(told_G[numbers]).to(network.head.weight.device)
            network.head.weight[rows] = 0.0
            network.head.bias[rows] = logit
            count += int(rows.sum())
    return count
