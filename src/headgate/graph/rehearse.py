"""Rehearse a smaller network before anybody relies on it.

The model's own forward code must run with fewer channels, and every tensor in it must hold exactly the channels
that are left. `rehearse` builds the smaller network for some decisions on the meta device, runs it, and compares
tensor by tensor. What fails is reported as the call at which it failed, so that the channels there can be frozen.
Knows nothing of numbers: the numerical check of a real network is `inference/shrink.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headgate.errors import HeadgateError
from headgate.graph.grouping import ChannelGraph, Decisions
from headgate.graph.labels import NO_CHANNEL, Labels
from headgate.graph.layer_rules import LAYERS, plain_attention
from headgate.graph.op_rules import MaybeLabels
from headgate.graph.plan import make_plan, restructure
from headgate.graph.propagate import Book, StreamCuts, walk
from headgate.graph.relayout import Relayout, dense_name
from headgate.graph.trace import Call, Trace, run_recorded, stripped_copy, tensors_in


@dataclass(frozen=True)
class Failure:
    """The first call of the dense network that does not work in the smaller one, and why."""

    call: Call | None
    message: str


@dataclass(eq=False)
class SmallBook(Book):
    """The walk over a smaller network: channels come from the dense book, less the closed ones."""

    graph: ChannelGraph | None = None
    open_atoms: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    hidden: list[bool] = field(default_factory=list)
    """Calls of the dense network that run inside an island, and so see all channels."""

    def fresh(self, owner: tuple[Any, ...], count: int) -> Labels:
        """The owner's channels that are left; zeros padded inside an island are all there."""
        assert self.graph is not None
        atoms = self.graph.book.owners[owner]
        if owner[0] == "zeros" and self.hidden[owner[1]]:
            return atoms
        return atoms[self.open_atoms[atoms]]

    def tie(self, first: Labels, second: Labels) -> None:
        """Ties are known already; only shapes must agree."""
        np.broadcast_shapes(first.shape, second.shape)

    def freeze(self, labels: MaybeLabels, reason: str) -> None:
        """Frozen channels are known already."""

    def resize(self, layer: str, reads: Labels | None, writes: Labels | None) -> None:
        """Sizes are known already."""

    def relaid(self, call: Call) -> MaybeLabels:
        """The labels a moved tensor must have, by the dense network's book."""
        assert self.graph is not None and call.layer is not None
        dense = self.graph.book
        wrapper, _, side = call.layer.rpartition(".")
        name = dense_name(wrapper)
        if name in self.graph.islands:
            span = self.graph.trace.spans_of[name][0]
            return dense.labels_of(span.inputs[0]) if side == "before" else self.left(dense.labels_of(span.outputs[0]))
        if side == "before":
            port = dense.read_ports[name]
            return self.left(dense.labels_of(self._reading_call(name).inputs[0]), port.atoms)
        return dense.labels_of(self.graph.trace.spans_of[name][0].outputs[0])

    def _reading_call(self, layer: str) -> Call:
        assert self.graph is not None
        return next(call for call in self.graph.trace.calls if call.layer == layer)

    def left(self, labels: MaybeLabels, atoms: Labels | None = None) -> MaybeLabels:
        """Labels (or other channels in the same layout) without the closed channels."""
        if labels is None:
            return None
        shown = labels if atoms is None else atoms.reshape(labels.shape)
        for axis, size in enumerate(shown.shape):
            if size != 1:
                other = tuple(place for place in range(shown.ndim) if place != axis)
                stays = ((shown == NO_CHANNEL) | self.open_atoms[shown]).any(axis=other)
                shown = shown.compress(stays, axis)
        return shown


def rehearse(
    model: nn.Module, example_input: Any, graph: ChannelGraph, decisions: Decisions, dead: tuple[int, ...] = ()
) -> Failure | None:
    """Run the smaller network where the dense one was traced; None if all is as it should be."""
    on_meta = graph.trace.on_meta
    try:
        small = restructure(stripped_copy(model, to_meta=on_meta), make_plan(graph, decisions, dead))
    except HeadgateError as error:
        return Failure(None, str(error))
    if on_meta:
        small = small.to("meta")
    with plain_attention(not dead):
        recorder, outputs = run_recorded(small.eval(), example_input, LAYERS, graph.trace.batch_size, on_meta)
    if dead:
        return _dead_failure(graph, recorder.crash, outputs)
    return _compare(graph, recorder.trace, dict(small.named_modules()), graph.open_atoms(decisions), recorder.crash)


def _dead_failure(graph: ChannelGraph, crash: Exception | None, outputs: Any) -> Failure | None:
    if crash is not None:
        return Failure(None, f"{type(crash).__name__}: {crash}")
    shapes = [tuple(tensor.shape) for tensor in tensors_in(outputs)]
    expected = [value.shape for value in graph.trace.outputs]
    return None if shapes == expected else Failure(None, f"output {shapes} instead of {expected}")


def _compare(
    graph: ChannelGraph,
    small: Trace,
    modules: Mapping[str, nn.Module],
    open_atoms: NDArray[np.bool_],
    crash: Exception | None,
) -> Failure | None:
    dense_calls = graph.trace.calls
    small_calls = [call for call in small.calls if not _moves(call)]
    for ours, theirs in zip(dense_calls, small_calls, strict=False):
        if ours.target is not theirs.target or (ours.layer or "") != dense_name(theirs.layer or ""):
            return Failure(ours, "the forward code takes another path with fewer channels")
    hidden = [False] * len(dense_calls)
    for name in graph.islands:
        span = graph.trace.spans_of[name][0]
        hidden[span.first : span.last] = [True] * (span.last - span.first)
    # where nothing is closed, nothing is moved: there the stream begins without a module that says so
    moved = {dense_name(name.removesuffix(".after")) for name in modules if name.endswith(".after")}
    unmoved = frozenset(graph.book.write_ports) - moved
    book = SmallBook(small, modules, StreamCuts(unmoved), graph=graph, open_atoms=open_atoms, hidden=hidden)
    failure = _walk_and_compare(graph, small, book)
    if failure is not None or crash is None:
        return failure
    reached = min(len(small_calls), len(dense_calls) - 1)
    return Failure(dense_calls[reached], f"{type(crash).__name__}: {crash}")


def _moves(call: Call) -> bool:
    return isinstance(call.target, type) and issubclass(call.target, Relayout)


def _walk_and_compare(graph: ChannelGraph, small: Trace, book: SmallBook) -> Failure | None:
    dense = graph.book
    partial = Trace(calls=small.calls, spans=small.spans, batch_size=small.batch_size)
    try:
        walk(book, partial)
        broken = None
    except (ValueError, IndexError, AssertionError) as error:
        broken = error
    for call in small.calls:
        if _moves(call):
            continue
        if call.index not in book.slots:
            break
        number = book.slots[call.index]
        ours = graph.trace.calls[number]
        for ours_value, small_value in zip(ours.outputs, call.outputs, strict=False):
            if small_value.index not in book.labels:
                return Failure(ours, f"can't follow the channels ({broken})")
            expected = dense.before_cut.get(ours_value.index, dense.labels_of(ours_value))
            expected = expected if book.hidden[number] else book.left(expected)
            found = book.before_cut.get(small_value.index, book.labels[small_value.index])
            problem = _difference(expected, found, ours_value.shape, small_value.shape)
            if problem:
                return Failure(ours, problem)
    return None


def _difference(
    expected: MaybeLabels, found: MaybeLabels, dense_shape: tuple[int, ...], shape: tuple[int, ...]
) -> str | None:
    if expected is None:
        return None if shape == dense_shape else f"has shape {shape} instead of {dense_shape}"
    want = tuple(
        size if labels == 1 and size != 0 else labels for size, labels in zip(dense_shape, expected.shape, strict=True)
    )
    if shape != want and not _single(expected, dense_shape, shape):
        return f"has shape {shape} instead of {want}"
    if expected.size == 1 and found is None:
        return None  # one channel: a rule could not tell its dimension from the others
    if found is None or found.shape != expected.shape or not np.array_equal(found, expected):
        return "holds other channels than it should"
    return None


def _single(expected: Labels, dense_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """One channel left: its labels are constant, so its dimension can't be told from the others."""
    return all(now in (dense, 1) for dense, now in zip(dense_shape, shape, strict=True)) and expected.size == 1
