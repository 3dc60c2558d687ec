"""Batches of one split of a data set: their order, their share for each process, and images kept in memory.

Takes pixels and labels; gives (images, labels) whose order and augmentation depend on nothing but the arguments: an
epoch may start at any batch, and may be shared by any number of processes, and the images are the same bit for bit.
Knows nothing of files, of models, or of training.

Axes: N images of the split, B images of a batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from headgate.errors import HeadgateError

__all__ = [
    "NORMALIZATIONS", "CropAndFlip", "DataSet", "EpochPlan", "InMemory", "Normalization", "Part", "Split",
    "eval_batch_size",
]  # fmt: skip

Batch = tuple[Tensor, Tensor]
Pixels = NDArray[np.uint8]
Rows = NDArray[np.int64]

# What a random draw is for goes first into its seed: [seed, epoch] and [seed, epoch, 0] alone give the same numbers.
ORDER, AUGMENTATION, VALIDATION = 1, 2, 3

EVAL_IMAGES, EVAL_PIXELS = 500, 500 * 64 * 64
"""Looked at together, at most: 40 images of 224×224."""


class Split(Protocol):
    """One split of a data set: images that models can take, in an order that depends on nothing but the arguments."""

    @property
    def classes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""

    def __len__(self) -> int: ...

    def steps(self, batch_size: int) -> int:
        """Joint training batches of an epoch: the incomplete last one is dropped, unless it is the only one."""

    def train_batches(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0, rank: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        """Shuffled and augmented, from joint batch `start` on.

        `batch_size` counts the images of all processes together; process `rank` gets rows `rank::processes` of each
        joint batch.
        """

    def eval_batches(self, batch_size: int, *, rank: int = 0, processes: int = 1) -> Iterator[Batch]:
        """Images `rank::processes` as they are and in their order, `batch_size` at a time and the rest at the end."""


@dataclass(frozen=True)
class DataSet:
    """Images to train on, and images to judge by: `test` holds the validation images if some were held out."""

    name: str
    train: Split
    test: Split
    classes: int
    shape: tuple[int, int, int]
    class_names: tuple[str, ...] = ()
    """In the order of their labels; numbers where nothing else is known."""

    def __post_init__(self) -> None:
        if not self.class_names:
            object.__setattr__(self, "class_names", tuple(str(number) for number in range(self.classes)))


@dataclass(frozen=True)
class Part:
    """Every so many of a split's images, at most `images` of them, as often as they are asked for; 0: all of them.

    The first images would not do: folders are read class by class.
    """

    split: Split
    images: int = 0
    batch_size: int = 0
    """0: as many as `eval_batch_size` says."""

    @property
    def stride(self) -> int:
        return max(1, -(-len(self.split) // self.images)) if self.images else 1

    def __len__(self) -> int:
        return -(-len(self.split) // self.stride)

    def __iter__(self) -> Iterator[Batch]:
        yield from self.split.eval_batches(
            self.batch_size or eval_batch_size(self.split), rank=0, processes=self.stride
        )


def eval_batch_size(split: Split) -> int:
    """Images to look at together: fewer of large ones, whose activations would not fit in memory."""
    _, height, width = split.shape
    return max(1, min(EVAL_IMAGES, EVAL_PIXELS // (height * width)))


# The order of an epoch.


def check_seed(seed: int) -> int:
    """A seed that random numbers can begin with."""
    if not 0 <= seed < 2**63:
        raise HeadgateError(f"seed={seed}: it must be a number from 0 to 2^63 - 1")
    return seed


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on the key alone, on every machine."""
    return np.random.default_rng(np.random.SeedSequence(key))


def step_count(length: int, batch_size: int) -> int:
    """Whole batches of `length` images; one smaller batch if they do not fill a single one."""
    if batch_size < 1:
        raise HeadgateError(f"batch_size={batch_size}: a batch holds at least 1 image")
    return max(length // batch_size, min(length, 1))


@dataclass(frozen=True)
class EpochPlan:
    """Which images stand in which batch of a training epoch, and which of them are one process's own."""

    length: int
    batch_size: int
    seed: int
    epoch: int
    start: int = 0
    rank: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        _check_share(self.rank, self.processes)
        if self.seed < 0 or self.epoch < 0:
            raise HeadgateError(f"seed={self.seed}, epoch={self.epoch}: both are 0 or more")
        if not 0 <= self.start <= self.steps:
            raise HeadgateError(
                f"start={self.start}: an epoch of {self.length} images in batches of {self.batch_size} "
                f"has {self.steps} batches; count from 0 in each epoch"
            )
        if self.steps and self.rows_per_step < self.processes:
            raise HeadgateError(
                f"a batch of {self.rows_per_step} images cannot be shared by {self.processes} processes: "
                "raise batch_size, or use fewer processes"
            )

    @property
    def steps(self) -> int:
        return step_count(self.length, self.batch_size)

    @property
    def rows_per_step(self) -> int:
        return min(self.batch_size, self.length)

    @property
    def share(self) -> slice:
        """This process's rows of a joint batch."""
        return slice(self.rank, None, self.processes)

    def joint_batches(self) -> Iterator[tuple[int, Rows]]:
        """Number and images of each joint batch, from `start` on."""
        order_N = generator(ORDER, self.seed, self.epoch).permutation(self.length)
        for step in range(self.start, self.steps):
            yield step, order_N[step * self.rows_per_step : (step + 1) * self.rows_per_step]

    def randomness(self, number: int) -> np.random.Generator:
        """For the augmentation of joint batch `number`, or of the image at place `number` of the joint epoch."""
        return generator(AUGMENTATION, self.seed, self.epoch, number)


def eval_rows(length: int, batch_size: int, rank: int, processes: int) -> list[Rows]:
    """The images of each evaluation batch of one process; over all processes every image stands in exactly one."""
    _check_share(rank, processes)
    step_count(length, batch_size)
    mine = np.arange(rank, length, processes)
    return [mine[first : first + batch_size] for first in range(0, len(mine), batch_size)]


def hold_out(labels_N: Rows, count: int) -> tuple[Rows, Rows]:
    """The images that stay and the `count` that are held out: always the same, every class in proportion."""
    if not 0 <= count < len(labels_N):
        raise HeadgateError(
            f"validation={count}: of {len(labels_N)} training images at most {len(labels_N) - 1} can be held out"
        )
    shuffled_N = generator(VALIDATION, 0).permutation(len(labels_N))
    wanted = _proportional(np.bincount(labels_N), count)
    held = [shuffled_N[labels_N[shuffled_N] == label][:number] for label, number in enumerate(wanted)]
    is_held_N = np.zeros(len(labels_N), dtype=bool)
    is_held_N[np.concatenate(held)] = True
    return np.flatnonzero(~is_held_N), np.flatnonzero(is_held_N)


def _proportional(counts: Rows, total: int) -> Rows:
    """`total` shared out in proportion to `counts`, in whole numbers: what is left over goes to the largest rests."""
    parts = counts * total // counts.sum()
    rests = counts * total % counts.sum()
    parts[np.argsort(-rests, kind="stable")[: total - parts.sum()]] += 1
    return parts


def _check_share(rank: int, processes: int) -> None:
    if not 0 <= rank < processes:
        raise HeadgateError(f"rank={rank} of processes={processes}: ranks count from 0 to processes - 1")


# From pixels to what models take.


@dataclass(frozen=True)
class Normalization:
    """Per channel, the mean to subtract and the deviation to divide by, for pixels scaled to 0..1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels_BCHW: Tensor) -> Tensor:
        """uint8 pixels as float32, by one multiplication and one addition.

        They are not contracted to a single instruction: that rounds by where a pixel stands in memory, and a batch
        shared by two processes would differ in the last bit from the same batch in one.
        """
        mean_C, std_C = torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)
        scale_C11 = (1 / (255 * std_C)).float().view(-1, 1, 1)
        shift_C11 = (-mean_C / std_C).float().view(-1, 1, 1)
        return pixels_BCHW.float().mul_(scale_C11).add_(shift_C11)


NORMALIZATIONS = {
    "imagenet": Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": Normalization((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
}


def normalization_named(name: str) -> Normalization:
    if name not in NORMALIZATIONS:
        raise HeadgateError(f'there is no normalization "{name}": choose from {", ".join(NORMALIZATIONS)}')
    return NORMALIZATIONS[name]


@dataclass(frozen=True)
class CropAndFlip:
    """Each image is padded with black pixels, cut to its old size at a random place, and mirrored half of the time."""

    padding: int = 4

    def draw(self, randomness: np.random.Generator, count: int) -> Rows:
        """For each image the top and left edge of its window, and whether it is mirrored: three columns."""
        return randomness.integers(0, [2 * self.padding + 1, 2 * self.padding + 1, 2], size=(count, 3))

    def __call__(self, pixels_BCHW: Pixels, drawn_B3: Rows) -> Pixels:
        pad, (count, channels, height, width) = self.padding, pixels_BCHW.shape
        padded = np.zeros((count, channels, height + 2 * pad, width + 2 * pad), dtype=pixels_BCHW.dtype)
        padded[:, :, pad : pad + height, pad : pad + width] = pixels_BCHW
        windows = sliding_window_view(padded, (height, width), axis=(2, 3))
        top_B, left_B, mirrored_B = drawn_B3.T
        cropped = windows[np.arange(count), :, top_B, left_B]
        mirrored = np.flatnonzero(mirrored_B)
        cropped[mirrored] = cropped[mirrored, :, :, ::-1]
        return cropped


@dataclass(frozen=True, eq=False)
class InMemory:
    """A split whose images lie in memory: uint8 with a normalisation, or float32 ready for use without one."""

    images_NCHW: NDArray[Any]
    labels_N: Rows
    classes: int
    normalization: Normalization | None = None
    augmentation: CropAndFlip | None = None

    def __post_init__(self) -> None:
        assert len(self.images_NCHW) == len(self.labels_N), "every image has a label"
        assert (self.images_NCHW.dtype == np.uint8) == (self.normalization is not None), "only pixels are normalised"

    @property
    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.images_NCHW.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.labels_N)

    def steps(self, batch_size: int) -> int:
        return step_count(len(self), batch_size)

    def train_batches(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0, rank: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        plan = EpochPlan(len(self), batch_size, seed, epoch, start, rank, processes)
        return (self._train_batch(plan, step, rows_B) for step, rows_B in plan.joint_batches())

    def eval_batches(self, batch_size: int, *, rank: int = 0, processes: int = 1) -> Iterator[Batch]:
        rows = eval_rows(len(self), batch_size, rank, processes)
        return (self._batch(self.images_NCHW[rows_B], rows_B) for rows_B in rows)

    def subset(self, rows: Rows, *, augmented: bool) -> InMemory:
        """Only these images; augmented as before, or not at all."""
        return replace(
            self,
            images_NCHW=self.images_NCHW[rows],
            labels_N=self.labels_N[rows],
            augmentation=self.augmentation if augmented else None,
        )

    def _train_batch(self, plan: EpochPlan, step: int, rows_B: Rows) -> Batch:
        """Draws for the joint batch, and computes this process's share of it."""
        images = self.images_NCHW[rows_B[plan.share]]
        if self.augmentation is not None:
            images = self.augmentation(images, self.augmentation.draw(plan.randomness(step), len(rows_B))[plan.share])
        return self._batch(images, rows_B[plan.share])

    def _batch(self, images_BCHW: NDArray[Any], rows_B: Rows) -> Batch:
        images, labels_B = torch.from_numpy(images_BCHW), torch.from_numpy(self.labels_N[rows_B])
        return images if self.normalization is None else self.normalization(images), labels_B
