"""What every split promises, and how pixels kept in memory become batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headgate.data.batches import (
    NORMALIZATIONS,
    CropAndFlip,
    InMemory,
    Part,
    Split,
    eval_batch_size,
    eval_rows,
    generator,
    hold_out,
    normalization_named,
)
from headgate.data.folder import ImageFolder, list_images
from headgate.errors import HeadgateError

LENGTH = 13


def pixels(length: int = LENGTH, channels: int = 3, height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (length, channels, height, width), dtype=np.uint8)


def numbered(length: int = LENGTH, augmentation: CropAndFlip | None = None) -> InMemory:
    """A split whose labels are the images' own numbers."""
    return InMemory(pixels(length), np.arange(length), length, NORMALIZATIONS["imagenet"], augmentation)


@pytest.fixture(params=["pixels", "augmented pixels", "floats", "files", "augmented files"])
def split(request, tmp_path) -> Split:
    """A split of 13 images, each a class of its own."""
    if request.param.endswith("pixels"):
        return numbered(augmentation=CropAndFlip(2) if "augmented" in request.param else None)
    if request.param == "floats":
        return InMemory(pixels(channels=1).astype(np.float32), np.arange(LENGTH), LENGTH)
    for number, image_HWC in enumerate(pixels(height=12, width=15).transpose(0, 2, 3, 1)):
        (tmp_path / f"{number:02}").mkdir()
        Image.fromarray(image_HWC).save(tmp_path / f"{number:02}" / "image.png")
    listing = list_images(tmp_path)
    augmented = "augmented" in request.param
    return ImageFolder(listing.files, listing.labels_N, LENGTH, 6, NORMALIZATIONS["imagenet"], augmented)


def assert_same(batches, others) -> None:
    batches, others = list(batches), list(others)
    assert len(batches) == len(others)
    for (images, labels), (other_images, other_labels) in zip(batches, others, strict=True):
        assert torch.equal(images, other_images) and torch.equal(labels, other_labels)


def labels_of(batches) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


# The laws of a split.


def test_batches_are_what_models_take(split: Split) -> None:
    for images, labels in [*split.train_batches(4, seed=0, epoch=0), *list(split.eval_batches(4))[:-1]]:
        assert images.shape == (4, *split.shape) and images.dtype == torch.float32 and images.is_contiguous()
        assert labels.shape == (4,) and labels.dtype == torch.int64


def test_an_epoch_has_whole_batches_of_different_images(split: Split) -> None:
    seen = labels_of(split.train_batches(4, seed=0, epoch=0))
    assert len(seen) == split.steps(4) == 3
    assert len({label for batch in seen for label in batch}) == 12


def test_fewer_images_than_a_batch_make_one_smaller_batch(split: Split) -> None:
    seen = labels_of(split.train_batches(100, seed=0, epoch=0))
    assert split.steps(100) == 1 and [sorted(batch) for batch in seen] == [list(range(LENGTH))]


def test_the_same_arguments_give_the_same_batches(split: Split) -> None:
    assert_same(split.train_batches(4, seed=3, epoch=2), split.train_batches(4, seed=3, epoch=2))


@pytest.mark.parametrize("other", [{"seed": 3, "epoch": 1}, {"seed": 4, "epoch": 2}])
def test_another_epoch_or_seed_gives_another_order(split: Split, other) -> None:
    assert labels_of(split.train_batches(4, seed=3, epoch=2)) != labels_of(split.train_batches(4, **other))


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_later_start_gives_the_tail(split: Split, start) -> None:
    whole = list(split.train_batches(4, seed=1, epoch=5))
    assert_same(split.train_batches(4, seed=1, epoch=5, start=start), whole[start:])


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_processes_share_the_joint_batch(split: Split, processes) -> None:
    shares = [split.train_batches(4, seed=1, epoch=5, start=1, rank=r, processes=processes) for r in range(processes)]
    joint = split.train_batches(4, seed=1, epoch=5, start=1)
    for (images, labels), *parts in zip(joint, *shares, strict=True):
        for rank, (part_images, part_labels) in enumerate(parts):
            assert torch.equal(part_images, images[rank::processes])
            assert torch.equal(part_labels, labels[rank::processes])


@pytest.mark.parametrize("processes", [1, 2, 5, 20])
def test_evaluation_sees_every_image_once(split: Split, processes) -> None:
    whole_images = torch.cat([images for images, _ in split.eval_batches(LENGTH)])
    for rank in range(processes):
        batches = list(split.eval_batches(2, rank=rank, processes=processes))
        labels = [label for batch in labels_of(batches) for label in batch]
        assert labels == list(range(rank, LENGTH, processes))
        if batches:
            assert torch.equal(torch.cat([images for images, _ in batches]), whole_images[labels])


def test_the_random_state_of_others_is_left_alone(split: Split) -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(split.train_batches(4, seed=0, epoch=0)), list(split.eval_batches(4))
    assert torch.equal(torch.get_rng_state(), before) and (np.random.get_state()[1] == numpy_before).all()


def test_changing_a_batch_changes_nothing_else(split: Split) -> None:
    before = [images.clone() for images, _ in split.eval_batches(4)]
    for images, labels in [*split.eval_batches(4), *split.train_batches(4, seed=0, epoch=0)]:
        images.zero_(), labels.zero_()
    assert_same(split.eval_batches(4), zip(before, [labels for _, labels in split.eval_batches(4)], strict=True))
    assert labels_of(split.eval_batches(LENGTH)) == [list(range(LENGTH))]


def test_a_subset_holds_its_rows(split: Split) -> None:
    rows = np.array([1, 4, 9])
    assert labels_of(split.subset(rows, augmented=True).eval_batches(8)) == [[1, 4, 9]]
    plain = split.subset(rows, augmented=False)
    ((images, labels),) = plain.train_batches(8, seed=0, epoch=0)
    ((expected, order),) = plain.eval_batches(8)
    assert torch.equal(images[labels.argsort()], expected[order.argsort()])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: a batch holds at least 1 image"),
        ({"seed": -1}, "seed=-1, epoch=0: both are 0 or more"),
        ({"epoch": -1}, "both are 0 or more"),
        ({"start": 4}, "start=4: an epoch of 13 images in batches of 4 has 3 batches"),
        ({"start": -1}, "count from 0"),
        ({"rank": 2, "processes": 2}, "rank=2 of processes=2: ranks count from 0"),
        ({"rank": -1}, "ranks count from 0"),
        ({"processes": 5}, "a batch of 4 images cannot be shared by 5 processes: raise batch_size"),
        ({"batch_size": 50, "processes": 14}, "a batch of 13 images cannot be shared by 14"),
    ],
)
def test_mistakes_are_told_before_the_first_batch(split: Split, wrong, message) -> None:
    with pytest.raises(HeadgateError, match=message):
        split.train_batches(**{"batch_size": 4, "seed": 0, "epoch": 0} | wrong)


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"rank": 1}, {"processes": 0}])
def test_mistakes_in_evaluation(split: Split, wrong) -> None:
    with pytest.raises(HeadgateError):
        split.eval_batches(**{"batch_size": 4} | wrong)


# For any sizes.


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 7))
def test_evaluation_rows_are_a_partition(length, batch_size, processes) -> None:
    batches = [rows for rank in range(processes) for rows in eval_rows(length, batch_size, rank, processes)]
    assert all(1 <= len(rows) <= batch_size for rows in batches)
    assert sorted(np.concatenate([*batches, np.arange(0)]).tolist()) == list(range(length))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 30), st.integers(1, 12))
def test_any_start_and_any_share_is_part_of_the_whole(data, length, batch_size) -> None:
    split = numbered(length, CropAndFlip(1))
    processes = data.draw(st.integers(1, min(length, batch_size)))
    rank, start = data.draw(st.integers(0, processes - 1)), data.draw(st.integers(0, split.steps(batch_size)))
    whole = list(split.train_batches(batch_size, seed=7, epoch=1))
    assert len(whole) == split.steps(batch_size) == max(1, length // batch_size)
    part = split.train_batches(batch_size, seed=7, epoch=1, start=start, rank=rank, processes=processes)
    assert_same(part, [(x[rank::processes], y[rank::processes]) for x, y in whole[start:]])


def test_an_empty_split_has_no_batches() -> None:
    empty = numbered(0)
    assert empty.steps(4) == 0
    assert list(empty.train_batches(4, seed=0, epoch=0)) == list(empty.eval_batches(4)) == []


# Augmentation.


def crop_and_flip_one(image_CHW: np.ndarray, top: int, left: int, mirrored: int, padding: int) -> np.ndarray:
    """The plain twin: one image at a time."""
    _, height, width = image_CHW.shape
    padded = np.pad(image_CHW, ((0, 0), (padding, padding), (padding, padding)))
    window = padded[:, top : top + height, left : left + width]
    return window[:, :, ::-1] if mirrored else window


@pytest.mark.parametrize(("padding", "height", "width"), [(4, 32, 32), (1, 5, 7), (0, 4, 4), (3, 2, 9)])
def test_crops_are_windows_of_the_padded_image(padding, height, width) -> None:
    images, augmentation = pixels(40, 3, height, width), CropAndFlip(padding)
    drawn = augmentation.draw(generator(0), 40)
    expected = [crop_and_flip_one(image, *row, padding) for image, row in zip(images, drawn, strict=True)]
    before = images.copy()
    assert (augmentation(images, drawn) == np.stack(expected)).all() and (images == before).all()


def test_every_window_and_both_directions_are_drawn_alike() -> None:
    top, left, mirrored = CropAndFlip(4).draw(generator(0), 9000).T
    for edge in (top, left):
        counts = np.bincount(edge)
        assert len(counts) == 9 and (abs(counts - 1000) < 150).all()
    assert abs(mirrored.mean() - 0.5) < 0.03
    assert abs(np.corrcoef([top, left, mirrored]) - np.eye(3)).max() < 0.05


def test_images_of_a_batch_are_augmented_each_on_its_own_and_anew_each_epoch() -> None:
    one = pixels(1, 3, 8, 8)
    split = InMemory(np.repeat(one, 64, axis=0), np.zeros(64, int), 1, NORMALIZATIONS["imagenet"], CropAndFlip(4))
    first, second = (next(split.train_batches(64, seed=0, epoch=epoch))[0] for epoch in (0, 1))
    assert len(first.unique(dim=0)) > 40 and not torch.equal(first, second)
    assert len(next(split.eval_batches(64))[0].unique(dim=0)) == 1


def test_padding_is_black_before_normalisation() -> None:
    white = np.full((1, 3, 2, 2), 255, dtype=np.uint8)
    black = NORMALIZATIONS["imagenet"](torch.zeros(1, 3, 1, 1, dtype=torch.uint8))[0, :, 0, 0]
    cropped = NORMALIZATIONS["imagenet"](torch.from_numpy(CropAndFlip(1)(white, np.array([[0, 0, 0]]))))
    assert torch.equal(cropped[0, :, 0, 0], black) and not torch.equal(cropped[0, :, 1, 1], black)


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_normalisation_is_the_textbook_one(name) -> None:
    images = torch.from_numpy(pixels(2, 3, 16, 16))
    mean, std = (
        torch.tensor(each).double().view(3, 1, 1) for each in (NORMALIZATIONS[name].mean, NORMALIZATIONS[name].std)
    )
    expected = ((images.double() / 255 - mean) / std).float()
    torch.testing.assert_close(NORMALIZATIONS[name](images), expected, atol=1e-6, rtol=0)


def test_unknown_normalisation() -> None:
    with pytest.raises(HeadgateError, match='no normalization "mnist": choose from imagenet, cifar10'):
        normalization_named("mnist")


# Holding out.


@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.data())
def test_what_is_held_out_and_what_stays_are_everything(labels, data) -> None:
    labels = np.array(labels)
    count = data.draw(st.integers(0, len(labels) - 1))
    kept, held = hold_out(labels, count)
    assert len(held) == count and sorted([*kept, *held]) == list(range(len(labels)))
    shares = np.bincount(labels, minlength=5) * count / len(labels)
    assert (abs(np.bincount(labels[held], minlength=5) - shares) < 1).all()


def test_the_same_images_are_held_out_every_time_and_not_the_first_ones() -> None:
    labels = np.repeat(np.arange(10), 50)
    kept, held = hold_out(labels, 100)
    assert (held == hold_out(labels, 100)[1]).all()
    assert np.bincount(labels[held]).tolist() == [10] * 10
    assert held.max() > 490 and len(kept) == 400


@pytest.mark.parametrize("count", [-1, 10, 11])
def test_too_many_held_out(count) -> None:
    with pytest.raises(HeadgateError, match=f"validation={count}: of 10 training images at most 9 can be held out"):
        hold_out(np.zeros(10, int), count)


@pytest.mark.parametrize("side, together", [(8, 500), (32, 500), (64, 500), (224, 40), (512, 7), (4000, 1)])
def test_large_images_are_looked_at_a_few_at_a_time(side: int, together: int) -> None:
    split = InMemory(np.zeros((1, 1, side, side), dtype=np.float32), np.zeros(1, int), 10)
    assert eval_batch_size(split) == together


def test_a_part_is_taken_from_all_over_a_split() -> None:
    images = np.arange(100, dtype=np.float32).reshape(100, 1, 1, 1)
    split = InMemory(images, np.repeat(np.arange(10), 10), 10)  # class by class, like a folder
    part = Part(split, 20, batch_size=8)
    assert len(part) == 20 and part.stride == 5
    labels = torch.cat([labels for _, labels in part])
    assert labels.tolist() == [each for each in range(10) for _ in range(2)]
    assert [len(labels) for _, labels in Part(split, batch_size=64)] == [64, 36]
    assert len(Part(split, 1000)) == 100
    for wanted in (1, 7, 30, 51, 60, 99):
        seen = torch.cat([labels for _, labels in Part(split, wanted)])
        assert len(seen) == len(Part(split, wanted)) <= wanted
        assert wanted < 20 or seen.unique().tolist() == list(range(10)), "no class is left out"
