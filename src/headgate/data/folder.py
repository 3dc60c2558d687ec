"""A data set of one's own: image files in `train/<class>/` and `val/<class>/`, decoded as they are needed.

Takes a folder; gives a split of it for training (random resized crop and mirror) or evaluation (resize and centre
crop), the usual ImageNet recipe. Decoding may be shared by worker processes; order and randomness do not depend on
them. Needs Pillow (extra ``vision``), whose resize is antialiased. Knows nothing of what the images show, of models,
or of training.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from headgate.data.batches import Batch, EpochPlan, Normalization, Rows, eval_rows, step_count
from headgate.errors import FileError, HeadgateError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageFolder", "list_images"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}
CROP_AREA = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
CROP_TRIES = 10

Box = tuple[int, int, int, int]
"""Left, top, right, bottom."""
Key = tuple[int, int]
"""An image's row in the split, and its place in the joint epoch."""
View = Callable[["Image", int], "Image"]
"""Turns an image, and its place in the joint epoch, into a square."""


# What is there.


@dataclass(frozen=True)
class Listing:
    """The image files of one split, and the class of each."""

    files: Sequence[str]
    labels_N: Rows
    class_names: tuple[str, ...]


def list_images(folder: Path, class_names: tuple[str, ...] | None = None) -> Listing:
    """Every image below `folder`, by class and name; `class_names` are those it must have."""
    if not folder.is_dir():
        raise FileError(f"{folder}: there is no such folder. Images lie in {folder}/<class>/ as .jpg, .png and so on")
    found = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not _hidden(entry.name)))
    if not found:
        raise FileError(f"{folder}: has no images: make a folder for each class and put its images there")
    if class_names is not None and found != class_names:
        raise FileError(f"{folder}: {_difference(found, class_names)}. Both splits need the same classes")
    files = [_files_below(folder / name) for name in found]
    labels = np.repeat(np.arange(len(found), dtype=np.int64), [len(each) for each in files])
    return Listing([file for each in files for file in each], labels, found)


def _files_below(folder: Path) -> list[str]:
    files, seen = [], set()
    for where, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not _hidden(name)]
        good = [name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES and not _hidden(name)]
        files += [os.path.join(where, name) for name in good]
    if not files:
        raise FileError(f"{folder}: has no images ({', '.join(sorted(SUFFIXES))}): add some, or remove the folder")
    return sorted(files)


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _difference(found: tuple[str, ...], expected: tuple[str, ...]) -> str:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    parts = [f"{what} {', '.join(names[:5])}" for what, names in (("lacks", missing), ("also has", extra)) if names]
    return f"{' and '.join(parts)}, unlike the training images"


# From a file to a square of pixels.


@dataclass(frozen=True)
class RandomView:
    """A random part of the image, stretched to a square and mirrored half of the time."""

    size: int
    plan: EpochPlan

    def __call__(self, image: Image, place: int) -> Image:
        randomness = self.plan.randomness(place)
        square = _resized(image.crop(random_box(image.size, randomness)), self.size, self.size)
        return _mirrored(square) if randomness.random() < 0.5 else square


@dataclass(frozen=True)
class CentreView:
    """The shorter side brought to 8/7 of the size, and the square in the middle."""

    size: int

    def __call__(self, image: Image, place: int) -> Image:
        width, height = image.size
        shorter = self.size * 256 // 224
        scaled = (shorter, shorter * height // width) if width < height else (shorter * width // height, shorter)
        left, top = (round((side - self.size) / 2) for side in scaled)
        return _resized(image, *scaled).crop((left, top, left + self.size, top + self.size))


def random_box(size: tuple[int, int], randomness: np.random.Generator) -> Box:
    """A part of random area, ratio of sides and place; a central one if the image is too narrow for any."""
    (width, height), (narrowest, widest) = size, CROP_RATIO
    for _ in range(CROP_TRIES):
        area = width * height * randomness.uniform(*CROP_AREA)
        ratio = math.exp(randomness.uniform(math.log(narrowest), math.log(widest)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(randomness.integers(width - w + 1)), int(randomness.integers(height - h + 1))
            return left, top, left + w, top + h
    return central_box(width, height)


def central_box(width: int, height: int) -> Box:
    """The largest part in the middle whose sides have an allowed ratio."""
    narrowest, widest = CROP_RATIO
    w, h = min(width, max(1, round(height * widest))), min(height, max(1, round(width / narrowest)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _resized(image: Image, width: int, height: int) -> Image:
    return image.resize((width, height), _pil().Resampling.BILINEAR)


def _mirrored(image: Image) -> Image:
    return image.transpose(_pil().Transpose.FLIP_LEFT_RIGHT)


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise HeadgateError(
            f'images in folders need Pillow, which cannot be imported ({error}): pip install "headgate[vision]"'
        ) from error
    return Image


def _rgb(image: Image) -> Image:
    """In three colours of eight bits each; grey values of sixteen bits are scaled, not cut off."""
    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if sixteen_bits:
        grey = np.asarray(image).astype(np.float64) / 257
        return _pil().fromarray(grey.round().astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"its values, of PIL's mode {image.mode}, have no range: make them 8 or 16 bits wide")
    return image.convert("RGB")


def decode(file: str, view: View, place: int) -> NDArray[np.uint8]:
    """The view of an image file as pixels, height × width × 3."""
    pil = _pil()
    try:
        with pil.open(file) as image:
            return np.asarray(view(_rgb(image), place))
    except (OSError, SyntaxError, ValueError, pil.DecompressionBombError) as error:
        raise FileError(f"{file}: can't be read as an image ({error}): replace or remove it") from error


# Batches.


@dataclass(frozen=True)
class _Decoder(Dataset[Any]):
    """What the worker processes get. A bad file is handed back as its error: raised there it would lose its words."""

    files: Sequence[str]
    labels_N: Rows
    view: View

    def __getitem__(self, key: Key) -> tuple[NDArray[np.uint8], int] | FileError:
        row, place = key
        try:
            return decode(self.files[row], self.view, place), int(self.labels_N[row])
        except FileError as error:
            return error


def _collate(images: list[tuple[NDArray[np.uint8], int] | FileError]) -> tuple[Tensor, Tensor] | FileError:
    good = []
    for image in images:
        if isinstance(image, FileError):
            return image
        good.append(image)
    pixels_BHWC = np.stack([pixels for pixels, _ in good])
    labels_B = torch.tensor([label for _, label in good])
    return torch.from_numpy(np.ascontiguousarray(pixels_BHWC.transpose(0, 3, 1, 2))), labels_B


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """A split whose images are decoded from files, by `workers` processes beside this one, or by none."""

    files: Sequence[str]
    labels_N: Rows
    classes: int
    size: int
    normalization: Normalization
    augmented: bool
    workers: int = 0

    def __post_init__(self) -> None:
        _pil()
        if self.size < 1:
            raise HeadgateError(f"size={self.size}: images have at least 1 pixel a side")

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def __len__(self) -> int:
        return len(self.files)

    def steps(self, batch_size: int) -> int:
        return step_count(len(self), batch_size)

    def train_batches(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0, rank: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        plan = EpochPlan(len(self), batch_size, seed, epoch, start, rank, processes)
        view = RandomView(self.size, plan) if self.augmented else CentreView(self.size)
        return self._batches(view, _train_keys(plan))

    def eval_batches(self, batch_size: int, *, rank: int = 0, processes: int = 1) -> Iterator[Batch]:
        rows = eval_rows(len(self), batch_size, rank, processes)
        return self._batches(CentreView(self.size), ([(int(row), 0) for row in rows_B] for rows_B in rows))

    def subset(self, rows: Rows, *, augmented: bool) -> ImageFolder:
        """Only these images; augmented as before, or not at all."""
        return replace(
            self,
            files=[self.files[row] for row in rows],
            labels_N=self.labels_N[rows],
            augmented=self.augmented and augmented,
        )

    def _batches(self, view: View, keys: Iterable[list[Key]]) -> Iterator[Batch]:
        """The loader gets a generator of its own: it would take its workers' seed from everybody's."""
        loader: DataLoader[Any] = DataLoader(
            _Decoder(self.files, self.labels_N, view),
            batch_sampler=keys,
            num_workers=self.workers,
            collate_fn=_collate,
            generator=torch.Generator(),
        )
        for loaded in _told(loader):
            if isinstance(loaded, FileError):
                raise loaded
            pixels_BCHW, labels_B = loaded
            yield self.normalization(pixels_BCHW), labels_B


def _told(loader: Iterable[Any]) -> Iterator[Any]:
    """What a loader gives; that one of its processes died is told."""
    batches = iter(loader)
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise HeadgateError(
                f"a process that decodes images died ({error}), mostly for want of memory: "
                "take fewer of them (--workers), and go on with --resume"
            ) from error


def _train_keys(plan: EpochPlan) -> Iterator[list[Key]]:
    for step, rows_B in plan.joint_batches():
        keys = [(int(row), step * plan.rows_per_step + number) for number, row in enumerate(rows_B)]
        yield keys[plan.share]
