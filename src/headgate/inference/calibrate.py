"""Make a trained gated network ready for use: decisions that meet the budget, and BatchNorm statistics that fit them.

`project` opens gates in the order of their probability while the cost stays within the target; no closed gate that
would still fit stays closed if a likelier one was opened. `reestimate_batchnorm` runs data through the network as it
will be used and averages BatchNorm's statistics anew; no weight changes. Knows nothing of gates' training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from headgate.errors import HeadgateError, TargetError
from headgate.gates.cost import Cost
from headgate.graph.grouping import ChannelGraph, Decisions

NEVER = 1e-30
"""Gates below this probability were closed for good: their channels have no weights any more."""
FILL_TRIALS = 200
"""How many more gates are tried one by one after the likeliest are open."""


def least_decisions(graph: ChannelGraph, probabilities: NDArray[np.float64]) -> Decisions:
    """The fewest open gates: the likeliest of each mask that must not die."""
    decisions = np.zeros(graph.gate_count, bool)
    for mask in graph.masks:
        if not mask.may_die:
            decisions[mask.first + int(np.argmax(probabilities[mask.gates]))] = True
    return decisions


def project(
    graph: ChannelGraph, cost: Cost, probabilities: NDArray[np.float64], target_macs: int, round_to: int = 1
) -> Decisions:
    """The likeliest gates whose cost is at most the target, and within one gate of it.

    With `round_to`, every mask opens a multiple of so many channels (or all of them).
    """
    least = least_decisions(graph, probabilities)
    order = _by_probability(graph, probabilities, least)
    order = order[least[order] | (probabilities[order] > NEVER)]

    def first(count: int) -> Decisions:
        decisions = np.zeros(graph.gate_count, bool)
        decisions[order[:count]] = True
        return rounded(graph, decisions, probabilities, round_to)

    low, high = int(least.sum()), len(order)
    if cost.decided_macs(first(low)) > target_macs:
        raise TargetError(_unreachable(cost, first(low), target_macs, rounding=round_to > 1))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost.decided_macs(first(middle)) <= target_macs else (low, middle - 1)
    decisions = first(low)
    return decisions if round_to > 1 else _fill(cost, decisions, order[low:], target_macs)


FARTHEST_LOGIT = 30.0
"""Thresholds are sought between its sigmoid and that of its opposite."""
NEAR = 1e-4
"""Of the target: a threshold that costs so little less is as good as any."""


def meet_with_tau(macs_at: Callable[[float], float], target_macs: float, steps: int = 16, near: float = 0.5) -> float:
    """The lowest threshold at which gates that depend on the input cost at most the target, to 2^-steps of the logits,
    or the first that is found so near to the target that no other matters. Every threshold tried costs a pass over
    images, so they are sought from `near` on, in strides that grow, then between the last two by how far each misses.

    The cost hardly ever rises with the threshold; where it does, a threshold that was seen to meet the target counts.
    """
    logit, stride = max(-FARTHEST_LOGIT, min(FARTHEST_LOGIT, _logit(near))), 1.0
    dear: tuple[float, float] | None = None  # logit and cost of the highest threshold that costs too much
    met: tuple[float, float] | None = None
    while dear is None or met is None:
        found = macs_at(_sigmoid(logit))
        if found > target_macs:
            if logit == FARTHEST_LOGIT:
                return _met_at_all(macs_at, target_macs)
            dear, logit = (logit, found), min(logit + stride, FARTHEST_LOGIT)
        else:
            if _close(found, target_macs):
                return _sigmoid(logit)
            if logit == -FARTHEST_LOGIT:
                return 0.0 if macs_at(0.0) <= target_macs else _sigmoid(logit)
            met, logit = (logit, found), max(logit - stride, -FARTHEST_LOGIT)
        stride *= 2
    width, slow = met[0] - dear[0], 0
    while width > 2 * FARTHEST_LOGIT / 2**steps:
        # a little below the target, where it is met; in the middle where that does not bring the two together
        share = (dear[1] - (1 - NEAR / 2) * target_macs) / (dear[1] - met[1]) if slow < 2 else 0.5
        logit = dear[0] + width * max(0.05, min(0.95, share))
        found = macs_at(_sigmoid(logit))
        dear, met = ((logit, found), met) if found > target_macs else (dear, (logit, found))
        if found <= target_macs and _close(found, target_macs):
            break
        slow = slow + 1 if met[0] - dear[0] > width / 2 else 0
        width = met[0] - dear[0]
    return _sigmoid(met[0])


def _met_at_all(macs_at: Callable[[float], float], target_macs: float) -> float:
    """The threshold that closes all that may close, if that is within the target."""
    if (floor := macs_at(1.0)) > target_macs:
        raise TargetError(
            f"the target of {target_macs:,.0f} MACs can't be reached: with all gates closed that may close it costs "
            f"{floor:,.0f}. Choose a higher target, or freeze less"
        )
    return 1.0


def _close(found: float, target_macs: float) -> bool:
    return found >= (1 - NEAR) * target_macs


def _logit(p: float) -> float:
    return math.log(p / (1 - p)) if 0 < p < 1 else math.copysign(math.inf, p - 0.5)


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def _unreachable(cost: Cost, least: Decisions, target_macs: int, rounding: bool = False) -> str:
    floor = cost.decided_macs(least)
    return (
        f"the target of {target_macs:,} MACs ({target_macs / cost.dense_macs:.3f} of the network) can't be reached: "
        f"with all gates closed that may close it costs {floor:,} ({floor / cost.dense_macs:.3f}). "
        f"Choose a higher target, {'round widths less (round_to), ' if rounding else ''}or freeze less"
    )


def _by_probability(graph: ChannelGraph, probabilities: NDArray[np.float64], least: Decisions) -> NDArray[np.int64]:
    """All gates, the ones that must be open first, then by falling probability; equal ones spread over the masks."""
    place = np.concatenate([(np.arange(mask.size) + 0.5) / mask.size for mask in graph.masks])
    return np.lexsort((place, -probabilities, ~least))


def _fill(cost: Cost, decisions: Decisions, closed: NDArray[np.int64], target_macs: int) -> Decisions:
    """Open further gates, likeliest first, as long as they fit."""
    decisions = decisions.copy()
    misses = 0
    for gate in closed:
        decisions[gate] = True
        if cost.decided_macs(decisions) > target_macs:
            decisions[gate] = False
            misses += 1
            if misses >= FILL_TRIALS:
                break
    return decisions


def rounded(
    graph: ChannelGraph, decisions: Decisions, probabilities: NDArray[np.float64], round_to: int, *, up: bool = False
) -> Decisions:
    """Open a multiple of `round_to` channels in each mask (or all): fewer, but never none; or with `up`, more."""
    if round_to < 1:
        raise HeadgateError(f"round_to={round_to}: widths can be rounded to 1, 2, 4, 8, …")
    if round_to == 1:
        return decisions
    result = decisions.copy()
    for mask in graph.masks:
        count = int(decisions[mask.gates].sum())
        if count == 0 or mask.kind == "branch":
            continue
        step = round_to // math.gcd(round_to, mask.width)
        wanted = -(-count // step) * step if up or count < step else count // step * step
        wanted = mask.size if count == mask.size else min(wanted, mask.size)
        score = probabilities[mask.gates] + decisions[mask.gates]
        result[mask.gates] = False
        result[mask.first + np.argsort(-score, kind="stable")[:wanted]] = True
    return result


class Takes(NamedTuple):
    """What a model is called with: tensors of how many dimensions each, and by which names, if by any."""

    dims: tuple[int, ...] = (4,)
    names: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        return len(self.dims)

    def fit(self, given: Sequence[Any]) -> bool:
        """Whether these can be what the model takes; several are told from labels by their dimensions."""
        if not given or len(given) < self.number or not all(isinstance(tensor, Tensor) for tensor in given):
            return False
        return self.number == 1 or all(tensor.dim() == dim for tensor, dim in zip(given, self.dims, strict=False))


ONE = Takes()


def inputs_of(batch: Any, takes: Takes = ONE) -> tuple[Any, ...]:
    """The model's arguments in a loader's batch: a tensor, or (images, labels), or {"image": …}; where the model takes
    several, ((first, second), labels) or (first, second, labels), or if it takes them by names, {"first": …, …}."""
    if takes.names and isinstance(batch, dict) and all(name in batch for name in takes.names):
        return tuple(batch[name] for name in takes.names)
    if isinstance(batch, Tensor) and takes.number == 1:
        return (batch,)
    if isinstance(batch, (tuple, list)) and batch:
        first = batch[: takes.number]
        if isinstance(batch[0], (tuple, list)):
            first = batch[0]
        if takes.fit(first):
            return tuple(first)
    if takes.number > 1:
        raise HeadgateError(
            f"the model takes {takes.number} tensors, and a loader's batch, a {type(batch).__name__}, does not begin "
            "with them: yield ((first, second), labels), or (first, second, labels)"
        )
    if isinstance(batch, dict):
        for key in ("image", "images", "pixel_values", "input", "inputs", "x"):
            if isinstance(batch.get(key), Tensor):
                return (batch[key],)
    raise HeadgateError(
        f"a loader's batch is a {type(batch).__name__} in which no images are found: yield (images, labels)"
    )


def labelled(batch: Any, takes: Takes = ONE) -> tuple[tuple[Any, ...], Tensor]:
    """The model's arguments and the labels in a loader's batch: (images, labels), or {"image": …, "label": …}."""
    labels = None
    if isinstance(batch, (tuple, list)) and batch:
        inputs = 1 if isinstance(batch[0], (tuple, list)) else takes.number
        labels = batch[inputs] if len(batch) == inputs + 1 else None
    elif isinstance(batch, dict):
        labels = next((batch[key] for key in ("label", "labels", "target", "targets", "y") if key in batch), None)
    if not isinstance(labels, Tensor):
        raise HeadgateError("no labels are found in a loader's batch: give a loader of (images, labels)")
    return inputs_of(batch, takes), labels


def _check_finite(inputs: tuple[Any, ...], number: int) -> None:
    """One NaN would be in all statistics."""
    for tensor in inputs:
        if isinstance(tensor, Tensor) and not tensor.numel():
            raise HeadgateError(f"batch {number} of the loader is empty: leave it out")
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise HeadgateError(f"batch {number} of the loader holds NaN or infinity: mend the data, or leave it out")


def endless(loader: Iterable[Any], batches: int, takes: Takes = ONE) -> Iterator[tuple[Any, ...]]:
    """`batches` batches of inputs, from the start again where the loader is shorter."""
    given = 0
    while given < batches:
        before = given
        for batch in loader:
            inputs = inputs_of(batch, takes)
            given += 1
            _check_finite(inputs, given)
            yield inputs
            if given == batches:
                return
        if given == before:
            if given:
                return  # an iterator that is spent: what it gave must do
            raise HeadgateError("the loader is empty: calibrate needs at least one batch")


class _EveryRowAlike:
    """Before a norm: what it sees now counts by its share of all rows seen so far."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, norm: Any, args: tuple[Tensor, ...]) -> None:
        self.rows += len(args[0])
        norm.momentum = len(args[0]) / self.rows


def _run_many(run: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """A pass in which BatchNorm looks at its batch."""
    try:
        run(*inputs)
    except ValueError as error:
        if len(inputs[0]) != 1:
            raise
        raise HeadgateError(
            f"BatchNorm can't be estimated on a batch of one image ({error}): "
            "leave out a last batch that is so small (DataLoader(…, drop_last=True))"
        ) from error


def reestimate_batchnorm(
    model: nn.Module, run: Callable[..., Any], loader: Iterable[Any], batches: int = 200, takes: Takes = ONE
) -> int:  # fmt: skip
    """Average BatchNorm's statistics anew over `batches` batches passed to `run`, every image alike; returns how many
    norms changed."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if batches < 1:
        raise HeadgateError(f"batches={batches}: BatchNorm needs at least one batch")
    if not norms:
        next(endless(loader, 1, takes))
        return 0
    momenta = [norm.momentum for norm in norms]
    statistics = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    modes = {module: module.training for module in model.modules()}
    hooks = [norm.register_forward_pre_hook(_EveryRowAlike()) for norm in norms]
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.training = True
        device = next(model.parameters()).device
        with torch.no_grad():
            for inputs in endless(loader, batches, takes):
                _run_many(run, [tensor.to(device) for tensor in inputs])
    except BaseException:
        for norm, before in zip(norms, statistics, strict=True):
            for name, buffer in norm.named_buffers():
                buffer.copy_(before[name])
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    return len(norms)
