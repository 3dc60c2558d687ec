"""Where gates that look at the input can look: for each mask the tensor that decides it.

A mask inside a residual branch is decided from what the branch reads, so all masks of a block look at the same tensor;
elsewhere from what the first layer reads that writes the mask's channels. A site is such a tensor, told by the first
layer that reads it. Masks that only the network's raw input could decide, or whose tensor is not there in time, have no
site: their gates stay static. Knows nothing of gates' networks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headgate.graph.branches import find_branches
from headgate.graph.grouping import ALWAYS_OPEN, ChannelGraph, Mask, gates_of
from headgate.graph.layer_rules import Usage
from headgate.graph.trace import Trace, under


@dataclass(frozen=True, eq=False)
class Site:
    """A tensor that decides some masks: what `layer` reads, its channels along `axis`."""

    layer: str
    axis: int
    batch_axis: int
    channels: int
    masks: tuple[int, ...]
    reads: NDArray[np.int64] | None = None
    """The gate of each channel there, as far as it is decided elsewhere; None where there are no such gates."""
    folded: bool = False
    """Whether the batch there holds more rows than images: frames, windows, pairs."""


def gates_at(site: Site, graph: ChannelGraph) -> NDArray[np.int64]:
    """The numbers of the gates that a site decides, in the order of its masks."""
    masks = [graph.masks[number] for number in site.masks]
    return np.concatenate([np.arange(mask.gates.start, mask.gates.stop) for mask in masks])


def find_sites(graph: ChannelGraph, static: Sequence[str] = ()) -> tuple[Site, ...]:
    """The sites in the order of the forward pass; masks whose layers all lie under a name in `static` are left out."""
    search = _Search(graph)
    masks_at: dict[int, list[int]] = {}
    for number, mask in enumerate(graph.masks):
        if static and all(any(under(layer, prefix) for prefix in static) for layer in mask.layers):
            continue
        value = search.deciding(number, mask)
        if value is not None:
            masks_at.setdefault(value, []).append(number)
    sites = [(search.first_reader[value], tuple(masks)) for value, masks in masks_at.items()]
    sites.sort(key=lambda site: search.called_at[site[0].layer])
    place_of = {mask: place for place, (_, masks) in enumerate(sites) for mask in masks}
    return tuple(
        search.site(usage, masks, {mask for mask, of in place_of.items() if of >= place})
        for place, (usage, masks) in enumerate(sites)
    )


def folded_readers(graph: ChannelGraph, sites: Sequence[Site]) -> tuple[Site, ...]:
    """What layers read whose batch holds more rows than images, where gates of sites lie on the channels."""
    search = _Search(graph)
    decided = np.zeros(graph.gate_count + 1, bool)  # the last stands for what is always open
    for site in sites:
        decided[gates_at(site, graph)] = True
    found = [
        search.site(search.usages[reader.layer], (), ())
        for reader in graph.readers
        if reader.layer in search.value_read and decided[reader.gates].any()
    ]
    return tuple(site for site in found if site.folded)


def needed_calls(trace: Trace) -> set[int]:
    """The calls that the network's answer depends on."""
    needed: set[int] = set()
    values = {value.index for value in trace.outputs}
    changing = {call.index for _, call in trace.overwritten}
    for call in reversed(trace.calls):
        if call.index in changing or any(value.index in values for value in call.outputs):
            needed.add(call.index)
            values.update(value.index for value in call.inputs)
    return needed


class _Search:
    """What a search for sites looks up again and again."""

    def __init__(self, graph: ChannelGraph) -> None:
        self.graph = graph
        self.trace = graph.trace
        self.usages = {usage.layer: usage for usage in graph.book.usages}
        needed = needed_calls(self.trace)
        once = [
            call for call in self.trace.calls
            if call.index in needed and call.layer in self.usages and self.trace.layer_calls[call.layer] == 1
        ]  # fmt: skip
        self.called_at = {call.layer: call.index for call in once if call.layer is not None}
        self.value_read = {call.layer: call.inputs[0] for call in once if call.layer is not None}
        self.first_reader: dict[int, Usage] = {}
        """By the number of the value."""
        for call in reversed(once):
            self.first_reader[call.inputs[0].index] = self.usages[call.layer]  # type: ignore[index]
        self.raw = {value.index for value in self.trace.inputs}
        self.branches = sorted(find_branches(self.trace), key=lambda branch: len(branch.calls))
        self.needed_at = self._needed_at()

    def _needed_at(self) -> list[int]:
        """For each mask the first call that is masked by it."""
        places = [[len(self.trace.calls)] for _ in self.graph.masks]
        owner = [number for number, mask in enumerate(self.graph.masks) for _ in range(mask.size)]
        calls: dict[str, int] = {}
        for call in reversed(self.trace.calls):
            if call.layer is not None:
                calls[call.layer] = call.index
        for span in self.trace.spans:
            calls.setdefault(span.name, span.last)
        for reader in (*self.graph.readers, *self.graph.writers):
            for number in {owner[gate] for gate in reader.gates.tolist() if gate >= 0}:
                places[number].append(calls[reader.layer])
        for gated in self.graph.branches:
            for number in gated.masks:
                places[number].append(max(gated.branch.calls))
        return [min(place) for place in places]

    def deciding(self, number: int, mask: Mask) -> int | None:
        """The value that decides a mask, if there is one in time."""
        layers = [layer for layer in mask.layers if layer in self.called_at]
        if not layers:
            return None
        first = min(layers, key=self.called_at.__getitem__)
        value = self.value_read[self._start_of_block(first)]
        usage = self.first_reader[value.index]
        in_time = self.called_at[usage.layer] <= self.needed_at[number]
        return value.index if in_time and value.index not in self.raw and value.from_input else None

    def _start_of_block(self, layer: str) -> str:
        """The first layer of the smallest branch around a layer; the layer itself if there is none."""
        for branch in self.branches:
            if self.called_at[layer] in branch.calls:
                inside = [name for name in branch.layers(self.trace) if name in self.called_at]
                return min(inside, key=self.called_at.__getitem__)
        return layer

    def site(self, usage: Usage, masks: tuple[int, ...], undecided: Collection[int]) -> Site:
        """What a layer reads, as a site of some masks."""
        reads = self.reads(usage, undecided)
        rows = self.value_read[usage.layer].shape[usage.batch_axis]
        folded = rows != self.trace.batch_size
        return Site(usage.layer, usage.in_axis, usage.batch_axis, self.channels(usage), masks, reads, folded)

    def reads(self, usage: Usage, undecided: Collection[int]) -> NDArray[np.int64] | None:
        """The gates on what a layer reads, without those of masks that are decided there or later.

        A depthwise layer masks nothing itself, but its channels have gates all the same.
        """
        reader = next((reader for reader in self.graph.readers if reader.layer == usage.layer), None)
        gates = gates_of(usage.reads, self.graph.atom_gate) if reader is None else reader.gates.copy()
        if gates is None:
            return None
        for number in undecided:
            mask = self.graph.masks[number]
            gates[(gates >= mask.first) & (gates < mask.gates.stop)] = ALWAYS_OPEN
        return gates if (gates != ALWAYS_OPEN).any() else None

    def channels(self, usage: Usage) -> int:
        shape = self.value_read[usage.layer].shape
        return shape[usage.in_axis % len(shape)]
