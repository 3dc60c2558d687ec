"""Count multiply-adds: convolutions, linear layers and matrix products; bias, norm and activation are free.

A MAC is one multiply-add, half of what "FLOPs" count. Knows nothing of gates.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from headgate.errors import ModelError
from headgate.graph.analyse import check_model
from headgate.graph.layer_rules import trace_model
from headgate.graph.propagate import follow
from headgate.graph.trace import Trace


def macs_by_layer(model: nn.Module, example_input: Any) -> dict[str, int]:
    """Multiply-adds an image of every layer, and of matrix products outside of layers by the module they run in."""
    return traced_macs(model, example_input)[1]


def traced_macs(model: nn.Module, example_input: Any) -> tuple[Trace, dict[str, int]]:
    """The forward pass they were counted in, too."""
    check_model(model)
    for module in model.modules():
        if reason := getattr(type(module), "not_counted_because", None):
            raise ModelError(f"the multiply-adds of a {type(module).__name__} can't be counted, {reason}")
    recorded = trace_model(model, example_input)
    book = follow(recorded, dict(model.named_modules()))
    macs: dict[str, int] = {}
    for name, count in [(usage.layer, usage.macs) for usage in book.usages] + list(book.other_macs.items()):
        macs[name] = macs.get(name, 0) + count
    return recorded, {name: count // recorded.batch_size for name, count in macs.items()}


def count_macs(model: nn.Module, example_input: Any) -> int:
    """Multiply-adds of conv, linear and matmul for one image."""
    return sum(macs_by_layer(model, example_input).values())
