from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headgate
from headgate import trained
from headgate.models.names import load_named

ENTRIES = headgate.zoo_entries()


def test_the_zoo_is_not_empty() -> None:
    assert ENTRIES


@pytest.mark.parametrize("name", ENTRIES)
def test_a_trained_network_is_what_its_record_says(name: str) -> None:
    record = ENTRIES[name].record
    named = load_named(record["model"])
    small = headgate.zoo(name)
    dense_macs = headgate.count_macs(named.model, named.example_input)
    target = float(record["recipe"]["target"])
    if isinstance(small, headgate.ExitModel):  # what it costs depends on the images
        assert small.dense_macs == dense_macs
        assert record["macs"] / dense_macs == pytest.approx(record["macs_fraction"]) == pytest.approx(target, abs=0.03)
        assert [row["name"] for row in record["exits"]["rows"]] == list(small.names)
    elif isinstance(small, headgate.GatedModel):
        assert small.dense_macs == dense_macs and small.dynamic is not None
        assert record["macs_fraction"] == pytest.approx(target, abs=0.005)
    else:
        macs = headgate.count_macs(small, named.example_input)
        assert macs == record["macs"] and macs / dense_macs == pytest.approx(record["macs_fraction"])
        assert record["macs_fraction"] <= target
    assert not small.training
    with torch.no_grad():
        probe = small(named.example_input)
    torch.testing.assert_close(probe[0], torch.tensor(record["answers"]), rtol=1e-3, atol=1e-3)
    assert (ENTRIES[name].path.stat().st_size) < 5e6


def test_an_unknown_name_is_answered_with_a_guess() -> None:
    name = next(iter(ENTRIES))
    with pytest.raises(headgate.HeadgateError, match="did you mean"):
        headgate.zoo(name + "x")


def test_weights_without_a_record_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    monkeypatch.setattr(trained, "zoo_folder", lambda: tmp_path)
    with pytest.raises(headgate.FileError, match="no record"):
        headgate.zoo_entries()
    (tmp_path / "a.json").write_text(json.dumps({}))
    assert list(headgate.zoo_entries()) == ["a"]
