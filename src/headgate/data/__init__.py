"""Data sets. They give tensors and know nothing of models or training."""

from headgate.data.batches import DataSet, Split
from headgate.data.cifar10 import obtain_cifar10
from headgate.data.digits import digits
from headgate.data.sources import open_data

__all__ = ["DataSet", "Split", "digits", "obtain_cifar10", "open_data"]
