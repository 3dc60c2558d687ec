"""Figures of a run: from plain data to matplotlib figures, and from those to files and to what a page can carry.

Every figure is a function from a study (see `training/study.py`) to a `Figure`, or None where a run has nothing of the
kind. Colours are told apart by the colour-blind, and where runs are compared each has a sign of its own too; in a page
colours are variables, so that light and dark follow the reader. Knows nothing of torch.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headgate.analysis.published import Published
from headgate.errors import HeadgateError

Study = Mapping[str, Any]

INK, QUIET = "#1a1d21", "#6a717b"
SERIES = ("#233d5c", "#e55a14", "#539c6f", "#453004", "#cc67c7", "#9049ff")
"""The page's light theme, chosen by a search for six that differ most for every kind of colour-blindness, with enough
contrast to be seen; a test measures them."""
SIGNS = "*PXov<>p"
"""Of runs: none that published or dense networks have."""
VARIABLES = {INK: "--ink", QUIET: "--quiet", **{color: f"--series-{n}" for n, color in enumerate(SERIES)}}
HEAT = "cividis"
WIDTH = 4.6
"""Inches: narrow enough to be read on a phone without zooming."""
STYLE = {
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "font.size": 9.0, "axes.titlesize": 9.0, "axes.labelsize": 9.0, "legend.fontsize": 8.0,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": QUIET, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.labelcolor": INK,
    "svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "headgate", "lines.linewidth": 1.6,
}  # fmt: skip
NAMED_LAYERS = 24
"""More layers than that, and only where a stage begins is named."""
STAGES = 16
FEW_POINTS = 20
NEAR, AWAY = 3.0, (4.0, 11.0, 18.0, 27.0)
"""In points: published points nearer to each other than the first get one label; labels are as far from them as one of
the others."""
LETTER_POINTS, LINE_POINTS = 5.0, 9.0
"""Of the labels."""
POINTS_ACROSS = 300.0
"""Of a figure's axes."""
ROOM = 68
"""Letters of a legend that fit side by side."""
LETTER, LINE = 0.022, 12
"""Of names above a figure: the width of a letter as a share of the figure's, the height of a line in points."""
OUT = " (out of use)"
NAMED_GATES, NAMED_CLASSES = 64, 40
"""In heatmaps: more of them, and none is named."""


@dataclass(frozen=True)
class Picture:
    """A figure with its name (for files), its caption, and the parts of the study that it shows."""

    name: str
    caption: str
    figure: Any
    shows: tuple[str, ...]


# ----------------------------------------------------------------------------------------------------- drawing


def check_installed() -> None:
    """Raise if there is nothing to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise HeadgateError("figures need matplotlib: pip install 'headgate[report]'") from error


@contextmanager
def _style() -> Iterator[None]:
    check_installed()
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def _new(height: float = 3.0, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure that belongs to nobody: no window, no global state but the style while it is made."""
    import matplotlib
    from matplotlib.figure import Figure

    assert matplotlib.rcParams["legend.frameon"] is False, "figures are drawn inside the style"
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, 1, **options)


def training(study: Study) -> Picture | None:
    """Loss, accuracy and cost over time."""
    steps, epochs = study["log"]["steps"], study["log"]["epochs"]
    if not epochs:
        return None
    figure, (upper, lower) = _new(4.2, 2, sharex=True)
    means, every = _points(epochs, "loss"), _points(steps, "loss")
    upper.plot(*_columns(every), color=SERIES[0], linewidth=1.0, alpha=0.45)
    upper.plot(*_columns(means), color=SERIES[0], marker="o", markersize=3)
    upper.set_ylabel("task loss")
    if means or every:
        upper.set_ylim(0, 1.08 * max(y for _, y in means + every))
    if len(means) < len(epochs):
        upper.text(0.5, 0.5, "the loss was not finite", ha="center", transform=upper.transAxes)
    curves = {
        "accuracy": ("accuracy, training images", SERIES[0], "-"),
        "validation_accuracy": ("accuracy, held-out images", SERIES[2], "-"),
        "cost": ("MACs, sampled gates", SERIES[1], "-"),
        "cost_decided": ("MACs, thresholded gates", SERIES[4], "--"),
        "goal": ("target of the moment", QUIET, ":"),
    }
    for name, (label, color, line_style) in curves.items():
        points = _points(epochs, name)
        if name in ("cost", "goal") and len(_points(steps, name)) > len(points):
            points = _points(steps, name)
        if points:
            marker = "o" if len(points) < FEW_POINTS else None
            lower.plot(*_columns(points), line_style, color=color, label=label, marker=marker, markersize=3)
    lower.set_ylim(0, 1.05)
    lower.set_xlim(0, epochs[-1]["at"] * 1.02)
    lower.xaxis.get_major_locator().set_params(integer=True)
    lower.set_xlabel("epochs")
    lower.set_ylabel("share")
    lower.yaxis.set_major_formatter(_percent)
    _legend(figure, lower)
    _phases((upper, lower), epochs)
    return Picture("training", "Loss, accuracy and cost over the epochs of all phases.", figure, ("log",))


def _phases(both: Sequence[Any], epochs: Sequence[Mapping[str, Any]]) -> None:
    """Lines between the phases, and their names on top."""
    first, start = 0.0, epochs[0]["phase"]
    spans: list[tuple[str, float, float]] = []
    for number, line in enumerate(epochs):
        last = number == len(epochs) - 1
        if last or epochs[number + 1]["phase"] != start:
            spans.append((start, first, line["at"]))
            if not last:
                for axes in both:
                    axes.axvline(line["at"], color=QUIET, linewidth=0.8)
                first, start = line["at"], epochs[number + 1]["phase"]
    for (name, left, right), row in zip(spans, _rows_of(spans), strict=True):
        both[0].annotate(
            name, ((left + right) / 2, 1), xycoords=both[0].get_xaxis_transform(), xytext=(0, 3 + LINE * row),
            textcoords="offset points", ha="center", annotation_clip=False,
        )  # fmt: skip


def _rows_of(spans: Sequence[tuple[str, float, float]]) -> list[int]:
    """On which line each name stands: the lowest on which it does not touch those before it."""
    ends: list[float] = []
    rows = []
    for name, left, right in spans:
        half = len(name) * LETTER * spans[-1][2] / 2
        middle = (left + right) / 2
        row = next((number for number, end in enumerate(ends) if end < middle - half), len(ends))
        ends[row : row + 1] = [middle + half]
        rows.append(row)
    return rows


def polarisation(study: Study) -> Picture | None:
    """How sure the gates are: p over the epochs, and the share that is polarised."""
    if study.get("leaving"):
        return _leaving(study)
    history, final = study["log"]["histograms"], study.get("histogram")
    shares = _points(study["log"]["epochs"], "polarised")
    if not history and not final:
        return None
    if len(shares) < 2:
        shares = []  # one point is no curve
    figure, axes = _new(4.0 if shares else 2.4, 2 if shares else 1)
    upper = axes[0] if shares else axes
    if len(history) > 1:
        _heat_of_epochs(figure, upper, history, "p(open)", "share of gates")
    else:
        counts = np.asarray(final if final else history[0]["histogram"], dtype=np.float64)
        edges = np.linspace(0, 1, len(counts) + 1)
        upper.bar(edges[:-1], counts / counts.sum(), width=np.diff(edges), align="edge", color=SERIES[0])
        upper.set_xlabel("p(open)")
        upper.set_ylabel("share of gates")
        upper.yaxis.set_major_formatter(_percent)
    if shares:
        _polarised_over_epochs(axes[1], shares)
    return Picture(
        "polarisation",
        "How sure the gates are: polarised means p below 5 % or above 95 %.",
        figure,
        ("log", "histogram"),
    )


def _polarised_over_epochs(axes: Any, shares: Sequence[tuple[float, float]]) -> None:
    axes.plot(*_columns(shares), color=SERIES[0], marker="o", markersize=3)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(_percent)
    axes.set_ylabel("polarised")
    axes.set_xlabel("epochs")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _polarised_share(counts: Sequence[int]) -> float:
    """Of a histogram of p, what is below 5 % or above 95 %."""
    ends = max(1, round(0.05 * len(counts)))
    return (sum(counts[:ends]) + sum(counts[-ends:])) / max(sum(counts), 1)


def _heat_of_epochs(figure: Any, axes: Any, history: Sequence[Mapping[str, Any]], what: str, share: str) -> None:
    """How p is distributed, epoch by epoch."""
    table = np.array([np.asarray(line["histogram"]) / max(sum(line["histogram"]), 1) for line in history]).T
    ends = (0.5, len(history) + 0.5, 0.0, 1.0)
    image = axes.imshow(np.sqrt(table), origin="lower", aspect="auto", extent=ends, cmap=HEAT, vmin=0, vmax=1)
    bar = figure.colorbar(image, ax=axes, label=share, ticks=np.sqrt([0, 0.05, 0.25, 0.5, 1]))
    bar.ax.set_yticklabels(["0", "5 %", "25 %", "50 %", "100 %"])
    axes.set_xlabel("epochs of gates")
    axes.set_ylabel(what)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _leaving(study: Study) -> Picture:
    """The same of exits: P(leave) over the epochs, and at the end exit by exit, with its threshold."""
    history, found = study["log"]["histograms"], study["leaving"]
    both = len(history) > 1
    figure, axes = _new(6.0 if both else 2.6, 3 if both else 1)
    lower = axes[2] if both else axes
    if both:
        _heat_of_epochs(figure, axes[0], history, "P(leave)", "share, all exits")
        shares = [(float(epoch), _polarised_share(line["histogram"])) for epoch, line in enumerate(history, 1)]
        _polarised_over_epochs(axes[1], shares)
    rows = zip(found["exits"], found["taus"], found["used"], found["counts"], strict=True)
    for number, (name, tau, used, counts) in enumerate(rows):
        color, dashes = SERIES[number % len(SERIES)], ("-", "--", "-.", ":")[number % 4]
        edges = np.linspace(0, 1, len(counts) + 1)
        shares = np.asarray(counts) / max(sum(counts), 1)
        label = _named(name) + ("" if used else OUT)
        lower.stairs(shares, edges, color=color, linestyle=dashes, linewidth=1.6, label=label)
        if used and 0 <= tau <= 1:
            lower.plot([tau, tau], [0, 1], color=color, linestyle=dashes, linewidth=0.8)
    lower.set_ylim(0, 1.02)
    lower.set_xlabel("P(leave), at the end")
    lower.set_ylabel("share of images")
    lower.yaxis.set_major_formatter(_percent)
    _legend(figure, lower)
    over_epochs = "above, on the last training images of each epoch; below, " if both else ""
    polarised = _polarised_share([sum(column) for column in zip(*found["counts"], strict=True)])
    caption = (
        f"How sure the exits' gates are: {over_epochs}at the end, on {sum(found['counts'][0]):,} images wherever they "
        f"leave: {polarised:.0%} are polarised, p below 5 % or above 95 %. Upright lines: the thresholds, above which "
        "images leave."
    )
    return Picture("polarisation", caption, figure, ("log", "leaving"))


def layers(study: Study) -> Picture | None:
    """Where the MACs went, layer by layer."""
    rows = study.get("layers")
    if not rows:
        return None
    figure, axes = _new(3.2)
    places = np.arange(len(rows))
    unit, scale = _unit(max(max(row["dense"], row["after"]) for row in rows))
    axes.bar(places, [row["dense"] / scale for row in rows], color=QUIET, alpha=0.45, width=0.85, label="before")
    axes.bar(places, [row["after"] / scale for row in rows], color=SERIES[0], width=0.55, label="after")
    axes.set_xticks(*_named_layers([row["name"] for row in rows]), rotation=90, fontsize=8)
    axes.set_ylabel(f"{unit} an image")
    _legend(figure, axes, "outside upper right")
    return Picture(
        "layers", "Where the MACs went, layer by layer: before, and after (the mean over images).", figure, ("layers",)
    )


def _named_layers(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Places and labels: of all layers if there are few, else of those where a stage begins and there is room."""
    if len(names) <= NAMED_LAYERS:
        return list(range(len(names))), list(names)
    for depth in (1, 2, 3):  # as many parts of the name as tell some stages apart
        stages = [".".join(name.split(".")[:depth]) for name in names]
        firsts = [n for n, stage in enumerate(stages) if n == 0 or stage != stages[n - 1]]
        if len(firsts) >= 4:
            break
    apart = -(-len(names) // STAGES)
    kept: list[int] = []
    for first in firsts:
        if not kept or first - kept[-1] >= apart:
            kept.append(first)
    return kept, [stages[n] for n in kept]


def trade_off(studies: Sequence[Study], published: Sequence[Published] = ()) -> Picture | None:
    """Accuracy against MACs: the runs, what tau does to them where their gates were kept, and what others have
    published."""
    if not any(_has_ended(study) for study in studies):
        return None
    with _style():
        return _trade_off(studies, published)


def _trade_off(studies: Sequence[Study], published: Sequence[Published]) -> Picture:
    figure, axes = _new(3.6)
    joined = _over_targets(studies)
    for number, ends in enumerate(joined):
        axes.plot(*_columns(ends), color=INK, linewidth=0.9, linestyle="--", gid=f"targets-{number}")
    for number, study in enumerate(studies):
        if not _has_ended(study):
            continue
        color, sign = SERIES[number % len(SERIES)], SIGNS[number % len(SIGNS)]
        shown = [(point["macs_fraction"], 100 * point["accuracy"]) for point in study.get("sweep", ())]
        axes.plot(*_columns(shown), color=color, linewidth=1.0, alpha=0.7)
        for place, (x, y) in enumerate(shown):
            axes.plot([x], [y], sign, color=color, markersize=4, gid=f"tau-{number}-{place}")
        at = _end(study)
        axes.plot(*[[value] for value in at], sign, color=color, markersize=11, label=_named(study["name"]))
        dense = 100 * study["result"]["accuracy"]["dense"]
        axes.plot([1.0], [dense], "D", color=color, markersize=4, fillstyle="none")
    for each in published:
        sign, fill = "s" if each.conditional else "^", "none" if each.measured_here else "full"
        axes.plot([each.macs_fraction], [each.accuracy], sign, color=QUIET, markersize=5, fillstyle=fill)
    axes.set_xlabel("MACs, of the dense network's")
    axes.set_ylabel("accuracy, %")
    axes.xaxis.set_major_formatter(_percent)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], _floor(studies, published)))
    _legend(figure, axes)
    if published:
        _number_(figure, axes, published)
    return Picture("trade_off", _told(studies, joined, published), figure, ("sweep", "result"))


def _told(studies: Sequence[Study], joined: Sequence[Any], published: Sequence[Published]) -> str:
    """What each kind of sign and line is, of those that are there."""
    parts = ["Accuracy against MACs. Large signs: the runs"]
    if any(study.get("sweep") for study in studies):
        parts.append("small ones: their gated networks over tau")
    parts.append("diamonds: dense")
    if joined:
        parts.append("dashed: one recipe at several targets (the mean of runs at the same one)")
    caption = "; ".join(parts) + "."
    if published:
        kinds = {False: "full: published by others", True: "hollow: measured for this package"}
        there = [told for here, told in kinds.items() if any(each.measured_here is here for each in published)]
        caption += f" Grey, by number (triangles pruned, squares conditional), {'; '.join(there)}."
    return caption


def _number_(figure: Any, axes: Any, published: Sequence[Published]) -> None:
    """Numbers beside published points: one label for those that lie on each other, each where it covers nothing."""
    figure.draw_without_rendering()  # only now is it known where things are
    to_points = 72 / figure.dpi
    places = [axes.transData.transform((each.macs_fraction, each.accuracy)) * to_points for each in published]
    taken = [
        _box(axes.transData.transform(at) * to_points, line.get_markersize(), line.get_markersize())
        for line in axes.lines
        if line.get_marker() != "None"
        for at in line.get_xydata()
    ]
    inside = axes.bbox.extents * to_points
    for group in _lying_on_each_other(places):
        text = _ranges([number + 1 for number in group])
        offset, far = _free_place(places[group[0]], LETTER_POINTS * len(text), taken, inside)
        taken.append(_box(places[group[0]] + offset, LETTER_POINTS * len(text), LINE_POINTS))
        first = published[group[0]]
        line = {"arrowstyle": "-", "color": QUIET, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2} if far else None
        axes.annotate(
            text, (first.macs_fraction, first.accuracy), xytext=tuple(offset), textcoords="offset points", color=QUIET,
            fontsize=8, ha="center", va="center", arrowprops=line,
        )  # fmt: skip


def _lying_on_each_other(places: Sequence[Any]) -> list[list[int]]:
    groups: list[list[int]] = []
    for number, here in enumerate(places):
        near = [group for group in groups if any(np.linalg.norm(here - places[other]) < NEAR for other in group)]
        groups = [group for group in groups if group not in near] + [[*(n for group in near for n in group), number]]
    return [sorted(group) for group in groups]


def _free_place(here: Any, width: float, taken: Sequence[Any], inside: Any) -> tuple[Any, bool]:
    """Where a label of this width goes, seen from its point: the nearest place that is free; and whether that is far.
    Where none is, beside the point all the same."""
    for distance in AWAY:
        for direction in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            offset = np.array(direction) * (distance + np.array([width, LINE_POINTS]) / 2)
            left, low, right, high = _box(here + offset, width, LINE_POINTS)
            free = all(left >= r or right <= x or low >= t or high <= b for x, b, r, t in taken)
            if free and left >= inside[0] and low >= inside[1] and right <= inside[2] and high <= inside[3]:
                return offset, distance != AWAY[0]
    return np.array([-AWAY[0] - width / 2, 0.0]), False


def _box(middle: Any, width: float, height: float) -> tuple[float, float, float, float]:
    x, y = middle
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 5 as "1–3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _over_targets(studies: Sequence[Study]) -> list[list[tuple[float, float]]]:
    """The ends of runs that differ in nothing but their target and seed, in the order of their MACs: the mean of those
    of one target. One target alone is no curve."""
    groups: dict[tuple[str, str], dict[float, list[tuple[float, float]]]] = {}
    for study in studies:
        if _has_ended(study):
            of_series = groups.setdefault((study["data"], study["series"]), {})
            of_series.setdefault(study["asked"], []).append(_end(study))
    means = [[np.mean(ends, 0).tolist() for ends in targets.values()] for targets in groups.values()]
    return [sorted((macs, accuracy) for macs, accuracy in ends) for ends in means if len(ends) > 1]


def _has_ended(study: Study) -> bool:
    """Whether a run has come to a network that costs less than the dense one."""
    return bool(study.get("result")) and last_network(study["result"]) != "dense"


def _end(study: Study) -> tuple[float, float]:
    """Where a run has ended: its share of the MACs, and its accuracy in per cent."""
    last = last_network(study["result"])
    return study["result"]["macs_fraction"][last], 100 * study["result"]["accuracy"][last]


def _floor(studies: Sequence[Study], published: Sequence[Published]) -> float:
    """The lowest accuracy worth showing: a tau at which nothing is left says little, and flattens the rest."""
    ends = [_end(study)[1] for study in studies if _has_ended(study)]
    return min([*ends, *(each.accuracy for each in published)]) - 12


def last_network(result: Mapping[str, Any]) -> str:
    """What a run ends with, as its result calls it."""
    return next(name for name in ("cascade", "conditional", "shrunk", "dense") if name in result["accuracy"])


def _named(name: str) -> str:
    """As a legend shows it: matplotlib leaves out what begins with an underscore."""
    return f" {name}" if name.startswith("_") else name


def _legend(figure: Any, axes: Any, place: str = "outside lower center", most: int = 2) -> None:
    """A legend beside the axes, in as many columns as its longest name leaves room for."""
    handles, labels = axes.get_legend_handles_labels()
    room = int(ROOM // (max(len(label) for label in labels) + 6))
    figure.legend(handles, labels, loc=place, ncols=max(1, min(most, room, len(labels))))


def latency(study: Study) -> Picture | None:
    """Milliseconds, before and after."""
    rows = study.get("latency")
    if not rows:
        return None
    figure, axes = _new(0.9 + 0.62 * len(rows))
    places = np.arange(len(rows))[::-1]
    each = [(row["dense_ms"] / row["batch"], row["small_ms"] / row["batch"]) for row in rows]
    axes.barh(places + 0.19, [dense for dense, _ in each], 0.36, color=QUIET, alpha=0.6, label="dense")
    axes.barh(places - 0.19, [small for _, small in each], 0.36, color=SERIES[0], label="after")
    for place, row, (dense, small) in zip(places, rows, each, strict=True):
        axes.text(max(dense, small), place, f"  {row['speed_up']:.2f}×", va="center")
    axes.set_yticks(places, [f"{row['engine']}\nbatch {row['batch']}" for row in rows])
    axes.set_xlim(right=1.18 * max(max(pair) for pair in each))
    axes.set_xlabel("milliseconds an image")
    _legend(figure, axes, "outside upper right")
    return Picture(
        "latency", f"Milliseconds an image, interleaved; threads: {rows[0]['threads']}.", figure, ("latency",)
    )


def heatmap(study: Study) -> Picture | None:
    """Which gates open for which classes."""
    found = study.get("classes")
    if not found or not found["gates"]:
        return None
    gates = len(found["gates"])
    figure, axes = _new(min(1.6 + 0.13 * max(gates, 8), 10.0))
    image = axes.imshow(found["rates"], aspect="auto", cmap=HEAT, vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks(range(len(found["classes"])), found["classes"], rotation=90)
    if gates <= NAMED_GATES:
        axes.set_yticks(range(gates), found["gates"], fontsize=7)
    else:
        deciding = found["numbers"]["deciding_gates"]
        which = f"all {gates} gates" if gates == deciding else f"the {gates} most telling of {deciding} gates"
        axes.set_ylabel(f"{which} that decide")
        axes.set_yticks([])
    bar = figure.colorbar(image, ax=axes, label="open for", format=_percent)
    bar.outline.set_visible(False)
    return Picture(
        "classes", "Which gates open for which classes, ordered so that specialisation shows.", figure, ("classes",)
    )


def exits(study: Study) -> Picture | None:
    """Who leaves where, and how right the answers are."""
    found = study.get("exits")
    if not found:
        return None
    rows = found["rows"]
    names = [row["name"] for row in rows]
    longest = max(map(len, names)) * LETTER_POINTS
    crowded = longest * len(names) > POINTS_ACROSS
    figure, (upper, lower) = _new(4.2 + (longest / 72 if crowded else 0), 2, sharex=True)
    places = np.arange(len(rows))
    upper.bar(places, [row["share"] for row in rows], color=SERIES[0], width=0.6)
    for place, row in zip(places, rows, strict=True):
        upper.text(place, row["share"], f"{row['share']:.1%}", ha="center", va="bottom")
    upper.set_ylim(0, 1.15 * max(row["share"] for row in rows))
    upper.set_ylabel("images leaving")
    upper.yaxis.set_major_formatter(_percent)
    chosen = [(float(place), row["accuracy_of_selected"]) for place, row in enumerate(rows) if row["share"]]
    lower.plot(places, [row["accuracy_of_all"] for row in rows], "o--", color=QUIET, label="all images, at this exit")
    lower.plot(*_columns(chosen), "o-", color=SERIES[1], label="those that leave here")
    lower.axhline(found["accuracy"], color=SERIES[0], linewidth=1, label="the cascade")
    lower.set_ylabel("accuracy")
    lower.yaxis.set_major_formatter(_percent)
    lower.set_xticks(places, names, rotation=90 if crowded else 0)
    lower.set_xlim(-0.6, len(rows) - 0.4)
    _legend(figure, lower)
    return Picture("exits", "Who leaves where, and how right the answers are.", figure, ("exits",))


def exits_by_class(study: Study) -> Picture | None:
    """Where images of each class leave."""
    found = study.get("exits_by_class")
    if not found:
        return None
    figure, axes = _new(2.8)
    shares = np.asarray(found["shares"])
    order = np.argsort(-shares[0], kind="stable")
    named = len(order) <= NAMED_CLASSES
    below = np.zeros(len(order))
    for number, name in enumerate(found["exits"]):
        color = SERIES[number % len(SERIES)]
        axes.bar(range(len(order)), shares[number][order], bottom=below, color=color, width=0.8, label=_named(name))
        below = below + shares[number][order]
    axes.set_xticks(
        range(len(order)) if named else [], [found["classes"][n] for n in order] if named else [], rotation=90
    )
    axes.set_xlabel("" if named else f"{len(order)} classes")
    axes.yaxis.set_major_formatter(_percent)
    _legend(figure, axes, "outside upper center", len(found["exits"]))
    return Picture("exits_by_class", "At which exit the images of each class leave.", figure, ("exits_by_class",))


def image_macs(study: Study) -> Picture | None:
    """How the cost differs from image to image."""
    quantiles = study.get("image_macs")
    if not quantiles:
        return None
    figure, axes = _new(2.4)
    dense = study["result"]["macs"]["dense"]
    axes.plot(np.linspace(0, 1, len(quantiles)), np.asarray(quantiles) / dense, color=SERIES[0])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("images, from the cheapest to the dearest")
    axes.set_ylabel("MACs of dense")
    axes.xaxis.set_major_formatter(_percent)
    axes.yaxis.set_major_formatter(_percent)
    return Picture("image_macs", "What an image costs, from the cheapest to the dearest.", figure, ("image_macs",))


OF_A_RUN: tuple[Callable[[Study], Picture | None], ...] = (
    training, polarisation, layers, latency, exits, exits_by_class, heatmap, image_macs,
)  # fmt: skip


def pictures_of(study: Study) -> list[Picture]:
    """Every figure there is of a run."""
    with _style():
        return [made for draw in OF_A_RUN if (made := draw(study)) is not None]


# ------------------------------------------------------------------------------------------------------- giving


def svg(picture: Picture, prefix: str, of: str = "") -> str:
    """A figure as a part of a page: its colours are the page's, its names are its own; `of` says whose it is."""
    text = _rendered(picture, "svg").decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r"font(-family)?: ([0-9.]+px )?[^;\"]*sans-serif", r"font\1: \2system-ui, sans-serif", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?[0-9]+\.[0-9]{3,}", _short, tag[0]), text)
    size = re.search(r'width="([0-9.]+)pt" height="([0-9.]+)pt"', text)
    assert size is not None, "matplotlib gives its figures a size in points"
    label = (
        f"{of}{': ' if of else ''}{picture.caption}".replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    )
    return text.replace(size[0], f'role="img" aria-label="{label}" style="max-width:{float(size[1]) * 1.6:.0f}px"', 1)


def write(pictures: Sequence[Picture], folder: Path, prefix: str = "") -> list[Path]:
    """Each figure as SVG and as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures:
        for kind in ("svg", "png"):
            path = folder / f"{prefix}{picture.name}.{kind}"
            path.write_bytes(_rendered(picture, kind, facecolor="white"))
            paths.append(path)
    return paths


def _rendered(picture: Picture, kind: str, facecolor: str = "none") -> bytes:
    file = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with _style():
        picture.figure.savefig(file, format=kind, dpi=160, metadata=metadata, facecolor=facecolor)
    return file.getvalue()


def _percent(value: float, place: object = None) -> str:
    return f"{100 * value:.0f} %" if abs(100 * value - round(100 * value)) < 0.05 else f"{100 * value:.1f} %"


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Where a value of the log was a number, and which."""
    return [(line["at"], line[name]) for line in lines if isinstance(line.get(name), (int, float))]


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _unit(most: float) -> tuple[str, float]:
    for unit, scale in (("GMACs", 1e9), ("MMACs", 1e6), ("kMACs", 1e3)):
        if most >= scale:
            return unit, scale
    return "MACs", 1.0
