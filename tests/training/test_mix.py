"""Mixing images: shares and labels by their definition, and the training step that uses them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate.data.sources import open_data
from headgate.errors import HeadgateError
from headgate.training.distill import Distillation, student_loss
from headgate.training.journal import SilentJournal
from headgate.training.loop import Surroundings, begin, train_step
from headgate.training.mix import Mixture
from headgate.training.recipe import Recipe
from headgate.training.team import Team


@pytest.mark.parametrize("strength", [0.01, 0.4, 1.0, 30.0])
def test_an_image_keeps_at_least_half_of_itself(strength: float) -> None:
    torch.manual_seed(0)
    drawn = [Mixture.draw(5, strength) for _ in range(50)]
    assert all(0.5 <= each.share <= 1 for each in drawn)
    assert all(sorted(each.partners_B.tolist()) == list(range(5)) for each in drawn)
    assert len({each.share for each in drawn}) > 1


def test_images_and_labels_are_mixed_alike() -> None:
    mixture = Mixture(torch.tensor([1, 2, 0]), 0.75)
    images = torch.randn(3, 2, 4, 4)
    torch.testing.assert_close(mixture.images(images)[0], 0.75 * images[0] + 0.25 * images[1])
    expected = torch.tensor([[0.75, 0.0, 0.25], [0.0, 0.0, 1.0], [0.25, 0.0, 0.75]])
    torch.testing.assert_close(mixture.labels(torch.tensor([0, 2, 2]), 3), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_labels_is_the_mixed_loss(smoothing: float) -> None:
    logits, labels = torch.randn(6, 4), torch.randint(4, (6,))
    mixture = Mixture(torch.randperm(6), 0.6)
    loss = student_loss(logits, mixture.labels(labels, 4), None, Distillation(), smoothing)
    own, other = (
        F.cross_entropy(logits, which, label_smoothing=smoothing) for which in (labels, labels[mixture.partners_B])
    )
    torch.testing.assert_close(loss, 0.6 * own + 0.4 * other)


def test_a_step_shows_network_and_teacher_the_same_mixture() -> None:
    seen: list[Tensor] = []

    def build() -> nn.Module:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        net.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        return net

    recipe = Recipe(model="any", mix=1.0, distill=0.5)
    around = Surroundings(recipe, open_data("digits").train, Team(), SilentJournal())
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8)
    phase = begin("tune", build(), recipe, build())
    torch.manual_seed(3)
    train_step(phase.net, phase.optimizer, phase, images, labels, around)
    torch.manual_seed(3)
    expected = Mixture.draw(8, 1.0).images(images)
    assert not torch.allclose(expected, images)
    assert len(seen) == 2
    for shown in seen:
        torch.testing.assert_close(shown, expected)


@pytest.mark.parametrize("strength", [-0.1, float("nan"), float("inf")])
def test_impossible_strengths_are_refused(strength: float) -> None:
    with pytest.raises(HeadgateError, match="mix"):
        Recipe(model="any", mix=strength)
