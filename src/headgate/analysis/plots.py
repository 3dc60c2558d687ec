"""Figures of a run: from plain data to matplotlib figures, and from those to files and to what a page can carry.

Every figure is a function from a study (see `training/study.py`) to a `Figure`, or None where a run has nothing of the
kind. Colours are told apart by the colour-blind (Okabe and Ito's), and in a page they are variables, so that light and
dark follow the reader. Knows nothing of torch.
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

INK, QUIET = "#1a1d21", "#8a9099"
SERIES = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
"""Okabe and Ito's colours, in an order in which neighbours differ most."""
VARIABLES = {INK: "--ink", QUIET: "--quiet", **{color: f"--series-{n}" for n, color in enumerate(SERIES)}}
HEAT = "cividis"
WIDTH = 4.6
"""Inches: narrow enough to be read on a phone without zooming."""
STYLE = {
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "font.size": 9.0, "axes.titlesize": 9.0, "axes.labelsize": 9.0, "legend.fontsize": 8.0,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": QUIET, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.labelcolor": INK,
    "svg.fonttype": "none", "svg.hashsalt": "headgate", "lines.linewidth": 1.6,
}  # fmt: skip
NAMED_LAYERS = 24
"""More layers than that, and only where a stage begins is named."""


@dataclass(frozen=True)
class Picture:
    """A figure with its name (for files), its caption, and the parts of the study that it shows."""

    name: str
    caption: str
    figure: Any
    shows: tuple[str, ...]


# ----------------------------------------------------------------------------------------------------- drawing


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise HeadgateError("figures need matplotlib: pip install 'headgate[report]'") from error
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
    for axes, name, color in ((upper, "loss", SERIES[0]),):
        points = [(line["at"], line[name]) for line in steps or epochs if _number(line.get(name))]
        axes.plot(*_columns(points), color=color, linewidth=1.0, alpha=0.45)
        means = [(line["at"], line[name]) for line in epochs if _number(line.get(name))]
        axes.plot(*_columns(means), color=color, marker="o", markersize=3)
        axes.set_ylabel("task loss")
        axes.set_ylim(0, 1.08 * max(y for _, y in points + means))
    curves = {
        "accuracy": ("accuracy, training images", SERIES[0], "-"),
        "validation_accuracy": ("accuracy, held-out images", SERIES[2], "-"),
        "cost": ("MACs, sampled gates", SERIES[3], "-"),
        "cost_decided": ("MACs, thresholded gates", SERIES[1], "--"),
        "goal": ("target of the moment", QUIET, ":"),
    }
    for name, (label, color, line_style) in curves.items():
        lines = steps if name in ("cost", "goal") and steps else epochs
        points = [(line["at"], line[name]) for line in lines if _number(line.get(name))]
        if points:
            marker = "o" if lines is epochs else None
            lower.plot(*_columns(points), line_style, color=color, label=label, marker=marker, markersize=3)
    lower.set_ylim(0, 1.05)
    lower.set_xlim(0, epochs[-1]["at"] * 1.02)
    lower.xaxis.get_major_locator().set_params(integer=True)
    lower.set_xlabel("epochs")
    lower.set_ylabel("share")
    lower.yaxis.set_major_formatter(_percent)
    figure.legend(*lower.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    _phases((upper, lower), epochs)
    return Picture("training", "Loss, accuracy and cost over the epochs of all phases.", figure, ("log",))


def _phases(both: Sequence[Any], epochs: Sequence[Mapping[str, Any]]) -> None:
    """Lines between the phases, and their names on top."""
    first, start = 0.0, epochs[0]["phase"]
    for number, line in enumerate(epochs):
        last = number == len(epochs) - 1
        if last or epochs[number + 1]["phase"] != start:
            both[0].text((first + line["at"]) / 2, 1.02, start, ha="center", transform=both[0].get_xaxis_transform())
            if not last:
                for axes in both:
                    axes.axvline(line["at"], color=QUIET, linewidth=0.8)
                first, start = line["at"], epochs[number + 1]["phase"]


def polarisation(study: Study) -> Picture | None:
    """How sure the gates are: p over the epochs, and the share that is polarised."""
    history, final = study["log"]["histograms"], study.get("histogram")
    shares = [(line["at"], line["polarised"]) for line in study["log"]["epochs"] if _number(line.get("polarised"))]
    if not history and not final:
        return None
    figure, axes = _new(4.0 if shares else 2.4, 2 if shares else 1)
    upper = axes[0] if shares else axes
    if history and len(history) > 1:
        table = np.array([np.asarray(line["histogram"]) / max(sum(line["histogram"]), 1) for line in history]).T
        ends = (0.5, len(history) + 0.5, 0.0, 1.0)
        image = upper.imshow(np.sqrt(table), origin="lower", aspect="auto", extent=ends, cmap=HEAT, vmin=0, vmax=1)
        bar = figure.colorbar(image, ax=upper, label="share of gates", ticks=np.sqrt([0, 0.05, 0.25, 0.5, 1]))
        bar.ax.set_yticklabels(["0", "5 %", "25 %", "50 %", "100 %"])
        upper.set_xlabel("epochs of gates")
        upper.set_ylabel("p(open)")
        upper.xaxis.get_major_locator().set_params(integer=True)
    else:
        counts = np.asarray(final if final else history[0]["histogram"], dtype=np.float64)
        edges = np.linspace(0, 1, len(counts) + 1)
        upper.bar(edges[:-1], counts / counts.sum(), width=np.diff(edges), align="edge", color=SERIES[0])
        upper.set_xlabel("p(open)")
        upper.set_ylabel("share of gates")
        upper.yaxis.set_major_formatter(_percent)
    if shares:
        axes[1].plot(*_columns(shares), color=SERIES[0], marker="o", markersize=3)
        axes[1].set_ylim(0, 1.05)
        axes[1].yaxis.set_major_formatter(_percent)
        axes[1].set_ylabel("polarised")
        axes[1].set_xlabel("epochs")
        axes[1].xaxis.get_major_locator().set_params(integer=True)
    return Picture(
        "polarisation",
        "How sure the gates are: polarised means p below 5 % or above 95 %.",
        figure,
        ("log", "histogram"),
    )


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
    names = [row["name"] for row in rows]
    if len(names) > NAMED_LAYERS:
        firsts = [n for n, name in enumerate(names) if n == 0 or _stage(name) != _stage(names[n - 1])]
        ticks, labels = firsts, [_stage(names[n]) for n in firsts]
    else:
        ticks, labels = list(places), names
    axes.set_xticks(ticks, labels, rotation=90, fontsize=7)
    axes.set_ylabel(f"{unit} an image")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return Picture(
        "layers", "Where the MACs went, layer by layer: before, and after (the mean over images).", figure, ("layers",)
    )


def _stage(name: str) -> str:
    return name.split(".")[0]


def trade_off(studies: Sequence[Study], published: Sequence[Published] = ()) -> Picture | None:
    """Accuracy against MACs: the runs, what tau does to them, and what others have published."""
    if not any(study.get("result") for study in studies):
        return None
    with _style():
        return _trade_off(studies, published)


def _trade_off(studies: Sequence[Study], published: Sequence[Published]) -> Picture:
    figure, axes = _new(3.6)
    for number, study in enumerate(studies):
        if not study.get("result"):
            continue
        color = SERIES[number % len(SERIES)]
        result, sweep = study["result"], study["sweep"]
        shown = [(point["macs_fraction"], 100 * point["accuracy"]) for point in sweep]
        axes.plot(*_columns(shown), color=color, linewidth=1.0, alpha=0.7)
        for place, (x, y) in enumerate(shown):
            axes.plot([x], [y], "o", color=color, markersize=3.5, gid=f"tau-{number}-{place}")
        last = _last(study)
        at = result["macs_fraction"][last], 100 * result["accuracy"][last]
        axes.plot(*[[value] for value in at], "*", color=color, markersize=12, label=study["name"])
        axes.plot([1.0], [100 * result["accuracy"]["dense"]], "D", color=color, markersize=4, fillstyle="none")
    for number, each in enumerate(published):
        axes.plot([each.macs_fraction], [each.accuracy], "s" if each.conditional else "^", color=QUIET, markersize=5)
        axes.annotate(
            str(number + 1), (each.macs_fraction, each.accuracy), xytext=(-5, 4), textcoords="offset points",
            color=QUIET, fontsize=7, ha="right",
        )  # fmt: skip
    axes.set_xlabel("MACs, of the dense network's")
    axes.set_ylabel("accuracy, %")
    axes.xaxis.set_major_formatter(_percent)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], _floor(studies, published)))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    caption = "Accuracy against MACs. Stars: the runs; small points: their gated networks over tau; diamonds: dense."
    return Picture("trade_off", caption, figure, ("sweep", "result"))


def _floor(studies: Sequence[Study], published: Sequence[Published]) -> float:
    """The lowest accuracy worth showing: a tau at which nothing is left says little, and flattens the rest."""
    best = [100 * study["result"]["accuracy"][_last(study)] for study in studies if study.get("result")]
    return min([*best, *(each.accuracy for each in published)]) - 12


def _last(study: Study) -> str:
    """What a run ends with, as its result calls it."""
    return next(name for name in ("cascade", "conditional", "shrunk") if name in study["result"]["accuracy"])


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
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return Picture(
        "latency", f"Milliseconds an image, interleaved; threads: {rows[0]['threads']}.", figure, ("latency",)
    )


def heatmap(study: Study) -> Picture | None:
    """Which gates open for which classes."""
    found = study.get("classes")
    if not found or not found["gates"]:
        return None
    gates = len(found["gates"])
    figure, axes = _new(min(1.4 + 0.13 * max(gates, 8), 6.5))
    image = axes.imshow(found["rates"], aspect="auto", cmap=HEAT, vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks(range(len(found["classes"])), found["classes"], rotation=90)
    if gates <= 40:
        axes.set_yticks(range(gates), found["gates"], fontsize=6)
    else:
        axes.set_ylabel(f"{gates} gates")
        axes.set_yticks([])
    bar = figure.colorbar(image, ax=axes, label="open for this share of the class", format=_percent)
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
    figure, (upper, lower) = _new(4.2, 2, sharex=True)
    places = np.arange(len(rows))
    upper.bar(places, [row["share"] for row in rows], color=SERIES[0], width=0.6)
    for place, row in zip(places, rows, strict=True):
        upper.text(place, row["share"], f"{row['share']:.1%}", ha="center", va="bottom")
    upper.set_ylim(0, 1.15 * max(row["share"] for row in rows))
    upper.set_ylabel("images leaving")
    upper.yaxis.set_major_formatter(_percent)
    chosen = [(float(place), row["accuracy_of_selected"]) for place, row in enumerate(rows) if row["share"]]
    lower.plot(places, [row["accuracy_of_all"] for row in rows], "o--", color=QUIET, label="all images, at this exit")
    lower.plot(*_columns(chosen), "o-", color=SERIES[3], label="those that leave here")
    lower.axhline(found["accuracy"], color=SERIES[0], linewidth=1, label="the cascade")
    lower.set_ylabel("accuracy")
    lower.yaxis.set_major_formatter(_percent)
    lower.set_xticks(places, [row["name"] for row in rows])
    lower.set_xlim(-0.6, len(rows) - 0.4)
    figure.legend(*lower.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return Picture("exits", "Who leaves where, and how right the answers are.", figure, ("exits",))


def exits_by_class(study: Study) -> Picture | None:
    """Where images of each class leave."""
    found = study.get("exits_by_class")
    if not found:
        return None
    figure, axes = _new(2.8)
    shares = np.asarray(found["shares"])
    order = np.argsort(-shares[0], kind="stable")
    below = np.zeros(len(order))
    for number, name in enumerate(found["exits"]):
        color = SERIES[number % len(SERIES)]
        axes.bar(range(len(order)), shares[number][order], bottom=below, color=color, width=0.8, label=name)
        below = below + shares[number][order]
    axes.set_xticks(range(len(order)), [found["classes"][number] for number in order], rotation=90)
    axes.yaxis.set_major_formatter(_percent)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(found["exits"]))
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


def svg(picture: Picture, prefix: str) -> str:
    """A figure as a part of a page: its colours are the page's, its names are its own."""
    text = _rendered(picture, "svg").decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r"font(-family)?: ([0-9.]+px )?[^;\"]*sans-serif", r"font\1: \2system-ui, sans-serif", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    text = re.sub(r"-?[0-9]+\.[0-9]{3,}", lambda found: f"{float(found[0]):.2f}", text)
    size = re.search(r'width="([0-9.]+)pt" height="([0-9.]+)pt"', text)
    assert size is not None, "matplotlib gives its figures a size in points"
    label = picture.caption.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
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


def _number(value: object) -> bool:
    return isinstance(value, (int, float))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _unit(most: float) -> tuple[str, float]:
    for unit, scale in (("GMACs", 1e9), ("MMACs", 1e6), ("kMACs", 1e3)):
        if most >= scale:
            return unit, scale
    return "MACs", 1.0
