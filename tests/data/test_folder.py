import builtins
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from headgate.data import folder as folder_module
from headgate.data import open_data
from headgate.data.batches import NORMALIZATIONS, EpochPlan, generator
from headgate.data.folder import CentreView, ImageFolder, RandomView, central_box, list_images, random_box
from headgate.errors import FileError, HeadgateError

CLASSES = ("cat", "dog", "newt")


def random_image(number: int, width: int = 40, height: int = 30) -> Image.Image:
    small = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def root(tmp_path) -> Path:
    """Three classes, with four training images and two validation images each."""
    number = 0
    for split, count in (("train", 4), ("val", 2)):
        for name in CLASSES:
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(count):
                suffix = ("png", "JPG")[index % 2]
                random_image(number, 30 + 5 * number, 40).save(tmp_path / split / name / f"{index}.{suffix}")
                number += 1
    return tmp_path


def opened(root: Path, **options):
    return open_data(f"folder:{root}", **{"size": 16} | options)


# What is there.


def test_files_by_class_and_name(root) -> None:
    (root / "train" / "cat" / "deeper").mkdir()
    random_image(0).save(root / "train" / "cat" / "deeper" / "x.webp")
    (root / "train" / "cat" / "notes.txt").write_text("not an image")
    (root / "train" / "cat" / "._0.png").write_text("left by a Mac")
    (root / "train" / ".cache").mkdir()
    listing = list_images(root / "train")
    assert listing.class_names == CLASSES
    names = [str(Path(file).relative_to(root / "train")) for file in listing.files]
    assert names[:5] == ["cat/0.png", "cat/1.JPG", "cat/2.png", "cat/3.JPG", "cat/deeper/x.webp"]
    assert listing.labels_N.tolist() == [0] * 5 + [1] * 4 + [2] * 4


def test_the_whole_data_set(root) -> None:
    data = opened(root)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (12, 6, 3, (3, 16, 16))
    assert opened(root, size=None).shape == (3, 224, 224)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_is_missing(root, split) -> None:
    (root / split).rename(root / "elsewhere")
    with pytest.raises(FileError, match=f"{split}: there is no such folder. Images lie in .*/{split}/<class>/"):
        opened(root)


def test_no_images(tmp_path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(FileError, match="train: has no images: make a folder for each class"):
        opened(tmp_path)
    (tmp_path / "train" / "cat").mkdir()
    with pytest.raises(FileError, match="cat: has no images .*.jpg.*: add some, or remove the folder"):
        opened(tmp_path)


def test_other_classes(root) -> None:
    (root / "val" / "newt").rename(root / "val" / "toad")
    with pytest.raises(FileError, match="val: lacks newt and also has toad, unlike the training images"):
        opened(root)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["not an image", "cut short", "cut short png", "gone"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_unreadable_image_is_named(root, damage, workers) -> None:
    data = opened(root, workers=workers)
    name = "2.png" if "png" in damage else "1.JPG"
    path = root / "train" / "dog" / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"hello" if damage == "not an image" else path.read_bytes()[:-400])
    with pytest.raises(FileError, match=rf"^{path}: can't be read as an image .*: replace or remove it$"):
        list(data.train.eval_batches(5))


def test_without_pillow(root, monkeypatch) -> None:
    real_import = builtins.__import__

    def no_pillow(name, *rest):
        if name == "PIL":
            raise ImportError("No module named 'PIL'")
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_pillow)
    with pytest.raises(HeadgateError, match=r'images in folders need Pillow.*pip install "headgate\[vision\]"'):
        opened(root)


def test_sizes_that_make_no_sense(root) -> None:
    with pytest.raises(HeadgateError, match="size=0: images have at least 1 pixel"):
        opened(root, size=0)


# Views of an image.


@pytest.mark.parametrize("size", [16, 33, 224])
@pytest.mark.parametrize("shape", [(40, 30), (30, 41), (300, 500), (7, 7), (16, 90)])
def test_evaluation_is_the_usual_recipe(shape, size) -> None:
    image = random_image(0, *shape)
    usual = v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size)])
    assert (np.asarray(CentreView(size)(image, 0)) == np.asarray(usual(image))).all()


@pytest.mark.parametrize("place", range(6))
def test_training_views_are_resized_parts(place) -> None:
    image, plan = random_image(0, 50, 40), EpochPlan(10, 2, seed=3, epoch=1)
    view = np.asarray(RandomView(16, plan)(image, place))
    left, top, right, bottom = random_box(image.size, plan.randomness(place))
    part = v2.functional.resized_crop(image, top, left, bottom - top, right - left, [16, 16])
    assert (view == np.asarray(part)).all() or (view == np.asarray(part)[:, ::-1]).all()
    assert (view == np.asarray(RandomView(16, plan)(image, place))).all()


def test_about_half_are_mirrored() -> None:
    stripe = np.zeros((20, 20, 3), dtype=np.uint8)
    stripe[:, :] = np.arange(20, dtype=np.uint8)[:, None] * 12
    view, image = RandomView(8, EpochPlan(10, 2, seed=0, epoch=0)), Image.fromarray(stripe)
    falling = [
        bool(np.asarray(view(image, place))[0, 0, 0] > np.asarray(view(image, place))[0, -1, 0]) for place in range(400)
    ]
    assert 0.42 < np.mean(falling) < 0.58


def test_random_boxes_have_the_promised_areas_and_ratios() -> None:
    boxes = np.array([random_box((400, 300), generator(9, number)) for number in range(2000)])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (boxes >= 0).all() and (boxes[:, 2] <= 400).all() and (boxes[:, 3] <= 300).all()
    areas, ratios = widths * heights / (400 * 300), widths / heights
    assert 0.07 < areas.min() < 0.1 and 0.9 < areas.max() <= 1
    assert 0.73 < ratios.min() < 0.77 and 1.3 < ratios.max() < 1.36
    assert abs(boxes[:, 0].mean() / (400 - widths).mean() - 0.5) < 0.03


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((1000, 10), (493, 0, 506, 10)),
        ((10, 1000), (0, 493, 10, 506)),
        ((1, 1), (0, 0, 1, 1)),
        ((30, 30), (0, 0, 30, 30)),
    ],
)
def test_the_central_box(size, box) -> None:
    assert central_box(*size) == box


@pytest.mark.parametrize("size", [(1000, 10), (10, 1000)])
def test_narrow_images_give_their_centre(size) -> None:
    assert any(random_box(size, generator(number)) == central_box(*size) for number in range(20))


# Batches.


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_every_kind_of_image_becomes_rgb(root, mode) -> None:
    suffix = "jpg" if mode == "CMYK" else "png"
    random_image(0).convert(mode).save(root / "train" / "cat" / f"0.{suffix}")
    images, _ = next(opened(root).train.eval_batches(4))
    assert images.shape == (4, 3, 16, 16)


def test_sixteen_bits_of_grey_are_scaled_and_not_cut_off(tmp_path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray((ramp / 257).round().astype(np.uint8)).save(tmp_path / "plain.png")
    deep, plain = (folder_module.decode(str(tmp_path / name), CentreView(32), 0) for name in ("deep.png", "plain.png"))
    assert int(deep.min()) < 40 and int(deep.max()) > 200
    assert np.abs(deep.astype(int) - plain).max() <= 1


def test_values_without_a_range_are_refused(tmp_path) -> None:
    Image.fromarray(np.zeros((8, 8), np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(FileError, match=r"float\.tiff.*have no range"):
        folder_module.decode(str(tmp_path / "float.tiff"), CentreView(8), 0)


def test_hidden_folders_and_links_that_lead_back_hold_no_images(root) -> None:
    before = len(list_images(root / "train").files)
    some = next(folder for folder in sorted((root / "train").iterdir()) if folder.is_dir())
    (some / ".ipynb_checkpoints").mkdir()
    random_image(0).save(some / ".ipynb_checkpoints" / "a-checkpoint.png")
    (some / "loop").symlink_to(some, target_is_directory=True)
    assert len(list_images(root / "train").files) == before


def test_values_are_the_normalised_pixels(root) -> None:
    images, labels = next(opened(root, normalization="cifar10").test.eval_batches(6))
    with Image.open(root / "val" / "cat" / "0.png") as file:
        pixels = torch.from_numpy(np.asarray(CentreView(16)(file.convert("RGB"), 0)).copy())
    torch.testing.assert_close(images[0], NORMALIZATIONS["cifar10"](pixels.permute(2, 0, 1)[None])[0])
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
class Broken:
    """A loader one of whose processes was killed."""

    def __iter__(self) -> Iterator[int]:
        yield 1
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")


def test_a_dead_worker_is_told() -> None:
    batches = folder_module._told(Broken())
    assert next(batches) == 1
    with pytest.raises(HeadgateError, match=r"died \(DataLoader worker .*--workers.*--resume"):
        next(batches)
    assert list(folder_module._told([1, 2])) == [1, 2]


def test_workers_give_the_same_batches(root) -> None:
    alone, helped = opened(root).train, opened(root, workers=1).train
    before = torch.get_rng_state()
    batches = helped.train_batches(4, seed=1, epoch=2, start=1, rank=1, processes=2)
    for (images, labels), (other, other_labels) in zip(
        alone.train_batches(4, seed=1, epoch=2, start=1, rank=1, processes=2), batches, strict=True
    ):
        assert torch.equal(images, other) and torch.equal(labels, other_labels)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_augmentation_training_sees_what_evaluation_sees(root) -> None:
    plain = opened(root, augment=False).train
    assert isinstance(plain, ImageFolder)
    ((images, labels),) = plain.train_batches(12, seed=0, epoch=0)
    ((expected, _),) = plain.eval_batches(12)
    assert torch.equal(images.sort(dim=0).values, expected.sort(dim=0).values) and len(labels) == 12


def test_held_out_images_are_not_augmented_and_val_is_not_opened(root) -> None:
    (root / "val").rename(root / "gone")
    data = opened(root, validation=3)
    assert (len(data.train), len(data.test)) == (9, 3)
    assert sorted([*data.train.files, *data.test.files]) == sorted(list_images(root / "train").files)
    assert data.test.labels_N.tolist() == [0, 1, 2] and data.train.augmented and not data.test.augmented
