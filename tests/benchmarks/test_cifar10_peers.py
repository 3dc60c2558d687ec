"""The table of peers: every method has a recipe, and all of them take as many epochs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["cifar10_peers.py", "--weights", "w.safetensors", "--data-dir", "d"])
    import cifar10_peers

    return cifar10_peers


def test_every_method_takes_the_same_epochs(peers) -> None:  # type: ignore[no-untyped-def]
    options = peers._options()
    recipes = {
        name: peers.recipe_for(name, 1, options) for base in peers.METHODS for name in (base, base + peers.DISTILLED)
    }
    assert {recipe.epochs for recipe in recipes.values()} == {10}
    assert {recipe.batch_size for recipe in recipes.values()} == {128}
    assert all(recipe.seed == 1 and recipe.target == "0.5" for recipe in recipes.values())
    assert recipes["aig-layers"].granularity == "layer" and recipes["aig-layers"].loss == "per_gate"
    assert {name for name, recipe in recipes.items() if recipe.distill} == {
        n for n in recipes if n.endswith("+distill")
    }


def test_a_recipe_with_other_epochs_is_refused(peers) -> None:  # type: ignore[no-untyped-def]
    options = peers._options()
    options.set = ["headgate.tune_epochs=20"]
    with pytest.raises(ValueError, match="21 epochs, but all methods take 10"):
        peers.recipe_for("headgate", 0, options)


def test_cells_of_an_earlier_record_count_where_the_folder_has_none(peers, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = peers._options()
    options.out, options.kept = tmp_path, peers.RECORD
    rows = {row["method"]: row for row in peers._rows(options)}
    recorded = {row["method"]: row for row in peers.read_record(peers.RECORD).results["rows"]}
    assert rows.keys() == recorded.keys()
    for method, row in rows.items():
        assert (
            row["accuracy"] == pytest.approx(recorded[method]["accuracy"])
            and row["epochs"] == recorded[method]["epochs"]
        )
        assert all(cell["kept"]["commit"] for cell in row["cells"])
        assert peers._changed(row["settings"]) == recorded[method]["settings"]
    options.epochs = 30
    assert [row["method"] for row in peers._rows(options)] == ["dense"], "cells of other epochs make another table"


def cell_of(peers, seed: int, precision: str, **changes):  # type: ignore[no-untyped-def]
    recipe = peers.recipe_for("headgate", seed, peers._options()).to_json() | {"precision": precision} | changes
    own = {name: recipe[name] for name in peers.OF_A_CELL}
    return {**own, "accuracy": 0.9, "macs_fraction": 0.5, "seconds": {}, "settings": {"recipe": recipe}}


def test_cells_of_a_method_may_differ_in_precision_and_in_nothing_else(peers) -> None:  # type: ignore[no-untyped-def]
    row = peers._row("headgate", [cell_of(peers, 0, "no"), cell_of(peers, 1, "bf16")])
    assert [(cell["seed"], cell["precision"]) for cell in row["cells"]] == [(0, "no"), (1, "bf16")]
    assert "precision" not in row["settings"]["recipe"]
    with pytest.raises(ValueError, match="not run with the same settings"):
        peers._row("headgate", [cell_of(peers, 0, "no"), cell_of(peers, 1, "no", tune_lr=0.1)])
