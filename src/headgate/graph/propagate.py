"""Follow channels through a recorded forward pass.

Takes a `Trace` and the layers' modules; gives a `Book`: the labels of every value, which channels are tied, which
are frozen and why, and what each mixing layer reads, writes and costs. The same walk serves twice: over the dense
network, where it finds the channels out, and over a smaller one (`SmallBook`), where it checks that each tensor
holds exactly the channels that should be left. Knows the rules' tables; knows nothing of gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headgate.graph.labels import NO_CHANNEL, Labels, along, varying_axes
from headgate.graph.layer_rules import Index, LayerBook, Usage, rule_for
from headgate.graph.op_rules import OP_MACS, OP_RULES, MaybeLabels, unknown
from headgate.graph.relayout import Relayout, dense_name
from headgate.graph.trace import PROBE_IMAGES, Call, Trace, Value


@dataclass(frozen=True)
class StreamCuts:
    """Where an indexed stream is cut: modules that write to it through a mask, values that
    layers read through one, and layers (the output layer) that read it whole all the same."""

    writers: frozenset[str] = frozenset()
    stream_values: frozenset[int] = frozenset()
    whole_readers: frozenset[str] = frozenset()


NO_CUTS = StreamCuts()


@dataclass
class Port:
    """A place where a dense stream meets a masked layer: `atoms` are the mask's channels, in the stream's order."""

    module: str
    axis: int
    atoms: Labels
    batch_axis: int


@dataclass(eq=False)
class Book(LayerBook):
    """All that one walk finds out about channels."""

    trace: Trace
    modules: Mapping[str, nn.Module]
    cuts: StreamCuts = NO_CUTS
    atom_count: int = 0
    labels: dict[int, MaybeLabels] = field(default_factory=dict)
    owners: dict[tuple[Any, ...], Labels] = field(default_factory=dict)
    ties: list[tuple[Labels, Labels]] = field(default_factory=list)
    frozen: list[tuple[Labels, str]] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    sizes: dict[str, tuple[Labels | None, Labels | None]] = field(default_factory=dict)
    read_ports: dict[str, Port] = field(default_factory=dict)
    write_ports: dict[str, Port] = field(default_factory=dict)
    other_macs: dict[str, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    before_cut: dict[int, Labels] = field(default_factory=dict)
    macs_calls: dict[str, list[Call]] = field(default_factory=dict)

    def labels_of(self, value: Value) -> MaybeLabels:
        """Labels of a value; None for one without channels."""
        return self.labels.get(value.index)

    def fresh(self, owner: tuple[Any, ...], count: int) -> Labels:
        """`count` new channels of an owner; the same ones when it asks again."""
        if owner not in self.owners:
            self.owners[owner] = np.arange(self.atom_count, self.atom_count + count)
            self.atom_count += count
        return self.owners[owner]

    def tie(self, first: Labels, second: Labels) -> None:
        """Channels in the same place stay or go together."""
        first, second = np.broadcast_arrays(first, second)
        both = (first != NO_CHANNEL) & (second != NO_CHANNEL)
        for known, fixed in ((first, second), (second, first)):
            self.freeze(known[(fixed == NO_CHANNEL) & (known != NO_CHANNEL)], "is added to fixed channels")
        if not np.array_equal(first, second):
            self.ties.append((first[both].copy(), second[both].copy()))

    def freeze(self, labels: MaybeLabels, reason: str) -> None:
        """These channels always stay."""
        if labels is not None and labels.size:
            atoms = np.unique(labels)
            self.frozen.append((atoms[atoms != NO_CHANNEL], reason))

    def slot(self, call: Call) -> int:
        """The call's number, the same in the dense and the smaller network."""
        return self.slots[call.index]

    def use(self, usage: Usage) -> None:
        """Write down that a mixing layer was called."""
        self.usages.append(usage)

    def resize(self, layer: str, reads: Labels | None, writes: Labels | None) -> None:
        """Write down what a layer's inputs and outputs hold; a second call is tied to the first."""
        if layer in self.sizes:
            before = self.sizes[layer][0]
            if before is None or reads is None or before.shape != reads.shape:
                self.freeze(before, f"`{layer}` is called again with other channels")
                self.freeze(reads, f"`{layer}` is called again with other channels")
                return
            self.tie(before, reads)
        self.sizes[layer] = (reads, writes)

    def spend(self, place: str, macs: int, call: Call) -> None:
        """Count multiply-adds of what is not a mixing layer."""
        self.other_macs[place] = self.other_macs.get(place, 0) + macs * self.repeats(call)
        self.macs_calls.setdefault(place, []).append(call)

    def relaid(self, call: Call) -> MaybeLabels:
        """What a module that moves channels gives back. In a network that was shrunk before, it is left as it is."""
        for value in call.inputs:
            self.freeze(self.labels_of(value), f"{call.title} was put there by an earlier shrink")
        return None

    def repeats(self, call: Call) -> int:
        """What is computed once for a whole batch is dear for a batch of one: it counts in full for every image.

        What does not come from the images may still be computed for each of them (a recurrent layer's first state),
        and what has no dimension over images may be called for each of them (in a loop).
        """
        images = self.trace.batch_size
        if images < PROBE_IMAGES:
            return 1 if any(value.from_input for value in call.inputs) else images
        for_each = any(self.has_images(value) for value in (*call.inputs, *call.outputs) if value.parameter is None)
        return 1 if for_each or self.trace.calls_at[call.target, call.where] >= images else images

    def has_images(self, value: Value) -> bool:
        """Whether a dimension of a value runs over images (or over images times something else)."""
        return any(size % self.trace.batch_size == 0 for size in value.shape)

    def batch_axis(self, value: Value) -> int:
        """The first dimension that is a multiple of the number of images; 0 if there is none."""
        images = self.trace.batch_size
        return next((axis for axis, size in enumerate(value.shape) if size % images == 0), 0)

    def axis_of_channels(self, value: Value) -> int | None:
        """The dimension along which the channels of a value lie; that of a single channel is some other than the
        images' of size 1. None where there is none, as where one channel is spread over many places."""
        labels = self.labels_of(value)
        if labels is None:
            return None
        if varying := varying_axes(labels):
            return max(varying, key=labels.shape.__getitem__)
        images = self.batch_axis(value)
        return next((axis for axis, size in enumerate(value.shape) if size == 1 and axis != images), None)

    def reading(self, call: Call, labels: MaybeLabels) -> MaybeLabels:
        """What a mixing layer reads; from an indexed stream, through a mask of its own."""
        value = call.inputs[0]
        if labels is None or value.index not in self.cuts.stream_values or call.layer in self.cuts.whole_readers:
            return labels
        assert call.layer is not None
        if self.trace.layer_calls[call.layer] > 1:
            return labels  # one mask could not serve several inputs
        axis = self.axis_of_channels(value)
        if axis is None:
            return labels
        self.freeze(labels, "is a stream that blocks index into")
        atoms = self.fresh(("read", call.layer), value.shape[axis])
        self.read_ports[call.layer] = Port(call.layer, axis, atoms, self.batch_axis(value))
        return along(atoms, axis, labels.ndim)


def follow(trace: Trace, modules: Mapping[str, nn.Module], cuts: StreamCuts = NO_CUTS) -> Book:
    """Walk through the calls in order and fill a book."""
    book = Book(trace, modules, cuts)
    walk(book, trace)
    return book


def walk(book: Book, trace: Trace) -> None:
    """Apply every call's rule, and cut the stream behind the modules that write to it."""
    leaving: dict[int, list[tuple[str, Value]]] = {}
    for span in trace.spans:
        if dense_name(span.name) in book.cuts.writers and len(span.outputs) == 1:
            leaving.setdefault(span.last, []).append((dense_name(span.name), span.outputs[0]))
    slot = 0
    for call in trace.calls:
        book.slots[call.index] = slot
        slot += not (isinstance(call.target, type) and issubclass(call.target, Relayout))
        outputs = _apply(call, book)
        for value, labels in zip(call.outputs, outputs, strict=True):
            book.labels[value.index] = labels
        for name, value in leaving.get(call.index + 1, ()):
            cut_behind(book, name, value)
    for value, call in trace.overwritten:
        for alias in (value, *call.outputs):
            book.freeze(book.labels_of(alias), f"{call.title} overwrites a tensor that is read again")
    for value in trace.outputs:
        book.freeze(book.labels_of(value), "is an output of the model")


def _apply(call: Call, book: Book) -> list[MaybeLabels]:
    if call.layer is None:
        if call.target in OP_MACS:
            book.spend(call.inside or "(model)", OP_MACS[call.target](call), call)
        return list(OP_RULES.get(call.target, unknown)(call, book))
    module = book.modules[call.layer]
    if isinstance(module, Relayout):
        return [book.relaid(call)]
    rule = rule_for(module)
    assert rule is not None
    renamed = Call(**{**vars(call), "layer": dense_name(call.layer)})
    before = len(book.usages)
    outputs = rule.propagate(renamed, module, book)
    if len(book.usages) == before and (macs := rule.macs(renamed, module)):
        book.spend(str(renamed.layer), macs, call)
    return outputs


def cut_behind(book: Book, name: str, value: Value) -> None:
    """What `name` returns enters a stream: behind it, the stream's own channels; before it, the layer's."""
    labels, axis = book.labels_of(value), book.axis_of_channels(value)
    if labels is None or axis is None:
        return
    book.write_ports[name] = Port(name, axis, labels.reshape(-1), book.batch_axis(value))
    book.before_cut[value.index] = labels
    book.labels[value.index] = along(book.fresh(("stream", name), value.shape[axis]), axis, labels.ndim)


def kept_places(labels: Labels, open_atoms: NDArray[np.bool_]) -> Index:
    """Places of a list of channels that are left: the open ones, and those that belong to no channel."""
    return np.flatnonzero((labels == NO_CHANNEL) | open_atoms[labels])
