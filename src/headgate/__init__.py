"""headgate learns which channels of a convolutional network are worth computing, and does not compute the others.

The public names, nothing else.
"""

from importlib.metadata import PackageNotFoundError, version

from headgate.errors import (
    FileError,
    HeadgateError,
    ModelError,
    NonFiniteLoss,
    NotDecided,
    NothingToGate,
    ShrinkMismatch,
    TargetError,
    TraceError,
)
from headgate.exits.add import add_exits
from headgate.exits.cascade import ExitModel
from headgate.exits.table import ExitRow, ExitTable
from headgate.gated import GatedModel, TauPoint
from headgate.gates.budget import Budget
from headgate.gating import gate, inspect
from headgate.graph import layer_rules as rules
from headgate.graph.layer_rules import register_rule
from headgate.graph.macs import count_macs
from headgate.inference.kernel import kernel_level
from headgate.storage import load, save
from headgate.trained import ZooEntry, zoo, zoo_entries

try:
    __version__ = version("headgate")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Budget",
    "ExitModel",
    "ExitRow",
    "ExitTable",
    "FileError",
    "GatedModel",
    "HeadgateError",
    "ModelError",
    "NonFiniteLoss",
    "NotDecided",
    "NothingToGate",
    "ShrinkMismatch",
    "TargetError",
    "TauPoint",
    "TraceError",
    "ZooEntry",
    "__version__",
    "add_exits",
    "count_macs",
    "gate",
    "inspect",
    "kernel_level",
    "load",
    "register_rule",
    "rules",
    "save",
    "zoo",
    "zoo_entries",
]
