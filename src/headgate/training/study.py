"""Everything that a report shows of a run, as plain data: gathered once, kept in the run's folder.

Reads the run's recipe, log and networks; looks at the images it was judged by: where the MACs went, what tau does to
accuracy, MACs and milliseconds, which gates open for which classes, which images are cheap and which are dear. Trains
nothing. Knows nothing of pages or plots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headgate.analysis.measure import torch_threads
from headgate.analysis.pictures import data_url, stretched
from headgate.analysis.records import PACKAGES, cpu_model, plain, versions_of, write_text
from headgate.analysis.specialisation import in_words, order, specialisation
from headgate.data.batches import Part
from headgate.data.sources import DataSet
from headgate.errors import HeadgateError
from headgate.exits.cascade import ExitModel, Watched
from headgate.gated import GatedModel
from headgate.graph.macs import macs_by_layer
from headgate.graph.trace import tensors_in
from headgate.training.ask import TAUS, bench, movable, network, open_run, sweep_milliseconds
from headgate.training.journal import LOG_NAME, read_log
from headgate.training.loop import EVAL_BATCH
from headgate.training.prepare import Start
from headgate.training.recipe import Recipe
from headgate.training.repeat import commands, shown, without_folders
from headgate.training.run import NETWORKS, RESULT, recipe_in, result_in

FORMAT = "headgate-study-2"
FILE = "study.json"
EXAMPLES = 8
WORDS = 12
MOST_ROWS, MOST_CLASSES = 160, 40
"""In a heatmap: the most telling gates, the classes that differ most."""
MOST_STEPS = 400
CURVES = {"step": "steps", "epoch": "epochs", "gates": "histograms"}
"""Lines of the log by their kind, and what becomes of them."""


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
    name = {"name": folder.resolve().name}
    kept = _kept(folder / FILE, state) if finished else None
    if kept is not None:
        return kept | name
    result = result_in(folder) if finished else None
    found: dict[str, Any] = {"format": FORMAT, "state": state, "recipe": shown(recipe), "log": _log(folder), **name}
    found |= {"model": without_folders(recipe.model), "data": without_folders(recipe.data), "target": recipe.target}
    found |= {"kind": "exits" if recipe.exits else recipe.kind, "command": "\n".join(commands(recipe, result))}
    found["result"] = result and _shown_result(result)
    if finished:
        found |= _looked(folder, look, data_dir) if recipe.gate_epochs else {}
        with suppress(OSError):  # a folder that can't be written to is looked at again next time
            write_text(folder / FILE, json.dumps(found, allow_nan=False) + "\n")
    return found


def _shown_result(result: dict[str, Any]) -> dict[str, Any]:
    """A run's result without its recipe, which stands beside it; those it began with have theirs, without folders."""
    found = {name: value for name, value in result.items() if name != "recipe"}
    if "before" in found:
        found["before"] = _with_recipe(found["before"])
    if "averaged" in found:
        found["averaged"] = [_with_recipe(each) for each in found["averaged"]]
    return found


def _with_recipe(result: dict[str, Any]) -> dict[str, Any]:
    return {"recipe": shown(Recipe.from_json(result["recipe"])), **_shown_result(result)}


def _state(folder: Path, look: Look) -> dict[str, Any]:
    """What a study depends on: another state, another study. Milliseconds are of one machine."""
    files = [folder / RESULT, *(folder / file for file in NETWORKS.values())]
    found = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()}
    machine = {"cpu": cpu_model(), "headgate": versions_of(["headgate"])}
    return {"files": found, "look": plain(asdict(look)), "machine": machine}


def _kept(path: Path, state: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    fits = isinstance(found, dict) and found.get("format") == FORMAT and found.get("state") == state
    return found if fits else None


# ------------------------------------------------------------------------------------------------------- the log


def _log(folder: Path) -> dict[str, Any]:
    """Curves over the epochs of all phases, one after the other; of steps no more than can be seen."""
    curves: dict[str, list[dict[str, Any]]] = {"steps": [], "epochs": [], "histograms": []}
    if not (folder / LOG_NAME).is_file():
        return curves
    lines = [line for line in read_log(folder / LOG_NAME) if line.get("kind") in CURVES and line.get("epoch")]
    sizes: dict[str, float] = {}
    ends: dict[str, int] = {}
    for line in lines:  # steps of an epoch, phase by phase: exactly, once one has ended
        whole = line["step"] / line["epoch"]
        sizes[line["phase"]] = whole if line["kind"] == "epoch" else max(sizes.get(line["phase"], 0), whole)
        ends[line["phase"]] = line["epoch"]
    offsets, before = {}, 0
    for phase, epochs in ends.items():
        offsets[phase], before = before, before + epochs
    for line in lines:
        place = offsets[line["phase"]] + line["step"] / sizes[line["phase"]]
        values = {name: value for name, value in line.items() if name not in ("time", "kind", "step")}
        curves[CURVES[line["kind"]]].append(values | {"at": round(place, 4)})
    thin = -(-len(curves["steps"]) // MOST_STEPS)
    return curves | {"steps": curves["steps"][:: max(thin, 1)]}


# ------------------------------------------------------------------------------------------------- the networks


def _looked(folder: Path, look: Look, data_dir: str | None) -> dict[str, Any]:
    start, data = open_run(folder, data_dir)
    part = Part(data.test, look.images, EVAL_BATCH)
    threads = look.threads or torch.get_num_threads()
    moved = movable(folder, start).cpu()
    found: dict[str, Any] = {"class_names": list(data.class_names), "images": len(part), "notes": []}
    if isinstance(moved, ExitModel):
        watched = moved.watch(part)
        found |= _exits(folder, moved, watched, part, data, start)
        points = moved.sweep_of(watched, TAUS)
    else:
        found |= _channels(folder, moved, part, data, start)
        points = moved.sweep_tau(part, TAUS)
    found["sweep"] = [asdict(point) for point in points]
    found["looked"] = {
        "cpu": cpu_model(), "threads": threads, "versions": versions_of(PACKAGES), "images": len(part),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
    _add_timings_(found, folder, moved, data, look, threads, data_dir)
    result: dict[str, Any] = plain(found)
    return result


def _add_timings_(
    found: dict[str, Any], folder: Path, moved: GatedModel | ExitModel, data: DataSet, look: Look, threads: int,
    data_dir: str | None,
) -> None:  # fmt: skip
    """Milliseconds, as far as they can be had: what can't be timed is told, and the rest is shown all the same."""
    try:
        with torch_threads(threads):
            timings = sweep_milliseconds(moved, data.test, rounds=max(1, look.rounds // 3))
        for point in found["sweep"]:
            point["milliseconds"] = timings[point["tau"]].as_record()
    except HeadgateError as error:
        found["notes"].append(f"No milliseconds over tau: {error}")
    try:
        found["latency"] = bench(folder, look.batches, threads, look.rounds, data_dir)
    except HeadgateError as error:
        found["notes"].append(f"No milliseconds beside the dense network: {error}")


def _layers(dense: Mapping[str, int], after: Mapping[str, float]) -> list[dict[str, Any]]:
    names = [*dense, *(name for name in after if name not in dense)]
    return [{"name": name, "dense": dense.get(name, 0), "after": after.get(name, 0)} for name in names]


@torch.no_grad()
def _channels(folder: Path, gated: GatedModel, part: Part, data: DataSet, start: Start) -> dict[str, Any]:
    dense = macs_by_layer(network(folder, "dense", start), start.example)
    if gated.dynamic is None:
        small: nn.Module = network(folder, "shrunk", start)
        return {"layers": _layers(dense, macs_by_layer(small, start.example)), "histogram": gated.histogram()}
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
            "use few channels": _examples(part, by_macs[:EXAMPLES], rows),
            "use many channels": _examples(part, by_macs[::-1][:EXAMPLES], rows),
        },
    }


def _classes(
    open_NG: np.ndarray, labels_N: np.ndarray, gate_names: Sequence[str], class_names: Sequence[str]
) -> dict[str, Any]:  # fmt: skip
    """The heatmap: the most telling gates, of many classes those that differ most, in an order in which it shows."""
    found = specialisation(open_NG, labels_N, len(class_names))
    telling = np.flatnonzero(found.deciding_G)
    telling = np.sort(telling[np.argsort(-found.bits_G[telling], kind="stable")[:MOST_ROWS]])
    record = {"numbers": found.as_record(), "rates": [], "gates": [], "classes": list(class_names), "words": []}
    if not len(telling):
        return record
    present = np.flatnonzero(~np.isnan(found.rates_GC[0]))
    rates = found.rates_GC[telling][:, present]
    names, classes = [gate_names[int(gate)] for gate in telling], [class_names[int(each)] for each in present]
    above = found.bits_G[telling] > found.shuffled_most
    words = in_words(
        rates[above], found.bits_G[telling][above], [n for n, a in zip(names, above, strict=True) if a], classes
    )
    apart = np.abs(rates - rates.mean(1, keepdims=True)).sum(0)
    shown = np.sort(np.argsort(-apart, kind="stable")[:MOST_CLASSES])
    gate_order, class_order = order(rates[:, shown])
    return record | {
        "rates": np.round(rates[:, shown][gate_order][:, class_order], 3),
        "gates": [names[int(gate)] for gate in gate_order],
        "classes": [classes[int(shown[each])] for each in class_order],
        "words": words[:WORDS],
    }


def _exits(
    folder: Path, exits: ExitModel, watched: Watched, part: Part, data: DataSet, start: Start
) -> dict[str, Any]:  # fmt: skip
    labels_N = np.concatenate([labels.numpy() for _, labels in part])
    taken_N = exits.exit_of(watched).numpy()
    macs_N = exits.macs_of(watched).numpy()
    shares = np.zeros((len(exits.names), data.classes))
    np.add.at(shares, (taken_N, labels_N), 1.0)
    present = np.bincount(labels_N, minlength=data.classes) > 0
    shares = shares[:, present] / shares[:, present].sum(0)
    right_N = watched.right_NK.numpy()[np.arange(len(taken_N)), taken_N]
    rows = [
        {"label": int(label), "answer": int(label) if right else None, "macs": float(macs), "exit": exits.names[taken]}
        for label, right, macs, taken in zip(labels_N, right_N, macs_N, taken_N, strict=True)
    ]
    early = np.argsort(-watched.p_NK[:, 0].numpy(), kind="stable")
    late = np.argsort(watched.p_NK.max(1).values.numpy(), kind="stable")
    classes = [name for name, there in zip(data.class_names, present, strict=True) if there]
    dense = macs_by_layer(network(folder, "dense", start), start.example)
    return {
        "exits": asdict(exits.table_of(watched)),
        "exits_by_class": {"exits": list(exits.names), "classes": classes, "shares": np.round(shares, 4)},
        "layers": _layers(dense, exits.layers_of(watched)),
        "image_macs": _quantiles(macs_N),
        "examples": {
            "leave first": _examples(part, early[:EXAMPLES], rows),
            "stay longest": _examples(part, late[:EXAMPLES], rows),
        },
    }


def _quantiles(macs: Sequence[float] | np.ndarray) -> np.ndarray:
    """What the cheapest image takes, the next per cent, and so on to the dearest."""
    return np.round(np.quantile(np.asarray(macs, dtype=np.float64), np.linspace(0, 1, 101)))


def _examples(part: Part, numbers: np.ndarray, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some images with what became of them."""
    wanted = {int(number) for number in numbers}
    pictures, first = {}, 0
    for images, _ in part:
        for number in wanted:
            if first <= number < first + len(images):
                pictures[number] = data_url(stretched(images[number - first].numpy()))
        first += len(images)
        if len(pictures) == len(wanted):
            break
    return [
        rows[int(number)] | {"number": int(number) * part.stride, "picture": pictures[int(number)]}
        for number in numbers
    ]  # fmt: skip
