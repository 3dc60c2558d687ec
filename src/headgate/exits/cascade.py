"""The cascade: a model whose images can leave early, what that costs, and thresholds for a budget.

In train mode all images go to the end and every gate is drawn: an image's answer is that of the first gate that opens,
its cost what was computed until then, and the expected cost of the cascade is pulled to a target like that of channels.
In eval mode images that leave are taken out of the batch at once: what comes after runs on fewer images, and not at all
where none is left. Knows nothing of where a model can be cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate.errors import FileError, HeadgateError, ModelError, NotDecided, ShrinkMismatch, TargetError
from headgate.exits.heads import ConvHead, MeanHead
from headgate.exits.reading import Reader, read
from headgate.exits.smaller import smaller_exits
from headgate.exits.table import ExitRow, ExitTable, Watched
from headgate.exits.thresholds import NOBODY, everybody_at, shifted, thresholds
from headgate.exits.under_way import Arrival, Everyone, Leaving, Rehearsing, Watching
from headgate.gated import GatedModel, TauPoint
from headgate.gates.budget import Budget, parse_target
from headgate.gates.cost import over_processes
from headgate.gates.draws import Channels
from headgate.gates.dynamic import GateNetwork
from headgate.gates.gumbel import Relaxation, draw, logistic_noise
from headgate.gates.passes import Passing
from headgate.graph.trace import tensors_in
from headgate.inference.calibrate import labelled
from headgate.inference.shrink import TOLERANCE, difference, random_like

# legend of axes: B images, K exits (the last is the model's own), S segments between them, C channels

READS = "log probabilities"
"""What gates are told of their classifier's answer; kept with their weights, which mean nothing without it."""
_AS_IT_IS = "use the cascade as it is, or exits.model.compact(), without exits"


class ExitModel(Passing):
    """A model whose images can leave early. Made by `headgate.add_exits`, in train mode; called like the model, it
    gives class scores."""

    of_a_pass = ("_pass", "_logits", "_reach_BK")
    not_counted_because = "they depend on who leaves: ask exits.macs() after a pass, or exits.table(loader)"
    not_gated_because = "it has exits: put gates on the model's channels first, then add_exits to the gated model"

    def __init__(
        self, model: nn.Module, names: Sequence[str], heads: Sequence[nn.Module],
        gates: Sequence[GateNetwork], head_macs: Sequence[int], segments: Sequence[dict[str, int]], target: float,
        budget: Budget | None, classifier_weight: float, example_input: Tensor, masks: Sequence[Channels | None],
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.heads = nn.ModuleList(heads)
        self.gates = nn.ModuleList(gates)
        self.names = (*names, "last")
        self.target = target
        self.budget = budget if budget is not None else Budget(target)
        self.classifier_weight = classifier_weight
        self.relaxation = Relaxation()
        self.dense_macs = sum(sum(segment.values()) for segment in segments)
        """Of the model without exits, all its channels open."""
        self.example_shape, self.example_dtype = tuple(example_input.shape), example_input.dtype
        self._segments = tuple(segments)
        self._head_macs = tuple(head_macs)
        self._masks = tuple(masks)
        """The gates on the channels that each exit reads, where some have any."""
        self.train_model = True
        """Whether the model itself learns, too; if not, it stays in eval mode and no gradient is made for it."""
        self.taus = [0.5] * len(heads)
        """An image leaves where its gate's probability is above; with `NOBODY`, an exit is out of use."""
        self._readers: dict[int, Reader] = {}
        """Exits prepared for inference, of the weights of the moment."""
        self._pass: Watching | Leaving | None = None
        self._logits: list[Tensor] | None = None
        self._reach_BK: Tensor | None = None
        self._macs: float | None = None
        modules = dict(self._network().named_modules())
        for number, name in enumerate(names):
            modules[name].register_forward_hook(Arrival(self, number))

    def __getstate__(self) -> dict[str, Any]:
        """A copy prepares its exits anew."""
        return super().__getstate__() | {"_readers": {}}

    def _network(self) -> nn.Module:
        return self.model.model if isinstance(self.model, GatedModel) else self.model

    def _apply(self, fn: Any, recurse: bool = True) -> ExitModel:
        """Move, or change the precision of, the model: an example for it is of another type then."""
        super()._apply(fn, recurse)
        self.example_dtype = fn(torch.empty(0, dtype=self.example_dtype)).dtype
        return self

    def read(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Class scores at exit `number`, and the logit of leaving there for each image. Channels that are closed are
        zero to an exit, as to every layer."""
        mask, head, gate = self._masks[number], self.heads[number], self.gates[number]
        assert isinstance(gate, GateNetwork)
        x = x if mask is None else mask.apply(x)
        if not Reader.fits(head, x):
            return read(head, gate, x, float(len(self.gates)) if self.budget.scale_gradient else 1.0)
        reader = self._readers.get(number)
        if reader is None or not reader.is_of_now():
            assert isinstance(head, (MeanHead, ConvHead))
            reader = self._readers[number] = Reader(head, gate)
        return reader(x)

    # ------------------------------------------------------------------------------------------------ running

    def train(self, mode: bool = True) -> ExitModel:
        """Train mode, or eval mode; a model that does not learn stays as it is."""
        super().train(mode)
        self._readers.clear()
        if not self.train_model:
            self.model.eval()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Class scores: of the exit that each image takes."""
        if self.training:
            return self._train_pass(args, kwargs)
        with self._turn:
            return self._leave(args, kwargs)

    @contextmanager
    def _passing(self, how: Watching | Leaving) -> Iterator[None]:
        self._pass = how
        try:
            yield
        finally:
            self._pass = None

    def _watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """All exits' scores and all gates' logits, for all images."""
        watching = Watching(self)
        with self._passing(watching):
            last = tensors_in(self.model(*args, **kwargs))[0]
        self._check_passed(len(watching.answers))
        return [*watching.answers, last], watching.wishes

    @torch.no_grad()
    def _rehearsed(self, number: int, images: Tensor) -> Tensor:
        """What the last exit answers to the other images where the first one leaves at exit `number`; in eval mode."""
        rehearsing = Rehearsing(self, len(images), number)
        with self._passing(rehearsing):
            rest = tensors_in(self.model(images))[0]
        return rest[rehearsing.inside.argsort()] if len(rest) == len(rehearsing.inside) else rest

    def _check_passed(self, exits: int) -> None:
        if isinstance(self.model, GatedModel) and self.model._squeezed is not None:
            raise HeadgateError("squeeze_() has put a network without exits in place: exits.model.unsqueeze_() first")
        if exits != len(self.heads):
            raise HeadgateError("not every exit was passed: the forward pass took another way than in the example")

    def _train_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self._logits, wishes = self._watch(args, kwargs)
        wishes_BK = torch.stack(wishes, 1)
        noise = logistic_noise(tuple(wishes_BK.shape), wishes_BK.device, None)
        leaves_BK = draw(wishes_BK, noise, self.relaxation)
        self._reach_BK, leave_BK = _ways(leaves_BK)
        return (torch.stack(self._logits, 2) * leave_BK[:, None]).sum(2)

    def _check_decided(self) -> None:
        if isinstance(self.model, GatedModel) and self.model.sampled:
            raise NotDecided(
                "images leave under channels that are decided, but the strategy of the gated model draws them anew: "
                "use exits.model.strategy('threshold'), or 'calibrated'"
            )

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self._check_decided()
        images = len((tensors_in(args) or tensors_in(kwargs))[0])
        leaving = Leaving(self, images)
        self._reach_BK = None
        with self._passing(leaving):
            try:
                last = tensors_in(self.model(*args, **kwargs))[0]
                self._check_passed(len(leaving.entered) - 1)
                leaving.answered.append((leaving.inside, last))
            except Everyone:
                pass
        self._macs = self._macs_of_counts(leaving.entered, images)
        return leaving.together(images)

    # --------------------------------------------------------------------------------------------------- cost

    def _macs_of_counts(self, entered: Sequence[int], images: int) -> float | None:
        if isinstance(self.model, GatedModel) and self.model.dynamic is not None:
            return None  # images that left are not in the counts of those that stayed
        if images == 0:
            return None
        segments = self._segment_shares()[0].tolist()
        own = [
            self._own_macs(number) / self.dense_macs if tau < NOBODY else 0.0 for number, tau in enumerate(self.taus)
        ]
        shares = [here + at for here, at in zip(segments, [*own, 0.0], strict=True)]
        return sum(count / images * share for count, share in zip(entered, shares, strict=False)) * self.dense_macs

    def least_macs(self) -> float | None:
        """Of an image that leaves at the first exit; None where that depends on the channels that are open."""
        if isinstance(self.model, GatedModel):
            return None
        return float(sum(self._segments[0].values()) + self._own_macs(0))

    def _own_macs(self, number: int) -> int:
        """What an exit costs every image that comes to it: the classifier, and the gate that reads its answer."""
        return self._head_macs[number] + self._gate_macs(number)

    def _gate_macs(self, number: int) -> int:
        network = self.gates[number]
        assert isinstance(network, GateNetwork)
        return network.macs

    def _segment_shares(self) -> Tensor:
        """What each segment costs, as a share of the dense model: (images or 1, segments)."""
        if not isinstance(self.model, GatedModel):
            return torch.tensor([[sum(segment.values()) / self.dense_macs for segment in self._segments]])
        gated = self.model
        if gated._last is None:
            raise NotDecided("there was no forward pass to tell the cost of: call the model first")
        always, names, each_BI = gated.cost.by_layer(gated._last)
        columns = []
        for number, segment in enumerate(self._segments):
            fixed = sum(macs for name, macs in always.items() if name in segment) + self._deciding_macs(number)
            places = [place for place, name in enumerate(names) if name in segment]
            columns.append(each_BI[:, places].sum(1) + fixed / self.dense_macs)
        return torch.stack(columns, 1)

    def _deciding_macs(self, segment: int) -> int:
        """Of the gate networks of channels, which are computed where the layers are that read the same tensor."""
        dynamic = self.model.dynamic if isinstance(self.model, GatedModel) else None
        if dynamic is None:
            return 0
        return sum(
            network.macs
            for site, network in zip(dynamic.sites, dynamic.networks, strict=True)
            if isinstance(network, GateNetwork) and self._segment_of(site.layer) == segment
        )

    def _segment_of(self, layer: str) -> int:
        return next((number for number, segment in enumerate(self._segments) if layer in segment), 0)

    def shares_B(
        self, reach_BK: Tensor, segments_BK: Tensor | None = None, taus: Sequence[float] | None = None
    ) -> Tensor:  # fmt: skip
        """Multiply-adds of each image as a share of the dense model's, for given ways through the cascade; segments
        cost what they did in the last pass, if nothing else is given. In training all exits are computed; under
        thresholds only those in use."""
        segments_BK = self._segment_shares() if segments_BK is None else segments_BK
        shares = (reach_BK * segments_BK.to(reach_BK)).sum(1)
        for number in range(len(self.gates)):
            if taus is None or taus[number] < NOBODY:
                shares = shares + reach_BK[:, number] * (self._own_macs(number) / self.dense_macs)
        return shares

    def macs(self) -> float:
        """Multiply-adds an image that the last forward pass needed, exits and gates included."""
        if self._reach_BK is not None:
            return float(self.shares_B(self._reach_BK).detach().double().mean()) * self.dense_macs
        if self._macs is None:
            raise NotDecided(
                "the cost of the last forward pass is not known: call the model first; "
                "where gates on channels look at the image, use table(loader), or macs() after a pass in train mode"
            )
        return self._macs

    def cost_loss(self) -> Tensor:
        """The scalar to add to the task loss: pulls the expected cost of the cascade to the target. Asked again for the
        same pass, it is the same: the budget moves on once a pass."""
        if self._reach_BK is None:
            raise NotDecided(
                "cost_loss() is about a forward pass in train mode, and there was none: call the model first"
            )
        reach_BK = self._reach_BK
        return self._pulled(reach_BK, lambda: over_processes(self.shares_B(reach_BK).mean()))

    def classifier_loss(self, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy of all exits on all images, times `classifier_weight`: for the pass just done."""
        if not self._logits:
            raise NotDecided("classifier_loss() is about a forward pass in train mode, and there was none")
        exact = [logits if logits.dtype == torch.float64 else logits.float() for logits in self._logits]
        losses = [F.cross_entropy(logits, labels, label_smoothing=label_smoothing) for logits in exact]
        return self.classifier_weight * torch.stack(losses).mean()

    def gate_parameters(self) -> list[nn.Parameter]:
        """The parameters of the exits' gates, and of the channels' where there are some."""
        inner = self.model.gate_parameters() if isinstance(self.model, GatedModel) else []
        return [*self.gates.parameters(), *inner]

    def param_groups(
        self, lr: float, weight_decay: float = 0.0, gate_lr: float | None = None, classifier_scale: float = 1.0
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Optimizer groups: the model's weights, the exits' classifiers (which start from nothing and may want to learn
        `classifier_scale` times as fast), and gates."""
        inner = (
            self.model.param_groups(lr, weight_decay, gate_lr)
            if isinstance(self.model, GatedModel)
            else [{"params": list(self.model.parameters()), "lr": lr, "weight_decay": weight_decay, "name": "weights"}]
        )
        groups = [
            *inner,
            {
                "params": list(self.heads.parameters()), "lr": lr * classifier_scale, "weight_decay": weight_decay,
                "name": "classifiers", "lr_scale": classifier_scale,
            },
            {
                "params": list(self.gates.parameters()), "lr": lr if gate_lr is None else gate_lr,
                "weight_decay": weight_decay, "name": "gates",
            },
        ]  # fmt: skip
        learning = [group | {"params": [p for p in group["params"] if p.requires_grad]} for group in groups]
        return [group for group in learning if group["params"]]

    # -------------------------------------------------------------------------------------------------- using

    @torch.no_grad()
    def watch(self, loader: Iterable[Any], batches: int | None = None) -> Watched:
        """A loader's (images, labels) on their way through all exits; nobody leaves."""
        self._check_decided()
        device = next(self.parameters()).device
        training = self.training
        self.eval()
        wished, right, costs = [], [], []
        try:
            for batch in itertools.islice(loader, batches):
                inputs, labels = labelled(batch)
                labels = labels.to(device)
                logits, wishes = self._watch(tuple(tensor.to(device) for tensor in inputs), {})
                wished.append(torch.sigmoid(torch.stack(wishes, 1)).cpu())
                right.append(torch.stack([answer.argmax(1) == labels for answer in logits], 1).cpu())
                costs.append(self._segment_shares().cpu().expand(len(labels), -1))
        finally:
            self.train(training)
        if not wished:
            raise HeadgateError("the loader is empty: give at least one batch of (images, labels)")
        return Watched(torch.cat(wished), torch.cat(right), torch.cat(costs))

    def exit_of(self, watched: Watched, taus: Sequence[float] | None = None) -> Tensor:
        """The number of the exit that each image takes, under these thresholds or the model's own."""
        return self._ways_of(watched, taus)[1].argmax(1)

    def macs_of(self, watched: Watched, taus: Sequence[float] | None = None) -> Tensor:
        """Multiply-adds of each image, under these thresholds or the model's own."""
        taus = taus or self.taus
        return self.shares_B(self._ways_of(watched, taus)[0], watched.segments_NK, taus) * self.dense_macs

    def layers_of(self, watched: Watched, taus: Sequence[float] | None = None) -> dict[str, float]:
        """Multiply-adds an image of every layer, and of the exits' own classifiers and gates: the mean over images.

        Where channels have gates too, those of a segment are shared out in proportion to the dense layers.
        """
        taus = taus or self.taus
        reach, _ = self._ways_of(watched, taus)
        spent = (reach * watched.segments_NK.to(reach)).mean(0) * self.dense_macs
        layers = {
            name: macs * float(total) / max(sum(segment.values()), 1)
            for segment, total in zip(self._segments, spent, strict=True)
            for name, macs in segment.items()
        }
        exits = [number for number in range(len(self.gates)) if taus[number] < NOBODY]
        layers["exit classifiers"] = sum(float(reach[:, number].mean()) * self._head_macs[number] for number in exits)
        layers["exit gates"] = sum(float(reach[:, number].mean()) * self._gate_macs(number) for number in exits)
        return layers

    def _ways_of(self, watched: Watched, taus: Sequence[float] | None) -> tuple[Tensor, Tensor]:
        return _ways((watched.p_NK > torch.tensor(taus or self.taus)).double())

    def calibrate(
        self, loader: Iterable[Any], batches: int | None = 200, target: float | str | None = None
    ) -> ExitModel:
        """Set the thresholds so that the loader's images cost at most the target on average, and as many of them as can
        be found are answered right. Where the target is the whole model, nobody leaves.

        `target` is the model's own if not given: one trained cascade serves many budgets.
        """
        return self.calibrate_on(self.watch(loader, batches), target)

    def calibrate_on(self, watched: Watched, target: float | str | None = None) -> ExitModel:
        """The same with images that were watched. An exit that does not earn its own cost goes out of use."""
        share = self.target if target is None else parse_target(target, self.dense_macs)
        exits = range(len(self.gates))
        least, where = min((self._share_of(watched, everybody_at(number, len(exits))), number) for number in exits)
        if share < min(least, 1.0):
            raise TargetError(
                f"target {share:.3g} can't be reached: if every image leaves at {self.names[where]}, "
                f"{least:.3f} of the MACs are needed. Choose a higher one, or an earlier first exit"
            )
        own = [self._own_macs(number) / self.dense_macs for number in exits]
        self.taus = thresholds(
            watched.p_NK, watched.right_NK, watched.segments_NK, own, partial(self._share_of, watched), share
        )
        return self

    def _share_of(self, watched: Watched, taus: Sequence[float]) -> float:
        return float(self.macs_of(watched, taus).mean()) / self.dense_macs

    def table(self, loader: Iterable[Any], batches: int | None = None) -> ExitTable:
        """Who leaves where, and how right they are; of the cascade and of the last exit alone."""
        return self.table_of(self.watch(loader, batches))

    def table_of(self, watched: Watched, taus: Sequence[float] | None = None) -> ExitTable:
        """The same of images that were watched, under these thresholds or the model's own."""
        right, segments = watched.right_NK, watched.segments_NK
        taus = taus or self.taus
        _, leave = self._ways_of(watched, taus)
        rows = []
        for number, name in enumerate(self.names):
            here = leave[:, number] > 0.5
            passed = torch.ones_like(leave)
            passed[:, number + 1 :] = 0
            rows.append(
                ExitRow(
                    name, float(here.double().mean()), float(right[:, number].double().mean()),
                    float(right[here, number].double().mean()) if bool(here.any()) else None,
                    float(self.shares_B(passed, segments, taus).mean()) * self.dense_macs,
                )
            )  # fmt: skip
        answered, last = (right.double() * leave).sum(1) > 0.5, right[:, -1].bool()
        macs = float(self.macs_of(watched, taus).mean())
        return ExitTable(
            tuple(rows), float(answered.double().mean()), float(last.double().mean()), macs, macs / self.dense_macs,
            len(right), int((answered & ~last).sum()), int((last & ~answered).sum()),
        )  # fmt: skip

    def sweep_tau(self, loader: Iterable[Any], taus: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9)) -> list[TauPoint]:
        """Accuracy and MACs over tau, for a loader of (images, labels): under `taus_at(tau)`, so that it passes through
        the model's own thresholds."""
        return self.sweep_of(self.watch(loader), taus)

    def taus_at(self, tau: float) -> list[float]:
        """The model's own thresholds moved together, until that of the first exit in use is `tau`: the others' logits
        move by as much. Exits out of use stay so."""
        return shifted(self.taus, tau)

    def sweep_of(self, watched: Watched, taus: Sequence[float]) -> list[TauPoint]:
        """The same of images that were watched."""
        tables = [self.table_of(watched, self.taus_at(tau)) for tau in taus]
        return [
            TauPoint(tau, table.macs, table.macs_fraction, table.accuracy)
            for tau, table in zip(taus, tables, strict=True)
        ]

    # ------------------------------------------------------------------------------------------------ smaller

    def shrink(self) -> ExitModel:
        """The cascade without the channels that static gates have closed: around `exits.model.shrink()`, classifiers
        and gates without them too.

        It answers as this one does in eval mode (checked at every call), and can be trained on. Its shares of MACs, and
        its target, are those of the smaller network.
        """
        gated = self.model
        if not isinstance(gated, GatedModel):
            raise NotDecided("no channel has a gate, so none is closed: shrink() is for exits of a gated model")
        if gated.dynamic is not None:
            raise NotDecided(f"gates of channels depend on the input, so no channel is closed for good: {_AS_IT_IS}")
        made = self._around(gated.shrink(), gated)
        self._check_same(made)
        return made

    def compact(self) -> ExitModel:
        """Raises: a compact network has no modules any more that an image could leave behind."""
        raise ModelError(f"compact() takes the network apart, and no image could leave it early: {_AS_IT_IS}")

    def _around(self, small: nn.Module, gated: GatedModel) -> ExitModel:
        """This cascade around a smaller network."""
        example = torch.zeros(self.example_shape, dtype=self.example_dtype, device=next(small.parameters()).device)
        own = smaller_exits(gated.graph, gated._decide(), small, example, self.names[:-1], self.heads, self.gates)
        made = ExitModel(
            small, own.names, own.heads, own.gates, own.head_macs, own.segments, self.target, None,
            self.classifier_weight, example, [None] * len(own.names),
        )  # fmt: skip
        made.relaxation, made.taus, made.train_model = self.relaxation, list(self.taus), self.train_model
        if not made.train_model:
            small.requires_grad_(False)
        made._aim_at(self.target * self.dense_macs, self.budget)
        return made.eval()

    def _aim_at(self, macs: float, budget: Budget) -> None:
        """A target in multiply-adds, or what comes nearest to it; a budget of the same settings starts anew."""
        least = self.least_macs()
        assert least is not None
        if least >= self.dense_macs:
            raise TargetError(
                f"in the smaller network, leaving at `{self.names[0]}` costs {least / self.dense_macs:.2f} of what "
                "staying does: use exits.model.shrink(), without exits"
            )
        self.target = min(max(macs, least + 1), self.dense_macs) / self.dense_macs
        self.budget = replace(budget, target=self.target, step=0, integral=0.0, start_cost=None, last_cost=None)

    @torch.no_grad()
    def _check_same(self, small: ExitModel) -> None:
        """All exits, and all gates, must say the same on a random batch."""
        images = random_like(torch.zeros(self.example_shape, dtype=self.example_dtype))
        images = images.to(next(self.parameters()).device)
        training = self.training
        try:
            ours, theirs = self.eval()._watch((images,), {}), small._watch((images,), {})
        finally:
            self.train(training)
        for what, expected, found in zip(("the classifier", "the gate"), ours, theirs, strict=True):
            for name, own, other in zip(self.names, expected, found, strict=False):
                tolerance = TOLERANCE.get(ours[0][-1].dtype, TOLERANCE[torch.float32])
                if not (gap := difference(own, other)) <= tolerance:
                    raise ShrinkMismatch(
                        f"in the shrunk cascade {what} of exit `{name}` differs by {gap:.2g} (allowed: {tolerance:g}): "
                        "use the cascade as it is, and report the model"
                    )

    # -------------------------------------------------------------------------------------------------- state

    def get_extra_state(self) -> dict[str, Any]:
        """Budget and thresholds, saved with the state dict."""
        return {"budget": self.budget.state(), "taus": list(self.taus), "reads": READS}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on with a saved budget and thresholds."""
        if state.get("reads") != READS:
            raise FileError(
                "the exits' gates are of an earlier headgate, which told them other things: train them again"
            )
        self.budget.load_state(state["budget"])
        self.taus = list(state["taus"])

    def extra_repr(self) -> str:
        return f"exits at {', '.join(self.names[:-1])}, target={self.target:.3g} of {self.dense_macs:,} MACs"


def _ways(leaves_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Who comes to each segment, and who leaves behind it: the first gate that is open counts."""
    stays = torch.cumprod(1 - leaves_BK, 1)
    reach = torch.cat([torch.ones_like(stays[:, :1]), stays], 1)
    return reach, torch.cat([reach[:, :-1] * leaves_BK, reach[:, -1:]], 1)
