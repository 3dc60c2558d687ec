"""Imports torchvision, also where its compiled operators do not fit the installed torch.

The torchvision of the package index is built for a CUDA torch. Beside a CPU-only torch its operators do not load, and
its import stops at the first one it looks up. Models, transforms and datasets need none of them: declaring (without
implementing) the two that the import asks for is enough. A healthy torchvision is imported as it is.
"""

import importlib
import sys
from types import ModuleType

import torch

__all__ = ["import_torchvision"]

# What `import torchvision` looks up by name.
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> ModuleType:
    """Returns the torchvision package; raises ImportError if it is not installed."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if not _is_missing_operator(error):
            raise
    _forget_half_import_()
    _declare_operators_()
    return importlib.import_module("torchvision")


def _is_missing_operator(error: RuntimeError) -> bool:
    return any(f"torchvision::{name}" in str(error) for name in _OPERATORS)


def _forget_half_import_() -> None:
    """Submodules that did load would otherwise stay unattached to the package of the second import."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


def _declare_operators_() -> None:
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SCHEMA)
