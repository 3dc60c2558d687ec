"""A run is a recipe: a frozen set of fields, most of them known by a name, any of them replaced on the command line.

The paper's experiments are recipes under their names. A run has up to three phases, each with its epochs and learning
rate: `dense` (train the network itself, where no weights are given), `gates` (weights and gates together, the cost
comes down to the target), `tune` (the shrunk network alone, at its own speed; or, where gates depend on the image, the
weights under gates that are decided and learn no more). Knows nothing of models or data but
their names, and nothing of torch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from headgate.errors import HeadgateError

SCHEDULES = ("constant", "cosine", "onecycle", "step")
PhaseName = Literal["dense", "gates", "tune"]
PHASES: tuple[PhaseName, ...] = ("dense", "gates", "tune")
WARM_UP = 0.15
"""Share of a one-cycle phase in which the learning rate rises."""


CHOICES = {
    "dense_schedule": SCHEDULES,
    "gate_schedule": SCHEDULES,
    "tune_schedule": SCHEDULES,
    "budget": ("control", "paper"),
    "precision": ("no", "fp16", "bf16"),
    "kind": ("static", "dynamic"),
    "stream": ("auto", "shared", "indexed"),
    "loss": ("macs", "activation", "per_gate"),
    "backward": ("sample", "probability"),
    "exit_head": ("mean", "conv"),
}
NAMES = ("exits", "frozen", "static")
"""Fields that are lists of modules."""
OF_CHANNELS = (
    "kind", "granularity", "stream", "frozen", "static", "loss", "rate", "initial_probability", "prime_batches",
    "round_to", "squeeze_below",
)  # fmt: skip
"""Fields that speak of gates on channels: exits have none, and leave them as they are."""
OF_EXITS = ("exit_head", "classifier_weight", "classifier_scale", "train_model")
SILENT: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("teacher", "distill", (0.0,)), ("distill_temperature", "distill", (0.0,)), ("distill_gates", "distill", (0.0,)),
    ("teacher_normalization", "teacher", (None,)), ("squeeze_below", "kind", ("dynamic",)),
    ("static", "kind", ("static",)), ("prime_loudness", "kind", ("static",)), ("tune_gate_lr", "kind", ("static",)),
    ("prime_loudness", "prime_batches", (0,)), ("rate", "loss", ("macs", "activation")),
    ("budget_weight", "budget", ("paper",)), ("ramp", "budget", ("paper",)),
    ("budget_weight", "loss", ("per_gate",)), ("ramp", "loss", ("per_gate",)),
)  # fmt: skip
"""Fields that would say nothing where another field has one of these values."""
PLACES = ("weights", "data_dir", "teacher", "workers")
"""Fields that say where something is or how it is read: they may change when a run goes on."""


def about(text: str, default: Any) -> Any:
    """A field with its sentence, which the command line shows as help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run computes."""

    name: str = about("What the recipe is called.", "custom")
    model: str = about("Name of the network: cifar_resnet56, torchvision:resnet50, timm:…, path.py:function.", "")
    weights: str | None = about("Weights to start from: a safetensors file, or 'pretrained' (torchvision, timm).", None)
    data: str = about("digits, cifar10, or folder:PATH with train/ and val/.", "digits")
    data_dir: str | None = about("Folder that holds cifar10 (default: $HEADGATE_DATA or the user's cache).", None)
    normalization: str | None = about("Mean and deviation of the pixels: imagenet or cifar10.", None)
    image_size: int | None = about("Pixels a side; the data's own if not given.", None)
    validation: int = about("Training images held out; accuracy is then theirs, and the test set is not touched.", 0)

    target: str = about("Share of the dense network's MACs, or a number such as 60M.", "0.5")
    kind: str = about("Gates that are parameters (static), or that depend on the image (dynamic).", "static")
    granularity: str = about("channel, layer, or a number of channels a gate.", "channel")
    stream: str = about("shared: gates tied along a stream; indexed: masks of their own; auto: by kind.", "auto")
    exits: tuple[str, ...] = about("Modules behind which images can leave early; no channel has a gate then.", ())
    exit_head: str = about("Their classifiers: mean (over all places, linear) or conv (a convolution first).", "mean")
    classifier_weight: float = about("Of all exits' classifiers on all images, in the loss.", 1.0)
    classifier_scale: float = about("Their learning rate, times that of the weights: they start from nothing.", 1.0)
    train_model: bool = about("With exits: whether the network learns too, or only classifiers and gates.", True)
    frozen: tuple[str, ...] = about("Modules to leave alone.", ())
    static: tuple[str, ...] = about("Modules whose gates stay static where the kind is dynamic.", ())
    loss: str = about("Cost loss: macs, activation or per_gate.", "macs")
    rate: str | None = about(
        "Target rate of gates, for the per_gate loss: one, or 1,0.8,… (default: the target).", None
    )
    budget: str = about("control: ramp, integral and scaled gradient; paper: the plain squared distance.", "control")
    budget_weight: float = about("Weight of the squared distance to the target of the moment.", 50.0)
    ramp: float = about("Share of the gate phase over which the target comes down.", 0.6)
    initial_probability: float = about("P(open) of every gate at the start.", 0.95)
    prime_batches: int = about("Batches from which gates learn where to start; 0: all start alike.", 0)
    prime_spread: float = about("How far apart they then start: the deviation of their logits.", 1.5)
    prime_loudness: float = about("Gates that look at the image: how much a channel's loudness in it counts.", 0.0)
    temperature: float = about("Of the Gumbel-softmax.", 1.0)
    hard: bool = about("Straight-through 0/1 gates (the soft ones otherwise).", True)
    backward: str = about("What stands for Z backward: sample or probability.", "sample")
    round_to: int = about("Widths of the shrunk network are multiples of this.", 1)
    squeeze_below: float = about("Gates below this probability are removed during the gate phase; 0: none.", 0.0)

    dense_epochs: int = about("Epochs of the dense network before its gates.", 0)
    gate_epochs: int = about("Epochs of weights and gates together.", 2)
    tune_epochs: int = about("Epochs of the shrunk network.", 8)
    dense_lr: float = about("Peak learning rate of the dense phase.", 0.1)
    gate_phase_lr: float = about("Peak learning rate of the weights in the gate phase.", 0.01)
    gate_lr: float = about("Learning rate of the gates themselves.", 0.01)
    tune_lr: float = about("Peak learning rate of the shrunk network.", 0.05)
    tune_gate_lr: float = about("The same, of gates that look at the image, decided meanwhile; 0: they rest.", 0.0)
    dense_schedule: str = about("constant, cosine, onecycle or step.", "onecycle")
    gate_schedule: str = about("The same, of the weights in the gate phase; gates keep their rate.", "constant")
    tune_schedule: str = about("The same, of the shrunk network.", "onecycle")
    step_epochs: int = about("For the step schedule: epochs after which the rate is multiplied by 0.1.", 30)
    momentum: float = about("Of SGD (Nesterov's).", 0.9)
    weight_decay: float = about("Of the weights; gates get 10/|G| of it.", 1e-4)
    batch_size: int = about("Images a step, over all processes.", 128)
    label_smoothing: float = about("Of the labels.", 0.0)
    mix: float = about("Images mixed in pairs, by shares from Beta(mix, mix); 0: none are.", 0.0)
    distill: float = about("Weight of the teacher's answers in the loss; 0: no teacher.", 0.0)
    distill_temperature: float = about("At which teacher and student are compared.", 4.0)
    teacher: str | None = about("Another teacher than the dense network: NAME=weights.safetensors.", None)
    teacher_normalization: str | None = about("Mean and deviation it is used to, if not the student's.", None)
    distill_gates: bool = about("Whether the teacher also speaks in the gate phase.", True)

    calibration_batches: int = about("Batches for BatchNorm's statistics after deciding.", 200)
    seed: int = about("Of everything random.", 0)
    precision: str = about("no, fp16 or bf16.", "no")
    compile: bool = about(
        "Let torch.compile make networks faster, the teacher too: pays from about an epoch on.", False
    )
    workers: int = about("Processes that decode images, for folder:PATH.", 0)

    def __post_init__(self) -> None:
        for name in ("dense_epochs", "gate_epochs", "tune_epochs", "validation", "workers", "prime_batches"):
            _check(getattr(self, name) >= 0, self, name, "0 or more")
        for name in ("batch_size", "step_epochs", "round_to", "calibration_batches"):
            _check(getattr(self, name) >= 1, self, name, "at least 1")
        _check(0 <= self.seed < 2**63, self, "seed", "a number from 0 to 2^63 - 1")
        for name in ("distill_temperature", "temperature"):
            _check(getattr(self, name) > 0, self, name, "above 0")
        for name, choices in CHOICES.items():
            _check(getattr(self, name) in choices, self, name, f"one of {', '.join(choices)}")
        for name in ("ramp", "distill", "squeeze_below", "label_smoothing"):
            _check(0 <= getattr(self, name) <= 1, self, name, "a share, from 0 to 1")
        _check(not (self.exits and self.tune_epochs), self, "tune_epochs", "0 with exits: nothing is shrunk")
        usual = {each.name: each.default for each in fields(self)}
        for name in OF_CHANNELS if self.exits else OF_EXITS:
            where = "with exits, which have no gates on channels" if self.exits else "without exits"
            _check(getattr(self, name) == usual[name], self, name, f"left out {where}")
        for name, other, values in SILENT:
            if getattr(self, other) in values:
                where = f"left out with {other}={getattr(self, other)}, which does not look at it"
                _check(getattr(self, name) == usual[name], self, name, where)
        self.rates()
        _check(self.momentum < 1, self, "momentum", "below 1")
        for name in ("classifier_weight", "classifier_scale"):
            _check(getattr(self, name) >= 0, self, name, "0 or more")
        for name in (
            "dense_lr", "gate_phase_lr", "gate_lr", "tune_lr", "tune_gate_lr", "momentum", "weight_decay",
            "prime_spread", "prime_loudness", "mix",
        ):  # fmt: skip
            value = getattr(self, name)
            _check(math.isfinite(value) and value >= 0, self, name, "a number from 0 on")

    def epochs_of(self, phase: PhaseName) -> int:
        """Epochs of a phase."""
        return int(getattr(self, EPOCHS[phase]))

    @property
    def epochs(self) -> int:
        """Epochs of all phases."""
        return sum(self.epochs_of(phase) for phase in PHASES)

    def rates(self) -> float | list[float] | None:
        """The target rate of all masks, or one for each."""
        if self.rate is None:
            return None
        try:
            found = [float(word) for word in str(self.rate).split(",")]
        except ValueError:
            found = [math.nan]
        _check(all(0 <= each <= 1 for each in found), self, "rate", "a share, or several with commas between")
        return found if len(found) > 1 else found[0]

    def lr(self, phase: PhaseName, step: int, steps_an_epoch: int) -> float:
        """Learning rate of the weights at a step of a phase."""
        peak, schedule = getattr(self, PEAK[phase]), getattr(self, SCHEDULE[phase])
        return learning_rate(
            schedule, peak, step, self.epochs_of(phase) * steps_an_epoch, self.step_epochs * steps_an_epoch
        )

    def gate_rate(self, phase: PhaseName, step: int, steps_an_epoch: int) -> float:
        """Learning rate of the gates at a step of a phase: the same all through it, but where the weights are tuned."""
        if phase != "tune":
            return self.gate_lr
        return self.tune_gate_lr * self.lr(phase, step, steps_an_epoch) / max(self.tune_lr, 1e-12)

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in NAMES}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recipe:
        """A recipe that was saved."""
        unknown = set(data) - {each.name for each in fields(cls)}
        if unknown:
            raise HeadgateError(
                f"the recipe has unknown fields {sorted(unknown)}: it is of another version of headgate"
            )
        return cls(**{**data, **{name: tuple(data.get(name, ())) for name in NAMES}})


EPOCHS: dict[PhaseName, str] = {"dense": "dense_epochs", "gates": "gate_epochs", "tune": "tune_epochs"}
PEAK: dict[PhaseName, str] = {"dense": "dense_lr", "gates": "gate_phase_lr", "tune": "tune_lr"}
SCHEDULE: dict[PhaseName, str] = {"dense": "dense_schedule", "gates": "gate_schedule", "tune": "tune_schedule"}


def _check(right: bool, recipe: Recipe, name: str, what: str) -> None:
    if not right:
        raise HeadgateError(f"recipe {recipe.name!r}: {name}={getattr(recipe, name)!r}, but it must be {what}")


def learning_rate(schedule: str, peak: float, step: int, steps: int, step_length: int) -> float:
    """The rate at `step` of `steps`: a function of the position alone, so that a run can go on anywhere."""
    done = step / max(steps, 1)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "onecycle":
        if done < WARM_UP:
            return peak * (0.1 + 0.9 * done / WARM_UP)
        return peak * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))
    if schedule == "step":
        return float(peak * 0.1 ** (step // max(step_length, 1)))
    return peak


# ------------------------------------------------------------------------------------------------------- named

_CIFAR = Recipe(
    data="cifar10", gate_epochs=1, tune_epochs=9, prime_batches=40, prime_spread=2.5, gate_phase_lr=0.03, gate_lr=0.03,
    tune_schedule="cosine",
)  # fmt: skip
_IMAGENET = Recipe(
    weights="pretrained", data="folder:imagenet", batch_size=256, gate_epochs=100, tune_epochs=0, gate_phase_lr=0.1,
    gate_lr=0.1, gate_schedule="step", step_epochs=30, workers=8,
)  # fmt: skip


_AIG = {
    "imagenet-resnet50": {"rate": "1,1,0.8,1,0.5,0.5,0.5,1,0.5,0.5,0.5,0.5,0.5,1,0.7,1", "target": "0.76"},
    "imagenet-resnet101": {"rate": ",".join(["1"] * 8 + ["0.5"] * 25), "target": "0.65"},
}
"""AIG's published target rates of blocks at t = 0.5, and the MACs that a network has in which blocks are as often open;
its other networks ask every block for t."""


def looking(recipe: Recipe) -> Recipe:
    """The same with gates that look at the image: they begin with what they are taught of how loud channels will be,
    and have a fifth of the epochs, at least one, to learn more."""
    dynamic = replace(recipe, kind="dynamic", prime_loudness=1.0 if recipe.prime_batches else 0.0)
    if not recipe.tune_epochs:
        return dynamic
    gate_epochs = max(1, recipe.epochs // 5)
    return replace(dynamic, gate_epochs=gate_epochs, tune_epochs=recipe.epochs - gate_epochs)


def _of_every_kind(recipe: Recipe) -> list[Recipe]:
    """Pruning, conditional computation, and AIG: whole blocks that start alike, each with a target rate of its own."""
    aig = {
        "kind": "dynamic", "granularity": "layer", "loss": "per_gate", "prime_batches": 0, **_AIG.get(recipe.name, {}),
    }  # fmt: skip
    if recipe.tune_epochs:
        aig |= {"gate_epochs": recipe.epochs * 3 // 5, "tune_epochs": recipe.epochs * 2 // 5}
    return [
        replace(recipe, name=f"{recipe.name}-static"),
        replace(looking(recipe), name=f"{recipe.name}-dynamic"),
        replace(recipe, name=f"{recipe.name}-aig", **aig),  # type: ignore[arg-type]
    ]


def _named() -> dict[str, Recipe]:
    recipes = [
        Recipe(
            name="digits-static",
            model="digits_resnet",
            image_size=16,
            batch_size=64,
            dense_epochs=6,
            gate_epochs=8,
            tune_epochs=8,
        )
    ]
    for depth in (20, 32, 44, 56, 110):
        recipes += _of_every_kind(replace(_CIFAR, name=f"cifar10-resnet{depth}", model=f"cifar_resnet{depth}"))
    for depth in (18, 34, 50, 101):
        recipes += _of_every_kind(
            replace(_IMAGENET, name=f"imagenet-resnet{depth}", model=f"torchvision:resnet{depth}")
        )
    for model, exits, pixels in (
        ("densenet100", ("block1", "block2"), "cifar10"), ("resnet56", ("layer1", "layer2"), None),
    ):  # fmt: skip
        leaving = replace(
            _CIFAR, name=f"cifar10-{model}-exits", model=f"cifar_{model}", exits=exits, target="0.85", prime_batches=0,
            gate_epochs=20, tune_epochs=0, gate_phase_lr=0.02, gate_schedule="cosine", exit_head="conv",
            classifier_scale=5.0, normalization=pixels,
        )  # fmt: skip
        recipes.append(leaving)
    return {recipe.name: recipe for recipe in recipes}


RECIPES = _named()


def recipe_named(name: str) -> Recipe:
    """The recipe of that name."""
    if name in RECIPES:
        return RECIPES[name]
    close = difflib.get_close_matches(name, RECIPES, 3, 0.4)
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(RECIPES)}"
    raise HeadgateError(f"there is no recipe {name!r}: {hint}")


def without_places(recipe: Recipe) -> Recipe:
    """What a run computes, wherever its files are."""
    data = "folder" if recipe.data.startswith("folder:") else recipe.data
    return replace(recipe, weights=None, data=data, data_dir=None, teacher=recipe.teacher and "another", workers=0)


def overridden(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some fields replaced; "none" takes away what a field names, None leaves it as it is."""
    changes = {name: value for name, value in changes.items() if value is not None}
    known = get_type_hints(Recipe)
    for name, value in changes.items():
        if name not in known:
            raise HeadgateError(f"a recipe has no field {name!r}")
        if value == "none" and type(None) in get_args(known[name]):
            changes[name] = None
        elif value == ("none",):
            changes[name] = ()
    different = {name: value for name, value in changes.items() if value != getattr(recipe, name)}
    return replace(recipe, **different) if different else recipe
