from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from headgate.cli import app
from headgate.training.recipe import RECIPES, Recipe, overridden, without_places
from headgate.training.repeat import commands, without_folders

FIRST = dataclasses.replace(
    RECIPES["cifar10-resnet20-static"], weights="/home/me/w.safetensors", data_dir="/home/me/data", compile=True
)


def result(recipe: Recipe, **more: Any) -> dict[str, Any]:
    return {"recipe": recipe.to_json(), **more}


def test_one_run_is_one_command() -> None:
    (line,) = commands(FIRST, result(FIRST))
    assert commands(FIRST) == [line] and "--out" not in line and "/home" not in line
    words = shlex.split(line)
    assert words[:2] == ["headgate", "train"] and words[words.index("--weights") + 1] == "w.safetensors"


def test_runs_that_were_tuned_on() -> None:
    second = dataclasses.replace(FIRST, seed=1, tune_epochs=15, compile=False)
    third = dataclasses.replace(second, seed=2, mix=0.4, weights=None)
    chain = result(third, before=result(second, before=result(FIRST)))
    lines = commands(third, chain)
    assert lines[0].endswith("--out RUN")
    assert lines[1] == "headgate train --tune-on RUN --tune-epochs 15 --seed 1 --no-compile --out RUN-on"
    assert lines[2] == "headgate train --tune-on RUN-on --weights none --mix 0.4 --seed 2 --out RUN-on-on"


def test_a_mean_of_a_run_and_what_came_of_it() -> None:
    second = dataclasses.replace(FIRST, seed=1)
    begun = result(FIRST)
    lines = commands(second, result(second, averaged=[begun, result(second, before=begun)]))
    assert [shlex.split(line)[1] for line in lines] == ["train", "train", "average"]
    assert lines[-1] == "headgate average RUN RUN-on --out RUN-on-mean"


def test_two_that_began_alike_have_two_names() -> None:
    begun = result(FIRST)
    forks = [result(dataclasses.replace(FIRST, seed=seed), before=begun) for seed in (1, 2)]
    lines = commands(FIRST, result(FIRST, averaged=forks))
    assert lines[-1] == "headgate average RUN-on RUN-on-too --out RUN-on-too-mean"
    assert len(lines) == 4


@pytest.mark.parametrize("name", ["cifar10-resnet56-static", "imagenet-resnet50-aig", "cifar10-densenet100-exits"])
def test_the_options_make_the_recipe(name: str) -> None:
    asked: dict[str, Any] = {}
    recipe = RECIPES[name]
    words = shlex.split(commands(recipe)[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("headgate.training.start.dry_run", lambda folder, made, places, quiet: asked.update(made=made))
        done = CliRunner().invoke(app, [*words[1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert without_places(overridden(asked["made"], {"name": recipe.name})) == without_places(recipe)


def test_folders_are_taken_off() -> None:
    given = ("folder:/a/b", "/a/b.py:make", "net=/a/b", "a/b.py:f", "cifar10")
    assert [without_folders(each) for each in given] == ["folder:b", "b.py:make", "net=b", "b.py:f", "cifar10"]
