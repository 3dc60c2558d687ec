"""Networks inside of wrappers: compiled ones, and those that are shared out over devices or processes.

A wrapper changes the names of all modules and parameters, and is nothing that can be copied, cut or written to a file.
Knows PyTorch's wrappers; knows nothing of what is inside.
"""

from __future__ import annotations

from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, whoever compiled it or shared it out; what is no network is given back as it is."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
