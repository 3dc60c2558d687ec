"""A run: a recipe carried out in a folder, from the dense network to the shrunk one, across interruptions.

The folder holds `recipe.json`, `log.jsonl`, `checkpoint.safetensors` (where the run stands), and what the phases leave
behind: `dense`, `trained` (with gates), `gated` (calibrated), `decided` (before tuning), `small.safetensors` (or
`conditional`, where gates depend on the image), and at last `result.json`. A phase starts from the file of the one
before, so a checkpoint only has to hold the phase it was taken in. Knows nothing of the command line.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headgate.analysis.records import PACKAGES, cpu_model, versions_of, write_text
from headgate.data.batches import Part, Split
from headgate.data.sources import DataSet
from headgate.errors import FileError, HeadgateError
from headgate.exits.cascade import ExitModel
from headgate.gated import GatedModel
from headgate.graph.macs import count_macs
from headgate.inference.files import remove_scratch
from headgate.storage import load, save
from headgate.training import checkpoint as checkpoints
from headgate.training.journal import AnyJournal
from headgate.training.loop import (
    Interrupted,
    Phase,
    Surroundings,
    Totals,
    accuracy,
    begin,
    calibration_batches,
    measure,
    plain_batches,
    run_phase,
)  # fmt: skip
from headgate.training.prepare import Start, data_of, gated_of, settled, start_of, teacher_of
from headgate.training.recipe import PHASES, PhaseName, Recipe, without_places
from headgate.training.team import Team

DENSE, GATED, DECIDED, SMALL = "dense.safetensors", "gated.safetensors", "decided.safetensors", "small.safetensors"
TRAINED, CONDITIONAL, CASCADE = "trained.safetensors", "conditional.safetensors", "cascade.safetensors"
NETWORKS = {
    "dense": DENSE, "trained": TRAINED, "gated": GATED, "decided": DECIDED, "shrunk": SMALL,
    "conditional": CONDITIONAL, "cascade": CASCADE,
}  # fmt: skip
"""What a folder may hold, by what it is called in results."""
RECIPE, RESULT = "recipe.json", "result.json"
OF_A_RESULT = {"recipe", "accuracy", "macs", "macs_fraction", "seconds", "input_shape"}
"""What is asked of results elsewhere."""
BEFORE = "before.json"
"""The result of the run whose network this one tunes on, if it does."""
AVERAGED = "averaged.json"
"""The results of the runs whose networks' mean this one is, if it is."""
ADOPTED = "adopted.json"
"""Where the network comes from, if the run was made around a trained one."""
DONE = "done"
"""Where a checkpoint stands when all phases are over."""


@dataclass
class Run:
    """A recipe in its folder, and the processes that carry it out."""

    recipe: Recipe
    folder: Path
    team: Team
    journal: AnyJournal
    checkpoint_seconds: float = 120.0
    data: DataSet | None = None
    """Other data than the recipe names."""
    seconds: dict[str, float] = field(default_factory=dict)
    _saved: float = field(default_factory=time.monotonic)
    _entered: float = field(default_factory=time.monotonic)
    _stop: bool = False
    _conditions: dict[str, int] = field(default_factory=dict)

    def execute(self) -> dict[str, Any]:
        """Carry it out, from its checkpoint if there is one; returns the result that is also written."""
        data = self.data or data_of(self.recipe)
        if self.recipe.batch_size % self.team.processes:
            raise HeadgateError(
                f"batch_size={self.recipe.batch_size} can't be shared by {self.team.processes} processes: "
                "choose a multiple of their number"
            )
        start = start_of(self.recipe, data.shape)
        self._conditions = {
            "threads": torch.get_num_threads(), "processes": self.team.processes, "images": len(data.train),
        }  # fmt: skip
        if self.team.main:
            for file in (*NETWORKS.values(), RESULT):
                remove_scratch(self.folder / file)
        resumed = self._resumed()
        self.team.wait()  # all have read it before anybody writes the next
        if resumed is None:
            self.journal.note("start", {"recipe": self.recipe.to_json()})
            if self.team.main:
                save(start.build(), self.folder / DENSE)
            self.team.wait()
        order: list[str] = [*PHASES, DONE]
        left = PHASES[0 if resumed is None else order.index(resumed.phase) :]
        with self._stop_signals():
            for name in left:
                if self.recipe.epochs_of(name):
                    self._carry_out(name, start, data, resumed if resumed and resumed.phase == name else None)
                if name == "gates" and self.recipe.gate_epochs:
                    self._decide(start, data)
                self._next_phase(name)
                if any(self.team.any_of([self._stop])):
                    raise Interrupted
        return self._finish(start, data)

    # ------------------------------------------------------------------------------------------------ phases

    def _carry_out(self, name: PhaseName, start: Start, data: DataSet, resumed: checkpoints.Checkpoint | None) -> None:
        self._entered = time.monotonic()
        net = self._net(name, start, data).to(self.team.device)
        inside = resumed is not None and bool(resumed.tensors)
        if isinstance(net, GatedModel) and name == "gates" and self.recipe.prime_batches and not inside:
            net.prime_(
                calibration_batches(data.train, self.recipe), self.recipe.prime_batches,
                spread=self.recipe.prime_spread, probability=self.recipe.initial_probability,
                loudness=self.recipe.prime_loudness,
            )  # fmt: skip
        if resumed is not None and inside:
            checkpoints.restore_net_(resumed, net)
        phase = begin(name, net, self.recipe, self._teacher(name, start))
        if resumed is not None and inside:
            checkpoints.restore_optimizer_(resumed, phase.optimizer)
            phase.step, phase.totals = resumed.step, Totals(**resumed.rest["totals"])
            if resumed.rest["scaler"] is not None:
                self.team.accelerator.scaler.load_state_dict(resumed.rest["scaler"])
        around = Surroundings(
            self.recipe, data.train, self.team, self.journal, lambda: self._stop, self._save_is_due, self._save,
            lambda phase: self._look(phase, data),
        )  # fmt: skip
        run_phase(phase, around)
        if isinstance(phase.net, GatedModel) and name == "tune":  # other weights, other costs: meet the target again
            phase.net.settle_(False).calibrate(
                calibration_batches(data.train, self.recipe), self.recipe.calibration_batches, batchnorm=False
            )
        self._count_time(name)
        if self.team.main:
            save(phase.net, self.folder / {"dense": DENSE, "gates": TRAINED, "tune": last_file(self.recipe)}[name])
        self.team.wait()

    def _net(self, name: PhaseName, start: Start, data: DataSet) -> nn.Module:
        """The network at the start of a phase."""
        dense = load(self.folder / DENSE, start.architecture())
        if name == "dense":
            return dense
        if name == "gates":
            steps = self.recipe.epochs_of("gates") * data.train.steps(self.recipe.batch_size)
            return gated_of(dense, start.example, self.recipe, steps)
        decided = load(self.folder / DECIDED, start.architecture())
        return settled(decided, self.recipe)

    def _teacher(self, name: PhaseName, start: Start) -> nn.Module | None:
        dense = load(self.folder / DENSE, start.architecture())
        teacher = teacher_of(self.recipe, name, dense, tuple(start.example.shape))
        return None if teacher is None else teacher.to(self.team.device)

    def _decide(self, start: Start, data: DataSet) -> None:
        """Between gates and tuning: calibrate, shrink what can be shrunk, keep both."""
        self._entered = time.monotonic()
        gated = load(self.folder / TRAINED, start.architecture()).to(self.team.device)
        if isinstance(gated, ExitModel):
            return self._set_exits(gated, data)
        assert isinstance(gated, GatedModel)
        if gated.dynamic is not None:  # its costs are those of images
            images = next(iter(calibration_batches(data.train, self.recipe)))[0]
            with torch.no_grad():
                gated.eval()(images.to(self.team.device))
        sampled, thresholded = gated.budget.last_cost, gated.thresholded_macs()
        polarised = gated.polarised()
        gated.calibrate(
            calibration_batches(data.train, self.recipe), self.recipe.calibration_batches, self.recipe.round_to
        )
        gated.eval()
        values = {
            "dense_macs": gated.dense_macs, "target": gated.target, "cost_sampled": sampled,
            "cost_thresholded": thresholded / gated.dense_macs, "polarised": polarised,
            "gates": gated.graph.gate_count,
        }  # fmt: skip
        decided: nn.Module = gated
        if gated.dynamic is None:
            decided = gated.shrink()
            values |= {"macs": int(gated.macs()), "cost_decided": gated.macs() / gated.dense_macs}
        self._count_time("decide")
        self.journal.note("decided", values)
        if self.team.main:
            save(gated, self.folder / GATED)
            save(decided, self.folder / DECIDED)
            if not self.recipe.tune_epochs:
                save(decided, self.folder / last_file(self.recipe))
        self.team.wait()

    def _set_exits(self, exits: ExitModel, data: DataSet) -> None:
        """The thresholds at which the training images cost the target."""
        watched = exits.watch(plain_batches(data.train, self.recipe))
        table = exits.calibrate_on(watched).table_of(watched)
        self._count_time("decide")
        values = {"target": exits.target, "cost_sampled": exits.budget.last_cost, "cost_decided": table.macs_fraction}
        self.journal.note("decided", {**values, "tau": min(exits.taus), "dense_macs": exits.dense_macs})
        if self.team.main:
            save(exits, self.folder / CASCADE)
        self.team.wait()

    def _look(self, phase: Phase, data: DataSet) -> dict[str, float]:
        """Accuracy after an epoch, on held-out training images; the test set waits for the end."""
        undecided = isinstance(phase.net, ExitModel) or (isinstance(phase.net, GatedModel) and not phase.net.settled)
        if not self.recipe.validation or undecided:
            return {}
        return {"validation_accuracy": accuracy(phase.net, data.test, self.team)}

    def _finish(self, start: Start, data: DataSet) -> dict[str, Any]:
        """Measure the networks of the folder, once, and write the result."""
        nets = {
            name: load(self.folder / file, start.architecture()).to(self.team.device)
            for name, file in NETWORKS.items()
            if name not in ("trained", "decided") and (self.folder / file).exists()
        }
        cascade = nets.get("cascade")
        table = cascade.table(Part(data.test)) if isinstance(cascade, ExitModel) else None
        if "dense" not in nets:
            raise FileError(f"{self.folder / DENSE} is gone: put it back, or begin a new run in another folder")
        found = {
            name: measured(net, data.test, self.team, start.example) for name, net in nets.items() if net is not cascade
        }
        if table is not None:  # what leaving gives, for all exits at once
            found["cascade"] = table.accuracy, table.macs
        macs = {name: needed for name, (_, needed) in found.items()}
        measured_on = "validation" if self.recipe.validation else "test"
        result = {
            "recipe": self.recipe.to_json(), "measured_on": measured_on, "images": len(data.test),
            "input_shape": list(data.shape),
            "accuracy": {name: share for name, (share, _) in found.items()},
            "macs": macs, "macs_fraction": {name: value / macs["dense"] for name, value in macs.items()},
            "parameters": {name: sum(p.numel() for p in net.parameters()) for name, net in nets.items()},
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "processes": self.team.processes, "threads": torch.get_num_threads(),
            "versions": versions_of(PACKAGES), "cpu": cpu_model(),
        }  # fmt: skip
        if table is not None:
            result["exits"] = asdict(table)
        for file, name in ((BEFORE, "before"), (AVERAGED, "averaged"), (ADOPTED, "adopted")):
            if (self.folder / file).exists():
                result[name] = json.loads((self.folder / file).read_text(encoding="utf-8"))
        self.journal.note("end", {key: result[key] for key in ("accuracy", "macs_fraction", "seconds")})
        if self.team.main:
            try:
                write_text(self.folder / RESULT, json.dumps(result, indent=1) + "\n")
            except OSError as error:
                raise FileError(
                    f"{self.folder / RESULT} can't be written ({error}): free some space, then go on with --resume"
                ) from error
        return result

    # -------------------------------------------------------------------------------------------- checkpoints

    def _save_is_due(self) -> bool:
        return self.team.main and time.monotonic() - self._saved > self.checkpoint_seconds

    def _save(self, phase: Phase) -> None:
        self._count_time(phase.name)
        scaler = getattr(self.team.accelerator, "scaler", None)
        if self.team.main:
            taken = checkpoints.taken(
                phase.net, phase.optimizer, phase=phase.name, step=phase.step, recipe=self.recipe.to_json(),
                seconds=self.seconds, log_position=self.journal.position, conditions=self._conditions,
                totals=vars(phase.totals), scaler=None if scaler is None else scaler.state_dict(),
            )  # fmt: skip
            checkpoints.write_checkpoint(self.folder, taken)
        self._saved = time.monotonic()

    def _next_phase(self, done: PhaseName) -> None:
        """The checkpoint between two phases: nothing but the position."""
        following = PHASES.index(done) + 1
        if self.team.main:
            name = PHASES[following] if following < len(PHASES) else DONE
            empty = checkpoints.Checkpoint(
                name, 0, self.recipe.to_json(), dict(self.seconds), self.journal.position,
                rest={"conditions": self._conditions},
            )  # fmt: skip
            checkpoints.write_checkpoint(self.folder, empty)
        self.team.wait()

    def _resumed(self) -> checkpoints.Checkpoint | None:
        if not (self.folder / checkpoints.FILE).exists():
            self.journal.resume_at(0)  # killed before its first checkpoint, or new
            return None
        found = checkpoints.read_checkpoint(self.folder)
        if without_places(Recipe.from_json(found.recipe)) != without_places(self.recipe):
            raise FileError(
                f"{self.folder} holds a run of another recipe ({found.recipe.get('name')}): choose another folder"
            )
        self._compare(found.rest.get("conditions", {}))
        self.seconds = dict(found.seconds)
        self.journal.resume_at(found.log_position)
        return found

    def _compare(self, conditions: Mapping[str, int]) -> None:
        """Other data is another run; other threads or processes only mean other rounding."""
        for name, value in conditions.items():
            if value == self._conditions.get(name):
                continue
            if name == "images":
                raise FileError(
                    f"the run began with {value} training images, now there are {self._conditions[name]}: "
                    "name the data it began with (--data-dir)"
                )
            self.journal.say(
                f"The run began with {value} {name}, it goes on with {self._conditions[name]}: not bit-exact."
            )

    def _count_time(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._entered
        self._entered = now

    @contextmanager
    def _stop_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run after the step that is under way; a second Ctrl-C ends it at once."""

        def ask(number: int, frame: Any) -> None:
            if self._stop:
                self.journal.say(
                    f"Stopped at once; {self.folder} holds the last checkpoint, and the run can go on from there."
                )
                raise KeyboardInterrupt
            self._stop = True

        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, ask) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)


def measured(net: nn.Module, split: Split, team: Team, example: Tensor) -> tuple[float, float]:
    """Accuracy, and multiply-adds an image: exactly, but where they depend on the images."""
    share, mean_macs = measure(net, split, team)
    if isinstance(net, ExitModel):
        return share, mean_macs
    if isinstance(net, GatedModel):
        return share, mean_macs if net.dynamic is not None else int(net.eval().macs())
    return share, count_macs(net.cpu(), example)


def last_file(recipe: Recipe) -> str:
    """What a run ends with."""
    if recipe.exits:
        return CASCADE
    return SMALL if recipe.kind == "static" else CONDITIONAL


def create_folder(folder: Path, recipe: Recipe, fill: Callable[[], None] | None = None) -> None:
    """A new run's folder; one that is there already must be empty. What `fill` puts there comes before its recipe."""
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file: choose another folder with --out")
    if folder.exists() and any(folder.iterdir()):
        going_on = f"go on with that run by `headgate train --resume {shlex.quote(str(folder))}`, or "
        state = "holds a finished run" if is_done(folder) else "is not empty"
        remedy = going_on if is_begun(folder) and not is_done(folder) else ""
        raise FileError(f"{folder} {state}: {remedy}choose another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if fill is not None:
                fill()
            write_text(folder / RECIPE, json.dumps(recipe.to_json(), indent=1) + "\n")
        except BaseException:
            for file in folder.iterdir():  # it was empty, and shall be so for the next attempt
                file.unlink()
            raise
    except OSError as error:
        raise FileError(f"{folder} can't be written ({error}): choose another folder with --out") from error


def recipe_in(folder: Path) -> Recipe:
    """The recipe of a run."""
    path = folder / RECIPE
    if not path.is_file():
        raise FileError(f"{folder} is no run, it has no {RECIPE}: name the folder that a run was begun in")
    try:
        return Recipe.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise FileError(f"{path} is damaged ({error}): begin a new run in another folder") from error


def result_in(folder: Path) -> dict[str, Any]:
    """The result of a run that must have come to its end."""
    if not is_done(folder):
        raise FileError(f"{folder} is not finished: go on with it first, by `headgate train --resume {folder}`")
    try:
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not found.keys() >= OF_A_RESULT:
            raise ValueError("it is not what a run writes")
    except ValueError as error:
        raise FileError(
            f"{folder / RESULT} is damaged ({error}): remove it, and the run measures again by "
            f"`headgate train --resume {shlex.quote(str(folder))}`"
        ) from error
    return found


def is_begun(folder: Path) -> bool:
    """Whether there is a run to go on with."""
    return (folder / RECIPE).exists()


def is_done(folder: Path) -> bool:
    """Whether a run has come to its end."""
    return os.path.exists(folder / RESULT)
