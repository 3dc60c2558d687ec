"""The table of variants: rows of an earlier record stand beside new ones, and only if they are of the same recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headgate.analysis.records import write_record
from headgate.training.recipe import Recipe, recipe_named

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
RECIPE = recipe_named("cifar10-resnet20-static")
ORDER = ["static", "dynamic"]


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(FOLDER))
    import cifar10_variants

    return cifar10_variants


def row(variant: str, seed: int, accuracy: float) -> dict[str, Any]:
    return {"variant": variant, "seed": seed, "accuracy": accuracy}


def kept(folder: Path, recipe: Recipe, rows: list[dict[str, Any]]) -> Path:
    results = {"rows": rows, "recipe": recipe.to_json() | {"weights": None, "data_dir": None}}
    write_record(folder / "record.json", question="which?", results=results, threads=1, seeds=[0])
    return folder / "record.json"


def test_rows_that_are_not_run_again_are_kept_with_their_origin(variants, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = kept(tmp_path, RECIPE, [row("dynamic", 0, 0.5), row("static", 1, 0.6)])
    now = [row("dynamic", 1, 0.7), row("dynamic", 0, 0.8)]
    found = variants._with_kept(now, path, replace(RECIPE, seed=3), ORDER)
    assert [(each["variant"], each["seed"], each["accuracy"]) for each in found] == [
        ("static", 1, 0.6), ("dynamic", 0, 0.8), ("dynamic", 1, 0.7),
    ]  # fmt: skip
    assert set(found[0]["kept"]) == {"commit", "date", "cpu"}
    assert not any("kept" in each for each in found[1:])


def test_a_kept_row_keeps_its_first_origin(variants, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    origin = {"commit": "abc", "date": "then", "cpu": "another"}
    path = kept(tmp_path, RECIPE, [row("static", 0, 0.5) | {"kept": origin}])
    (found,) = variants._with_kept([], path, RECIPE, ORDER)
    assert found["kept"] == origin


def test_rows_of_another_recipe_are_refused(variants, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = kept(tmp_path, replace(RECIPE, tune_epochs=3), [row("static", 0, 0.5)])
    with pytest.raises(SystemExit, match="tune_epochs is 3 there, 9 here"):
        variants._with_kept([], path, RECIPE, ORDER)
