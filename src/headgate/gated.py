"""The gated model: the user's network with gates on its channels, and all that can be asked of it.

Puts the layers below together and adds nothing of its own but the public names: graph (what channels there are),
gates (how they are drawn and what they cost), inference (how they are decided, and what is left without them). Knows
nothing of training loops, data sets or the command line.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from headgate.errors import HeadgateError, NonFiniteLoss, NotDecided, ShrinkMismatch
from headgate.gates.budget import Budget
from headgate.gates.cost import LOSSES, Cost, Rates, activation_rate, over_processes, per_gate_loss, target_rates
from headgate.gates.draws import Board, Channels, Draw, Group, Ledger, attach
from headgate.gates.dynamic import STRIDE, DynamicGates
from headgate.gates.gumbel import decide as decide_gates
from headgate.gates.gumbel import draw as draw_gates
from headgate.gates.gumbel import logistic_noise, threshold_logit
from headgate.gates.loudness import Loudness, teach_
from headgate.gates.passes import Passing
from headgate.gates.prime import marginal_macs, primed_logits, worth
from headgate.gates.seen import Seen, seen
from headgate.gates.static import StaticGates
from headgate.graph.grouping import ChannelGraph, Reader
from headgate.graph.plan import Plan
from headgate.graph.trace import tensors_in
from headgate.inference.calibrate import (
    Takes,
    endless,
    inputs_of,
    labelled,
    least_decisions,
    meet_with_tau,
    project,
    reestimate_batchnorm,
    rounded,
)  # fmt: skip
from headgate.inference.compact import CompactModel, check_images, compact, decided_otherwise
from headgate.inference.polarise import decide_for_good_
from headgate.inference.shrink import TOLERANCE, check_same, difference, random_like, shrink
from headgate.inference.squeeze import Squeezed, homes_in, move_state_, squeeze, write_back_
from headgate.inference.strategies import OPTIONS, Strategy, combine

GATES_FOR_FULL_DECAY = 20
"""The paper's rule: gates get 20/|G| of the usual weight decay (and never more than the usual)."""
POLARISED = 0.05
DOUBT = 1e-3
"""Logits nearer to the threshold than that, relatively, may be tipped by rounding."""
ROUGHLY = 10
"""Steps of the search for a threshold that BatchNorm is re-estimated at: it is sought again afterwards."""
TAU_BATCHES = 16
"""Batches on which the threshold of gates that depend on the input is found."""
OPTION_KINDS: Mapping[str, tuple[Any, str]] = {
    "tau": ((Real, Tensor), "number between 0 and 1"),
    "generator": ((torch.Generator, type(None)), "generator: pass torch.Generator().manual_seed(…)"),
    "runs": (Integral, "whole number of runs"),
    "combine": (str, 'name: use "mean" (of probabilities) or "vote" (majority)'),
}
"""Of the strategies' options."""
_SPENT = (
    "the loader was spent after the first tau: a sweep goes through it once for every tau, so pass a list or a "
    "DataLoader rather than an iterator"
)
_NO_PASS = "gates depend on the input, and there was no forward pass for {} to tell of: call the model first"


@dataclass(frozen=True)
class TauPoint:
    """One row of a sweep over tau."""

    tau: float
    macs: float
    macs_fraction: float
    accuracy: float


class GatedModel(Passing):
    """A network whose channels are multiplied by 0/1 gates: sampled in train mode, decided in eval mode.

    Made by `headgate.gate`, in train mode. Call it like the model it was made from.
    """

    of_a_pass = ("_last", "_macs")
    not_counted_because = "its gates decide them: ask gated.macs() after a pass, or count what shrink() gives"
    not_gated_because = "it has gates already: gate the model that was gated, `gated.model`, or its shrunk form"

    def __init__(
        self, model: nn.Module, graph: ChannelGraph, example_input: Any, target: float, loss: str,
        budget: Budget | None, gates: StaticGates, rates: Rates | None,
        dynamic: DynamicGates | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if loss not in LOSSES:
            raise HeadgateError(f"loss={loss!r} is unknown: use one of {', '.join(LOSSES)}")
        self.model = model
        self.gates = gates
        self.dynamic = dynamic
        self.graph = graph
        self.target = target
        self.loss = loss
        self.budget = budget if budget is not None else Budget(target)
        self.cost = Cost(graph, 0 if dynamic is None else dynamic.macs)
        self.register_buffer("decisions", torch.ones(graph.gate_count, dtype=torch.bool))
        self._example_input = example_input
        self.frozen_names: tuple[str, ...] = ()
        self.static_names: tuple[str, ...] = ()
        self.settled = False
        """Whether gates are decided in train mode too: see `settle_`."""
        self.learning = False
        """Whether gates that look at the input go on learning while they are settled."""
        self._ledger = Ledger(graph)
        sites = () if dynamic is None else dynamic.sites
        decided_there = {number for site in sites for number in site.masks}
        fixed = [number for number in range(len(graph.masks)) if number not in decided_there]
        self._fixed = Group(graph, fixed) if sites else self._ledger
        """The masks whose gates are parameters."""
        self._groups = tuple(Group(graph, site.masks) for site in sites)
        self._images = 1
        self._tau = Strategy.tau
        """Where calibration has put the threshold of gates that depend on the input."""
        self._board = Board()
        self._strategy = Strategy()
        self._rates = target_rates(graph, target if rates is None else rates)
        self._macs: float | int | None = None
        self._last: Draw | None = None
        self._squeezed: tuple[nn.Module, Squeezed] | None = None  # the dense network, and what stands for it
        self._optimizer: Optimizer | None = None  # that trains what stands for it
        self._homes: dict[str, int] = {}  # the groups of its parameters there
        self._arriving = tuple(
            None if site.reads is None else Channels(self._board, graph, Reader(site.layer, site.axis, site.reads))
            for site in sites
        )
        """The gates on what arrives at each site, from masks that were decided before."""
        attach(self.model, graph, self._board, sites=sites)

    # ------------------------------------------------------------------------------------------------ running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, computed with the open channels."""
        tensors = tensors_in((args, kwargs))
        images = tensors[0].shape[0] if tensors and tensors[0].dim() else 1
        if self.training:
            return self._run(images, args, kwargs)
        with self._turn:
            how = self._ensemble if self._strategy.name == "ensemble" else self._run
            return how(images, args, kwargs)

    def _run(self, images: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        draw = self._draw(images)
        self._last = draw
        self._macs = None
        self._board.draw, self._board.decide = draw, self._decide_site
        self._board.kept = draw if torch.is_grad_enabled() else None
        try:
            return self.model(*args, **kwargs)
        finally:
            self._board.draw = None

    @property
    def _sampling(self) -> bool:
        return (self.training and not self.settled) or (not self.training and self._strategy.sampled)

    @property
    def _generator(self) -> torch.Generator | None:
        return None if self.training else self._strategy.generator

    def _draw(self, images: int) -> Draw:
        """The gates of a pass, as far as they are known before it."""
        self._images = images
        plain = not self.budget.scale_gradient
        scale = 1.0 if plain else float(self.graph.gate_count)
        self.gates.gradient_scale = scale
        self.gates.largest_move = self.budget.limit(self.graph.gate_count)
        if self.dynamic is not None:
            self.dynamic.gradient_scale = 1.0 if plain else scale / STRIDE
        draw = Draw(self._ledger)
        if not self._fixed.count:
            return draw
        probabilities_1N = self.gates.probabilities().unsqueeze(0)
        if self._sampling:
            gates_BN = self._fixed.keep_one_open(self.gates.sample(images, self._generator), probabilities_1N)
        else:
            decided_G = torch.from_numpy(self._decide())
            gates_BN = decided_G[self._fixed.gates].to(probabilities_1N).unsqueeze(0)
        draw.fill_(self._fixed, gates_BN, probabilities_1N.detach())
        return draw

    def _decide_site(self, number: int, x: Tensor, draw: Draw) -> None:
        """Gates that depend on the input, image by image, now that the input is there."""
        assert self.dynamic is not None
        group = self._groups[number]
        images = self._images
        if self.dynamic.sites[number].batch_axis == 0 and x.shape[0] < images:
            images = x.shape[0]  # some have left the network before
        arriving = self._arriving[number]
        open_BC = None if arriving is None else arriving.mask_BC(draw)
        logits_BN = self.dynamic.logits(number, x, images, open_BC)
        probabilities_BN = torch.sigmoid(logits_BN)
        if self._sampling:
            noise = logistic_noise(tuple(logits_BN.shape), logits_BN.device, self._generator)
            gates_BN = draw_gates(logits_BN, noise, self.gates.relaxation)
        elif self._strategy.name == "always_on":
            gates_BN = torch.ones_like(probabilities_BN)
        else:
            gates_BN = decide_gates(logits_BN, threshold_logit(self._threshold), self.learning and self.training)
        draw.fill_(group, group.keep_one_open(gates_BN, logits_BN), probabilities_BN.detach())

    @property
    def _threshold(self) -> float:
        """Of gates that depend on the input."""
        return self._tau if self._strategy.name == "calibrated" else self._strategy.tau

    def settle_(self, settled: bool = True, *, learning: bool = False) -> GatedModel:
        """Decide the gates in train mode too, by the strategy in force, and let them learn no more: the weights get
        used to the gates as they will be. For the last epochs of a conditional network. With `learning`, gates that
        look at the input follow the weights: without noise, under the budget's loss; those that are parameters don't.
        """
        if learning and (not settled or self.dynamic is None):
            raise HeadgateError("settle_(learning=True) is for gates that look at the input: use kind='dynamic'")
        self.settled, self.learning = settled, learning
        for parameter in self.gate_parameters():
            parameter.requires_grad_(not settled and parameter.numel() > 0)
        if self.dynamic is not None:
            self.dynamic.requires_grad_(not settled or learning)
        return self.train(self.training)

    @torch.no_grad()
    def polarise_(self, loader: Iterable[Any], batches: int | None = 200) -> int:
        """Decide for good the gates on which all images of a loader agree, under the strategy in force: whatever the
        image, they say the same from now on, and `compact()` and its ONNX file are without them. These images are
        answered as before; others may be answered otherwise. Gives the number of such gates that look at the image."""
        if self.dynamic is None:
            raise NotDecided("no gate depends on the input: there is nothing left to decide, use shrink()")
        if self.sampled:
            raise NotDecided("the strategy in force draws gates: choose 'threshold' or 'calibrated' before polarise_()")
        device, training = next(self.parameters()).device, self.training
        opened_G, images = np.zeros(self.graph.gate_count), 0
        self.eval()
        try:
            for batch in itertools.islice(loader, batches):
                self._run_inputs(*(each.to(device) for each in inputs_of(batch, self._takes)))
                assert self._last is not None
                gates_BG = self._last.gates_BG
                opened_G += gates_BG.sum(0).cpu().numpy()
                images += len(gates_BG)
        finally:
            self.train(training)
        if not images:
            raise HeadgateError("the loader is empty: gates are decided by what images say")
        return decide_for_good_(self.dynamic, self.graph, opened_G == images, opened_G == 0)

    def train(self, mode: bool = True) -> GatedModel:
        """Train mode, or eval mode; settled gates stay as they are."""
        super().train(mode)
        if self.settled and not self.learning and self.dynamic is not None:
            self.dynamic.eval()
        return self

    def _decide(self) -> np.ndarray:
        """The 0/1 decisions of the strategy in force, all masks alive that must be; for gates that are parameters."""
        if self._strategy.name == "always_on":
            return np.ones(self.graph.gate_count, bool)
        if self._strategy.name == "calibrated":
            return self._kept_alive(self.decisions.cpu().numpy())  # type: ignore[operator]
        return self._kept_alive(self._probabilities() > self._strategy.tau)

    def _kept_alive(self, decisions: np.ndarray) -> np.ndarray:
        """The decisions, and the likeliest gate of every mask that would die and must not."""
        least = least_decisions(self.graph, self._probabilities())
        for mask in self.graph.masks:
            if not mask.may_die and not decisions[mask.gates].any():
                decisions = decisions.copy()
                decisions[mask.gates] = least[mask.gates]
        return decisions

    def _ensemble(self, images: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        outputs, macs = [], 0.0
        for _ in range(self._strategy.runs):
            output = self._run(images, args, kwargs)
            if not isinstance(output, Tensor):
                raise HeadgateError("an ensemble combines class scores: this model's output is no single tensor")
            outputs.append(output)
            macs += self.macs() if images else 0.0
        self._macs = macs if images else None
        return combine(outputs, self._strategy.combine)

    @property
    def sampled(self) -> bool:
        """Whether the strategy for eval mode draws gates, rather than decides them."""
        return self._strategy.sampled

    def strategy(self, name: str, **options: Any) -> GatedModel:
        """How to infer in eval mode: "threshold" (tau), "calibrated", "sample" (generator), "always_on",
        "ensemble" (runs, combine="mean"/"vote", generator). Returns the model itself."""
        self._strategy = Strategy(name, **_checked_options(name, options))
        self._macs = self._last = None
        return self.unsqueeze_() if name == "always_on" else self

    # --------------------------------------------------------------------------------------------------- cost

    @property
    def dense_macs(self) -> int:
        """Multiply-adds an image of the ungated model."""
        return self.cost.dense_macs

    def macs(self) -> float | int:
        """Multiply-adds an image that the last forward pass needed (in eval mode without a pass: will need)."""
        if self._macs is None:
            if self._last is None:
                if self._sampling:
                    raise NotDecided(
                        "macs() tells what the last forward pass needed, and there was none: "
                        "call the model first, or eval()"
                    )
                if self.dynamic is not None:
                    raise NotDecided(_NO_PASS.format("macs()"))
                return self.cost.decided_macs(self._decide())
            draw = self._last_pass("macs()")
            if self.dynamic is None and len(draw.gates_BG) == 1 and not self._sampling:
                self._macs = self.cost.decided_macs(draw.gates_BG[0].detach().cpu().numpy() > 0.5)
            else:
                self._macs = float(self.cost.macs_B(draw).detach().double().mean()) * self.dense_macs
        return self._macs

    def thresholded_macs(self, tau: float = 0.5) -> int:
        """Multiply-adds an image if the gates were decided now, by their probabilities alone: of those that depend on
        the input, for the last batch."""
        if self.dynamic is None:
            return self.cost.decided_macs(self._kept_alive(self._probabilities() > tau))
        if self._last is None:
            raise NotDecided(_NO_PASS.format("thresholded_macs()"))
        last, decided = self._last_pass("thresholded_macs()"), Draw(self._ledger)
        for group in (self._fixed, *self._groups) if self._fixed.count else self._groups:
            parts = [last.probabilities[number] for number in group.masks]
            probabilities_BN = torch.cat([part for part in parts if part is not None], 1)
            gates_BN = (probabilities_BN > tau).to(probabilities_BN.dtype)
            decided.fill_(group, group.keep_one_open(gates_BN, probabilities_BN))
        return round(float(self.cost.macs_B(decided).double().mean()) * self.dense_macs)

    def cost_loss(self) -> Tensor:
        """The scalar to add to the task loss, for the forward pass just done; 0 where gates are settled. Asked again
        for the same pass, it is the same: the budget moves on once a pass."""
        if self.settled and not self.learning and self._last is not None:
            return self._last.gates_BG.new_zeros(())
        draw = self._last_pass("cost_loss()")
        if self.loss == "per_gate":
            loss = per_gate_loss(draw, self._rates)
            if not bool(loss.isfinite()):
                raise NonFiniteLoss(
                    "the cost loss is not finite: a gate's logit became NaN. Lower the learning rate, or clip gradients"
                )
            self._note_cost(draw)
            return loss
        if self.training:
            loss = self._pulled(draw, lambda: self._share_of(draw))
            self._note_cost(draw)
            return loss
        return self.budget.weight * (self.budget.target - self._share_of(draw)) ** 2

    def _note_cost(self, draw: Draw) -> None:
        """What the sampled gates cost, also where the loss pulls at something else."""
        if self.training and self.loss != "macs":
            self.budget.last_cost = float(over_processes(self.cost.macs_B(draw).mean()).detach())

    def _share_of(self, draw: Draw) -> Tensor:
        """What the loss pulls at: of the MACs, or of the gates, over all processes."""
        return over_processes(self.cost.macs_B(draw).mean() if self.loss == "macs" else activation_rate(draw))

    def activation_rates(self) -> tuple[float, dict[str, Tensor]]:
        """The paper's activation rates of the last batch: of all gates, and of each gate by mask."""
        rates = self._last_pass("activation_rates()").gates_BG.detach().mean(0)
        return float(rates.mean()), self._by_mask(rates)

    def polarised(self) -> float:
        """Share of gates with p below 0.05 or above 0.95 (for gates that depend on the input: of the last batch)."""
        p = self._every_probability("polarised()")
        return float(((p < POLARISED) | (p > 1 - POLARISED)).mean())

    def histogram(self, bins: int = 20) -> list[int]:
        """How many gates have a p in each of `bins` equal parts of 0…1 (those that depend on the input: of how many
        images of the last batch)."""
        counts, _ = np.histogram(self._every_probability("histogram()"), bins, (0.0, 1.0))
        return [int(count) for count in counts]

    def seen(self) -> Seen:
        """The forward pass just done: which gates were open for which image, and what each layer cost."""
        return seen(self._last_pass("seen()"), self.cost)

    def _last_pass(self, asked: str) -> Draw:
        """The gates of the forward pass just done, of one image or more."""
        if self._last is None:
            raise NotDecided(f"{asked} is about the forward pass just done, and there was none: call the model first")
        if not len(self._last.gates_BG):
            raise NotDecided(
                f"{asked} is about the forward pass just done, and there was no image in the last pass: "
                "call the model with one or more"
            )
        return self._last

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HeadgateError(
            "a gated model can't be pickled: write it with headgate.save(model, path), "
            "and read it with headgate.load(path, dense_model)"
        )

    # -------------------------------------------------------------------------------------------------- gates

    def gate_parameters(self) -> list[nn.Parameter]:
        """The parameters that belong to gates, and to networks that compute them."""
        return [*self.gates.parameters(), *(() if self.dynamic is None else self.dynamic.parameters())]

    def param_groups(self, lr: float, weight_decay: float = 0.0, gate_lr: float | None = None) -> list[dict[str, Any]]:
        """Optimizer groups: weights, and gates with the paper's weight decay, divided by their number."""
        share = min(1.0, GATES_FOR_FULL_DECAY / self.graph.gate_count)
        weights = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return [
            {"params": weights, "lr": lr, "weight_decay": weight_decay, "name": "weights"},
            {
                # one logit stands for two: half the decay, as the identity w0² + w1² = ½(…)² says
                "params": self.gate_parameters(), "lr": lr if gate_lr is None else gate_lr,
                "weight_decay": weight_decay * share / 2, "name": "gates",
            },
        ]  # fmt: skip

    def _probabilities(self) -> np.ndarray:
        """P(open) of every gate that is a parameter; 1 where it depends on the input, whatever was seen before."""
        p = np.ones(self.graph.gate_count)
        p[self._fixed.gates.numpy()] = self.gates.probabilities().detach().cpu().numpy()
        if not np.isfinite(p).all():
            raise NonFiniteLoss(
                "a gate's probability is NaN: the loss was not finite at some step. "
                "Go back to a checkpoint, lower the learning rate"
            )
        return p

    def _every_probability(self, asked: str) -> np.ndarray:
        """P(open) of every gate, of those that depend on the input for every image of the last batch."""
        if self.dynamic is None:
            return self._probabilities()
        if self._last is None or not any(part is not None for part in self._last.probabilities):
            raise NotDecided(_NO_PASS.format(asked))
        parts = [part for part in self._last_pass(asked).probabilities if part is not None]
        return np.concatenate([part.double().cpu().numpy().reshape(-1) for part in parts])

    def _by_mask(self, flat: Tensor) -> dict[str, Tensor]:
        return {mask.name: flat[mask.gates] for mask in self.graph.masks}

    def gate_probabilities(self) -> dict[str, Tensor]:
        """P(open) of every gate, by mask; where it depends on the input, for each image of the last batch."""
        flat = self.gates.probabilities().detach().clone()
        if self.dynamic is None:
            return self._by_mask(flat)
        if self._last is None:
            raise NotDecided(_NO_PASS.format("gate_probabilities()"))
        fixed = dict(zip(self._fixed.masks, flat.split(self._fixed.sizes), strict=True))
        return {
            mask.name: seen
            for number, (mask, part) in enumerate(zip(self.graph.masks, self._last.probabilities, strict=True))
            if (seen := fixed.get(number, part)) is not None
        }

    def prime_(
        self, loader: Iterable[Any], batches: int = 40, *, spread: float = 1.5, probability: float = 0.95,
        loudness: float = 0.0,
    ) -> GatedModel:  # fmt: skip
        """Let the gates start from what the trained network says: those whose channels matter least to the loss, for
        the MACs they cost, start least likely to be open.

        Takes a loader of (images, labels) of a classifier; logits get a deviation of `spread` around that of
        `probability`. Gates that depend on the input start from there too. With a `loudness` above 0 they are also
        taught how loud their channels will be in an image: as if one that is e times as loud as usual were worth e to
        the power of `loudness` as much.
        """
        if not 0 < probability < 1:
            raise HeadgateError(f"probability={probability}: it must be between 0 and 1, e.g. 0.95")
        for name, value, what in (
            ("spread", spread, "the deviation of the gates' logits"),
            ("loudness", loudness, "a power"),
        ):
            if not 0 <= value < math.inf:
                raise HeadgateError(f"{name}={value}: it is {what}, 0 or more, e.g. 1.5")
        self.unsqueeze_()
        training = self.training
        heard = None if self.dynamic is None or not loudness else Loudness(self._ledger.count, self.dynamic)
        try:
            given = (labelled(batch, self._takes) for batch in itertools.islice(loader, batches))
            worth_G = worth(self.eval().model, self._ledger, self._board, given, self._arguments, heard)
        finally:
            self.train(training)
        logit = math.log(probability / (1 - probability))
        macs_G = marginal_macs(self.cost, self._ledger).to(worth_G)
        logits_G, by_nat = primed_logits(worth_G, macs_G, logit, spread)
        self.gates.set_logits(logits_G[self._fixed.gates])
        if self.dynamic is not None:
            teach_(self.dynamic, [group.gates for group in self._groups], logits_G, heard, by_nat * loudness)
        self._macs = self._last = None
        return self

    def squeeze_(self, below: float = 0.02, optimizer: Optimizer | None = None, least_gain: float = 0.05) -> bool:
        """Stop computing channels whose gates are open with a probability under `below`: they stay closed for good.

        For use during training, with the optimizer, whose state moves along. Does nothing unless at least `least_gain`
        of the MACs now computed are saved; returns whether it did something.
        """
        if self.dynamic is not None:
            return False  # what is closed for one image may be open for the next
        before = None if self._squeezed is None else self._squeezed[1]
        left = self._kept_alive(self._probabilities() >= below)
        now = np.ones_like(left) if before is None else before.left
        left &= now
        if self.cost.decided_macs(left) > (1 - least_gain) * self.cost.decided_macs(now):
            return False
        self._squeeze_to(left, optimizer)
        return True

    def _squeeze_to(self, left: np.ndarray, optimizer: Optimizer | None = None) -> None:
        net, plan = self.model, Plan() if self._squeezed is None else self._squeezed[1].plan
        dense = self.model if self._squeezed is None else self._squeezed[0]
        if self._squeezed is not None:
            write_back_(*self._squeezed)
        squeezed = squeeze(dense.train(self.training), self.graph, left, self._board)
        closed = torch.from_numpy(~left)
        self.gates.close_(closed)
        if optimizer is not None:
            self._homes = (self._homes if optimizer is self._optimizer else {}) | homes_in(optimizer, net)
            move_state_(optimizer, self._homes, (net, plan), (squeezed.net, squeezed.plan), _shapes(dense))
            for parameter in self.gate_parameters():
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor) and value.shape == closed.shape:
                        value[closed.to(value.device)] = 0
        self._squeezed = (dense, squeezed)
        self._optimizer = optimizer
        self.model = squeezed.net

    def unsqueeze_(self) -> GatedModel:
        """Go back to the dense network, with what was learned since; gates that closed for good are closed."""
        if self._squeezed is not None:
            dense, squeezed = self._squeezed
            write_back_(dense, squeezed)
            if self._optimizer is not None:  # training may go on
                forms = (squeezed.net, squeezed.plan), (dense, Plan())
                move_state_(self._optimizer, self._homes, *forms, _shapes(dense))
                self._optimizer = None
            self.model = dense.train(self.training)
            self._squeezed = None
        return self

    def _unsqueezed(self) -> GatedModel:
        """The same with the dense network: itself, or a copy of what is squeezed, which can go on training."""
        if self._squeezed is None:
            return self
        optimizer, self._optimizer = self._optimizer, None
        try:
            return copy.deepcopy(self).unsqueeze_()
        finally:
            self._optimizer = optimizer

    def set_gate_probabilities(self, probabilities: Mapping[str, Tensor]) -> None:
        """Import decisions made elsewhere: masks that are not named keep theirs."""
        masks = {mask.name: mask for mask in self.graph.masks}
        dynamic = {self.graph.masks[number].name for group in self._groups for number in group.masks}
        self.unsqueeze_()
        flat = torch.ones(self.graph.gate_count)
        flat[self._fixed.gates] = self.gates.probabilities().detach().cpu()
        for name, given in probabilities.items():
            values = torch.as_tensor(given, dtype=torch.float32).detach()
            if name not in masks:
                raise HeadgateError(f"there is no mask `{name}`: names are those of gate_probabilities()")
            if name in dynamic:
                raise HeadgateError(f"the gates of mask `{name}` depend on the input: they can't be set")
            if values.shape != (masks[name].size,):
                raise HeadgateError(
                    f"mask `{name}` has {masks[name].size} gates, got probabilities of shape {tuple(values.shape)}"
                )
            if not bool(((values >= 0) & (values <= 1)).all()):
                raise HeadgateError(f"mask `{name}`: probabilities lie between 0 and 1 and are no NaN")
            flat[masks[name].gates] = values.to(flat)
        assert isinstance(self.decisions, Tensor)
        for name in probabilities:  # what was decided of these before does not hold any more
            self.decisions[masks[name].gates] = (flat[masks[name].gates] > 0.5).to(self.decisions.device)
        self.gates.set_probabilities(flat[self._fixed.gates])
        self._macs = self._last = None

    # -------------------------------------------------------------------------------------------------- using

    def project(self, round_to: int = 1) -> GatedModel:
        """Decide: open the likeliest gates, so that MACs are at most the target and within one gate of it."""
        if self.dynamic is not None:
            raise NotDecided("gates depend on the input, so their cost is known on data only: calibrate(loader)")
        self.unsqueeze_()
        found = project(self.graph, self.cost, self._probabilities(), int(self.target * self.dense_macs), round_to)
        self.decisions.copy_(torch.from_numpy(found))  # type: ignore[operator]
        return self.strategy("calibrated")

    def calibrate(
        self, loader: Iterable[Any], batches: int = 200, round_to: int = 1, *, batchnorm: bool = True
    ) -> GatedModel:
        """Decide within the target, then re-estimate BatchNorm under these decisions (unless told not to); no weight
        changes. For gates that depend on the input, the target is met on average over the loader's first images."""
        if 0 < self.budget.step < self.budget.ramp_steps:
            warnings.warn(
                f"training stopped at step {self.budget.step} of a ramp of {self.budget.ramp_steps}: the gates were "
                "not yet asked for the whole target. "
                f"Pass budget=headgate.Budget({self.target:g}, ramp_steps=half of your steps)",
                stacklevel=2,
            )
        self.unsqueeze_()
        training = self.training
        try:
            if self.dynamic is None:
                with self._undecided_if_it_fails():
                    self.project(round_to).eval()
                    if batchnorm:
                        reestimate_batchnorm(self.model, self._run_inputs, loader, batches, self._takes)
            else:
                if round_to != 1:
                    raise HeadgateError(f"round_to={round_to}: gates that depend on the input leave no widths to round")
                self.eval()._calibrate_tau(loader, batches, batchnorm)
        finally:
            self.train(training)
        return self

    def _calibrate_tau(self, loader: Iterable[Any], batches: int, batchnorm: bool) -> None:
        """The threshold at which a loader's images cost the target on average, with BatchNorm re-estimated there."""
        assert self.dynamic is not None
        probe, more = self._probe(loader, batches)

        def macs_at(tau: float) -> float:
            self._tau = tau
            self.decisions.copy_(torch.from_numpy(self._kept_alive(self._probabilities() > tau)))  # type: ignore[operator]
            return self._mean_macs(probe)

        target_macs = self.target * self.dense_macs
        with self._undecided_if_it_fails():
            self.strategy("calibrated")
            if batchnorm:
                macs_at(meet_with_tau(macs_at, target_macs, ROUGHLY, self._tau))
                both = nn.ModuleList([self.model, self.dynamic])
                again = ((inputs,) for inputs in itertools.chain(probe, more))
                reestimate_batchnorm(both, self._run_inputs, again, batches)
            macs_at(meet_with_tau(macs_at, target_macs, near=self._tau))

    @contextmanager
    def _undecided_if_it_fails(self) -> Iterator[None]:
        """What is decided within this holds only if all of it succeeds; no pass within it is remembered."""
        before: tuple[Strategy, float, Any] = self._strategy, self._tau, self.decisions.clone()  # type: ignore[operator]
        try:
            yield
        except BaseException:
            self._strategy, self._tau = before[:2]
            self.decisions.copy_(before[2])  # type: ignore[operator]
            raise
        finally:
            self._macs = self._last = None

    def _probe(self, loader: Iterable[Any], batches: int) -> tuple[list[tuple[Any, ...]], Iterator[tuple[Any, ...]]]:
        """A loader's first batches, none of them twice, and those that come after, up to `batches` in all."""
        if batches < 1:
            raise HeadgateError(f"batches={batches}: a threshold is found on at least one batch")
        rounds = _Rounds(loader)
        data = endless(rounds, batches, self._takes)
        probe: list[tuple[Any, ...]] = []
        for inputs in data:
            if rounds.begun > 1:
                return probe, itertools.chain([inputs], data)
            probe.append(inputs)
            if len(probe) == TAU_BATCHES:
                break
        return probe, data

    @torch.no_grad()
    def _mean_macs(self, batches: Sequence[tuple[Any, ...]]) -> float:
        """Multiply-adds an image, over these batches."""
        device = next(self.parameters()).device
        total, images = 0.0, 0
        for inputs in batches:
            self._run_inputs(*(tensor.to(device) for tensor in inputs))
            total += self.macs() * self._images
            images += self._images
        return total / images

    @property
    def _names(self) -> tuple[str, ...]:
        """Of the model's arguments, where the example gave them by name."""
        return tuple(self._example_input) if isinstance(self._example_input, Mapping) else ()

    @property
    def _takes(self) -> Takes:
        """What the example was of."""
        return Takes(tuple(tensor.dim() for tensor in tensors_in(self._example_input)), self._names)

    def _arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What was found in a loader's batch, as the model takes it."""
        if len(self._names) == len(inputs):
            return (), dict(zip(self._names, inputs, strict=True))
        return tuple(inputs), {}

    def _run_inputs(self, *inputs: Tensor) -> Any:
        """A pass with what was found in a loader's batch."""
        return self._run(len(inputs[0]), *self._arguments(inputs))

    def sweep_tau(self, loader: Iterable[Any], taus: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9)) -> list[TauPoint]:
        """Accuracy and MACs over tau, for a loader of (images, labels): every gate is open where p > tau, whether it
        depends on the input or not."""
        before, training = self._strategy, self.training
        rows: list[TauPoint] = []
        try:
            self.eval()
            for tau in taus:
                self.strategy("threshold", tau=tau)
                right, total, macs = self._judged(loader)
                if total == 0:
                    raise HeadgateError(_SPENT if rows else "the loader is empty: a sweep needs data")
                mean = macs / total
                rows.append(TauPoint(tau, mean, mean / self.dense_macs, right / total))
        finally:
            self._strategy = before
            self._macs = self._last = None
            self.train(training)
        return rows

    @torch.no_grad()
    def _judged(self, loader: Iterable[Any]) -> tuple[int, int, float]:
        """How many of a loader's images are answered right, how many there are, and the multiply-adds of all."""
        device = next(self.parameters()).device
        right, total, macs = 0, 0, 0.0
        for batch in loader:
            inputs, labels = labelled(batch, self._takes)
            answers = tensors_in(self._run_inputs(*(each.to(device) for each in inputs)))[0].argmax(1)
            right += int((answers.to(labels.device) == labels).sum())
            total += len(answers)
            macs += self.macs() * len(answers) if len(answers) else 0.0
        return right, total, macs

    def shrink(self, round_to: int = 1, fold_batchnorm: bool = False) -> nn.Module:
        """A plain, smaller nn.Module that computes what this one computes in eval mode. Checked at every call.

        With `round_to=8`, widths are multiples of 8 (or the full width): channels that only fill up are cut off from
        what reads them. With `fold_batchnorm`, convolutions and the BatchNorms behind them become one.
        """
        if self.dynamic is not None:
            raise NotDecided("gates depend on the input, so no channel is closed for good: use compact()")
        if self._strategy.sampled:
            raise NotDecided(
                f'strategy "{self._strategy.name}" decides nothing: choose "threshold" or "calibrated" before shrink()'
            )
        self.unsqueeze_()
        decisions = self._decide()
        if decisions.all() and self._strategy.name != "always_on":
            raise NotDecided(
                "no gate is closed, so there is nothing to shrink: train the gates, then calibrate(loader), "
                "or set_gate_probabilities(…) and project()"
            )
        kept = rounded(self.graph, decisions, self._probabilities(), round_to, up=True)
        small = shrink(
            self.model, self.graph, decisions, padding=kept if round_to > 1 else None, fold_batchnorm=fold_batchnorm
        )
        training = self.training
        self.eval()
        try:
            check_same(self, self.model, small, self.graph, kept, self._example_input)
        finally:
            self.train(training)
        return small

    def compact(self, images: Tensor | None = None, *, fold: bool = True) -> CompactModel:
        """A module that evaluates the gates and computes only the open channels of each image, in float32.

        It computes what this one computes in eval mode with the strategy in force ("threshold" or "calibrated"). Every
        layer is timed on `images` (as many as will come at once; the example input if not given) and computed densely
        and masked where that is quicker; `report` lists these layers, and those without a fast path. Gates that no
        image can change are folded away; with `fold=False` none is, and `tau` can be moved. Checked at every call.
        """
        if self.dynamic is None:
            raise NotDecided("no gate depends on the input, so a plain smaller network does it: use shrink()")
        if self._strategy.sampled:
            raise NotDecided(
                f'strategy "{self._strategy.name}" draws gates: choose "threshold" or "calibrated" before compact()'
            )
        if next(self.parameters()).device.type != "cpu":
            raise HeadgateError("compact() is for the CPU, and the model is elsewhere: call gated.cpu() first")
        example = self._one_image_tensor()
        if images is not None:
            check_images(images, example)
        always_on = self._strategy.name == "always_on"
        tau = 0.0 if always_on else self._threshold
        fast = compact(self.model, self.graph, self.dynamic, self._decide(), tau, example, fold, always_on)
        training = self.training
        self.eval()
        try:
            self._check_compact(fast, example)
        finally:
            self.train(training)
        fast.choose_(example if images is None else images)
        return fast

    def _one_image_tensor(self) -> Tensor:
        """The example input of a model that is called with one tensor and nothing else."""
        given = self._example_input
        given = given[0] if isinstance(given, (tuple, list)) and len(given) == 1 else given
        if not isinstance(given, Tensor):
            raise HeadgateError(
                "compact() takes models that are called with one tensor and nothing else, and the example input is "
                "more than that: use the gated model itself, or give the other arguments default values"
            )
        return given

    @torch.no_grad()
    def _check_compact(self, fast: CompactModel, example: Tensor) -> None:
        """With the gates that the compact network decided, this one must give the same; and it must decide the same,
        but where rounding may tip a gate."""
        images = random_like(torch.cat([example[:1]] * 3))
        found, gates_BG = fast.watched(images)
        tipped: list[str] = []

        def replay(number: int, x: Tensor, draw: Draw) -> None:
            assert self.dynamic is not None
            group, arriving = self._groups[number], self._arriving[number]
            given_BN = gates_BG[:, group.gates].to(x.device)
            open_BC = None if arriving is None else arriving.mask_BC(draw)
            logits_BN = self.dynamic.logits(number, x, len(images), open_BC)
            above_BN = logits_BN > threshold_logit(fast.tau)
            sure_BN = (logits_BN - threshold_logit(fast.tau)).abs() > DOUBT * (1 + logits_BN.abs())
            if decided_otherwise(given_BN, above_BN, sure_BN, group.sizes):
                tipped.append(self.dynamic.sites[number].layer)
            draw.fill_(group, given_BN.to(logits_BN.dtype), torch.sigmoid(logits_BN))

        draw = self._draw(len(images))
        self._board.draw, self._board.decide = draw, replay
        try:
            expected = self.model(images)
        finally:
            self._board.draw = self._board.decide = None
        pairs = list(zip(tensors_in(expected), tensors_in(found), strict=True))
        gap = max((difference(own, other) for own, other in pairs), default=0.0)
        if tipped or not gap <= TOLERANCE[torch.float32]:
            what = f"decides other gates at `{tipped[0]}`" if tipped else f"gives an output that differs by {gap:.2g}"
            raise ShrinkMismatch(
                f"the compact network {what}, against the gated one: use the gated model itself, and report the model"
            )

    # -------------------------------------------------------------------------------------------------- state

    def get_extra_state(self) -> dict[str, Any]:
        """Budget and strategy, saved with the state dict."""
        strategy = {key: value for key, value in vars(self._strategy).items() if key != "generator"}
        left = None if self._squeezed is None else np.flatnonzero(self._squeezed[1].left).tolist()
        return {
            "budget": self.budget.state(), "strategy": strategy, "squeezed_to": left, "tau": self._tau,
            "settled": self.settled, "learning": self.learning,
        }  # fmt: skip

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on with a saved budget and strategy."""
        self.budget.load_state(state["budget"])
        self._strategy = Strategy(**state["strategy"])
        self._tau = state.get("tau", Strategy.tau)
        how = state.get("settled", self.settled), state.get("learning", False)
        if how != (self.settled, self.learning):
            self.settle_(how[0], learning=how[1])
        optimizer = self._optimizer  # goes on with what is loaded
        self.unsqueeze_()
        if state.get("squeezed_to") is not None:
            left = np.zeros(self.graph.gate_count, bool)
            left[state["squeezed_to"]] = True
            self._squeeze_to(left, optimizer)  # before the tensors of its size are loaded

    def _apply(self, fn: Any, recurse: bool = True) -> GatedModel:
        """Move, or change the precision of, the network behind a squeezed one too, and the example that fits them."""
        super()._apply(fn, recurse)
        self._example_input = tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, self._example_input)
        if self._squeezed is not None:
            self._squeezed[0]._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        gates, masks = self.graph.gate_count, len(self.graph.masks)
        kind = "" if self.dynamic is None else f" (decided at {len(self._groups)} sites, {self._fixed.count} static)"
        return (
            f"{gates} gates{kind} in {masks} masks, target={self.target:.3g} of {self.dense_macs:,} MACs, "
            f"stream={self.graph.stream!r}"
        )


class _Rounds:
    """A loader that tells how often it was begun."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return iter(self.loader)


def _checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A strategy's options, each of the kind that it must be."""
    for option, value in options.items():
        if option not in (own := OPTIONS.get(name, tuple(OPTION_KINDS))):
            told = f"its options are {', '.join(own)}" if own else "it has none"
            raise HeadgateError(f"strategy {name!r} does not take {option!r}: {told}")
        kinds, what = OPTION_KINDS[option]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise HeadgateError(f"strategy {name!r}: {option}={value!r} is no {what}")
    plain = {"tau": float, "runs": int}
    return {option: plain[option](value) if option in plain else value for option, value in options.items()}


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}
