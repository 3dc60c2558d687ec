"""Everything that a report shows of a run, as plain data: gathered once, kept in the run's folder.

Reads the run's recipe, log and networks; looks at the images it was judged by: where the MACs went, what tau does to
accuracy, MACs and milliseconds, which gates open for which classes, which images are cheap and which are dear. What a
run has not kept (gates that were left where a network was trained) is told, and left out. Trains nothing. Knows nothing
of pages or plots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headgate.analysis.measure import torch_threads
from headgate.analysis.pictures import data_url, stretched
from headgate.analysis.records import PACKAGES, cpu_model, plain, versions_of, write_text
from headgate.analysis.specialisation import in_words, order, specialisation
from headgate.data.batches import Part
from headgate.data.sources import DataSet
from headgate.errors import HeadgateError
from headgate.exits.cascade import ExitModel
from headgate.exits.table import Watched
from headgate.exits.thresholds import NOBODY
from headgate.gated import GatedModel
from headgate.gates.budget import parse_target
from headgate.graph.macs import macs_by_layer
from headgate.graph.trace import tensors_in
from headgate.training.ask import TAUS, bench, movable, network, open_run, sweep_milliseconds
from headgate.training.journal import LOG_NAME, read_log
from headgate.training.loop import BINS
from headgate.training.prepare import Start
from headgate.training.recipe import Recipe, without_places
from headgate.training.repeat import commands, shown, without_folders
from headgate.training.run import CASCADE, CONDITIONAL, GATED, NETWORKS, RESULT, recipe_in, result_in

FORMAT = "headgate-study-4"
FILE = "study.json"
EXAMPLES = 8
WORDS = 12
MOST_ROWS, MOST_CLASSES = 160, 40
"""In a heatmap: the most telling gates, the classes that differ most."""
MOST_STEPS = 400
CURVES = {"step": "steps", "epoch": "epochs", "gates": "histograms"}
"""Lines of the log by their kind, and what becomes of them."""
NO_GATES = (
    "The folder has no network whose gates can still be moved (one that was trained elsewhere comes without): "
    "no accuracy over tau, and nothing of how sure its gates were."
)


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
    found["trained"] = _dates(folder)
    found["series"] = _series({"recipe": recipe.to_json()} | (result or {}))
    if result is not None and recipe.gate_epochs:
        found["asked"] = round(parse_target(recipe.target, result["macs"]["dense"]), 6)
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
    if "adopted" in found:
        origin = found["adopted"]
        found["adopted"] = origin | {"recipe": shown(Recipe.from_json(origin["recipe"]))} | (
            {"before": [_with_recipe(each) for each in origin["before"]]} if "before" in origin else {}
        )  # fmt: skip
    return found


def _series(result: Mapping[str, Any]) -> str:
    """What runs have in common that differ in nothing but their target, their seed, and where their files are: the
    recipe, and those of the runs they began with."""
    recipe = replace(without_places(Recipe.from_json(result["recipe"])), name="", target="0.5", seed=0)
    origin = result.get("adopted", {})
    steps = [result["before"]] if "before" in result else result.get("averaged", origin.get("before", []))
    parts = [shown(recipe), "averaged" in result, "adopted" in result, [_series(each) for each in steps]]
    return json.dumps(parts, sort_keys=True)


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


def _dates(folder: Path) -> dict[str, str]:
    """When the first and the last line of a run's log were written; of one that was trained elsewhere, nothing."""
    path = folder / LOG_NAME
    lines = list(read_log(path)) if path.is_file() else []
    if not any(line.get("kind") == "epoch" for line in lines):
        return {}
    times = [str(line["time"]) for line in lines if "time" in line]
    return {"began": times[0], "ended": times[-1]} if times else {}


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
    part = Part(data.test, look.images)
    threads = look.threads or torch.get_num_threads()
    kept = any((folder / file).is_file() for file in (GATED, CONDITIONAL, CASCADE))
    moved = movable(folder, start).cpu() if kept else None
    found: dict[str, Any] = {"class_names": list(data.class_names), "images": len(part), "notes": []}
    if moved is None:
        found |= {"layers": _shrunk_layers(folder, start), "notes": [NO_GATES]}
    elif isinstance(moved, ExitModel):
        watched = moved.watch(part)
        found |= _exits(folder, moved, watched, part, data, start)
        found["sweep"] = [asdict(point) for point in moved.sweep_of(watched, TAUS)]
    else:
        found |= _channels(folder, moved, part, data, start)
        found["sweep"] = [asdict(point) for point in moved.sweep_tau(part, TAUS)]
    found["looked"] = {
        "cpu": cpu_model(), "threads": threads, "versions": versions_of(PACKAGES), "images": len(part),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
    _add_timings_(found, folder, moved, data, look, threads, data_dir)
    result: dict[str, Any] = plain(found)
    return result


def _add_timings_(
    found: dict[str, Any], folder: Path, moved: GatedModel | ExitModel | None, data: DataSet, look: Look,
    threads: int, data_dir: str | None,
) -> None:  # fmt: skip
    """Milliseconds, as far as they can be had: what can't be timed is told, and the rest is shown all the same."""
    if moved is not None:
        try:
            with torch_threads(threads):
                timings = sweep_milliseconds(moved, data.test, rounds=max(1, look.rounds // 3))
            for point in found["sweep"]:
                point["milliseconds"] = timings[point["tau"]].as_record()
        except HeadgateError as error:
            found["notes"].append(f"No milliseconds over tau: {error}")
    try:
        fitting = [batch for batch in look.batches if moved is None or batch <= len(data.test)]
        found["latency"] = bench(folder, fitting, threads, look.rounds, data_dir)
    except HeadgateError as error:
        found["notes"].append(f"No milliseconds beside the dense network: {error}")


def _layers(dense: Mapping[str, int], after: Mapping[str, float]) -> list[dict[str, Any]]:
    names = [*dense, *(name for name in after if name not in dense)]
    return [{"name": name, "dense": dense.get(name, 0), "after": after.get(name, 0)} for name in names]


def _shrunk_layers(folder: Path, start: Start) -> list[dict[str, Any]]:
    """Of a network that computes the same for all images."""
    dense, small = (macs_by_layer(network(folder, name, start), start.example) for name in ("dense", "shrunk"))
    return _layers(dense, small)


@torch.no_grad()
def _channels(folder: Path, gated: GatedModel, part: Part, data: DataSet, start: Start) -> dict[str, Any]:
    if gated.dynamic is None:
        return {"layers": _shrunk_layers(folder, start), "histogram": gated.histogram()}
    dense = macs_by_layer(network(folder, "dense", start), start.example)
    rows: list[dict[str, Any]] = []
    opened, layers = [], dict.fromkeys(dense, 0.0)
    histogram = np.zeros(BINS, dtype=np.int64)
    gated.eval()
    for images, labels in part:
        answers = tensors_in(gated(images))[0].argmax(1)
        pass_seen = gated.seen()
        opened.append(pass_seen.gates_BG.expand(len(images), -1).numpy())
        histogram += gated.histogram(BINS)
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
    early, late = _first_and_last(watched.p_NK.numpy(), taken_N, exits.taus)
    classes = [name for name, there in zip(data.class_names, present, strict=True) if there]
    dense = macs_by_layer(network(folder, "dense", start), start.example)
    return {
        "exits": asdict(exits.table_of(watched)),
        "exits_by_class": {"exits": list(exits.names), "classes": classes, "shares": np.round(shares, 4)},
        "leaving": _leaving(exits, watched),
        "layers": _layers(dense, exits.layers_of(watched)),
        "image_macs": _quantiles(macs_N),
        "examples": {
            what: _examples(part, images[:EXAMPLES], rows)
            for what, images in (("leave first", early), ("stay longest", late))
            if len(images)
        },
    }


def _first_and_last(p_NK: np.ndarray, taken_N: np.ndarray, taus: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Images that leave early, the first and surest first; and those that stay, the least tempted first. Exits out of
    use have no say."""
    p_NK = np.where(np.asarray(taus) < NOBODY, p_NK, 0.0)
    last = p_NK.shape[1]
    there_N = np.append(p_NK, np.zeros((len(p_NK), 1)), 1)[np.arange(len(taken_N)), taken_N]
    early, late = np.lexsort((-there_N, taken_N)), np.argsort(p_NK.max(1), kind="stable")
    return early[taken_N[early] < last], late[taken_N[late] == last]


def _leaving(exits: ExitModel, watched: Watched) -> dict[str, Any]:
    """How sure the exits' gates are: of all images, how many have a P(leave) in each part of 0…1 at each exit."""
    counts = [np.histogram(p_N.numpy(), BINS, (0.0, 1.0))[0] for p_N in watched.p_NK.T]
    used = [tau < NOBODY for tau in exits.taus]
    return {"exits": list(exits.names[:-1]), "taus": list(exits.taus), "used": used, "counts": counts}


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
