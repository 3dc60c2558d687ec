from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from headgate.data.batches import NORMALIZATIONS
from headgate.errors import HeadgateError
from headgate.training import teacher as teachers
from headgate.training.prepare import teacher_of
from headgate.training.recipe import Recipe, recipe_named
from headgate.training.teacher import Renormalized, answers
from tests.training.runs import RECIPE, TINY, run
from tests.training.tiny import make


def test_a_teacher_sees_the_pixels_it_is_used_to() -> None:
    pixels = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    given, wanted = NORMALIZATIONS["imagenet"], NORMALIZATIONS["cifar10"]
    seen = Renormalized(nn.Identity(), given, wanted)(given(pixels))
    torch.testing.assert_close(seen, wanted(pixels), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("images", [1, teachers.PART - 1, teachers.PART, 2 * teachers.PART + 3])
def test_answers_are_those_of_the_whole_batch(images: int) -> None:
    net, x = make().eval(), torch.randn(images, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(answers(net, x), net(x))


def test_a_recipe_wraps_its_teacher(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from headgate.models.names import build

    save_file(build("cifar_resnet20").state_dict(), tmp_path / "t.safetensors")
    recipe = Recipe(
        name="x", model="cifar_resnet20", data="cifar10", distill=0.5,
        teacher=f"cifar_resnet20={tmp_path / 't.safetensors'}", teacher_normalization="cifar10",
    )  # fmt: skip
    found = teacher_of(recipe, "tune", nn.Identity(), (1, 3, 32, 32))
    assert isinstance(found, Renormalized) and not any(p.requires_grad for p in found.parameters())
    torch.testing.assert_close(
        found.scale_C11.flatten(), torch.tensor([0.229 / 0.2023, 0.224 / 0.1994, 0.225 / 0.2010])
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_normalization": "cifar10"}, "left out with teacher=None"),
        ({"teacher_normalization": "cifar10", "distill": 0.5}, "left out with teacher=None"),
        ({"teacher_normalization": "cifar10", "distill": 0.5, "teacher": f"{TINY}=t.safetensors"}, "digits come norm"),
    ],
)
def test_a_normalization_nobody_would_use_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    save_file(make().state_dict(), "t.safetensors")
    with pytest.raises(HeadgateError, match=message):
        run(tmp_path / "run", **changes)


def test_networks_of_other_sources_have_their_own_pixels() -> None:
    assert recipe_named("cifar10-densenet100-exits").normalization == "cifar10"
    assert recipe_named("cifar10-resnet56-exits").normalization is None
    assert RECIPE.normalization is None
