"""Images as text that a page can carry: PNG in a data URL. Knows nothing of where the pixels come from."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.errors import HeadgateError

THUMBNAIL = 96
"""Pixels a side: a page holds dozens of them."""


def stretched(image_CHW: NDArray[Any]) -> NDArray[np.uint8]:
    """Pixels from 0 to 255, whatever normalisation they have gone through: the darkest is 0, the brightest 255."""
    values = np.asarray(image_CHW, dtype=np.float64)
    low, high = values.min(), values.max()
    return np.round((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)


def data_url(pixels_CHW: NDArray[np.uint8], most: int = THUMBNAIL) -> str:
    """A PNG of one (grey) or three channels, of at most `most` pixels a side."""
    try:
        from PIL import Image
    except ImportError as error:
        raise HeadgateError("pictures need Pillow: pip install 'headgate[report]'") from error
    grey = pixels_CHW.shape[0] != 3
    image = Image.fromarray(pixels_CHW[0] if grey else np.ascontiguousarray(pixels_CHW.transpose(1, 2, 0)))
    image.thumbnail((most, most))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
