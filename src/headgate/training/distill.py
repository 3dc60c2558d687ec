"""Learn from a teacher's answers as well as from the labels.

`student_loss` is the usual mixture: cross entropy with the labels, and the divergence from the teacher's softened
answers. Knows logits and labels, nothing of networks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Distillation:
    """How much the teacher's answers weigh, and how much they are softened."""

    weight: float = 0.0
    temperature: float = 4.0


def student_loss(
    logits_BC: Tensor,
    labels: Tensor,
    teacher_BC: Tensor | None,
    distillation: Distillation,
    label_smoothing: float = 0.0,
) -> Tensor:
    """(1 − w) cross entropy + w T² KL(teacher ‖ student) at temperature T; without a teacher, cross entropy.
    Labels are classes, or shares of them."""
    labels_loss = F.cross_entropy(logits_BC, labels, label_smoothing=label_smoothing)
    if teacher_BC is None or distillation.weight == 0:
        return labels_loss
    t, w = distillation.temperature, distillation.weight
    student = F.log_softmax(logits_BC / t, 1)
    teacher = F.log_softmax(teacher_BC / t, 1)
    return (1 - w) * labels_loss + w * t * t * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
