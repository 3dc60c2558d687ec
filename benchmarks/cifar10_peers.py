"""Side by side with other ways to halve a network: CIFAR ResNet-20, at most half of its MACs, ten epochs (or more).

Every method starts from the same weights and gets the same number of epochs, the same images in the same order for a
seed, the same augmentation, batch size and optimizer; the accuracy counts after the last epoch, not after the best one.
A method and a seed make a cell with a folder of its own: a finished one is kept, an interrupted one goes on where it
was, whatever stopped it. The table is made of all cells that are finished, and of those of an earlier record
(`--kept`), which may be of another machine. What the methods are is `pruners.py`'s and
`headgate.training`'s; a name with `+distill` learns from the dense network as well. Random numbers, images and the loop
are the package's own.
"""

from __future__ import annotations

import json
import signal
import statistics
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RECORDS, names_in, show
from pruners import PRUNERS, inner_widths, sparse_regularizer, with_inner_widths
from rich.console import Console
from safetensors import safe_open
from torch import nn

from headgate import count_macs
from headgate.analysis.measure import torch_threads
from headgate.analysis.records import PACKAGES, cpu_model, read_record, versions_of, write_record, write_text
from headgate.data.batches import NORMALIZATIONS, CropAndFlip, DataSet, InMemory
from headgate.errors import FileError, HeadgateError
from headgate.inference.files import read, write
from headgate.training import checkpoint as checkpoints
from headgate.training.journal import AnyJournal, Journal
from headgate.training.loop import Interrupted, Phase, Surroundings, Totals, accuracy, begin, run_phase
from headgate.training.prepare import data_of, start_of
from headgate.training.recipe import CHOICES, PHASES, PhaseName, Recipe, overridden, recipe_named
from headgate.training.run import RECIPE, RESULT, SMALL, Run, create_folder
from headgate.training.team import Team

QUESTION = "How accurate is a CIFAR ResNet-20 at half its MACs, beside other methods that get as many epochs?"
START = "cifar10-resnet20-static"
RECORD = RECORDS / "cifar10_peers.json"
DENSE, SPARSE_METHOD = "dense", "torch-pruning-sparse"
OURS: dict[str, dict[str, Any]] = {"headgate": {}, "aig-layers": {"granularity": "layer", "loss": "per_gate"}}
METHODS = ("headgate", "torch-pruning", SPARSE_METHOD, "uniform-l1", "fpgm", "aig-layers")
DISTILLED = "+distill"
CELL, SPARSE, PRUNED, TUNED = "cell.json", "sparse.safetensors", "pruned.safetensors", "tuned.safetensors"
QUICK_STEPS, QUICK_IMAGES, QUICK_TEST = 3, 1000, 500
STOPPED = 130
OF_A_CELL = ("seed", "precision")
"""Fields in which the cells of a method may differ: each says what its own is."""
SAY = Console(highlight=False, soft_wrap=True)
Row = dict[str, Any]


def main() -> None:
    options = _options()
    if not options.table_only:
        with torch_threads(options.threads):
            _carry_out(options)
    rows = _rows(options)
    if not rows:
        raise SystemExit(f"there is no finished cell in {options.out}")
    _show(rows)
    record = options.record or (RECORD if _official(rows) else None)
    if record is not None:
        seeds = sorted({cell["seed"] for row in rows for cell in row["cells"]})
        write_record(record, question=QUESTION, results=_results(rows), threads=options.threads, seeds=seeds)


# ------------------------------------------------------------------------------------------------------ options


def _options() -> Namespace:
    made = ArgumentParser(description=QUESTION, formatter_class=ArgumentDefaultsHelpFormatter)
    made.add_argument("--methods", type=names_in, default=",".join(METHODS), help="with commas between")
    made.add_argument("--seeds", type=lambda text: [int(seed) for seed in names_in(text)], default="0,1,2")
    made.add_argument("--weights", help="of the dense network, a safetensors file")
    made.add_argument("--data-dir", help="the folder that holds cifar-10-batches-bin")
    made.add_argument("--epochs", type=int, default=10, help="of every method, all its phases together")
    made.add_argument("--gate-epochs", type=int, help="of these, weights and gates together; a tenth if not given")
    made.add_argument("--sparse-epochs", type=int, help="of these, regularized for sparsity; 40 %% if not given")
    made.add_argument("--sparse-reg", type=float, default=5e-4, help=f"strength of {SPARSE_METHOD}'s regularization")
    made.add_argument("--sparse-lr", type=float, default=0.01, help="learning rate meanwhile")
    made.add_argument("--tune-lr", type=float, help="the peers' peak learning rate; headgate's if not given")
    made.add_argument(
        "--distill", type=float, default=0.7, help="weight of the teacher's answers, for names with +distill"
    )
    made.add_argument("--set", action="append", default=[], metavar="METHOD.FIELD=VALUE", help="change a recipe")
    made.add_argument("--target", type=float, default=0.5, help="share of the MACs")
    made.add_argument("--validation", type=int, default=0, help="training images to hold out and measure on")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--precision", choices=CHOICES["precision"], default="no", help="of all training steps")
    made.add_argument("--compile", action="store_true", help="torch.compile all phases")
    made.add_argument("--checkpoint-seconds", type=float, default=60.0)
    made.add_argument("--out", type=Path, help="folder of the cells; runs/cifar10_peers if not given")
    made.add_argument("--record", type=Path, help=f"the record to write; {RECORD.name} if not given and no trial")
    made.add_argument("--kept", type=Path, help="a record of earlier cells, for the table: those not in the folder")
    made.add_argument("--table-only", action="store_true", help="carry out nothing, show what is finished")
    made.add_argument("--quick", action="store_true", help="two epochs of a few steps: does it run?")
    return _completed(made, made.parse_args())


def _completed(parser: ArgumentParser, options: Namespace) -> Namespace:
    """The defaults that depend on other options, and what is wrong with the rest."""
    if options.quick:
        options.epochs = 2
    elif not (options.table_only or (options.weights and options.data_dir)):
        parser.error("--weights and --data-dir are needed (or --quick, which does with random ones)")
    for method in options.methods:
        if method.removesuffix(DISTILLED) not in METHODS:
            parser.error(f"there is no method {method!r}: choose from {', '.join(METHODS)}")
    options.gate_epochs = options.gate_epochs or max(1, options.epochs // 10)
    options.sparse_epochs = options.sparse_epochs or max(1, options.epochs * 2 // 5)
    trial = options.quick or options.validation
    options.out = options.out or Path("runs") / ("cifar10_peers-trial" if trial else "cifar10_peers")
    return options


def recipe_for(method: str, seed: int, options: Namespace) -> Recipe:
    """The start recipe with the fields that make the method."""
    base = method.removesuffix(DISTILLED)
    recipe = replace(
        recipe_named(START), name=method, weights=options.weights, data_dir=options.data_dir, seed=seed,
        target=f"{options.target:g}", validation=options.validation, compile=options.compile,
        precision=options.precision, **_phases(base, options), **OURS.get(base, {}),
    )  # fmt: skip
    if base in PRUNERS and options.tune_lr is not None:
        recipe = replace(recipe, tune_lr=options.tune_lr)
    if method.endswith(DISTILLED):
        recipe = replace(recipe, distill=options.distill)
    if options.quick:
        recipe = replace(recipe, calibration_batches=QUICK_STEPS)
    for name, text in _changes(method, options.set).items():
        old = getattr(recipe, name, None)
        recipe = overridden(recipe, {name: text if isinstance(old, str) else json.loads(text)})
    if recipe.epochs != options.epochs:
        raise HeadgateError(f"{method} would take {recipe.epochs} epochs, but all methods take {options.epochs}")
    return recipe


def _phases(base: str, options: Namespace) -> dict[str, Any]:
    """How a method divides its epochs."""
    if base in OURS:
        return {"gate_epochs": options.gate_epochs, "tune_epochs": options.epochs - options.gate_epochs}
    sparse = options.sparse_epochs if base == SPARSE_METHOD else 0
    return {
        "gate_epochs": 0, "dense_epochs": sparse, "dense_lr": options.sparse_lr, "dense_schedule": "constant",
        "tune_epochs": options.epochs - sparse,
    }  # fmt: skip


def _changes(method: str, given: Sequence[str]) -> dict[str, str]:
    """What --set says for a method; what it says for `headgate` is for `headgate+distill` too."""
    changes = {}
    for text in given:
        name, dot, rest = text.partition(".")
        field_name, equals, value = rest.partition("=")
        if not (dot and equals):
            raise HeadgateError(f"--set {text}: write METHOD.FIELD=VALUE, such as headgate.gate_lr=0.02")
        if name in (method, method.removesuffix(DISTILLED)):
            changes[field_name] = value
    return changes


# -------------------------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Cell:
    """One method with one seed, and where it is kept."""

    method: str
    folder: Path
    recipe: Recipe
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What decides the result beside the recipe."""

    @property
    def base(self) -> str:
        return self.method.removesuffix(DISTILLED)

    @property
    def done(self) -> bool:
        return (self.folder / RESULT).is_file()

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the result, without paths of this machine."""
        recipe = self.recipe.to_json()
        recipe["weights"] = Path(recipe["weights"]).name if recipe["weights"] else None
        del recipe["data_dir"]
        return {"method": self.method, **self.extras, "recipe": recipe}


def _folder(options: Namespace, method: str, seed: int) -> Path:
    return options.out / (DENSE if method == DENSE else f"{method}-s{seed}-e{options.epochs}")


def _cells(options: Namespace) -> Iterator[Cell]:
    """The dense network, then seed by seed, so that an unfinished table has something of every method."""
    quick = {"quick": True} if options.quick else {}
    untrained = replace(
        recipe_named(START), name=DENSE, weights=options.weights, data_dir=options.data_dir,
        target=f"{options.target:g}", validation=options.validation, gate_epochs=0, tune_epochs=0,
    )  # fmt: skip
    yield Cell(DENSE, _folder(options, DENSE, 0), untrained, quick)
    for seed in options.seeds:
        for method in options.methods:
            sparse = {"sparse_reg": options.sparse_reg} if method.startswith(SPARSE_METHOD) else {}
            recipe = recipe_for(method, seed, options)
            yield Cell(method, _folder(options, method, seed), recipe, {**sparse, **quick})


def _carry_out(options: Namespace) -> None:
    """All cells that are not finished yet."""
    cells = list(_cells(options))
    for cell in cells:
        _check(cell)
    data = _quick_data(cells[0].recipe) if options.quick else data_of(cells[0].recipe)
    team = Team(options.precision)
    try:
        with _stop_signals() as wants_stop:
            for cell in cells:
                if cell.done:
                    SAY.print(f"{cell.folder}: finished before")
                    continue
                if wants_stop():
                    raise Interrupted
                _claim(cell)
                _carry_out_cell(cell, data, team, wants_stop, options)
    except Interrupted:
        SAY.print("stopped, and saved: the same command goes on from here")
        raise SystemExit(STOPPED) from None


def _check(cell: Cell) -> None:
    """A folder that was made with other settings is refused, before hours are spent."""
    path = cell.folder / CELL
    if path.exists():
        old = _settings_in(cell.folder)
        if old != cell.settings:
            changed = _differences(old, cell.settings)
            raise FileError(f"{cell.folder} has other settings ({changed}): choose another --out, or remove it")


def _settings_in(folder: Path) -> dict[str, Any]:
    """What a cell was made with; a field that its recipe did not have yet was as it is now by default."""
    settings: dict[str, Any] = json.loads((folder / CELL).read_text(encoding="utf-8"))
    recipe = Recipe.from_json(settings["recipe"]).to_json()
    del recipe["data_dir"]
    return {**settings, "recipe": recipe}


def _claim(cell: Cell) -> None:
    """Makes the folder the cell's own."""
    if cell.base in OURS and not (cell.folder / RECIPE).exists():
        create_folder(cell.folder, cell.recipe)
    write_text(cell.folder / CELL, json.dumps(cell.settings, indent=1) + "\n")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    old, new = {**old, **old["recipe"]}, {**new, **new["recipe"]}
    names = sorted(name for name in old.keys() | new.keys() if name != "recipe" and old.get(name) != new.get(name))
    return ", ".join(f"{name} {old.get(name)} instead of {new.get(name)}" for name in names)


def _carry_out_cell(
    cell: Cell, data: DataSet, team: Team, wants_stop: Callable[[], bool], options: Namespace
) -> None:  # fmt: skip
    if cell.method == DENSE:
        start = start_of(cell.recipe, data.shape)
        return _write_result(cell, start.build(), data, team, {})
    with Journal(cell.folder, title=cell.folder.name) as journal:
        steps = data.train.steps(cell.recipe.batch_size)
        journal.plan([(name, epochs * steps) for name in PHASES if (epochs := cell.recipe.epochs_of(name))])
        if cell.base in OURS:
            Run(cell.recipe, cell.folder, team, journal, options.checkpoint_seconds, data).execute()
        else:
            PeerRun(cell, data, team, journal, wants_stop, options.checkpoint_seconds).execute()


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the cell after the step that is under way; a second one ends it at once."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in signals]
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


# ----------------------------------------------------------------------------------------------- a peer's cell


@dataclass
class PeerRun:
    """A peer's cell from the dense weights to its result: regularized epochs (if any), pruning, fine-tuning.

    Each stage leaves a file behind and the next one starts from it, so a checkpoint only has to hold its own stage.
    """

    cell: Cell
    data: DataSet
    team: Team
    journal: AnyJournal
    wants_stop: Callable[[], bool]
    checkpoint_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)
    _saved: float = field(default_factory=time.monotonic)
    _entered: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.start = start_of(self.cell.recipe, self.data.shape)

    def execute(self) -> None:
        net = self.start.build()
        if self.cell.recipe.dense_epochs:
            net = self._stage(SPARSE, self._train_sparse, net)
        net = self._stage(PRUNED, self._prune, net)
        net = self._stage(TUNED, self._tune, net)
        _write_result(self.cell, net, self.data, self.team, self.seconds)

    def _stage(self, file: str, work: Callable[[nn.Module], nn.Module], net: nn.Module) -> nn.Module:
        """What `work` makes of the network, or made of it before; either way it is read from the stage's file."""
        path = self.cell.folder / file
        if not path.exists():
            made = work(net)
            write(path, made.state_dict(), {"widths": inner_widths(made), "seconds": self.seconds})
        tensors, left = read(path)
        self.seconds = left["seconds"]
        net = with_inner_widths(self.start.build(), left["widths"])
        net.load_state_dict(tensors)
        return net

    def _train_sparse(self, net: nn.Module) -> nn.Module:
        """In Torch-Pruning's own script its regularizer takes the place of weight decay."""
        regularize = sparse_regularizer(net, self.start.example, self.cell.extras["sparse_reg"])
        return self._train("dense", net, replace(self.cell.recipe, weight_decay=0.0), regularize)

    def _prune(self, net: nn.Module) -> nn.Module:
        self._entered = time.monotonic()
        small = PRUNERS[self.cell.base](net, self.start.example, float(self.cell.recipe.target))
        self._count_time("prune")
        widths = inner_widths(small)
        self.journal.note("pruned", {"widths": widths, "macs": count_macs(small, self.start.example)})
        self.journal.say(f"{self.cell.folder.name}: pruned to {' '.join(map(str, widths.values()))}")
        return small

    def _tune(self, net: nn.Module) -> nn.Module:
        return self._train("tune", net, self.cell.recipe)

    def _train(
        self, name: PhaseName, net: nn.Module, recipe: Recipe, after_backward: Callable[[nn.Module], None] | None = None
    ) -> nn.Module:
        phase = begin(name, net.to(self.team.device), recipe, self._teacher())
        self._resume_(phase)
        self._entered = time.monotonic()
        around = Surroundings(
            recipe, self.data.train, self.team, self.journal, self.wants_stop, self._save_is_due, self._save,
            self._look, after_backward or (lambda net: None),
        )  # fmt: skip
        run_phase(phase, around)
        self._count_time(name)
        return phase.net

    def _teacher(self) -> nn.Module | None:
        if self.cell.recipe.distill == 0:
            return None
        return self.start.build().eval().requires_grad_(False).to(self.team.device)

    def _look(self, phase: Phase) -> dict[str, float]:
        """Accuracy after an epoch, on held-out training images only."""
        if not self.cell.recipe.validation:
            return {}
        return {"validation_accuracy": accuracy(phase.net, self.data.test, self.team)}

    def _resume_(self, phase: Phase) -> None:
        if not (self.cell.folder / checkpoints.FILE).exists():
            return
        found = checkpoints.read_checkpoint(self.cell.folder)
        if found.phase != phase.name:  # of the stage before, which is over
            return
        checkpoints.restore_net_(found, phase.net)
        checkpoints.restore_optimizer_(found, phase.optimizer)
        phase.step, self.seconds = found.step, dict(found.seconds)
        phase.totals = Totals(**found.rest["totals"])
        self.journal.resume_at(found.log_position)

    def _save_is_due(self) -> bool:
        return time.monotonic() - self._saved > self.checkpoint_seconds

    def _save(self, phase: Phase) -> None:
        self._count_time(phase.name)
        taken = checkpoints.taken(
            phase.net, phase.optimizer, phase=phase.name, step=phase.step, recipe=self.cell.settings,
            seconds=self.seconds, log_position=self.journal.position, conditions={}, totals=vars(phase.totals),
        )  # fmt: skip
        checkpoints.write_checkpoint(self.cell.folder, taken)
        self._saved = time.monotonic()

    def _count_time(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._entered
        self._entered = now


def _write_result(cell: Cell, net: nn.Module, data: DataSet, team: Team, seconds: Mapping[str, float]) -> None:
    """In the form that a run of headgate's leaves, for the one network that there is."""
    start = start_of(cell.recipe, data.shape)
    macs, dense_macs = count_macs(net, start.example), count_macs(start.build(), start.example)
    result = {
        "recipe": cell.recipe.to_json(),
        "measured_on": "validation" if cell.recipe.validation else "test", "images": len(data.test),
        "accuracy": {"shrunk": accuracy(net.to(team.device), data.test, team)},
        "macs": {"shrunk": macs, "dense": dense_macs}, "macs_fraction": {"shrunk": macs / dense_macs},
        "parameters": {"shrunk": sum(parameter.numel() for parameter in net.parameters())},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "threads": torch.get_num_threads(), "versions": versions_of(PACKAGES), "cpu": cpu_model(),
    }  # fmt: skip
    write_text(cell.folder / RESULT, json.dumps(result, indent=1) + "\n")


# -------------------------------------------------------------------------------------------------------- quick


def _quick_data(recipe: Recipe) -> DataSet:
    """A few steps of the real images, or of random ones, and a batch to judge by."""
    whole = data_of(recipe) if recipe.data_dir else _random_data()
    train, test = whole.train, whole.test
    assert isinstance(train, InMemory) and isinstance(test, InMemory), "the images of CIFAR-10 lie in memory"
    few = train.subset(np.arange(QUICK_STEPS * recipe.batch_size), augmented=True)
    return replace(whole, train=few, test=test.subset(np.arange(QUICK_TEST), augmented=False))


def _random_data() -> DataSet:
    randomness = np.random.default_rng(0)
    pixels_NCHW = randomness.integers(0, 256, (QUICK_IMAGES, 3, 32, 32), dtype=np.uint8)
    labels_N = randomness.integers(0, 10, QUICK_IMAGES)
    train = InMemory(pixels_NCHW, labels_N, 10, NORMALIZATIONS["imagenet"], CropAndFlip())
    return DataSet("random", train, train, 10, train.shape)


# -------------------------------------------------------------------------------------------------------- table


def _rows(options: Namespace) -> list[Row]:
    """One row a method, of all cells of the folder that are finished; the dense network first."""
    cells: dict[str, list[Row]] = {}
    for folder in (options.out / DENSE, *sorted(options.out.glob(f"*-s*-e{options.epochs}"))):
        if (folder / RESULT).is_file():
            cell = _read_cell(folder)
            cells.setdefault(cell["settings"]["method"], []).append(cell)
    for cell in _kept(options.kept, options.epochs) if options.kept else ():
        there = cells.setdefault(cell["settings"]["method"], [])
        if cell["seed"] not in [other["seed"] for other in there]:
            there.append(cell)
    for each in cells.values():
        each.sort(key=lambda cell: cell["seed"])
    order = [DENSE, *(method + more for method in METHODS for more in ("", DISTILLED))]
    rows = [_row(method, cells[method]) for method in order if method in cells]
    shared = [{name: row["settings"]["recipe"][name] for name in ("weights", "target", "validation")} for row in rows]
    if any(each != shared[0] for each in shared):
        raise HeadgateError(f"{options.out} mixes weights, targets or images: give each a folder of its own")
    return rows


def _kept(path: Path, epochs: int) -> Iterator[Row]:
    """The cells of a record, as if they were read from their folders; each says which commit it is from."""
    record = read_record(path)
    origin = {"commit": record.commit.sha, "date": record.date, "cpu": record.cpu}
    for row in record.results["rows"]:
        recipe = record.results["start_recipe"] | row["settings"]["recipe"]
        if row["method"] != DENSE and row["epochs"] != epochs:
            continue
        for cell in row["cells"]:
            own = {name: cell[name] for name in OF_A_CELL if name in cell}
            whole = Recipe.from_json(recipe | own).to_json()
            del whole["data_dir"]
            said = {name: whole[name] for name in OF_A_CELL}
            yield {"kept": origin, **said, **cell, "settings": {**row["settings"], "recipe": whole}}


def _official(rows: Sequence[Row]) -> bool:
    """Whether these are numbers to keep, on the test images."""
    settings = [row["settings"] for row in rows]
    return not any(each.get("quick") or each["recipe"]["validation"] for each in settings)


def _read_cell(folder: Path) -> Row:
    settings = _settings_in(folder)
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    files = [folder / name for name in (SMALL, TUNED) if (folder / name).is_file()]
    return {
        **{name: settings["recipe"][name] for name in OF_A_CELL},
        "measured_on": result["measured_on"], "images": result["images"],
        **{name: result[name]["shrunk"] for name in ("accuracy", "macs_fraction", "macs", "parameters")},
        "seconds": result["seconds"], "widths": _conv_widths(files[0]) if files else None,
        "settings": settings,
    }  # fmt: skip


def _conv_widths(path: Path) -> dict[str, int]:
    with safe_open(str(path), framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return {name.removesuffix(".weight"): shape[0] for name, shape in shapes.items() if len(shape) == 4}


def _row(method: str, cells: Sequence[Row]) -> Row:
    settings = [cell.pop("settings") for cell in cells]
    for each in settings:
        for name in OF_A_CELL:
            del each["recipe"][name]
    if any(each != settings[0] for each in settings):
        raise HeadgateError(f"the seeds of {method} were not run with the same settings: repeat those that differ")
    accuracies = [cell["accuracy"] for cell in cells]
    return {
        "method": method,
        "accuracy": statistics.mean(accuracies),
        "accuracy_deviation": statistics.stdev(accuracies) if len(cells) > 1 else None,
        "macs_fraction": max(cell["macs_fraction"] for cell in cells),
        "epochs": _epochs(settings[0]["recipe"]),
        "seconds": statistics.mean(sum(cell["seconds"].values()) for cell in cells),
        "cells": list(cells),
        "settings": settings[0],
    }


def _epochs(recipe: Mapping[str, Any]) -> int:
    return sum(recipe[name] for name in ("dense_epochs", "gate_epochs", "tune_epochs"))


def _show(rows: Sequence[Row]) -> None:
    cell, share = rows[0]["cells"][0], float(rows[0]["settings"]["recipe"]["target"])
    columns = ["method", "accuracy, %", "to dense", "MACs, %", "parameters", "epochs", "seconds", "seeds"]
    title = f"CIFAR ResNet-20 at {share:.0%} of its MACs, {cell['images']:,} {cell['measured_on']} images"
    show(title, columns, [_line(row, rows[0]) for row in rows])


def _line(row: Row, first: Row) -> list[Any]:
    deviation, against = row["accuracy_deviation"], first["method"] == DENSE and row is not first
    return [
        row["method"],
        f"{100 * row['accuracy']:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}"),
        f"{100 * (row['accuracy'] - first['accuracy']):+.2f}" if against else None,
        f"{100 * row['macs_fraction']:.2f}",
        f"{statistics.mean(cell['parameters'] for cell in row['cells']):,.0f}",
        row["epochs"],
        f"{row['seconds']:.0f}",
        len(row["cells"]),
    ]


def _results(rows: Sequence[Row]) -> dict[str, Any]:
    cell = rows[0]["cells"][0]
    return {
        "model": "cifar_resnet20",
        "target": float(rows[0]["settings"]["recipe"]["target"]),
        "spread": "sample standard deviation over the seeds",
        "measured_on": cell["measured_on"],
        "images": cell["images"],
        "start_recipe": recipe_named(START).to_json(),
        "rows": [{**row, "settings": _changed(row["settings"])} for row in rows],
    }


def _changed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method, of its recipe only what is not the start recipe's."""
    start = recipe_named(START).to_json()
    recipe = {name: value for name, value in settings["recipe"].items() if value != start.get(name)}
    return {**settings, "recipe": recipe}


if __name__ == "__main__":
    try:
        main()
    except HeadgateError as error:
        raise SystemExit(f"error: {error}") from None
