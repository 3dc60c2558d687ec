from __future__ import annotations

import dataclasses
import re

import pytest

from headgate.errors import HeadgateError
from headgate.graph.macs import macs_by_layer
from headgate.models.names import load_named
from headgate.training.recipe import RECIPES, Recipe, learning_rate, overridden, recipe_named


def test_every_field_has_its_sentence() -> None:
    for field in dataclasses.fields(Recipe):
        assert field.metadata["help"].endswith("."), field.name


@pytest.mark.parametrize("name", ["cifar10-resnet20-static", "cifar10-resnet56-static", "cifar10-resnet110-static"])
def test_the_papers_cifar_experiments_have_names(name: str) -> None:
    assert recipe_named(name).data == "cifar10"


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
def test_the_papers_imagenet_schedule(depth: int) -> None:
    recipe = recipe_named(f"imagenet-resnet{depth}-static")
    assert (recipe.batch_size, recipe.epochs, recipe.weight_decay) == (256, 100, 1e-4)
    rates = [recipe.lr("gates", epoch * 10, 10) for epoch in (0, 29, 30, 60, 90)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.0001])


@pytest.mark.parametrize("depth", [50, 101])
def test_the_published_rates_of_aig(depth: int) -> None:
    """One for each block, and a target that is what such a network costs."""
    recipe = recipe_named(f"imagenet-resnet{depth}-aig")
    named = load_named(recipe.model)
    by_layer = macs_by_layer(named.model, named.example_input)
    blocks = [name for name, _ in named.model.named_modules() if re.fullmatch(r"layer\d\.\d+", name)]
    rates = recipe.rates()
    assert isinstance(rates, list) and len(rates) == len(blocks)
    closed = 0.0
    for block, rate in zip(blocks, rates, strict=True):
        inside = [macs for name, macs in by_layer.items() if name.startswith(f"{block}.") and "downsample" not in name]
        closed += (1 - rate) * sum(inside)
    assert 1 - closed / sum(by_layer.values()) == pytest.approx(float(recipe.target), abs=0.005)
    assert recipe_named("imagenet-resnet18-aig").rates() is None, "its gates are all asked for the target"


def test_one_rate_or_several() -> None:
    gates = dataclasses.replace(RECIPES["digits-static"], loss="per_gate", granularity="layer")
    assert dataclasses.replace(gates, rate="0.3").rates() == 0.3
    assert dataclasses.replace(gates, rate="1, 0.25").rates() == [1, 0.25]
    assert dataclasses.replace(gates, rate=0.3).rates() == 0.3, "as recipes were saved once"  # type: ignore[arg-type]


def test_a_recipe_survives_json() -> None:
    for recipe in RECIPES.values():
        changed = overridden(recipe, {"frozen": () if recipe.exits else ("conv1",), "distill": 0.5, "teacher": "x=y"})
        assert Recipe.from_json(changed.to_json()) == changed


def test_overriding_takes_only_what_was_given() -> None:
    recipe = recipe_named("digits-static")
    assert overridden(recipe, {"target": None, "seed": None}) is recipe
    assert overridden(recipe, {"target": "0.3"}).target == "0.3"
    with pytest.raises(HeadgateError, match="no field 'nonsense'"):
        overridden(recipe, {"nonsense": 1})


def test_an_unknown_recipe_is_answered_with_a_guess() -> None:
    with pytest.raises(HeadgateError, match="did you mean .*cifar10-resnet56-static"):
        recipe_named("cifar10-resnet56")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gate_epochs", -1), ("batch_size", 0), ("ramp", 1.5), ("tune_lr", float("nan")), ("gate_schedule", "linear"),
        ("budget", "none"), ("precision", "fp8"), ("distill", -0.1), ("step_epochs", 0), ("momentum", 3.0),
        ("rate", "0.5,1.5"), ("rate", "half"), ("rate", "0.5,"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(HeadgateError, match=field):
        dataclasses.replace(RECIPES["digits-static"], **{field: value})


@pytest.mark.parametrize(
    ("other", "field", "value"),
    [
        ({}, "teacher", "x=y.safetensors"), ({}, "distill_temperature", 2.0), ({}, "rate", "0.3"), ({}, "static", ("conv1",)),
        ({"kind": "dynamic"}, "squeeze_below", 0.02), ({"budget": "paper"}, "ramp", 0.1),
        ({"loss": "per_gate"}, "ramp", 0.1), ({"loss": "per_gate"}, "budget_weight", 7.0),
        ({"prime_batches": 4}, "prime_loudness", 1.0), ({"kind": "dynamic"}, "prime_loudness", 1.0),
        ({}, "tune_gate_lr", 0.01),
    ],
)  # fmt: skip
def test_a_field_that_would_say_nothing_is_refused(other: dict[str, object], field: str, value: object) -> None:
    with pytest.raises(HeadgateError, match=f"{field}=.* left out with"):
        dataclasses.replace(RECIPES["digits-static"], **other, **{field: value})


def test_schedules_start_and_end_where_they_should() -> None:
    for schedule in ("cosine", "onecycle"):
        assert learning_rate(schedule, 1.0, 100, 100, 1) == pytest.approx(0, abs=1e-12)
    assert learning_rate("cosine", 1.0, 0, 100, 1) == 1
    assert learning_rate("onecycle", 1.0, 0, 100, 1) == pytest.approx(0.1)
    assert max(learning_rate("onecycle", 1.0, step, 100, 1) for step in range(101)) == pytest.approx(1)
    assert learning_rate("constant", 0.3, 50, 100, 1) == 0.3


def test_the_rate_of_gates_comes_down_only_where_weights_are_tuned() -> None:
    recipe = dataclasses.replace(RECIPES["cifar10-resnet20-dynamic"], tune_gate_lr=0.01, tune_schedule="cosine")
    steps = recipe.tune_epochs * 10
    assert {recipe.gate_rate("gates", step, 10) for step in range(0, 60, 7)} == {recipe.gate_lr}
    assert recipe.gate_rate("tune", 0, 10) == 0.01
    assert recipe.gate_rate("tune", steps // 2, 10) == pytest.approx(0.005)
    assert recipe.gate_rate("tune", steps, 10) == pytest.approx(0, abs=1e-12)


def test_a_recipe_of_another_version_is_refused() -> None:
    with pytest.raises(HeadgateError, match="another version"):
        Recipe.from_json({"name": "x", "new_field": 1})


def test_none_takes_away_what_a_recipe_names() -> None:
    scratch = overridden(RECIPES["imagenet-resnet50-static"], {"weights": "none", "dense_epochs": 90})
    assert scratch.weights is None and scratch.dense_epochs == 90
    assert overridden(RECIPES["imagenet-resnet50-static"], {"weights": None}).weights == "pretrained"
    plain = overridden(RECIPES["digits-static"], {"frozen": ("conv1",)})
    assert overridden(plain, {"frozen": ("none",)}).frozen == ()
