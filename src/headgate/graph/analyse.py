"""From a model and an example input to its channel graph: trace, follow, group, rehearse, until all holds.

The only entrance to this package. What can't be gated is frozen with a reason; what the rehearsal shows not to work
with fewer channels is frozen too, or made an island that gets its dense tensor back. Knows nothing of gates'
probabilities.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headgate.errors import HeadgateError, ModelError
from headgate.graph.branches import Branch, find_branches, replacements
from headgate.graph.grouping import (
    ALWAYS_OPEN,
    ChannelGraph,
    Classes,
    Decisions,
    GatedBranch,
    Granularity,
    Mask,
    Reader,
    classes_of,
    cost_items,
    gates_of,
    make_masks,
)  # fmt: skip
from headgate.graph.labels import Labels
from headgate.graph.layer_rules import rule_for, trace_model
from headgate.graph.library_rules import adopt_library_rules
from headgate.graph.propagate import Book, StreamCuts, follow, walk
from headgate.graph.rehearse import Failure, rehearse
from headgate.graph.relayout import Relayout
from headgate.graph.trace import Call, Value, under

StreamForm = Literal["shared", "indexed"]
Frozen = list[tuple[Labels, str]]
REMOVAL_TRIALS = 16
"""How many rehearsals may be spent on finding branches that can't be removed."""
OUTPUT_REASON = "is an output of the model"


@dataclass(frozen=True)
class Settings:
    """What the user chose of the graph."""

    granularity: Granularity = "channel"
    frozen: Sequence[str] = ()
    stream: StreamForm = "shared"

    def __post_init__(self) -> None:
        size = self.granularity
        if size not in ("channel", "layer") and not (
            isinstance(size, int) and not isinstance(size, bool) and size >= 1
        ):
            raise HeadgateError(f'granularity={size!r}: use "channel", "layer", or a number of channels such as 8')
        if self.stream not in ("shared", "indexed"):
            raise HeadgateError(
                f'stream={self.stream!r}: use "shared" (gates tied along it) or "indexed" (masks of their own)'
            )


DEFAULT_SETTINGS = Settings()


def analyse(model: nn.Module, example_input: Any, settings: Settings = DEFAULT_SETTINGS) -> ChannelGraph:
    """The channel graph of a model, which is not changed. Every graph returned has passed its rehearsal."""
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, Relayout):
            raise ModelError(f"`{name}` is there since the network was shrunk: gate the original, dense network")
    adopt_library_rules()
    recorded = trace_model(model, example_input)
    modules = dict(model.named_modules())
    frozen_names = check_module_names(settings.frozen, modules)
    book = follow(recorded, modules)
    branches = _one_for_each_addition(find_branches(recorded), book)
    if settings.stream == "indexed" and settings.granularity != "layer":
        book = follow(recorded, modules, stream_cuts(book, branches))
    _follow_training(model, example_input, book)
    frozen = [*_frozen_by_user(book, frozen_names), *_shared_parameters(model, book)]
    islands: set[str] = set()
    removable = _removable(model, example_input, book, branches, frozen, settings)
    while True:
        graph = assemble(book, frozen, frozenset(islands), removable, settings)
        failure = _first_failure(model, example_input, graph)
        if failure is None:
            return graph
        _give_way(graph, failure, frozen, islands)


def check_model(model: nn.Module) -> None:
    """Refuse what can't be traced at all."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}: pass an nn.Module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(f"`{name}` is not initialised yet (a lazy module): run the model once on an example first")
        if parameter.is_meta:
            raise ModelError(
                f"`{name}` is on the meta device and has no values: "
                "build the model on a real device, or model.to_empty() and load weights"
            )


def check_module_names(
    frozen: Sequence[str], modules: Mapping[str, nn.Module], option: str = "frozen"
) -> tuple[str, ...]:
    """The names, if all of them exist."""
    for name in frozen:
        if name not in modules or not name:
            close = difflib.get_close_matches(name, [known for known in modules if known], 3, 0.5)
            hint = f": did you mean {', '.join(map(repr, close))}?" if close else ""
            raise ModelError(f"{option} names `{name}`, but the model has no such module{hint}")
    return tuple(frozen)


# ------------------------------------------------------------------------------------------------- freezing


def _atoms_at(book: Book, layer: str) -> list[Labels]:
    return [labels for labels in book.sizes.get(layer, ()) if labels is not None]


def _frozen_by_user(book: Book, names: tuple[str, ...]) -> Frozen:
    return [
        (atoms[atoms >= 0], f"`{prefix}` is frozen by the user")
        for prefix in names
        for layer in book.sizes
        if under(layer, prefix)
        for atoms in _atoms_at(book, layer)
    ]


def _shared_parameters(model: nn.Module, book: Book) -> Frozen:
    """Two modules with one parameter: freeze both."""
    owners: dict[int, list[str]] = {}
    for module_name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(module_name)
    return [
        (atoms[atoms >= 0], f"`{layer}` shares a parameter with `{other}`")
        for names in owners.values()
        if len(set(names)) > 1
        for layer, other in zip(names, names[1:] + names[:1], strict=True)
        for atoms in _atoms_at(book, layer)
    ]


def _follow_training(model: nn.Module, example_input: Any, book: Book) -> None:
    """Layers that only run in training (auxiliary classifiers) must fit too: follow a training pass for their ties."""
    called = book.trace.layer_calls
    if all(name in called for name, module in book.modules.items() if rule_for(module) is not None):
        return
    twice = tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf, example_input)
    try:
        recorded = trace_model(model, twice, training=True)
    except HeadgateError:
        return  # never trained as it is; evaluation is what counts
    other = Book(
        recorded, book.modules, book.cuts, book.atom_count, owners=book.owners, ties=book.ties, frozen=book.frozen
    )
    other.cuts = replace(book.cuts, stream_values=frozenset())
    walk(other, recorded)
    book.atom_count = other.atom_count
    for layer, sizes in other.sizes.items():
        book.resize(layer, *sizes)


# ------------------------------------------------------------------------------------------------- branches


def _one_for_each_addition(branches: list[Branch], book: Book) -> list[Branch]:
    """Where both operands are branches, the dearer one is the block and the other its shortcut: keep the block."""
    cost: dict[str, int] = {}
    for usage in book.usages:
        cost[usage.layer] = cost.get(usage.layer, 0) + usage.macs
    best: dict[int, Branch] = {}
    for branch in branches:
        price = sum(cost.get(layer, 0) for layer in branch.layers(book.trace))
        rival = best.get(branch.addition.index)
        if rival is None or price > sum(cost.get(layer, 0) for layer in rival.layers(book.trace)):
            best[branch.addition.index] = branch
    return list(best.values())


def stream_cuts(book: Book, branches: list[Branch]) -> StreamCuts:
    """Where to cut for an indexed stream: behind everything that is added to it, before everything that reads it."""
    classes = classes_of(book)
    everything = find_branches(book.trace)
    additions = {branch.addition.index for branch in branches}
    stream_classes: set[int] = set()
    for branch in branches:
        labels = book.labels_of(branch.operand)
        if labels is not None:
            stream_classes.update(classes.of_atom[labels[labels >= 0]].tolist())
    frozen_elsewhere = {root for root, reason in classes.reasons.items() if reason != OUTPUT_REASON}
    member = np.zeros(book.atom_count, bool)
    member[list(stream_classes - frozen_elsewhere)] = True
    values = frozenset(
        index
        for index, labels in book.labels.items()
        if labels is not None and (labels >= 0).all() and member[classes.of_atom[labels]].all()
    )
    writers = frozenset(
        branch.mask_at for branch in everything if branch.addition.index in additions and branch.operand.index in values
    )
    outputs = {root for root, reason in classes.reasons.items() if reason == OUTPUT_REASON}
    whole = frozenset(usage.layer for usage in book.usages if set(classes.of_atom[usage.writes].tolist()) & outputs)
    return StreamCuts(writers, values, whole)


def _removable(
    model: nn.Module, example_input: Any, book: Book, branches: list[Branch], frozen: Frozen, settings: Settings
) -> list[Branch]:
    """Branches that the forward code can do without: tried all at once, and where that fails, by halves."""
    off_limits = settings.frozen
    found = [
        branch
        for branch in branches
        if replacements(branch, book.trace, dict(book.modules)) is not None
        and (book.has_images(branch.mask_value) or not branch.mask_value.from_input)
        and not any(under(layer, prefix) for layer in branch.layers(book.trace) for prefix in off_limits)
    ]
    whole = replace(settings, granularity="layer")

    trials = iter(range(REMOVAL_TRIALS))

    def works(some: list[Branch]) -> bool:
        if next(trials, None) is None:
            return False  # too many exceptions: what was not shown to work stays
        graph = assemble(book, frozen, frozenset(), some, whole)
        return rehearse(model, example_input, graph, np.zeros(len(some), bool), tuple(range(len(some)))) is None

    def working(some: list[Branch]) -> list[Branch]:
        if not some or works(some):
            return some
        half = len(some) // 2
        return working(some[:half]) + working(some[half:]) if half else []

    return working(found)


# ---------------------------------------------------------------------------------------------------- graph


def assemble(
    book: Book, frozen: Frozen, islands: frozenset[str], removable: list[Branch], settings: Settings
) -> ChannelGraph:
    """A channel graph from what is known now."""
    recorded = book.trace
    classes = classes_of(book, [*frozen, *_kept_stream(book)])
    if settings.granularity != "layer":
        _feed_every_reader(book, classes, settings.granularity)
    if settings.granularity == "layer":
        masks = tuple(
            Mask(branch.name, i, 1, tuple(sorted(branch.layers(recorded))), "branch", may_die=True)
            for i, branch in enumerate(removable)
        )
        atom_gate = np.full(book.atom_count, ALWAYS_OPEN)
        branches = tuple(
            GatedBranch(branch, (number,), book.batch_axis(branch.mask_value))
            for number, branch in enumerate(removable)
        )
    else:
        masks, atom_gate = make_masks(book, classes, settings.granularity)
        branches = _dying_branches(book, masks, atom_gate, removable)
        mortal = {number for branch in branches for number in branch.masks}
        masks = tuple(replace(mask, may_die=number in mortal) for number, mask in enumerate(masks))
    assert len({mask.name for mask in masks}) == len(masks), "names are keys"
    around: dict[int, tuple[int, ...]] = {}
    for number, gated in enumerate(branches):
        for index in gated.branch.calls:
            around[index] = (*around.get(index, ()), number)
    return ChannelGraph(
        recorded, book, atom_gate, masks, cost_items(book, atom_gate, recorded, around), _readers(book, atom_gate),
        _writers(book, atom_gate), branches, _reasons(book, classes, atom_gate), islands,
        settings.granularity, settings.stream,
    )  # fmt: skip


def _feed_every_reader(book: Book, classes: Classes, granularity: Granularity) -> None:
    """A layer that reads only parts of masks could lose all its inputs: freeze the first channel it reads."""
    masks, atom_gate = make_masks(book, Classes(classes.of_atom, dict(classes.reasons)), granularity)
    number = np.repeat(np.arange(len(masks)), [mask.size for mask in masks])
    for usage in book.usages:
        gates = gates_of(usage.reads, atom_gate)
        if gates is None or (gates == ALWAYS_OPEN).any():
            continue
        read = np.unique(gates)
        mask_read, count = np.unique(number[read], return_counts=True)
        if not any(masks[m].size == n for m, n in zip(mask_read, count, strict=True)):
            assert usage.reads is not None
            classes.reasons.setdefault(
                int(classes.of_atom[usage.reads[0]]), f"`{usage.layer}` reads only part of these channels"
            )


def _kept_stream(book: Book) -> Frozen:
    """Channels of an indexed stream stay: its readers and writers have masks of their own."""
    return [
        (atoms, "is a stream that blocks index into") for owner, atoms in book.owners.items() if owner[0] == "stream"
    ]


def _readers(book: Book, atom_gate: NDArray[np.int64]) -> tuple[Reader, ...]:
    readers: dict[str, Reader] = {}
    for usage in book.usages:
        gates = gates_of(usage.reads, atom_gate)
        if usage.mode != "whole" and gates is not None and (gates != ALWAYS_OPEN).any():
            readers.setdefault(usage.layer, Reader(usage.layer, usage.in_axis, gates, usage.batch_axis))
    return tuple(readers.values())


def _writers(book: Book, atom_gate: NDArray[np.int64]) -> tuple[Reader, ...]:
    ports = ((port, gates_of(port.atoms, atom_gate)) for port in book.write_ports.values())
    return tuple(
        Reader(port.module, port.axis, gates, port.batch_axis)
        for port, gates in ports
        if gates is not None and (gates != ALWAYS_OPEN).any()
    )


def _reasons(book: Book, classes: Classes, atom_gate: NDArray[np.int64]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    explained = np.zeros(book.atom_count, bool)
    explained[list(classes.reasons)] = True
    for usage in book.usages:
        if (atom_gate[usage.writes] == ALWAYS_OPEN).all():
            roots = classes.of_atom[usage.writes]
            known = roots[explained[roots]]
            reasons[usage.layer] = classes.reasons[int(known[0])] if known.size else "gates are on whole branches"
    for place in book.other_macs:
        reasons.setdefault(place, "operators and attention have no channel rule")
    return reasons


def _dying_branches(
    book: Book, masks: tuple[Mask, ...], atom_gate: NDArray[np.int64], removable: list[Branch]
) -> tuple[GatedBranch, ...]:
    """Removable branches with the masks that, all closed, leave them nothing to say."""
    chains = _Chains(book, masks, atom_gate)
    found = ((branch, chains.of(branch)) for branch in removable)
    return tuple(GatedBranch(branch, chain, book.batch_axis(branch.mask_value)) for branch, chain in found if chain)


class _Chains:
    """Finds the masks on the way through a branch, each of which everything must pass."""

    def __init__(self, book: Book, masks: tuple[Mask, ...], atom_gate: NDArray[np.int64]) -> None:
        self.book = book
        self.masks = masks
        self.atom_gate = atom_gate
        self.mask_of_gate = np.repeat(np.arange(len(masks)), [mask.size for mask in masks])
        self.usages = {usage.layer: usage for usage in book.usages}
        self.producers = {value.index: call for call in book.trace.calls for value in call.outputs}
        self.layers_at: dict[int, set[str]] = {}
        for usage in book.usages:
            for labels in (usage.reads, usage.writes):
                for number in self._numbers(labels):
                    self.layers_at.setdefault(number, set()).add(usage.layer)

    def _numbers(self, labels: Labels | None) -> set[int]:
        gates = gates_of(labels, self.atom_gate)
        return set() if gates is None else set(self.mask_of_gate[gates[gates != ALWAYS_OPEN]].tolist())

    def _only_mask(self, labels: Labels | None, inside: set[str]) -> int | None:
        """The one mask that all these channels belong to, if no layer outside the branch has to do with it."""
        gates = gates_of(labels, self.atom_gate)
        numbers = self._numbers(labels)
        if gates is None or (gates == ALWAYS_OPEN).any() or len(numbers) != 1:
            return None
        number = numbers.pop()
        return number if self.layers_at[number] <= inside else None

    def of(self, branch: Branch) -> tuple[int, ...]:
        """The masks from the branch's end to its start."""
        inside = branch.layers(self.book.trace)
        labels = self.book.before_cut.get(branch.mask_value.index, self.book.labels_of(branch.mask_value))
        if labels is None or labels.size == 0:
            return ()
        own = self._only_mask(labels.reshape(-1), inside)
        chain = [] if own is None else [own]
        layer = self._source(branch.mask_value)
        while layer is not None and layer in inside:
            usage = self.usages[layer]
            number = self._only_mask(usage.reads, inside) if usage.mode != "whole" else None
            if number is None or number in chain:
                break
            chain.append(number)
            feeding = [name for name in self.masks[number].layers if name != layer and self._mixes(name)]
            layer = feeding[0] if len(feeding) == 1 else None
        return tuple(chain)

    def _source(self, value: Value) -> str | None:
        """The mixing layer that alone makes a value: between them, nothing else comes in."""
        while value.index in self.producers:
            call = self.producers[value.index]
            if call.layer is not None and self._mixes(call.layer):
                return call.layer
            live = [given for given in call.inputs if given.from_input]
            if len(live) != 1:
                return None
            value = live[0]
        return None

    def _mixes(self, layer: str) -> bool:
        return layer in self.usages and self.usages[layer].mode != "whole"


# ------------------------------------------------------------------------------------------------ rehearsal


def complementary_decisions(graph: ChannelGraph, seed: int = 0) -> tuple[Decisions, Decisions]:
    """Two sets of decisions; every gate of a mask is closed in one of them, at random, and open in the other."""
    random = np.random.default_rng(seed)
    closed = np.zeros(graph.gate_count, bool)
    for mask in graph.masks:
        if mask.kind != "branch":
            closed[mask.first + random.permutation(mask.size)[: mask.size // 2]] = True
    branches = np.array([mask.kind == "branch" for mask in graph.masks for _ in range(mask.size)], dtype=bool)
    return ~closed, closed | branches


def _first_failure(model: nn.Module, example_input: Any, graph: ChannelGraph) -> Failure | None:
    if all(mask.kind == "branch" for mask in graph.masks):
        return None  # rehearsed when the branches were found removable
    for decisions in complementary_decisions(graph):
        failure = rehearse(model, example_input, graph, decisions)
        if failure is not None:
            return failure
    return None


def _give_way(graph: ChannelGraph, failure: Failure, frozen: Frozen, islands: set[str]) -> None:
    """Freeze the channels at the call that failed, and at its like; or make the module around it an island."""
    call = failure.call
    if call is not None and call.layer is None and _can_be_island(graph, call.inside, islands):
        islands.add(call.inside)
        return
    reason = f"the forward code does not work with fewer channels: {failure.message}"
    alike: list[Call] = []
    if call is not None:
        reason = f"{call.title} does not work with fewer channels: {failure.message}"
        alike = [
            other
            for other in graph.trace.calls
            if other is call or (call.layer is None and (other.target, other.where) == (call.target, call.where))
        ]
    atoms = [
        labels[labels >= 0]
        for other in alike
        for value in (*other.inputs, *other.outputs)
        if (labels := graph.book.labels_of(value)) is not None
    ]
    gated = np.unique(np.concatenate(atoms)) if atoms else np.zeros(0, np.int64)
    if not (graph.atom_gate[gated] != ALWAYS_OPEN).any():
        gated = np.flatnonzero(graph.atom_gate != ALWAYS_OPEN)
    frozen.append((gated, reason))


def _can_be_island(graph: ChannelGraph, name: str, islands: set[str]) -> bool:
    """A module without weights that takes and gives one tensor can be handed the dense tensor."""
    spans = graph.trace.spans_of.get(name, [])
    if not name or name in islands or len(spans) != 1:
        return False
    module, span = graph.book.modules[name], spans[0]
    calls = graph.trace.calls[span.first : span.last]
    plain = len(span.inputs) == 1 and span.gives_tensor and not any(True for _ in module.parameters())
    known = all(graph.book.labels_of(value) is not None for value in (*span.inputs, *span.outputs))
    return plain and known and all(call.layer is None for call in calls)
