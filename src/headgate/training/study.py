"""Everything that a report shows of a run, as plain data: gathered once, kept in the run's folder.

Reads the run's recipe, log and networks; looks at the images it was judged by: where the MACs went, what tau does to
accuracy, MACs and milliseconds, which gates open for which classes, which images are cheap and which are dear. Trains
nothing. Knows nothing of pages or plots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headgate.analysis.pictures import data_url, stretched
from headgate.analysis.records import plain, write_text
from headgate.analysis.specialisation import in_words, order, specialisation
from headgate.data.batches import Split
from headgate.data.sources import DataSet
from headgate.exits import ExitModel
from headgate.gated import GatedModel
from headgate.graph.macs import macs_by_layer
from headgate.graph.trace import tensors_in
from headgate.training.ask import TAUS, bench, movable, network, open_run, sweep_milliseconds
from headgate.training.journal import LOG_NAME, read_log
from headgate.training.loop import EVAL_BATCH
from headgate.training.prepare import Start
from headgate.training.recipe import Recipe
from headgate.training.run import NETWORKS, RESULT, recipe_in

FORMAT = "headgate-study-1"
FILE = "study.json"
EXAMPLES = 8
WORDS = 12
MOST_ROWS = 160
"""Gates in a heatmap: the most telling ones."""


@dataclass(frozen=True)
class Look:
    """How closely to look: images for everything but the run's own result, and rounds and batches of timings."""

    images: int = 2000
    rounds: int = 15
    batches: tuple[int, ...] = (1, 32)
    threads: int = 0


def study(folder: Path, look: Look | None = None, data_dir: str | None = None) -> dict[str, Any]:
    """What there is to show of a run; of one that has not come to its end, how far it is."""
    look = look or Look()
    recipe = recipe_in(folder)
    finished = (folder / RESULT).is_file()
    state = _state(folder, look)
    kept = _kept(folder / FILE, state) if finished else None
    if kept is not None:
        return kept
    found: dict[str, Any] = {"format": FORMAT, "state": state, "name": folder.name, "recipe": _changed(recipe)}
    found |= {
        "model": recipe.model.rpartition("/")[2],
        "data": recipe.data,
        "target": recipe.target,
        "kind": _kind(recipe),
    }
    found["log"] = _log(folder)
    found["result"] = json.loads((folder / RESULT).read_text(encoding="utf-8")) if finished else None
    if finished:
        found |= _looked(folder, look, data_dir)
        write_text(folder / FILE, json.dumps(found, allow_nan=False) + "\n")
    return found


def _kind(recipe: Recipe) -> str:
    return "exits" if recipe.exits else recipe.kind


def _changed(recipe: Recipe) -> dict[str, Any]:
    """The fields that are not as they are by default, and no paths."""
    default = Recipe().to_json()
    changed = {name: value for name, value in recipe.to_json().items() if value != default[name]}
    for name in ("weights", "data_dir", "teacher"):
        if isinstance(changed.get(name), str):
            changed[name] = Path(changed[name]).name
    return changed


def _state(folder: Path, look: Look) -> dict[str, Any]:
    """What a study depends on: another state, another study."""
    files = [folder / RESULT, *(folder / file for file in NETWORKS.values())]
    found = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()}
    return {"files": found, "look": plain(asdict(look))}


def _kept(path: Path, state: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    fits = isinstance(found, dict) and found.get("format") == FORMAT and found.get("state") == state
    return found if fits else None


# ------------------------------------------------------------------------------------------------------- the log


def _log(folder: Path) -> dict[str, Any]:
    """Curves over the epochs of all phases, one after the other."""
    if not (folder / LOG_NAME).is_file():
        return {"steps": [], "epochs": [], "histograms": []}
    lines = read_log(folder / LOG_NAME)
    sizes: dict[str, int] = {}
    for line in lines:  # steps of an epoch, phase by phase
        if line["kind"] == "epoch" and line["epoch"]:
            sizes[line["phase"]] = line["step"] // line["epoch"]
    ends = {line["phase"]: line["epoch"] for line in lines if line["kind"] == "epoch"}
    offsets, before = {}, 0
    for phase, epochs in ends.items():
        offsets[phase] = before
        before += epochs

    def at(line: dict[str, Any]) -> float | None:
        phase = line["phase"]
        return offsets[phase] + line["step"] / sizes[phase] if phase in sizes else None

    curves: dict[str, list[dict[str, Any]]] = {"steps": [], "epochs": [], "histograms": []}
    for line in lines:
        place = at(line)
        if place is None:
            continue
        values = {
            name: value for name, value in line.items() if name not in ("time", "kind", "step") and value is not None
        } | {"at": round(place, 4)}  # fmt: skip
        where = {"step": "steps", "epoch": "epochs", "gates": "histograms"}.get(line["kind"])
        if where is not None:
            curves[where].append(values)
    return curves


# ------------------------------------------------------------------------------------------------- the networks


def _looked(folder: Path, look: Look, data_dir: str | None) -> dict[str, Any]:
    start, data = open_run(folder, data_dir)
    part = _Part(data.test, look.images)
    moved = movable(folder, start).cpu()
    found: dict[str, Any] = {"class_names": list(data.class_names), "images": len(part)}
    found["histogram"] = None if isinstance(moved, ExitModel) or moved.dynamic is not None else moved.histogram()
    if isinstance(moved, ExitModel):
        found |= _exits(moved, part, data, start)
    else:
        found |= _channels(folder, moved, part, data, start)
    points = moved.sweep_tau(part, TAUS)
    timings = sweep_milliseconds(moved, data.test, rounds=max(1, look.rounds // 3))
    found["sweep"] = [asdict(point) | {"milliseconds": timings[point.tau].as_record()} for point in points]
    found["latency"] = bench(folder, look.batches, look.threads, look.rounds, data_dir)
    result: dict[str, Any] = plain(found)
    return result


@dataclass(frozen=True)
class _Part:
    """The first images of a split, as often as they are asked for; 0: all of them."""

    split: Split
    images: int

    def __len__(self) -> int:
        return min(len(self.split), self.images or len(self.split))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        left = len(self)
        for images, labels in self.split.eval_batches(EVAL_BATCH):
            yield images[:left], labels[:left]
            left -= len(labels)
            if left <= 0:
                return


def _layers(dense: dict[str, int], after: dict[str, float]) -> list[dict[str, Any]]:
    names = [*dense, *(name for name in after if name not in dense)]
    return [{"name": name, "dense": dense.get(name, 0), "after": after.get(name, 0)} for name in names]


@torch.no_grad()
def _channels(folder: Path, gated: GatedModel, part: _Part, data: DataSet, start: Start) -> dict[str, Any]:
    dense = macs_by_layer(network(folder, "dense", start), start.example)
    if gated.dynamic is None:
        small: nn.Module = network(folder, "shrunk", start)
        return {"layers": _layers(dense, dict(macs_by_layer(small, start.example)))}
    rows: list[dict[str, Any]] = []
    opened, layers = [], dict.fromkeys(dense, 0.0)
    histogram = np.zeros(20, dtype=np.int64)
    gated.eval()
    for images, labels in part:
        answers = tensors_in(gated(images))[0].argmax(1)
        pass_seen = gated.seen()
        opened.append(pass_seen.gates_BG.expand(len(images), -1).numpy())
        histogram += gated.histogram()
        for name, macs in pass_seen.macs_by_layer.items():
            layers[name] = layers.get(name, 0.0) + macs * len(images) / len(part)
        for label, answer, macs in zip(labels, answers, pass_seen.macs_B.expand(len(images)), strict=True):
            rows.append({"label": int(label), "answer": int(answer), "macs": float(macs)})
    names = [f"{mask.name}[{number}]" for mask in gated.graph.masks for number in range(mask.size)]
    labels_N = np.array([row["label"] for row in rows])
    by_macs = np.argsort([row["macs"] for row in rows], kind="stable")
    return {
        "layers": _layers(dense, layers),
        "histogram": histogram,
        "classes": _classes(np.concatenate(opened), labels_N, names, data.class_names),
        "image_macs": _quantiles([row["macs"] for row in rows]),
        "examples": {
            "few channels": _examples(data.test, by_macs[:EXAMPLES], rows),
            "many channels": _examples(data.test, by_macs[::-1][:EXAMPLES], rows),
        },
    }


def _classes(
    open_NG: np.ndarray, labels_N: np.ndarray, gate_names: Sequence[str], class_names: Sequence[str]
) -> dict[str, Any]:  # fmt: skip
    """The heatmap: the most telling gates, in an order in which it shows."""
    found = specialisation(open_NG, labels_N, len(class_names))
    telling = np.flatnonzero(found.deciding_G)
    telling = np.sort(telling[np.argsort(-found.bits_G[telling], kind="stable")[:MOST_ROWS]])
    record = {"numbers": found.as_record(), "rates": [], "gates": [], "classes": list(class_names), "words": []}
    if not len(telling):
        return record
    gates, classes = order(found.rates_GC[telling])
    names = [gate_names[int(number)] for number in telling]
    words = in_words(found.rates_GC[telling], found.bits_G[telling], names, class_names)
    return record | {
        "rates": np.round(found.rates_GC[telling][gates][:, classes], 3),
        "gates": [names[int(number)] for number in gates],
        "classes": [class_names[int(number)] for number in classes],
        "words": words[:WORDS],
    }


def _exits(exits: ExitModel, part: _Part, data: DataSet, start: Start) -> dict[str, Any]:
    watched = exits.watch(part)
    labels_N = np.concatenate([labels.numpy() for _, labels in part])
    taken_N = exits.exit_of(watched).numpy()
    macs_N = exits.macs_of(watched).numpy()
    shares = np.zeros((len(exits.names), data.classes))
    np.add.at(shares, (taken_N, labels_N), 1.0)
    shares /= np.maximum(np.bincount(labels_N, minlength=data.classes), 1)
    right_N = watched.right_NK.numpy()[np.arange(len(taken_N)), taken_N]
    rows = [
        {"label": int(label), "answer": int(label) if right else None, "macs": float(macs), "exit": exits.names[taken]}
        for label, right, macs, taken in zip(labels_N, right_N, macs_N, taken_N, strict=True)
    ]
    sure_N = watched.p_NK[:, 0].numpy()
    early = np.argsort(-sure_N, kind="stable")
    late = np.argsort(watched.p_NK.max(1).values.numpy(), kind="stable")
    table = exits.table_of(watched)
    reach = [sum(row.share for row in table.rows[number:]) for number in range(len(table.rows))]
    segments = exits.segment_macs()
    return {
        "exits": asdict(table),
        "exits_by_class": {"exits": list(exits.names), "classes": list(data.class_names), "shares": shares},
        "layers": [
            {"name": f"to {name}", "dense": macs, "after": macs * share}
            for name, macs, share in zip(exits.names, segments, reach, strict=True)
        ],
        "image_macs": _quantiles(macs_N),
        "examples": {
            "leave first": _examples(data.test, early[:EXAMPLES], rows),
            "stay longest": _examples(data.test, late[:EXAMPLES], rows),
        },
    }


def _quantiles(macs: Sequence[float] | np.ndarray) -> np.ndarray:
    """What the cheapest image takes, the next per cent, and so on to the dearest."""
    return np.round(np.quantile(np.asarray(macs, dtype=np.float64), np.linspace(0, 1, 101)))


def _examples(split: Split, numbers: np.ndarray, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some images with what became of them."""
    wanted = {int(number) for number in numbers}
    pictures, first = {}, 0
    for images, _ in split.eval_batches(EVAL_BATCH):
        for number in wanted:
            if first <= number < first + len(images):
                pictures[number] = data_url(stretched(images[number - first].numpy()))
        first += len(images)
        if len(pictures) == len(wanted):
            break
    return [rows[int(number)] | {"number": int(number), "picture": pictures[int(number)]} for number in numbers]
