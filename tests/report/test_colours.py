"""Colours that runs are told apart by, as people see them who lack one of the three kinds of cones."""

from __future__ import annotations

import re
from importlib import resources
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headgate.analysis.plots import VARIABLES

Floats = NDArray[np.float64]

APART, APART_FROM_GREY, CONTRAST = 30.0, 20.0, 3.0
"""Least differences (CIE 1976; 2.3 can just be seen) and the contrast that WCAG asks of graphics."""
SIGHT = {  # Machado, Oliveira and Fernandes 2009, the whole of a kind of cones missing; of linear RGB
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no long": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no middle": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no short": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])


def themes() -> dict[str, dict[str, str]]:
    css = (resources.files("headgate.analysis") / "report.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]{6})", part)) for part in _parts(css))
    return {"light": light, "dark": dark}


def _parts(css: str) -> tuple[str, str]:
    first, second = (match.start() for match in re.finditer(":root", css))
    return css[first:second], css[second:]


def linear(color: str) -> Floats:
    values = np.array([int(color[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(color: str, sight: Any) -> Floats:
    white = XYZ.sum(1)
    share = XYZ @ np.clip(np.asarray(sight) @ linear(color), 0, 1) / white
    x, y, z = np.where(share > (6 / 29) ** 3, np.cbrt(share), share / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(first: str, second: str, sight: Any) -> float:
    return float(np.linalg.norm(lab(first, sight) - lab(second, sight)))


def contrast(first: str, second: str) -> float:
    darker, lighter = sorted(float(XYZ[1] @ linear(color)) for color in (first, second))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_any_two_runs_are_told_apart(theme: str, sight: str) -> None:
    colors = themes()[theme]
    series = [colors[f"--series-{number}"] for number in range(6)]
    worst = min((difference(a, b, SIGHT[sight]), a, b) for a, b in combinations(series, 2))
    assert worst[0] >= APART, f"{worst[1]} and {worst[2]} look alike"
    grey = min((difference(each, colors["--quiet"], SIGHT[sight]), each) for each in series)
    assert grey[0] >= APART_FROM_GREY, f"{grey[1]} looks like what others have published"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_colour_stands_out_from_what_is_behind_it(theme: str) -> None:
    colors = themes()[theme]
    drawn = [colors[name] for name in VARIABLES.values()]
    assert min(contrast(each, colors[behind]) for each in drawn for behind in ("--card", "--page")) >= CONTRAST


def test_files_have_the_colours_of_the_light_page() -> None:
    assert {name: color for color, name in VARIABLES.items()}.items() <= themes()["light"].items()


def test_the_measure_knows_what_is_alike() -> None:
    assert difference("#000000", "#ffffff", SIGHT["all cones"]) == pytest.approx(100, abs=0.1)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert (
        difference("#b97700", "#d55e00", SIGHT["no middle"])
        < 2.3
        < difference("#b97700", "#d55e00", SIGHT["all cones"])
    )
