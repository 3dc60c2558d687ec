"""What is known of images on their way through a cascade, and the table that is made of it. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# legend of axes: N images, K exits (the last is the model's own)


@dataclass(frozen=True)
class ExitRow:
    """What becomes of images at one exit."""

    name: str
    share: float
    """Of all images, those that leave here."""
    accuracy_of_all: float
    """If all images were answered here."""
    accuracy_of_selected: float | None
    """Of those that leave here; None where nobody does."""
    macs: float
    """Multiply-adds of an image that leaves here."""


@dataclass(frozen=True)
class ExitTable:
    """The cascade on some data."""

    rows: tuple[ExitRow, ...]
    accuracy: float
    accuracy_of_last: float
    """Of the last exit alone, on all images."""
    macs: float
    macs_fraction: float
    images: int
    gained: int
    """Images that the cascade answers right and its last exit would not."""
    lost: int
    """Images that only the last exit would answer right."""

    def __str__(self) -> str:
        """For people."""
        lines = [f"{'exit':<24}{'leave here':>12}{'right, of all':>15}{'of these':>10}"]
        for row in self.rows:
            own = "" if row.accuracy_of_selected is None else f"{row.accuracy_of_selected:.2%}"
            lines.append(f"{row.name:<24}{row.share:>12.1%}{row.accuracy_of_all:>15.2%}{own:>10}")
        lines.append(
            f"together {self.accuracy:.2%} at {self.macs_fraction:.1%} of the MACs; "
            f"the last exit alone {self.accuracy_of_last:.2%} "
            f"({self.gained} gained, {self.lost} lost of {self.images:,} images)"
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Watched:
    """Some images on their way through all exits: what every gate and every classifier says, wherever they leave."""

    p_NK: Tensor
    """P(leave) at each exit but the last."""
    right_NK: Tensor
    """Whether each exit's answer is right."""
    segments_NK: Tensor
    """What the way from exit to exit costs, as shares of the dense model's multiply-adds."""
