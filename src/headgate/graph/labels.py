"""Arithmetic of channel labels.

A label array says which channel each place of a tensor belongs to. It has as many dimensions as the tensor and
size 1 wherever the label does not change along a dimension: `(1, 64, 1, 1)` for an ordinary feature map. A label
is the number of a channel, or `NO_CHANNEL` for a place that belongs to none. `None` stands for a tensor
without any channel. Knows nothing of operators, layers, or what a channel is.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
NO_CHANNEL = -1


def along(atoms: NDArray[np.int64], axis: int, dims: int) -> Labels:
    """Labels of a tensor with `dims` dimensions whose channels lie along `axis`."""
    shape = [1] * dims
    shape[axis] = len(atoms)
    return atoms.reshape(shape)


def varying_axes(labels: Labels) -> list[int]:
    """Dimensions along which the label changes (or could: their size is not 1)."""
    return [axis for axis, size in enumerate(labels.shape) if size != 1]


def channel_axis(labels: Labels, expected: int) -> int | None:
    """The one dimension that carries channels, if it is `expected`; None if labels lie otherwise."""
    axes = varying_axes(labels)
    expected %= labels.ndim
    return expected if axes in ([], [expected]) else None


def squeeze_constant(labels: Labels) -> Labels:
    """The same labels, size 1 wherever they are constant."""
    for axis in varying_axes(labels):
        first = labels.take([0], axis)
        if (labels == first).all():
            labels = first
    return labels


def viewed(labels: Labels, old_shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Labels:
    """Labels after `tensor.view(new_shape)`."""
    expanded: list[int] = []
    result: list[int] = []
    for old_axes, new_axes in matching_axes(old_shape, new_shape):
        varies = any(labels.shape[axis] != 1 for axis in old_axes)
        expanded += [old_shape[axis] if varies else 1 for axis in old_axes]
        result += [new_shape[axis] if varies else 1 for axis in new_axes]
    return squeeze_constant(np.broadcast_to(labels, expanded).reshape(result))


def matching_axes(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The finest pairing of runs of old and new dimensions that hold the same number of elements each."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        old_axes, new_axes = ([i], []) if i < len(old) else ([], [j])
        i, j = (i + 1, j) if old_axes else (i, j + 1)
        if old_axes and j < len(new):
            new_axes = [j]
            j += 1
        while (have := prod(old[a] for a in old_axes)) != (want := prod(new[a] for a in new_axes)):
            if have < want or j >= len(new):
                old_axes.append(i)
                i += 1
            else:
                new_axes.append(j)
                j += 1
        groups.append((old_axes, new_axes))
    return groups


def split_axes(labels: Labels) -> tuple[list[int], int] | None:
    """(outer axes, last axis) of labels that vary along more than one dimension, else None."""
    axes = varying_axes(labels)
    return (axes[:-1], axes[-1]) if len(axes) > 1 else None
