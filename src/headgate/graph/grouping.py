"""From ties and freezes to masks: which channels can be gated, together with which others, and what they cost.

Takes the `Book` of a walk, gives a `ChannelGraph`: the masks (named vectors of gates), the gate of every channel,
the cost of every layer as a function of the gates, and for all that is frozen the reason. Knows nothing of
probabilities or of training: a gate here is a number, open or closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headgate.graph.branches import Branch
from headgate.graph.labels import NO_CHANNEL, Labels
from headgate.graph.propagate import Book
from headgate.graph.trace import Trace

Granularity = Literal["channel", "layer"] | int
ALWAYS_OPEN = -1
Decisions = NDArray[np.bool_]


def granularity_named(text: str) -> Granularity:
    """A granularity as it is written on the command line or in a recipe; `Settings` says what is wrong with it."""
    return int(text) if text.isdigit() else text  # type: ignore[return-value]


@dataclass(frozen=True)
class Mask:
    """A named vector of gates: `gates` are its numbers `first` to `first + size`."""

    name: str
    first: int
    size: int
    layers: tuple[str, ...]
    """The layers that write its channels (for an input mask: the layer that reads them)."""
    kind: Literal["channels", "input", "branch"] = "channels"
    width: int = 1
    """Channels a gate, in the first of its layers (the last gate may have fewer)."""
    may_die: bool = False
    """Whether all gates may close: in a residual branch they may, elsewhere the network would be cut in two."""

    @property
    def gates(self) -> slice:
        """Its gates among all gates."""
        return slice(self.first, self.first + self.size)


@dataclass(frozen=True)
class CostItem:
    """A layer's cost: `macs` × share of open inputs × share of open outputs, × 0 where a branch around it is dead."""

    name: str
    kind: str
    macs: int
    reads: NDArray[np.int64] | None
    writes: NDArray[np.int64] | None
    out_shape: tuple[int, ...] = ()
    branches: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reader:
    """A layer whose input is masked: the gate of each of its input channels."""

    layer: str
    axis: int
    gates: NDArray[np.int64]
    batch_axis: int = 0


@dataclass(frozen=True)
class GatedBranch:
    """A branch that can be closed as a whole: dead where all gates of one of its `masks` are closed."""

    branch: Branch
    masks: tuple[int, ...]
    batch_axis: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class ChannelGraph:
    """All that gates, costs, shrinking and reports need to know of a network."""

    trace: Trace
    book: Book
    atom_gate: NDArray[np.int64]
    """Gate of every channel, or ALWAYS_OPEN."""
    masks: tuple[Mask, ...]
    costs: tuple[CostItem, ...]
    readers: tuple[Reader, ...]
    writers: tuple[Reader, ...]
    """Modules whose output is masked: what they add to an indexed stream."""
    branches: tuple[GatedBranch, ...]
    frozen: dict[str, str] = field(default_factory=dict)
    """Layer → why none of the channels it writes is gated."""
    islands: frozenset[str] = frozenset()
    """Modules that must see all channels: a smaller network gives them back their zeros."""
    granularity: Granularity = "channel"
    stream: str = "shared"

    def __repr__(self) -> str:
        return f"ChannelGraph({self.gate_count} gates in {len(self.masks)} masks, {self.dense_macs:,} MACs)"

    def __str__(self) -> str:
        from headgate.graph.table import as_text  # which is made of graphs

        return as_text(self)

    @property
    def gate_count(self) -> int:
        """How many gates there are."""
        return sum(mask.size for mask in self.masks)

    @property
    def dense_macs(self) -> int:
        """Multiply-adds an image, all gates open."""
        return sum(item.macs for item in self.costs)

    @property
    def gateable_fraction(self) -> float:
        """Share of the multiply-adds in layers that some gate makes cheaper."""
        gated = sum(
            item.macs
            for item in self.costs
            if item.branches
            or any(gates is not None and (gates != ALWAYS_OPEN).any() for gates in (item.reads, item.writes))
        )
        return gated / max(self.dense_macs, 1)

    def open_atoms(self, decisions: Decisions) -> NDArray[np.bool_]:
        """Which channels are left under these decisions."""
        return (self.atom_gate == ALWAYS_OPEN) | decisions[self.atom_gate]


def components(count: int, ties: Sequence[tuple[Labels, Labels]]) -> NDArray[np.int64]:
    """The smallest channel of each channel's class, when tied channels are of one class."""
    parent = np.arange(count)
    if not ties:
        return parent
    first = np.concatenate([a for a, _ in ties])
    second = np.concatenate([b for _, b in ties])
    while True:
        root_a, root_b = parent[first], parent[second]
        apart = root_a != root_b
        if not apart.any():
            return parent
        np.minimum.at(parent, np.maximum(root_a, root_b)[apart], np.minimum(root_a, root_b)[apart])
        while not np.array_equal(parent, shorter := parent[parent]):
            parent = shorter


@dataclass(frozen=True)
class Classes:
    """Channels that stay or go together, and those that always stay."""

    of_atom: NDArray[np.int64]
    reasons: dict[int, str]


def classes_of(book: Book, extra_frozen: Sequence[tuple[Labels, str]] = ()) -> Classes:
    """Solve the ties; a class with one frozen channel is frozen."""
    of_atom = components(book.atom_count, book.ties)
    reasons: dict[int, str] = {}
    for atoms, reason in (*extra_frozen, *book.frozen):
        for root in np.unique(of_atom[atoms]):
            reasons.setdefault(int(root), reason)
    return Classes(of_atom, reasons)


def owner_numbers(book: Book) -> tuple[list[tuple[str, str]], NDArray[np.int64]]:
    """The layers that own channels, as (kind, name), and for every channel the number of its owner (-1: none)."""
    owners: list[tuple[str, str]] = []
    number_of = np.full(book.atom_count, -1)
    for owner, atoms in book.owners.items():
        if owner[0] in ("layer", "read"):
            number_of[atoms] = len(owners)
            owners.append((owner[0], owner[1]))
    return owners, number_of


def make_masks(book: Book, classes: Classes, granularity: Granularity) -> tuple[tuple[Mask, ...], NDArray[np.int64]]:
    """Classes with the same owners make one mask; gates are its classes, or runs of them."""
    owners, number_of = owner_numbers(book)
    free = np.ones(book.atom_count, bool)
    free[list(classes.reasons)] = False
    owned = np.flatnonzero((number_of >= 0) & free[classes.of_atom])
    # one row for each pair of a class and an owner; classes with equal sets of owners get equal fingerprints
    keys, widths = np.unique(classes.of_atom[owned] * len(owners) + number_of[owned], return_counts=True)
    pairs = np.stack(np.divmod(keys, max(len(owners), 1)))
    roots, first_pair = np.unique(pairs[0], return_index=True)
    weights = np.random.default_rng(0).integers(1, 2**62, len(owners))
    fingerprint = np.add.reduceat(weights[pairs[1]], first_pair) if len(roots) else np.zeros(0, np.int64)
    _, first_class, kind_of_class = np.unique(fingerprint, return_index=True, return_inverse=True)
    gate_of_class = np.full(book.atom_count, ALWAYS_OPEN)
    masks: list[Mask] = []
    for kind in np.argsort(first_class):
        members = roots[kind_of_class == kind]
        start = first_pair[first_class[kind]]
        stop = first_pair[first_class[kind] + 1] if first_class[kind] + 1 < len(first_pair) else pairs.shape[1]
        signature = [owners[number] for number in pairs[1, start:stop]]
        run = max(1, granularity // int(widths[start])) if isinstance(granularity, int) else 1
        size = -(-len(members) // run)
        if size == 1:
            for root in members:
                classes.reasons[int(root)] = "all its channels hang together: one gate would be the whole layer"
            continue
        first = masks[-1].gates.stop if masks else 0
        gate_of_class[members] = first + np.arange(len(members)) // run
        kind_name: Literal["input", "channels"] = "input" if signature[0][0] == "read" else "channels"
        masks.append(
            Mask(
                _free_name(signature, {mask.name for mask in masks}),
                first,
                size,
                tuple(owner[1] for owner in signature),
                kind_name,
                run * int(widths[start]),
            )
        )
    return tuple(masks), gate_of_class[classes.of_atom]


def _free_name(signature: Sequence[tuple[str, str]], taken: set[str]) -> str:
    """A mask is called after its first layer; where another has that name, after one of its other layers, too."""
    kind, layer = signature[0]
    name = f"{layer}.input" if kind == "read" else layer
    longer = (f"{name}+{other}" for _, other in signature[1:])
    numbered = (f"{name}+{number}" for number in count(2))
    return next(each for each in chain([name], longer, numbered) if each not in taken)


def gates_of(labels: Labels | None, atom_gate: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The gate of every place of a list of channels."""
    if labels is None:
        return None
    return np.where(labels == NO_CHANNEL, ALWAYS_OPEN, atom_gate[labels])


def cost_items(
    book: Book, atom_gate: NDArray[np.int64], trace: Trace, around: dict[int, tuple[int, ...]]
) -> tuple[CostItem, ...]:
    """The cost of each layer an image, in the order of the calls; `around` gives the gated branches of a call."""
    batch = trace.batch_size
    calls: dict[str, list[int]] = {}
    for call in trace.calls:
        if call.layer is not None:
            calls.setdefault(call.layer, []).append(call.index)
    items: dict[str, CostItem] = {}
    macs_of: Counter[str] = Counter()
    for usage in book.usages:
        inside = _common([around.get(index, ()) for index in calls[usage.layer]])
        macs_of[usage.layer] += usage.macs
        reads = None if usage.mode == "whole" else gates_of(usage.reads, atom_gate)
        items[usage.layer] = CostItem(
            usage.layer, usage.kind, macs_of[usage.layer] // batch, reads, gates_of(usage.writes, atom_gate),
            usage.out_shape, inside,
        )  # fmt: skip
    for place, macs in book.other_macs.items():
        inside = _common([around.get(call.index, ()) for call in book.macs_calls[place]])
        items[f"{place} (operators)" if place in items else place] = CostItem(
            place, "operators", macs // batch, None, None, (), inside
        )
    return tuple(items.values())


def _common(parts: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(branch for branch in parts[0] if all(branch in part for part in parts)) if parts else ()
