"""Mix the images of a batch in pairs, and their labels in the same shares (mixup).

A network that has learned its training images by heart finds something new between them, above all under a teacher,
who answers for the mixture itself. Each process mixes its own share of the batch. Knows images and labels, nothing of
networks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Mixture:
    """Who is mixed with whom; an image keeps at least half of itself."""

    partners_B: Tensor
    share: float

    @classmethod
    def draw(cls, images: int, strength: float) -> Mixture:
        """Random pairs, and one share for all of them from Beta(strength, strength), by torch's global generator."""
        share = float(torch.distributions.Beta(strength, strength).sample())
        return cls(torch.randperm(images), max(share, 1 - share))

    def images(self, images_BX: Tensor) -> Tensor:
        """The images, each with its partner in it."""
        return self.share * images_BX + (1 - self.share) * images_BX[self.partners_B.to(images_BX.device)]

    def labels(self, labels_B: Tensor, classes: int) -> Tensor:
        """The labels as shares of the classes."""
        labels_BC = F.one_hot(labels_B, classes).float()
        return self.share * labels_BC + (1 - self.share) * labels_BC[self.partners_B.to(labels_B.device)]
