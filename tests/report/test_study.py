from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from headgate.analysis.report import page
from headgate.errors import FileError, HeadgateError
from headgate.exits.thresholds import NOBODY
from headgate.training import study as module
from headgate.training.adopt import adopt
from headgate.training.onward import onward
from headgate.training.start import go
from headgate.training.study import _first_and_last, _series, study
from tests.report.conftest import LOOK
from tests.training.runs import QUIET, RECIPE, run

Studies = dict[str, dict[str, Any]]


def test_the_layers_add_up_to_the_networks_macs(studies: Studies) -> None:
    for found in studies.values():
        result, layers = found["result"], found["layers"]
        assert sum(row["dense"] for row in layers) == result["macs"]["dense"]
    assert sum(row["after"] for row in studies["pruned"]["layers"]) == studies["pruned"]["result"]["macs"]["shrunk"]
    for name in ("conditional", "layers"):  # the study looks at all 360 test images, like the result
        after = sum(row["after"] for row in studies[name]["layers"])
        assert after == pytest.approx(studies[name]["result"]["macs"]["conditional"], rel=1e-5)
    early = studies["early"]
    assert sum(row["after"] for row in early["layers"]) == pytest.approx(early["exits"]["macs"])
    assert early["exits"]["macs"] == pytest.approx(early["result"]["macs"]["cascade"], rel=1e-5)


def test_a_higher_tau_closes_channels_and_keeps_images_in(studies: Studies) -> None:
    for name, found in studies.items():
        macs = [point["macs"] for point in found["sweep"]]
        assert macs == sorted(macs, reverse=name != "early") and macs[0] != macs[-1]
        assert all(point["milliseconds"]["median_ms"] > 0 for point in found["sweep"])


def test_every_gate_that_decides_is_told_of_by_class(studies: Studies) -> None:
    found = studies["conditional"]["classes"]
    assert found["gates"] and sorted(found["classes"]) == [str(digit) for digit in range(10)]
    assert all(len(rates) == 10 and min(rates) >= 0 and max(rates) <= 1 for rates in found["rates"])
    assert found["numbers"]["specialised_gates"] > 0
    assert found["numbers"]["mean_bits"] > 3 * found["numbers"]["mean_bits_shuffled"]
    assert "classes" not in studies["pruned"]


def test_examples_are_the_cheapest_and_the_dearest_images(studies: Studies) -> None:
    few, many = studies["conditional"]["examples"].values()
    quantiles = studies["conditional"]["image_macs"]
    assert round(few[0]["macs"]) == quantiles[0] and round(many[0]["macs"]) == quantiles[-1]
    assert all(row["picture"].startswith("data:image/png;base64,") for row in few + many)
    first, stay = studies["early"]["examples"].values()
    assert {row["exit"] for row in first} <= {"layer1", "layer2"} and {row["exit"] for row in stay} == {"last"}


def test_exits_out_of_use_have_no_say_in_who_leaves_first() -> None:
    p_NK = np.array([[0.9, 0.1], [0.1, 0.9], [0.8, 0.7], [0.7, 0.2], [0.2, 0.0]])
    early, late = _first_and_last(p_NK, np.array([0, 1, 0, 0, 2]), [0.5, 0.5])
    assert early.tolist() == [0, 2, 3, 1] and late.tolist() == [4]
    early, late = _first_and_last(p_NK, np.array([2, 1, 1, 2, 2]), [NOBODY, 0.5])
    assert early.tolist() == [1, 2] and late.tolist() == [4, 0, 3]
    early, late = _first_and_last(p_NK, np.array([2] * 5), [NOBODY, NOBODY])
    assert early.tolist() == [] and late.tolist() == [0, 1, 2, 3, 4]


def test_how_sure_exits_are_is_told_of_every_image(studies: Studies) -> None:
    found = studies["early"]["leaving"]
    assert found["exits"] == ["layer1", "layer2"] and len(found["taus"]) == 2
    assert [sum(counts) for counts in found["counts"]] == [360, 360]
    assert found["used"] == [tau < NOBODY for tau in found["taus"]]
    assert "histogram" not in studies["early"]


def test_gates_are_followed_over_the_epochs(studies: Studies) -> None:
    for name in ("pruned", "conditional", "early"):
        log = studies[name]["log"]
        ends = [1, 2, 3] if name == "early" else [1, 2, 3, 4]  # dense, two of gates, tune
        assert [line["at"] for line in log["epochs"]] == ends
        assert [line["at"] for line in log["histograms"]] == [2, 3]
        assert all(sum(line["histogram"]) > 0 for line in log["histograms"])


def test_runs_of_a_series_differ_in_target_and_seed_alone() -> None:
    def of(**changes: Any) -> dict[str, Any]:
        return {"recipe": replace(RECIPE, **changes).to_json()}

    plain = of()
    places = {"weights": "/a/b.safetensors", "data_dir": "/a", "workers": 3}
    assert _series(plain) == _series(of(target="0.7", seed=3, name="other", **places))
    others = [of(kind="dynamic"), of(kind="dynamic", granularity="layer"), of(tune_epochs=2), of(round_to=8)]
    others += [plain | {"before": plain}, plain | {"averaged": [plain, plain]}]
    others += [plain | {"adopted": {"name": "net", **plain}}, plain | {"before": of(tune_epochs=2)}]
    assert len({_series(each) for each in [plain, *others]}) == len(others) + 1
    assert _series(plain | {"before": plain}) == _series(of(target="0.7") | {"before": of(target="0.7", seed=1)})


def made_of(theirs: Path, file: str, place: Path) -> Path:
    """A run made of a network that was trained elsewhere: without a log, and without gates that were left there."""
    result = json.loads((theirs / "result.json").read_text(encoding="utf-8"))
    save_file(load_file(theirs / "dense.safetensors"), place / "start.safetensors")
    record = {"recipe": result["recipe"], "before": []}
    adopt(place / "run", theirs / file, record, str(place / "start.safetensors"), QUIET)
    return place / "run"


@pytest.fixture(scope="module")
def adopted(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_of(folders["pruned"], "small.safetensors", tmp_path_factory.mktemp("adopted"))


def test_exits_trained_elsewhere_can_still_be_moved(folders: dict[str, Path], studies: Studies, tmp_path: Path) -> None:
    found = study(made_of(folders["early"], "cascade.safetensors", tmp_path), LOOK)
    assert found["leaving"] == studies["early"]["leaving"] and len(found["sweep"]) == len(studies["early"]["sweep"])
    assert found["notes"] == [] and "How sure the gates are" in page([found])


def test_a_network_trained_elsewhere_shows_what_can_be_told_of_it(adopted: Path, studies: Studies) -> None:
    found, theirs = study(adopted, LOOK), studies["pruned"]
    assert found["layers"] == theirs["layers"] and found["result"]["accuracy"]["shrunk"] == pytest.approx(
        theirs["result"]["accuracy"]["shrunk"]
    )
    assert {row["batch"] for row in found["latency"]} == {1, 32}
    assert found.keys() & {"sweep", "histogram", "classes"} == set() and found["trained"] == {}
    (note,) = found["notes"]
    text = page([found, studies["conditional"]])
    assert note in text and text.count('id="moved-') == 1 and str(adopted.parent) not in text
    assert "headgate zoo small --weights start.safetensors" in text
    assert 'id="slider"' not in page([found]) and 'id="trade_off-figure_1"' in page([found])


def test_nor_is_more_asked_of_a_run_that_tunes_it_on(adopted: Path) -> None:
    later = adopted.parent / "later"
    go(later, onward(adopted, {"tune_epochs": 1}), QUIET, earlier=adopted)
    found = study(later, LOOK)
    assert found["layers"] and found["latency"] and "sweep" not in found and len(found["notes"]) == 1
    assert [line["phase"] for line in found["log"]["epochs"]] == ["tune"] and found["trained"]["began"]
    assert "<svg" in page([found, study(adopted, LOOK)])


def test_what_was_found_is_kept(
    folders: dict[str, Path], studies: Studies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: object) -> dict[str, Any]:
        return {"looked": "again"}

    monkeypatch.setattr(module, "_looked", nothing)
    assert study(folders["pruned"], LOOK) == json.loads(json.dumps(studies["pruned"]))
    copy = Path(shutil.copytree(folders["pruned"], tmp_path / "copy"))
    monkeypatch.chdir(copy)
    assert study(Path("."), LOOK)["name"] == "copy"
    (copy / "study.json").unlink()
    assert study(copy, LOOK)["looked"] == "again"


def test_damage_and_change_are_noticed(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_looked", lambda *_: {"looked": "again"})
    copy = Path(shutil.copytree(folders["pruned"], tmp_path / "copy"))
    assert "looked" in study(copy, LOOK) and study(copy, LOOK)["looked"] != "again"
    (copy / "small.safetensors").touch()  # another network, for all one knows
    assert study(copy, LOOK)["looked"] == "again"
    (copy / "study.json").write_text("{", encoding="utf-8")
    assert study(copy, LOOK)["looked"] == "again"


def test_a_run_that_has_not_ended_shows_how_far_it_is(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folders["pruned"], tmp_path / "copy"))
    (copy / "result.json").unlink()
    (copy / "study.json").unlink()
    found = study(copy, LOOK)
    assert found["result"] is None and found["log"]["epochs"] and "sweep" not in found
    assert not (copy / "study.json").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is no run"):
        study(tmp_path, LOOK)


def test_what_can_not_be_timed_is_told_and_the_rest_is_shown(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> Any:
        raise HeadgateError("no fast path")

    copy = Path(shutil.copytree(folders["conditional"], tmp_path / "copy"))
    (copy / "study.json").unlink()
    monkeypatch.setattr(module, "sweep_milliseconds", refused)
    monkeypatch.setattr(module, "bench", refused)
    found = study(copy, LOOK)
    assert len(found["notes"]) == 2 and "no fast path" in found["notes"][0]
    assert found["classes"]["gates"] and "milliseconds" not in found["sweep"][0]
    assert "no fast path" in page([found])


def test_a_dense_run_has_nothing_to_show_but_its_training(tmp_path: Path) -> None:
    run(tmp_path / "run", gate_epochs=0, tune_epochs=0)
    found = study(tmp_path / "run", LOOK)
    assert found["result"]["accuracy"].keys() == {"dense"} and "sweep" not in found
    assert "<svg" in page([found])


def test_no_more_images_than_asked_for(tmp_path: Path) -> None:
    run(tmp_path / "run", gate_epochs=1)
    found = study(tmp_path / "run", module.Look(images=40, rounds=1, batches=(1,), threads=1))
    assert found["images"] == 40 and found["result"]["images"] == 360
    assert found["looked"]["images"] == 40 and found["looked"]["threads"] == 1
