"""The few modules a shrunk network may need that PyTorch does not have: they move channels to other places.

`SelectChannels` leaves some channels of a dense tensor, `ScatterChannels` puts a few channels back to their places
in a dense one. A module that needs them is replaced by `nn.Sequential(select?, module, scatter?)`, the module under
the name `BODY`, so `dense_name` gives back the name it had. Knows nothing of gates or graphs.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

BODY = "headgate_body"


def dense_name(name: str) -> str:
    """The name that a module or tensor had before modules were wrapped."""
    return name.replace(f".{BODY}", "").replace(f"{BODY}.", "")


class Relayout(nn.Module):
    """A module that only moves channels."""


class SelectChannels(Relayout):
    """Some channels of a dense tensor, in the order of `index`."""

    index: Tensor

    def __init__(self, index: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(self.axis, self.index)

    def extra_repr(self) -> str:
        return f"{len(self.index)} channels, axis={self.axis}"


class ScatterChannels(Relayout):
    """Zeros, but for the channels of the input at the places `index` of a dense tensor of `size` channels."""

    index: Tensor

    def __init__(self, index: Tensor, size: int, axis: int) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.size = size
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.axis] = self.size
        return x.new_zeros(shape).index_copy(self.axis, self.index, x)

    def extra_repr(self) -> str:
        return f"{len(self.index)} of {self.size} channels, axis={self.axis}"


class ZeroBranch(Relayout):
    """What a removed branch adds: zeros, with the pixels of its input and `channels` channels (None: as many as it)."""

    def __init__(self, channels: int | None, axis: int) -> None:
        super().__init__()
        self.channels = channels
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        if self.channels is not None:
            shape[self.axis] = self.channels
        return x.new_zeros(shape)

    def extra_repr(self) -> str:
        return "" if self.channels is None else f"{self.channels} channels"


def wrapped(body: nn.Module, before: nn.Module | None, after: nn.Module | None) -> nn.Sequential:
    """The module with channels moved before and behind it."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if before is not None:
        parts["before"] = before
    parts[BODY] = body
    if after is not None:
        parts["after"] = after
    return nn.Sequential(parts)


def index_tensor(places: object, device: torch.device | str | None = None) -> Tensor:
    """Places as the int64 tensor that indexing wants."""
    return torch.as_tensor(places, dtype=torch.int64, device=device)
