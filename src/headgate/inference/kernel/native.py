"""Finds the compiled kernel and calls it through its plain C interface.

Takes contiguous float32 tensors and masks of bytes that somebody else has checked. Knows pointers and sizes, nothing
of operators or networks.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LEVELS = ("portable", "avx2", "avx512")
Pair = tuple[int, int]
FOLDER = Path(__file__).parent
VERSION = 3
"""Of the functions' arguments, as in conv.cpp: a library that was built before they changed is not called."""


@cache
def compiled() -> ctypes.CDLL | None:
    """The compiled kernel, or None. torch is imported by then, so both share one pool of OpenMP threads."""
    passed_over = []
    for path in sorted(FOLDER.glob("_conv*")):
        if path.suffix in (".so", ".pyd", ".dylib"):
            try:
                return _typed(ctypes.CDLL(str(path)))
            except (OSError, AttributeError):
                passed_over.append(path.name)
    if passed_over:
        warnings.warn(
            f"the compiled kernel ({', '.join(passed_over)}) is of another version or for another machine: conditional "
            "networks use PyTorch's operators instead. Install headgate again to have it built",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
    return None


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its arguments. Raises AttributeError where it has others."""
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    if found.headgate_version() != VERSION:
        raise AttributeError("a library of another version")
    found.headgate_conv2d.argtypes = [
        pointer, pointer, pointer, pointer, pointer, pointer, number, pointer, number, pointer, flag, flag, flag, flag,
    ]  # fmt: skip
    found.headgate_conv2d.restype = ctypes.c_int
    found.headgate_gate_masks.argtypes = [
        pointer, pointer, number, pointer, pointer, pointer, pointer, number, number, number, number, pointer, pointer,
        number, pointer, number, ctypes.c_float, pointer, flag,
    ]  # fmt: skip
    found.headgate_gate_masks.restype = ctypes.c_int
    found.headgate_read_planes.argtypes = [pointer, pointer, pointer, pointer, pointer, pointer, flag]
    found.headgate_read_planes.restype = ctypes.c_int
    found.headgate_max_pool.argtypes = [pointer, pointer, pointer, flag]
    found.headgate_max_pool.restype = flag
    found.headgate_run.argtypes = [pointer, number, pointer, number, pointer, number, flag]
    found.headgate_run.restype = flag
    found.headgate_level.restype = ctypes.c_int
    return found


def kernel_level() -> str:
    """Which kernel this machine uses: avx512, avx2, portable, or plain (no compiled kernel)."""
    found = compiled()
    return "plain" if found is None else LEVELS[found.headgate_level()]


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, in_mask: Tensor | None, out_mask: Tensor | None,
    residual: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, relu: bool, y: Tensor,
    rectified: bool = False, level: int = -1,
) -> bool:  # fmt: skip
    """Fill `y`, which may be the residual itself. All tensors are contiguous; masks are of bytes, one row an image or
    one for all. `rectified` says that the residual has no negative values. False if the images are too large for the
    kernel, which has done nothing then."""
    found = compiled()
    assert found is not None
    numbers = (ctypes.c_int64 * 15)(
        *x.shape, y.shape[1], y.shape[2], y.shape[3], weight.shape[2], weight.shape[3], *stride, *padding, *dilation
    )
    failed = found.headgate_conv2d(
        x.data_ptr(), weight.data_ptr(), at(bias), at(residual), y.data_ptr(),
        at(in_mask), step(in_mask), at(out_mask), step(out_mask),
        ctypes.addressof(numbers), int(relu), int(rectified), torch.get_num_threads(), level,
    )  # fmt: skip
    return done(failed)


def done(failed: int) -> bool:
    """What a convolution's return value says: whether it is computed, or too large for the kernel."""
    if failed < 0:
        raise MemoryError("the convolution's scratch memory could not be allocated")
    return not failed


def at(tensor: Tensor | None) -> int | None:
    """Where a tensor lies, if there is one."""
    return None if tensor is None else tensor.data_ptr()


def step(mask: Tensor | None) -> int:
    """From one image's row of a mask to the next; 0 where all share one."""
    return 0 if mask is None or mask.shape[0] == 1 else mask.shape[1]


class Gates:
    """A gate network from images to masks: what `plain.gate_masks` says, for contiguous float32 images."""

    def __init__(
        self, trunk: tuple[Tensor, Tensor], head: tuple[Tensor, Tensor], sizes: list[int], immortal: list[int],
        groups: list[int],
    ) -> None:  # fmt: skip
        self.tensors = tuple(tensor.contiguous() for tensor in (*trunk, head[0].t(), head[1]))
        self.sizes = sizes
        self.hidden = trunk[0].shape[0]
        self.numbers = (
            (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_uint8 * len(sizes))(*immortal), len(sizes),
            (ctypes.c_int64 * max(len(groups), 1))(*groups), len(groups),
        )  # fmt: skip
        self._rows = ctypes.c_void_p * len(sizes)
        found = compiled()
        assert found is not None
        self._decide = found.headgate_gate_masks

    def __call__(self, x: Tensor, arriving: Tensor | None, threshold: float) -> list[Tensor]:
        images, channels = x.shape[:2]
        masks = [x.new_empty(images, size, dtype=torch.bool) for size in self.sizes]
        failed = self._decide(
            x.data_ptr(), at(arriving), step(arriving), *(tensor.data_ptr() for tensor in self.tensors), images,
            channels, x.numel() // max(images * channels, 1), self.hidden, *self.numbers, threshold,
            self._rows(*(mask.data_ptr() for mask in masks)), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("the gates' scratch memory could not be allocated")
        return masks


def read_planes(x: Tensor, scale: Tensor, shift: Tensor, tile: Pair, tiles: Tensor, means: Tensor) -> None:
    """Fill `tiles` and `means`; all are contiguous."""
    found = compiled()
    assert found is not None
    numbers = (ctypes.c_int64 * 6)(x.shape[0] * x.shape[1], *x.shape[1:], *tile)
    failed = found.headgate_read_planes(
        x.data_ptr(), scale.data_ptr(), shift.data_ptr(), tiles.data_ptr(), means.data_ptr(),
        ctypes.addressof(numbers), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("the scratch memory of an exit could not be allocated")


def max_pool2d(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, y: Tensor) -> None:
    """Fill `y`; both are contiguous."""
    found = compiled()
    assert found is not None
    numbers = (ctypes.c_int64 * 11)(x.shape[0] * x.shape[1], *x.shape[2:], *y.shape[2:], *kernel, *stride, *padding)
    if found.headgate_max_pool(x.data_ptr(), y.data_ptr(), ctypes.addressof(numbers), torch.get_num_threads()):
        raise MemoryError("the pooling's scratch memory could not be allocated")
