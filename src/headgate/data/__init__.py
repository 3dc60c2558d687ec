"""Data sets. They give tensors and know nothing of models or training."""

from headgate.data.digits import digits

__all__ = ["digits"]
