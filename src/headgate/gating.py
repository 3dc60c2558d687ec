"""From a model to a gated one: what users call first.

`gate` follows the channels, makes a gate for each that may close, and checks that the target can be reached; `inspect`
shows what it would find. The model that is given is not changed. Knows nothing of what becomes of the gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from headgate.errors import HeadgateError, ModelError, NothingToGate, TargetError
from headgate.gated import GatedModel
from headgate.gates.budget import Budget, own_budget, parse_target
from headgate.gates.cost import Rates
from headgate.gates.dynamic import DynamicGates
from headgate.gates.folding import check_folding
from headgate.gates.gumbel import Backward, Relaxation
from headgate.gates.static import StaticGates
from headgate.graph.analyse import Settings, StreamForm, analyse, check_model, check_module_names
from headgate.graph.grouping import ChannelGraph, Granularity
from headgate.graph.sites import find_sites, folded_readers
from headgate.graph.trace import stripped_copy
from headgate.graph.wrapped import unwrapped
from headgate.inference.calibrate import least_decisions


def gate(
    model: nn.Module,
    example_input: Any,
    *,
    kind: Literal["static", "dynamic"] = "static",
    granularity: Granularity = "channel",
    target: float | str = 0.5,
    frozen: Sequence[str] = (),
    stream: StreamForm | None = None,
    static: Sequence[str] = (),
    loss: str = "macs",
    budget: Budget | None = None,
    rates: Rates | None = None,
    initial_probability: float = 0.95,
    temperature: float = 1.0,
    hard: bool = True,
    backward: Backward = "sample",
) -> GatedModel:
    """Put gates on the channels of any model. The model itself is not changed.

    `granularity` is "channel", "layer" (whole residual branches) or a number of channels a gate; `target` is a share of
    the whole model's MACs, or a number such as "60M"; `frozen` names modules to leave alone. `stream` says what happens
    where blocks add to one tensor: "shared" gates it once for all (the default of static gates), "indexed" gives each
    reader and writer its own mask (the default of dynamic ones). `kind` "static" makes gates parameters; "dynamic"
    computes them from the input of each block, but under the modules that `static` names.
    """
    if kind not in ("static", "dynamic"):
        raise HeadgateError(f'kind={kind!r}: gates are "static" or "dynamic"')
    if static and kind == "static":
        raise HeadgateError("static=[…] names exceptions where kind='dynamic': all gates are static already")
    if rates is not None and loss != "per_gate":
        raise HeadgateError(f"rates=… are those of loss='per_gate': leave them out with loss={loss!r}")
    settings = _settings(granularity, frozen, stream or ("shared" if kind == "static" else "indexed"))
    model = unwrapped(model)
    _check_model(model, static)
    graph = analyse(model, example_input, settings)
    _check_masks(graph, model)
    share = parse_target(target, graph.dense_macs)
    budget = own_budget(budget, share, graph.dense_macs)
    sites = find_sites(graph, static) if kind == "dynamic" else ()
    if kind == "dynamic" and not sites:
        raise NothingToGate("no gate of this model finds an input to look at: use kind='static'")
    looking = sum(graph.masks[number].size for site in sites for number in site.masks)
    gates = StaticGates(graph.gate_count - looking, initial_probability, Relaxation(temperature, hard, backward))
    dynamic = DynamicGates(graph, sites, initial_probability) if sites else None
    device = next(model.parameters()).device
    gated = GatedModel(
        stripped_copy(model, to_meta=False), graph, example_input, share, loss, budget, gates.to(device), rates,
        None if dynamic is None else dynamic.to(device),
    )  # fmt: skip
    gated.frozen_names = tuple(settings.frozen)
    gated.static_names = tuple(static)
    if sites:
        check_folding(gated.model, (*sites, *folded_readers(graph, sites)), example_input)
    gated.train()
    graph.book.modules = dict(gated.model.named_modules())  # the copy's: the user's model is not kept alive
    _check_floor(gated)
    return gated


def _check_model(model: nn.Module, static: Sequence[str]) -> None:
    check_model(model)
    for module in model.modules():
        if reason := getattr(type(module), "not_gated_because", None):
            raise ModelError(f"the model can't be gated, {reason}")
    check_module_names(_names("static", static), dict(model.named_modules()), "static")


def _check_masks(graph: ChannelGraph, model: nn.Module) -> None:
    if graph.masks:
        return
    reasons = "; ".join(sorted({f"{reason}" for reason in graph.frozen.values()})[:3])
    raise NothingToGate(
        f"no channel of this model can be gated: {reasons or 'it has no layer with channels'}."
        f"{_parametrized(model)} `headgate inspect` shows every layer"
    )


def _check_floor(gated: GatedModel) -> None:
    """Whether the target can be reached at all."""
    graph, dense = gated.graph, gated.graph.dense_macs
    floor = gated.cost.decided_macs(least_decisions(graph, np.full(graph.gate_count, 0.5)))
    if floor <= gated.target * dense:
        return
    own = "" if gated.dynamic is None else f"; the gates' own networks need {gated.dynamic.macs / dense:.3f}"
    less = ", or freeze less" if gated.frozen_names else ""
    remedy = f"Choose a higher target{less}; `headgate inspect` shows what is frozen"
    if floor > dense:  # no target helps
        remedy = "Use kind='static', or larger gates, whose networks are smaller: granularity=8, or \"layer\""
    raise TargetError(
        f"target {gated.target:.3g} can't be reached: with all gates closed that may close, {floor / dense:.3f} of the "
        f"MACs are left ({graph.gateable_fraction:.0%} are in layers with gates{own}). {remedy}"
    )


def _parametrized(model: nn.Module) -> str:
    """A hint, where weights are computed from others: weight norm, spectral norm and the like."""
    for name, module in model.named_modules():
        if is_parametrized(module):
            return f" `{name}` has a parametrization, whose weights are computed: remove_parametrizations(…) first."
        if hasattr(module, "weight_g") and hasattr(module, "weight_v"):
            return f" `{name}` has the old weight norm, whose weights are computed: remove_weight_norm(…) first."
    return ""


def inspect(
    model: nn.Module,
    example_input: Any,
    *,
    granularity: Granularity = "channel",
    frozen: Sequence[str] = (),
    stream: StreamForm = "shared",
) -> ChannelGraph:
    """What channels a model has, what they cost, what can be gated, and why the rest can't."""
    return analyse(unwrapped(model), example_input, _settings(granularity, frozen, stream))


def _settings(granularity: Granularity, frozen: Sequence[str], stream: StreamForm) -> Settings:
    return Settings(granularity, _names("frozen", frozen), stream)


def _names(option: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise HeadgateError(f"{option}={given!r} is one string: pass a list of module names, {option}=[{given!r}]")
    if not isinstance(given, Iterable) or not all(isinstance(name, str) for name in given):
        raise HeadgateError(f'{option}={given!r}: pass a list of module names, such as {option}=["layer1", "fc"]')
    return tuple(given)
