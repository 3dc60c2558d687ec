from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headgate.analysis.plots import SERIES, SIGNS, _named_layers, pictures_of, svg, trade_off, write
from headgate.analysis.published import PUBLISHED, published_for
from headgate.analysis.report import page, provenance
from headgate.cli import app
from headgate.training import start
from headgate.training.recipe import Recipe, without_places
from headgate.training.run import recipe_in
from tests.training.runs import TINY

Studies = dict[str, dict[str, Any]]
FIGURES = {
    "pruned": {"training", "polarisation", "layers", "latency"},
    "conditional": {"training", "polarisation", "layers", "latency", "classes", "image_macs"},
    "layers": {"training", "polarisation", "layers", "latency", "classes", "image_macs"},
    "early": {"training", "polarisation", "layers", "latency", "exits", "exits_by_class", "image_macs"},
}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.addresses.append(value or "")
        if tag not in ("meta", "img", "input", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def text(report_file: Path) -> str:
    return report_file.read_text(encoding="utf-8")


def test_every_run_has_its_figures(studies: Studies) -> None:
    assert {name: {each.name for each in pictures_of(found)} for name, found in studies.items()} == FIGURES


def test_the_page_is_whole_and_needs_nothing_from_outside(text: str) -> None:
    tags = Tags()
    tags.feed(text)
    assert not tags.open and len(tags.ids) == len(set(tags.ids))
    assert all(address.startswith(("#", "data:")) for address in tags.addresses)
    outside = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert len(text) < 600_000


def test_what_the_user_named_is_text_not_markup(text: str) -> None:
    assert "four &lt;runs&gt;" in text and "four <runs>" not in text


def test_class_names_from_folders_can_be_anything(studies: Studies) -> None:
    found = dict(studies["conditional"])
    nasty = ["</script><script>alert(1)</script>", '"><b>', *"cdefghij"]
    found["class_names"] = nasty
    found["classes"] = {**found["classes"], "classes": nasty, "words": [f"a[0]: serves {nasty[0]}"]}
    text = page([found])
    tags = Tags()
    tags.feed(text)
    assert not tags.open and text.count("<script>") == 1 and "<b>" not in text


def test_figures_take_the_colours_of_the_page(studies: Studies) -> None:
    drawn = svg(pictures_of(studies["pruned"])[0], "one")
    assert "var(--ink)" in drawn and "var(--series-0)" in drawn and "#1a1d21" not in drawn
    assert 'id="one-figure_1"' in drawn and "<metadata>" not in drawn


def test_a_figure_is_the_same_twice(studies: Studies) -> None:
    once, again = (svg(pictures_of(studies["layers"])[0], "x") for _ in range(2))
    assert once == again


def test_figures_become_files(studies: Studies, tmp_path: Path) -> None:
    paths = write(pictures_of(studies["early"]), tmp_path / "new", "early-")
    assert len(paths) == 2 * len(FIGURES["early"])
    assert all(path.read_bytes()[:4] in (b"\x89PNG", b"<?xm") for path in paths)


def test_published_points_stand_beside_runs_of_their_network(studies: Studies) -> None:
    found = {**studies["pruned"], "model": "cifar_resnet56", "data": "cifar10"}
    assert published_for("cifar_resnet56", "cifar10") and not published_for("cifar_resnet56", "digits")
    text = page([found])
    assert all(each.who.replace("&", "&amp;") in text for each in PUBLISHED if each.model == "cifar_resnet56")
    picture = trade_off([found], published_for("cifar_resnet56", "cifar10"))
    assert picture is not None and svg(picture, "x").count("var(--quiet)") > svg_of([studies["pruned"]]).count(
        "var(--quiet)"
    )


def test_every_published_point_has_its_number_and_a_place_of_its_own(studies: Studies) -> None:
    published = published_for("torchvision:resnet50", "folder:imagenet")
    accurate = {"accuracy": {"dense": 0.7613, "shrunk": 0.7513}}
    found = studies["pruned"] | {"result": studies["pruned"]["result"] | accurate, "sweep": []}
    picture = trade_off([found], published)
    assert picture is not None
    labels = [text for text in picture.figure.axes[0].texts if text.get_text()]
    assert sorted(int(text.get_text()) for text in labels) == list(range(1, len(published) + 1))
    picture.figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in labels]
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[n + 1 :])


def test_what_lies_on_each_other_has_one_number(studies: Studies) -> None:
    published = published_for("cifar_resnet20", "cifar10")
    picture = trade_off([studies["pruned"]], published)
    assert picture is not None and {each.measured_here for each in published} == {True}
    labels = [text.get_text() for text in picture.figure.axes[0].texts]
    assert len(labels) < len(published) and any("–" in label or "," in label for label in labels)
    assert "hollow: measured for this package" in picture.caption and "published by others" not in picture.caption
    text = page([studies["pruned"] | {"model": "cifar_resnet20", "data": "cifar10"}])
    assert "Measured for this package" in text and "Published by others" not in text


def test_a_published_cascade_without_macs_is_a_sentence(studies: Studies) -> None:
    text = page([studies["early"] | {"model": "cifar_densenet100", "data": "cifar10"}])
    assert "94.40 % together, 94.19 % at the last exit alone; MACs were not published" in text


def svg_of(studies: list[dict[str, Any]]) -> str:
    picture = trade_off(studies)
    assert picture is not None
    return svg(picture, "x")


def test_many_classes_layers_and_long_names_do_not_break_figures(studies: Studies) -> None:
    names = [f"class {number}" for number in range(300)]
    rates = [[(gate * each % 7) / 7 for each in range(300)] for gate in range(200)]
    numbers = studies["conditional"]["classes"]["numbers"]
    many = studies["conditional"] | {
        "class_names": names,
        "classes": {
            "rates": rates,
            "gates": [f"g[{n}]" for n in range(200)],
            "classes": names,
            "words": [],
            "numbers": numbers,
        },
        "layers": [{"name": f"features.{n // 10}.conv{n}", "dense": 100 + n, "after": n} for n in range(157)],
    }
    assert {"classes", "layers"} <= {picture.name for picture in pictures_of(many)}
    ticks, labels = _named_layers([row["name"] for row in many["layers"]])
    assert labels == [f"features.{n}" for n in range(16)] and ticks == [10 * n for n in range(16)]
    exits = studies["early"]["exits_by_class"]
    wide = studies["early"] | {"exits_by_class": exits | {"classes": names, "shares": [[1 / 3] * 300] * 3}}
    assert "exits_by_class" in {picture.name for picture in pictures_of(wide)}


def test_tick_labels_keep_their_digits(studies: Studies) -> None:
    rows = [row | {"dense_ms": 0.0214, "small_ms": 0.0113, "batch": 1} for row in studies["pruned"]["latency"]]
    drawn = [svg(each, "x") for each in pictures_of(studies["pruned"] | {"latency": rows}) if each.name == "latency"]
    assert ">0.005<" in drawn[0] or ">0.0050<" in drawn[0] or ">0.0025<" in drawn[0]


def test_a_loss_that_was_not_finite_is_told(studies: Studies) -> None:
    log = studies["pruned"]["log"]
    epochs = [line | {"loss": "nan"} for line in log["epochs"]]
    (drawn, *_) = pictures_of(studies["pruned"] | {"log": log | {"epochs": epochs, "steps": []}})
    assert "not finite" in svg(drawn, "x")


def test_answers_that_are_no_class_are_shown(studies: Studies) -> None:
    few = [row | {"answer": 537} for row in studies["conditional"]["examples"]["use few channels"]]
    assert "output 537" in page([studies["conditional"] | {"examples": {"use few channels": few}}])


def joined(studies: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """The dashed lines of the trade-off, and that its caption speaks of them if there are any."""
    picture = trade_off(studies)
    assert picture is not None
    lines = [line for line in picture.figure.axes[0].lines if str(line.get_gid()).startswith("targets")]
    assert all(line.get_linestyle() == "--" for line in lines)
    assert ("dashed: one recipe at several targets" in picture.caption) is bool(lines)
    return [list(zip(*line.get_data(), strict=True)) for line in lines]


def at(study: dict[str, Any], asked: float, accuracy: float, macs_fraction: float) -> dict[str, Any]:
    """The study of a run of the same recipe that was asked for something else, and came to something else."""
    result = study["result"]
    result = result | {
        "accuracy": result["accuracy"] | {"shrunk": accuracy},
        "macs_fraction": result["macs_fraction"] | {"shrunk": macs_fraction},
    }
    return study | {"name": f"{asked} {accuracy}", "asked": asked, "result": result}


def test_runs_of_one_recipe_at_several_targets_are_joined(studies: Studies) -> None:
    half, more = at(studies["pruned"], 0.5, 0.90, 0.49), at(studies["pruned"], 0.7, 0.95, 0.69)
    assert joined([more, half]) == [[(0.49, 90.0), (0.69, 95.0)]]
    again = at(studies["pruned"], 0.5, 0.92, 0.47)  # another seed: the curve goes through the mean
    (line,) = joined([more, half, again])
    assert line == [pytest.approx((0.48, 91.0)), (0.69, 95.0)]


def test_no_other_runs_are(studies: Studies) -> None:
    half = at(studies["pruned"], 0.5, 0.90, 0.49)
    assert joined([half, at(studies["pruned"], 0.5, 0.92, 0.47)]) == []  # one target is no curve
    other = {"asked": 0.7, "name": "other"}
    assert joined([half, half | other | {"data": "cifar10"}]) == []
    assert studies["conditional"]["kind"] == studies["layers"]["kind"]  # but their granularity differs, and the target
    assert joined([studies["conditional"], studies["layers"], studies["early"], studies["pruned"]]) == []


def test_every_run_has_a_sign_and_a_colour_of_its_own(studies: Studies) -> None:
    picture = trade_off([studies["pruned"] | {"name": str(number)} for number in range(24)])
    assert picture is not None
    looks = {
        line.get_label(): (line.get_color(), line.get_marker())
        for line in picture.figure.axes[0].lines
        if not line.get_label().startswith("_")
    }
    assert len(looks) == len(set(looks.values())) == 24
    first = [looks[str(number)] for number in range(len(SERIES))]
    assert len({color for color, _ in first}) == len({sign for _, sign in first}) == len(SERIES) < len(SIGNS)


def test_a_run_that_has_not_ended_has_a_page_too(studies: Studies) -> None:
    found = {
        name: studies["pruned"][name]
        for name in ("name", "recipe", "command", "model", "data", "target", "kind", "log")
    }
    text = page([found | {"result": None}])
    assert "not finished" in text and 'id="slider"' not in text


def test_the_command_repeats_the_run(
    studies: Studies, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(start, "dry_run", lambda folder, recipe, places, quiet: asked.append(recipe))
    for name, found in studies.items():
        words = shlex.split(found["command"])
        assert words[:2] == ["headgate", "train"]
        result = CliRunner().invoke(app, [*words[1:], "--model", TINY, "--dry-run"])
        assert result.exit_code == 0, result.output
        run = recipe_in(folders[name])
        assert without_places(asked[-1]) == without_places(replace(run, name=asked[-1].name))
    assert [words[n + 1] for n, word in enumerate(words) if word == "--exits"] == ["layer1", "layer2"]


def test_no_folder_of_this_machine_is_told(text: str, folders: dict[str, Path]) -> None:
    assert str(folders["pruned"].parent) not in text and str(Path(TINY).parent) not in text


def test_the_command_line_writes_page_and_figures(folders: dict[str, Path], tmp_path: Path) -> None:
    copies = [str(shutil.copytree(folders[name], tmp_path / name)) for name in ("pruned", "early")]
    words = ["report", *copies, "-o", str(tmp_path / "r.html")]
    words += ["--figures", str(tmp_path / "figures"), "--rounds", "1", "--threads", "1"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "pruned" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".svg", ".png"}
    assert (tmp_path / "figures" / "trade_off.svg").is_file()


@pytest.mark.parametrize(
    "words, message",
    [
        (["RUN", "RUN"], "named twice"),
        (["RUN", "--rounds", "0"], "at least one round"),
        (["RUN", "-o", "/no/such/folder/r.html"], "folder that is there"),
        (["nowhere"], "is no run"),
    ],
)
def test_mistakes_get_one_line(folders: dict[str, Path], tmp_path: Path, words: list[str], message: str) -> None:
    given = [str(folders["pruned"]) if word == "RUN" else word for word in words]
    result = CliRunner().invoke(app, ["report", "-o", str(tmp_path / "r.html"), *given])
    assert result.exit_code == 1 and message in result.output and not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("epochs", [(1, 1, 28), (1, 1, 1), (0, 1, 60), (10, 10, 10), (28, 1, 1)])
def test_the_names_of_short_phases_do_not_lie_on_each_other(studies: Studies, epochs: tuple[int, int, int]) -> None:
    names = [name for name, count in zip(("dense", "gates", "tune"), epochs, strict=True) for _ in range(count)]
    lines = [{"at": n, "phase": name, "loss": 1.0, "accuracy": 0.5} for n, name in enumerate(names, 1)]
    log = {"epochs": lines, "steps": [], "histograms": []}
    (drawn, *_) = pictures_of(studies["pruned"] | {"log": log})
    drawn.figure.draw_without_rendering()
    titles = [text for text in drawn.figure.axes[0].texts if text.get_text() in names]
    boxes = [text.get_window_extent() for text in titles]
    assert [text.get_text() for text in titles] == list(dict.fromkeys(names))
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[n + 1 :])
    assert len({round(box.y0) for box in boxes}) == 1 or max(epochs) == 28  # side by side, where there is room
    assert all(box.y1 < drawn.figure.bbox.y1 for box in boxes)


def test_how_sure_exits_are_is_drawn_exit_by_exit(studies: Studies) -> None:
    found = studies["early"]["leaving"]
    unused = studies["early"] | {"leaving": found | {"used": [False, True], "taus": [1.0, 0.5]}}
    (drawn,) = [svg(each, "x") for each in pictures_of(unused) if each.name == "polarisation"]
    assert "layer1 (out of use)" in drawn and ">layer2<" in drawn and "P(leave)" in drawn and "p(open)" not in drawn


def test_how_many_gates_of_exits_are_polarised_is_said(studies: Studies) -> None:
    counts = [[4, *[0] * 18, 1], [1, 2, *[1] * 17, 3]]
    found = studies["early"] | {"leaving": studies["early"]["leaving"] | {"counts": counts}}
    (drawn,) = [each for each in pictures_of(found) if each.name == "polarisation"]
    assert f"{9 / 28:.0%} are polarised" in drawn.caption
    assert [axes.get_ylabel() for axes in drawn.figure.axes][:3] == ["P(leave)", "polarised", "share of images"]


def test_names_that_begin_with_an_underscore_are_shown(studies: Studies) -> None:
    early = studies["early"]
    names = {"name": "_half", "leaving": early["leaving"] | {"exits": ["_blocks.1", "_blocks.$2$"]}}
    drawn = [svg(each, "x") for each in pictures_of(early | names)] + [svg(trade_off([early | names]), "y")]
    assert any("_blocks.1" in each and "_blocks.$2$" in each for each in drawn) and any(
        "_half" in each for each in drawn
    )


def test_the_heatmap_counts_its_gates(studies: Studies) -> None:
    def label(deciding: int) -> str:
        numbers = studies["conditional"]["classes"]["numbers"] | {"deciding_gates": deciding}
        rows = {"rates": [[0.1, 0.9]] * 75, "gates": [f"g[{n}]" for n in range(75)], "classes": ["a", "b"], "words": []}
        found = studies["conditional"] | {"classes": rows | {"numbers": numbers}}
        (drawn,) = [each for each in pictures_of(found) if each.name == "classes"]
        return str(drawn.figure.axes[0].get_ylabel())

    assert label(75) == "all 75 gates that decide"
    assert label(76) == "the 75 most telling of 76 gates that decide"


def test_that_no_gate_decides_is_said(studies: Studies) -> None:
    numbers = studies["conditional"]["classes"]["numbers"] | {"deciding_gates": 0, "specialised_gates": 0}
    none = {"numbers": numbers, "rates": [], "gates": [], "classes": [], "words": []}
    text = page([studies["conditional"] | {"classes": none}])
    assert f"No gate decides: each of the {numbers['gates']} gates is open for all of 360 images" in text
    assert "No gate decides" not in page([studies["conditional"]])


def test_records_of_examples_hold_the_examples(studies: Studies) -> None:
    text = page([studies["conditional"]])
    (data,) = re.findall(r'<script type="application/json" id="studies">(.*?)</script>', text)
    (kept,) = json.loads(data)
    few = kept["examples"]["use few channels"]
    assert [row["number"] for row in few] == [
        row["number"] for row in studies["conditional"]["examples"]["use few channels"]
    ]
    assert few[0].keys() == {"label", "answer", "macs", "number"}
    assert text.count('data-shows="examples image_macs"') == 2


def test_records_tell_when_a_run_was_trained_and_of_which_commit_if_it_knows(studies: Studies) -> None:
    told = provenance(studies["pruned"])["trained"]
    assert told["began"] <= told["ended"] and "commit" not in told
    day = told["began"][:10]
    assert f"Trained {day}" in page([studies["pruned"]])
    result = studies["pruned"]["result"] | {"commit": "abc", "date": "2026-11-17T00:00:00+00:00"}
    assert provenance(studies["pruned"] | {"result": result})["trained"]["commit"] == "abc"


def test_runs_without_movable_gates_are_stars_without_a_curve(studies: Studies) -> None:
    bare = {name: value for name, value in studies["pruned"].items() if name not in ("sweep", "histogram")}
    bare |= {"name": "bare", "log": {"steps": [], "epochs": [], "histograms": []}, "notes": ["nothing over tau"]}
    alone = page([bare])
    assert "bare: nothing over tau" in alone and 'id="slider"' not in alone and 'id="trade_off-figure_1"' in alone
    both = page([bare, studies["early"]])
    assert 'id="moved-1"' in both and 'id="moved-0"' not in both and ">bare</text>" in both
    picture = trade_off([bare])
    assert picture is not None and "over tau" not in picture.caption
