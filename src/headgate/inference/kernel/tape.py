"""Layers that follow each other, run by the kernel in a single call.

Being called from Python costs a small layer more than its arithmetic. `Steps` holds gate networks and convolutions in
their order, and which value each of them takes and gives. For the shapes of what it is given it writes a tape once,
every place in memory as a slot and an offset, so that a call only has to fill in the slots. What stays inside lies in
one piece of memory, used again as soon as nobody needs it any more. A batch goes through layer by layer, or, `apart`,
image by image, each thread one at a time. `one_by_one` is the plain twin, and what happens where a tape can't be used.
Knows layers and shapes; nothing of graphs.
"""

from __future__ import annotations

import ctypes
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from headgate.inference.kernel import native
from headgate.inference.kernel.prepared import Conv

MOST_BYTES = 1 << 24
"""Of what stays inside, and of any value with its padding. Larger layers have time to be called, and take their memory
one by one."""
FEW_BYTES = 1 << 22
"""Of weights that stay in the cache from image to image."""
MOST_TAPES = 64
ALIGNMENT = 64
READ = (torch.float32, torch.bool)
"""Types of what the kernel reads."""
CONV, GATES = 0, 1
"""Kinds of steps, as in tape.cpp."""
ADDRESS, NOWHERE = -1, [-1, 0]
Value: TypeAlias = int
"""Number of a tensor: those that are given come first."""


class Site(Protocol):
    """A gate network that the kernel can run."""

    threshold: float
    sizes: list[int]

    def prepared(self, x: Tensor) -> native.Gates:
        """What the kernel needs, once it is clear that it can read tensors like this one."""
        ...

    def __call__(self, x: Tensor, arriving: Tensor | None) -> list[Tensor]: ...


@dataclass(frozen=True)
class ConvStep:
    """A convolution: what it takes, and what it gives (the residual itself, where it works in place)."""

    layer: Conv
    x: Value
    in_mask: Value | None
    out_mask: Value | None
    residual: Value | None
    y: Value

    @property
    def takes(self) -> tuple[Value | None, ...]:
        return self.x, self.in_mask, self.out_mask, self.residual

    @property
    def gives(self) -> tuple[Value, ...]:
        return () if self.layer.in_place else (self.y,)


@dataclass(frozen=True)
class GatesStep:
    """A gate network, and the masks it gives."""

    layer: Site
    x: Value
    arriving: Value | None
    gives: tuple[Value, ...]

    @property
    def takes(self) -> tuple[Value | None, ...]:
        return self.x, self.arriving


Step: TypeAlias = ConvStep | GatesStep


@dataclass(frozen=True)
class Tape:
    """Steps for one set of shapes, as the kernel reads them."""

    words: Any
    outputs: tuple[tuple[list[int], torch.dtype] | Value, ...]
    """What is given back: a new tensor of some shape, or one that was given."""
    inside_bytes: int
    tensors: tuple[Tensor, ...]
    pointers: tuple[int, ...]
    """Where the layers' tensors were: they may be moved to other memory (not replaced by others)."""
    gates: tuple[native.Gates, ...]
    """Hold the numbers that the words point to."""

    @property
    def is_right(self) -> bool:
        """Whether all tensors are where they were."""
        return tuple(map(Tensor.data_ptr, self.tensors)) == self.pointers


class _Tapes(dict[Any, "tuple[Tape | None]"]):
    """Of one owner: a copy writes its own, for it has tensors of its own. None where there can be no tape."""

    def __deepcopy__(self, memo: Any) -> _Tapes:
        return _Tapes()


class Steps(nn.Module):
    """Layers in their order, run in one call where they can be."""

    def __init__(self, steps: Sequence[Step], given: int, outputs: Sequence[Value]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.given = given
        """How many values it is given."""
        self.outputs = tuple(outputs)
        self._tapes = _Tapes()
        self._sites = tuple(step.layer for step in steps if isinstance(step, GatesStep))
        self._images = tuple({step.x for step in steps if step.x < given})
        """Those of the values that are given which layers read."""
        self.apart = self.weights_bytes <= FEW_BYTES
        """Whether the images of a batch go through one by one: their activations stay near then, weights are read for
        each of them."""

    @property
    def weights_bytes(self) -> int:
        """Of all convolutions."""
        return sum(4 * step.layer.weight.numel() for step in self.steps if isinstance(step, ConvStep))

    def forward(self, *given: Tensor) -> list[Tensor]:
        """The values that are asked for, one after the other."""
        images, threads = max((len(x) for x in given), default=1), torch.get_num_threads()
        apart = self.apart and images >= max(threads, 2) and all(_is_of(x, images) for x in given)
        fits = all(x.is_contiguous() and x.is_cpu and x.dtype in READ for x in given)
        tape = self._tape([x[:1] for x in given] if apart else given) if fits else None
        if tape is None:
            return self.one_by_one(*given)
        inside = torch.empty(tape.inside_bytes * (threads if apart else 1), dtype=torch.uint8, device="cpu")
        made = [
            given[each] if isinstance(each, int)
            else torch.empty((images if apart else each[0][0], *each[0][1:]), dtype=each[1], device="cpu")
            for each in tape.outputs
        ]  # fmt: skip
        count = len(given) + len(made) + 1
        slots = (ctypes.c_void_p * count)(*map(Tensor.data_ptr, (*given, *made, inside)))
        strides = None
        if apart:
            of_images = (0 if len(x) < images else x[0].numel() * x.element_size() for x in (*given, *made))
            strides = (ctypes.c_int64 * count)(*of_images, tape.inside_bytes)
        found = native.compiled()
        assert found is not None
        if found.headgate_run(tape.words, len(tape.words), slots, count, strides, images, threads):
            raise MemoryError("the scratch memory of some layers could not be allocated")
        return made

    def one_by_one(self, *given: Tensor) -> list[Tensor]:
        """The same, each layer called by itself."""
        values: dict[Value | None, Tensor | None] = {None: None, **dict(enumerate(given))}
        for step in self.steps:
            taken: list[Any] = [values[each] for each in step.takes]
            if isinstance(step, ConvStep):
                values[step.y] = step.layer(*taken)
            else:
                values |= dict(zip(step.gives, step.layer(*taken), strict=True))
        return [value for each in self.outputs if (value := values[each]) is not None]

    def _tape(self, given: Sequence[Tensor]) -> Tape | None:
        """The tape for these values; None where layers are better, or only, called one by one."""
        key = (*(x.shape for x in given), *(site.threshold for site in self._sites))
        known = self._tapes.get(key)
        if known is None or (known[0] is not None and not known[0].is_right):
            if len(self._tapes) >= MOST_TAPES:
                self._tapes.clear()
            known = self._tapes[key] = (self._written(given),)
        return known[0]

    def _written(self, given: Sequence[Tensor]) -> Tape | None:
        images = all(given[at].dim() > 2 for at in self._images) and all(x.numel() for x in given)
        return _Writer(self, given).tape() if images and native.compiled() is not None else None


def _is_of(x: Tensor, images: int) -> bool:
    """Whether it has a row for each of so many images, or is a mask that all of them share."""
    return len(x) == images or (len(x) == 1 and x.dtype == torch.bool)


class _Writer:
    """Writes a tape: follows shapes from step to step, and finds each value a place."""

    def __init__(self, steps: Steps, given: Sequence[Tensor]) -> None:
        self._steps = steps
        self._values = {number: torch.empty(x.shape, dtype=x.dtype, device="meta") for number, x in enumerate(given)}
        new = [each for each in steps.outputs if each >= steps.given]
        self._places = {number: [number, 0] for number in range(steps.given)}
        self._places |= {each: [steps.given + steps.outputs.index(each), 0] for each in new}
        self._inside = steps.given + len(steps.outputs)
        self._bytes = self._padded_bytes = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._last_use = {
            value: number for number, step in enumerate(steps.steps) for value in (*step.takes, *step.gives)
        }
        self._words: list[int] = []
        self._tensors: list[Tensor] = []
        self._gates: list[native.Gates] = []

    def tape(self) -> Tape | None:
        for number, step in enumerate(self._steps.steps):
            if isinstance(step, ConvStep):
                self._conv(step)
            else:
                self._gate(step)
            self._leave(number, step)
        if max(self._bytes, self._padded_bytes, *(_bytes_of(value) for value in self._values.values())) > MOST_BYTES:
            return None
        outputs = tuple(
            each if each < self._steps.given else (list(self._values[each].shape), self._values[each].dtype)
            for each in self._steps.outputs
        )
        words = (ctypes.c_int64 * len(self._words))(*self._words)
        tensors = tuple(self._tensors)
        return Tape(words, outputs, self._bytes, tensors, tuple(map(Tensor.data_ptr, tensors)), tuple(self._gates))

    def _conv(self, step: ConvStep) -> None:
        x, in_mask, out_mask, residual = (None if each is None else self._values[each] for each in step.takes)
        assert x is not None
        shape, numbers = step.layer.checked(x, in_mask, out_mask, residual)
        _, (pad_h, pad_w), _ = step.layer.geometry
        self._padded_bytes = max(
            self._padded_bytes, 4 * x.shape[1] * (x.shape[2] + 2 * pad_h) * (x.shape[3] + 2 * pad_w)
        )
        if not step.layer.in_place:
            self._make(step.y, torch.empty(shape, dtype=torch.float32, device="meta"))
        self._words += [
            CONV, *self._at(step.x), *self._address(step.layer.weight), *self._address(step.layer.bias),
            *self._at(step.residual), *self._at(step.y),
            *self._at(step.in_mask), native.step(in_mask), *self._at(step.out_mask), native.step(out_mask),
            int(step.layer.relu), int(step.layer.rectified), *numbers,
        ]  # fmt: skip

    def _gate(self, step: GatesStep) -> None:
        x, arriving = (None if each is None else self._values[each] for each in step.takes)
        assert x is not None
        gates = step.layer.prepared(x)
        self._gates.append(gates)
        for value, size in zip(step.gives, step.layer.sizes, strict=True):
            self._make(value, torch.empty(x.shape[0], size, dtype=torch.bool, device="meta"))
        (bits,) = struct.unpack("<i", struct.pack("<f", step.layer.threshold))
        sizes, immortal, _, groups, groups_length = gates.numbers
        self._words += [
            GATES, *self._at(step.x), *self._at(step.arriving), native.step(arriving),
            *(word for tensor in gates.tensors for word in self._address(tensor)),
            x.shape[0], x.shape[1], x[0, 0].numel(), gates.hidden,
            *(word for array in (sizes, immortal, groups) for word in (ADDRESS, ctypes.addressof(array))),
            groups_length, bits, len(step.gives), *(word for value in step.gives for word in self._at(value)),
        ]  # fmt: skip

    def _address(self, tensor: Tensor | None) -> list[int]:
        if tensor is None:
            return NOWHERE
        self._tensors.append(tensor)
        return [ADDRESS, tensor.data_ptr()]

    def _at(self, value: Value | None) -> list[int]:
        return NOWHERE if value is None else self._places[value]

    def _make(self, value: Value, like: Tensor) -> None:
        """Note down a new value, and find it a place that nobody needs any more, or a new one."""
        self._values[value] = like
        if value in self._places:
            return
        size = _bytes_of(like)
        if not self._free[size]:
            self._free[size].append(self._bytes)
            self._bytes += size
        self._places[value] = [self._inside, self._free[size].pop()]

    def _leave(self, number: int, step: Step) -> None:
        """The places of values that no later step takes."""
        for value in {*step.takes, *step.gives} - {None}:
            assert value is not None
            slot, offset = self._places[value]
            if slot == self._inside and self._last_use[value] == number:
                self._free[_bytes_of(self._values[value])].append(offset)


def _bytes_of(value: Tensor) -> int:
    """Rounded up, so that every value begins where a line of the cache does."""
    return -(-value.numel() * value.element_size() // ALIGNMENT) * ALIGNMENT
