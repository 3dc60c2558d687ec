"""From a name to a data set, ready to train on.

=============== ====================================================================================
``digits``      the embedded handwritten digits, one channel, 16×16 pixels unless `size` says otherwise
``cifar10``     CIFAR-10 in its official binary files (`headgate data cifar10 DIR` gets them)
``folder:PATH`` images in PATH/train/<class>/ and PATH/val/<class>/ (extra ``vision``)
=============== ====================================================================================

Nothing is downloaded here. Knows nothing of models or of training.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from headgate.data import cifar10
from headgate.data.batches import CropAndFlip, DataSet, InMemory, Rows, Split, hold_out, normalization_named
from headgate.data.digits import digits
from headgate.data.folder import ImageFolder, Listing, list_images
from headgate.errors import HeadgateError

__all__ = ["DataSet", "Split", "open_data"]

DIGITS_SIZE = 16
FOLDER_SIZE = 224
DEFAULT_NORMALIZATION = "imagenet"


@dataclass(frozen=True)
class _Wishes:
    """What `open_data` was asked for beside the name; `where` is what followed its colon."""

    where: str
    root: Path | None
    validation: int
    normalization: str | None
    size: int | None
    augment: bool
    workers: int


def open_data(
    name: str,
    *,
    root: Path | None = None,
    validation: int = 0,
    normalization: str | None = None,
    size: int | None = None,
    augment: bool = True,
    workers: int = 0,
) -> DataSet:
    """Opens the data set called `name`.

    `root` is where its files lie: for cifar10 the folder that holds `cifar-10-batches-bin` (default: $HEADGATE_DATA, or
    `~/.cache/headgate/data`); a relative `folder:PATH` starts there. `validation` training images, always the same and
    every class in proportion, are held out and become `test`; the real test images are not even read then.
    `normalization` is "imagenet" (default) or "cifar10"; the digits come normalised. `augment=False` leaves the
    training images as they are, which the digits always are. `workers` processes decode the images of a folder; data
    sets in memory need none.
    """
    kind, colon, where = name.partition(":")
    if kind not in _OPENERS or bool(colon) != (kind == "folder") or (colon and not where):
        raise HeadgateError(_unknown(name, kind))
    if workers < 0:
        raise HeadgateError(f"workers={workers}: 0 (decode in this process) or more")
    return _OPENERS[kind](name, _Wishes(where, root, validation, normalization, size, augment, workers))


def _unknown(name: str, kind: str) -> str:
    choices = {"digits": "digits", "cifar10": "cifar10", "folder": "folder:PATH"}
    close = difflib.get_close_matches(kind.lower(), choices, n=1)
    hint = f"did you mean {choices[close[0]]}? " if close else ""
    return f'there is no data set "{name}"; {hint}The choices are {", ".join(choices.values())}'


# One function for each data set.


def _open_digits(name: str, wishes: _Wishes) -> DataSet:
    if wishes.normalization is not None:
        raise HeadgateError(f'normalization="{wishes.normalization}": the digits come normalised; leave it out')
    size = DIGITS_SIZE if wishes.size is None else wishes.size
    return _divided(name, _digits("train", size), lambda: _digits("test", size), wishes.validation)


def _digits(split: Literal["train", "test"], size: int) -> InMemory:
    images_NCHW, labels_N = digits(split, size).tensors
    return InMemory(images_NCHW.numpy(), labels_N.numpy(), 10)


def _open_cifar10(name: str, wishes: _Wishes) -> DataSet:
    side = cifar10.SHAPE[1]
    if wishes.size not in (None, side):
        raise HeadgateError(f"images of {wishes.size} pixels: those of cifar10 are {side}×{side}; leave their size out")
    normalization = normalization_named(wishes.normalization or DEFAULT_NORMALIZATION)

    def split(which: Literal["train", "test"], augmentation: CropAndFlip | None) -> InMemory:
        pixels_NCHW, labels_N = cifar10.read_cifar10(which, wishes.root)
        return InMemory(pixels_NCHW, labels_N, cifar10.CLASSES, normalization, augmentation)

    train = split("train", CropAndFlip() if wishes.augment else None)
    return _divided(name, train, lambda: split("test", None), wishes.validation, cifar10.CLASS_NAMES)


def _open_folder(name: str, wishes: _Wishes) -> DataSet:
    path = (wishes.root or Path()) / Path(wishes.where).expanduser()
    size = FOLDER_SIZE if wishes.size is None else wishes.size
    normalization = normalization_named(wishes.normalization or DEFAULT_NORMALIZATION)

    def split(listing: Listing, augmented: bool) -> ImageFolder:
        classes = len(listing.class_names)
        return ImageFolder(listing.files, listing.labels_N, classes, size, normalization, augmented, wishes.workers)

    train = list_images(path / "train")
    return _divided(
        name,
        split(train, wishes.augment),
        lambda: split(list_images(path / "val", train.class_names), False),
        wishes.validation,
        train.class_names,
    )


_OPENERS: dict[str, Callable[[str, _Wishes], DataSet]] = {
    "digits": _open_digits,
    "cifar10": _open_cifar10,
    "folder": _open_folder,
}


# Help for them.


class _Divisible(Split, Protocol):
    @property
    def labels_N(self) -> Rows: ...

    def subset(self, rows: Rows, *, augmented: bool) -> Split: ...


def _divided(
    name: str, train: _Divisible, open_test: Callable[[], Split], validation: int, class_names: tuple[str, ...] = ()
) -> DataSet:  # fmt: skip
    """Training and test images; or, with `validation`, two parts of the training images, and no test images opened."""
    if validation == 0:
        return DataSet(name, train, open_test(), train.classes, train.shape, class_names)
    kept, held = hold_out(train.labels_N, validation)
    kept_train, held_test = train.subset(kept, augmented=True), train.subset(held, augmented=False)
    return DataSet(name, kept_train, held_test, train.classes, train.shape, class_names)
