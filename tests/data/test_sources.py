from pathlib import Path

import numpy as np
import pytest
import torch

from headgate.data import cifar10, digits, open_data
from headgate.data.cifar10 import FOLDER, TEST_FILES, TRAIN_FILES
from headgate.errors import FileError, HeadgateError

IMAGES = 20


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """CIFAR-10 with 20 images a file, each image a colour of its own."""
    monkeypatch.setattr(cifar10, "IMAGES_A_FILE", IMAGES)
    (tmp_path / FOLDER).mkdir()
    for number, name in enumerate((*TRAIN_FILES, *TEST_FILES)):
        rows = np.repeat(np.arange(IMAGES, dtype=np.uint8)[:, None] + number * IMAGES, 3073, axis=1)
        rows[:, 0] = np.arange(IMAGES) % 10
        (tmp_path / FOLDER / f"{name}.bin").write_bytes(rows.tobytes())
    return tmp_path


def colours(split) -> list[int]:
    """The red of each image's middle, as the file has it."""
    images = torch.cat([images for images, _ in split.eval_batches(64)])
    return [round(value) for value in ((images[:, 0, 16, 16] * 0.229 + 0.485) * 255).tolist()]


# CIFAR-10.


def test_cifar10(root) -> None:
    data = open_data("cifar10", root=root)
    assert (data.name, data.classes, data.shape) == ("cifar10", 10, (3, 32, 32))
    assert data.train.shape == data.test.shape == data.shape and data.train.classes == data.test.classes == 10
    assert colours(data.train) == list(range(100)) and colours(data.test) == list(range(100, 120))


def test_training_images_are_augmented_unless_not_wanted(root) -> None:
    augmented, plain = (open_data("cifar10", root=root, augment=augment) for augment in (True, False))
    images, labels = next(augmented.train.train_batches(100, seed=0, epoch=0))
    others, other_labels = next(plain.train.train_batches(100, seed=0, epoch=0))
    assert torch.equal(labels, other_labels) and not torch.equal(images, others)
    assert torch.equal(images[:, :, 4:-4, 4:-4], others[:, :, 4:-4, 4:-4]), "one colour inside, black at the edges"


def test_normalisations(root) -> None:
    default, imagenet, own = (
        next(open_data("cifar10", root=root, normalization=name).test.eval_batches(20))[0]
        for name in (None, "imagenet", "cifar10")
    )
    assert torch.equal(default, imagenet) and not torch.equal(default, own)
    with pytest.raises(HeadgateError, match="choose from imagenet, cifar10"):
        open_data("cifar10", root=root, normalization="mnist")


def test_validation_images_come_from_training_images_and_the_test_images_stay_shut(root) -> None:
    (root / FOLDER / "test_batch.bin").unlink()
    data = open_data("cifar10", root=root, validation=30)
    assert (len(data.train), len(data.test)) == (70, 30)
    assert sorted(colours(data.train) + colours(data.test)) == list(range(100))
    assert np.bincount(data.test.labels_N).tolist() == [3] * 10
    assert data.train.augmentation is not None and data.test.augmentation is None
    assert colours(open_data("cifar10", root=root, validation=30).test) == colours(data.test)


@pytest.mark.parametrize("validation", [-1, 100, 5000])
def test_too_many_validation_images(root, validation) -> None:
    with pytest.raises(HeadgateError, match=f"validation={validation}: of 100 training images at most 99"):
        open_data("cifar10", root=root, validation=validation)


def test_cifar10_has_one_size(root) -> None:
    assert open_data("cifar10", root=root, size=32).shape == (3, 32, 32)
    with pytest.raises(HeadgateError, match="images of 64 pixels: those of cifar10 are 32×32"):
        open_data("cifar10", root=root, size=64)


def test_cifar10_is_not_there(tmp_path) -> None:
    with pytest.raises(FileError, match="headgate data cifar10"):
        open_data("cifar10", root=tmp_path)


# Digits.


@pytest.mark.parametrize(("size", "side"), [(None, 16), (8, 8), (20, 20)])
def test_digits(size, side) -> None:
    data = open_data("digits", size=size)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (1437, 360, 10, (1, side, side))
    images, labels = digits("test", side).tensors
    ((same_images, same_labels),) = data.test.eval_batches(500)
    assert torch.equal(images, same_images) and torch.equal(labels, same_labels)


def test_digits_held_out() -> None:
    data = open_data("digits", validation=200)
    assert (len(data.train), len(data.test)) == (1237, 200)
    assert abs(np.bincount(data.test.labels_N) - 20).max() <= 1


def test_digits_come_normalised() -> None:
    with pytest.raises(HeadgateError, match='normalization="imagenet": the digits come normalised'):
        open_data("digits", normalization="imagenet")


# Names.


def test_a_relative_folder_starts_at_the_root(tmp_path) -> None:
    with pytest.raises(FileError, match=f"{tmp_path}/birds/train: there is no such folder"):
        open_data("folder:birds", root=tmp_path)
    with pytest.raises(FileError, match="^birds/train: there is no such folder"):
        open_data("folder:birds")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cifar", "did you mean cifar10\\? "),
        ("CIFAR10", "did you mean cifar10\\? "),
        ("digit", "did you mean digits\\? "),
        ("folder", "did you mean folder:PATH\\? "),
        ("folder:", "did you mean folder:PATH\\? "),
        ("digits:x", "did you mean digits\\? "),
        ("imagenet", ""),
        ("", ""),
    ],
)
def test_unknown_names(name, hint) -> None:
    with pytest.raises(
        HeadgateError, match=f'no data set "{name}"; {hint}The choices are digits, cifar10, folder:PATH$'
    ):
        open_data(name)


def test_workers_count_from_zero() -> None:
    with pytest.raises(HeadgateError, match="workers=-1: 0 .* or more"):
        open_data("digits", workers=-1)
