"""The embedded data set: 1,797 handwritten digits of 8×8 pixels, for tests and for the demo.

Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0; see
README.md beside this file. Nothing is downloaded, and the split is stored with the images, so every call gives the
same tensors. This module knows nothing of models, batches or augmentation.
"""

from importlib import resources
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from headgate.errors import HeadgateError

__all__ = ["digits"]

NATIVE_SIZE = 8
MAX_PIXEL = 16
# Of the training images, with pixels scaled to 0..1.
TRAIN_MEAN = 0.30553
TRAIN_STD = 0.37611


def digits(split: Literal["train", "test"] = "train", size: int = NATIVE_SIZE) -> TensorDataset:
    """Returns (image, label) pairs: float32 images of 1 × size × size, normalised, and int64 labels 0..9.

    ``train`` has 1,437 images and ``test`` 360, every digit in proportion. A ``size`` above 8 scales bilinearly.
    """
    if split not in ("train", "test"):
        raise HeadgateError(f'split is "train" or "test", not {split!r}')
    if size < NATIVE_SIZE:
        raise HeadgateError(
            f"the digits are {NATIVE_SIZE}×{NATIVE_SIZE} pixels and can only be enlarged, not to {size}"
        )

    with resources.files("headgate.data").joinpath("digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        chosen = arrays["is_test"] == (split == "test")
        pixels_NHW, labels_N = arrays["images"][chosen], arrays["labels"][chosen]

    images_NCHW = torch.from_numpy(pixels_NHW).float().div(MAX_PIXEL).sub(TRAIN_MEAN).div(TRAIN_STD).unsqueeze(1)
    if size != NATIVE_SIZE:
        images_NCHW = F.interpolate(images_NCHW, size=(size, size), mode="bilinear", align_corners=False)
    return TensorDataset(images_NCHW, torch.from_numpy(labels_N).long())
