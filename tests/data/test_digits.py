import pytest
import torch
import torch.nn.functional as F

from headgate.data import digits

# How often each digit occurs in the whole data set, as its authors say.
COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.parametrize(("split", "length"), [("train", 1437), ("test", 360)])
def test_shapes_types_and_proportions(split, length) -> None:
    images, labels = digits(split).tensors
    assert images.shape == (length, 1, 8, 8) and images.dtype == torch.float32
    assert labels.shape == (length,) and labels.dtype == torch.int64
    expected = torch.tensor(COUNTS) * length / 1797
    assert ((labels.bincount() - expected).abs() < 1).all()


def test_the_splits_share_the_data_set() -> None:
    counts = digits("train").tensors[1].bincount() + digits("test").tensors[1].bincount()
    assert counts.tolist() == COUNTS


def test_training_images_are_normalised() -> None:
    images, _ = digits("train").tensors
    torch.testing.assert_close(images.mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(images.std(), torch.tensor(1.0), atol=1e-3, rtol=0)
    assert len(images.unique()) == 17


def test_every_call_gives_the_same() -> None:
    for first, second in zip(digits("test", size=12).tensors, digits("test", size=12).tensors, strict=True):
        assert torch.equal(first, second)


def test_the_first_digit_looks_as_it_should() -> None:
    image, label = digits("train")[0]
    pixels = (image[0] * 0.37611 + 0.30553).mul(16).round().int()
    assert label == 0
    assert pixels[0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_enlarging_is_bilinear() -> None:
    small, large = digits("test").tensors[0], digits("test", size=32).tensors[0]
    assert large.shape == (360, 1, 32, 32)
    torch.testing.assert_close(large, F.interpolate(small, scale_factor=4, mode="bilinear"))
    torch.testing.assert_close(F.avg_pool2d(large, 32), F.avg_pool2d(small, 8), atol=0.1, rtol=0)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match='"train" or "test", not \'valid\''):
        digits("valid")
    with pytest.raises(ValueError, match="only be enlarged"):
        digits(size=4)
