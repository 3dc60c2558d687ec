"""Every error headgate raises on purpose.

    HeadgateError (ValueError)
    ├── ModelError            the model, or the example input, can't be used
    │   ├── TraceError        the forward pass failed, or depends on the values of the data
    │   └── NothingToGate     no channel can be gated
    ├── TargetError           the cost target makes no sense or can't be reached
    ├── NotDecided            asked for a result that needs decisions nobody has made yet
    ├── ShrinkMismatch        the smaller network does not compute what the gated one does
    ├── NonFiniteLoss         NaN or infinity where a loss or a gate should be
    └── FileError             a saved file is damaged, foreign, or of another model

All of them are `ValueError`s: they are the user's to mend, and the message says how.
What is our own mistake is an `assert`. This module knows nothing of torch.
"""

from __future__ import annotations


class HeadgateError(ValueError):
    """Root of all errors that headgate raises on purpose."""


class ModelError(HeadgateError):
    """The model, or the example input, can't be used."""


class TraceError(ModelError):
    """The forward pass failed on the example input, or depends on the values of the data."""


class NothingToGate(ModelError):
    """No channel of the model can be gated."""


class TargetError(HeadgateError):
    """The cost target makes no sense or can't be reached."""


class NotDecided(HeadgateError):
    """A result was asked for that needs gate decisions nobody has made yet."""


class ShrinkMismatch(HeadgateError):
    """The smaller network does not compute what the gated one does."""


class NonFiniteLoss(HeadgateError):
    """NaN or infinity where a loss or a gate should be."""


class FileError(HeadgateError):
    """A saved file is damaged, foreign, or of another model."""
