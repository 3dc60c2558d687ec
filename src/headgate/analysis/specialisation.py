"""Do gates specialise on classes? How often each gate is open for each class, and how many bits it tells of the class.

Takes which gates were open for which images, and the images' classes, as arrays. The mutual information of a gate and
the class is estimated from counts, which on finite data is above zero even for gates that know nothing: the same
estimate with shuffled labels stands beside it. Knows nothing of torch, of models or of pictures.

Axes: N images, G gates, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.errors import HeadgateError

Floats = NDArray[np.float64]

SHUFFLES = 20
NAMED = 6
"""Classes that a sentence names."""
MOSTLY, HARDLY = 0.8, 0.2
"""A gate serves a class if it is open for more than this share of its images, and leaves it out below the other."""


@dataclass(frozen=True)
class Specialisation:
    """Gates by classes."""

    rates_GC: Floats
    """Share of a class's images for which a gate is open; NaN where a class has no images."""
    deciding_G: NDArray[np.bool_]
    """Whether a gate is open for some images and closed for others."""
    bits_G: Floats
    """Mutual information of each gate and the class."""
    shuffled_bits_G: Floats
    """The same with shuffled labels, the mean over some shuffles: what chance gives."""
    shuffled_most: float
    """The highest of all gates and shuffles."""
    bits_of_class: float
    """What there is to know of an image's class."""
    images: int

    @property
    def specialised_G(self) -> NDArray[np.bool_]:
        """Gates that tell more of the class than any gate does by chance."""
        return self.bits_G > self.shuffled_most

    def as_record(self) -> dict[str, Any]:
        """The numbers that answer the question."""
        deciding = self.deciding_G
        some = bool(deciding.any())
        return {
            "images": self.images, "gates": len(self.bits_G), "deciding_gates": int(deciding.sum()),
            "specialised_gates": int(self.specialised_G.sum()),
            "mean_bits": float(self.bits_G[deciding].mean()) if some else 0.0,
            "mean_bits_shuffled": float(self.shuffled_bits_G[deciding].mean()) if some else 0.0,
            "most_bits": float(self.bits_G.max(initial=0.0)), "most_bits_shuffled": self.shuffled_most,
            "bits_of_class": self.bits_of_class,
        }  # fmt: skip


def specialisation(
    open_NG: NDArray[np.bool_], labels_N: NDArray[np.int64], classes: int, shuffles: int = SHUFFLES, seed: int = 0
) -> Specialisation:
    """How gates and classes go together."""
    if open_NG.ndim != 2 or len(open_NG) != len(labels_N) or not len(labels_N):
        raise HeadgateError(f"gates of shape {open_NG.shape} for {len(labels_N)} labels: give one row an image")
    counts_C = np.bincount(labels_N, minlength=classes).astype(np.float64)
    randomness = np.random.default_rng(seed)
    float_NG = open_NG.astype(np.float32)  # counts are exact up to 2²⁴ images
    shuffled = np.stack(
        [_bits(_open_GC(float_NG, randomness.permutation(labels_N), classes), counts_C) for _ in range(shuffles)]
    )
    open_GC = _open_GC(float_NG, labels_N, classes)
    open_G, present_C = open_GC.sum(1), counts_C[counts_C > 0] / len(labels_N)
    return Specialisation(
        np.divide(open_GC, counts_C, out=np.full_like(open_GC, np.nan), where=counts_C > 0),
        (open_G > 0) & (open_G < len(labels_N)),
        _bits(open_GC, counts_C), shuffled.mean(0), float(shuffled.max(initial=0)),
        float(-(present_C * np.log2(present_C)).sum()), len(labels_N),
    )  # fmt: skip


def _open_GC(open_NG: NDArray[np.float32], labels_N: NDArray[np.int64], classes: int) -> Floats:
    """For how many images of each class each gate is open."""
    return (np.eye(classes, dtype=np.float32)[labels_N].T @ open_NG).T.astype(np.float64)


def _bits(open_GC: Floats, counts_C: Floats) -> Floats:
    """Mutual information of open/closed and class, from counts."""
    total = counts_C.sum()
    bits = np.zeros(len(open_GC))
    for joint_GC in (open_GC, counts_C - open_GC):
        expected_GC = joint_GC.sum(1, keepdims=True) * counts_C / total
        ratio_GC = np.divide(joint_GC, expected_GC, out=np.ones_like(joint_GC), where=joint_GC > 0)
        bits += (joint_GC / total * np.log2(ratio_GC)).sum(1)
    return np.maximum(bits, 0.0)


def order(rates_GC: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """An order of gates and one of classes in which specialisation shows as blocks.

    Classes that use the same gates stand side by side; gates follow the class they prefer most, the pickiest first.
    """
    centred_GC = rates_GC - rates_GC.mean(1, keepdims=True)
    _, _, directions = np.linalg.svd(centred_GC, full_matrices=False)
    first = directions[0] if len(directions) else np.zeros(rates_GC.shape[1])
    classes = np.argsort(first * (1 if first[np.abs(first).argmax()] > 0 else -1), kind="stable")
    sorted_GC = centred_GC[:, classes]
    gates = np.lexsort((-sorted_GC.max(1, initial=0), sorted_GC.argmax(1)))
    return gates.astype(np.int64), classes.astype(np.int64)


def in_words(rates_GC: Floats, bits_G: Floats, gate_names: Sequence[str], class_names: Sequence[str]) -> list[str]:
    """A sentence for each gate, the most telling first: which classes it serves, and which it leaves out; or, where it
    serves all or leaves out all, for which it is open most and least.

    Classes without images are to be left out before.
    """
    return [
        f"{gate_names[gate]} ({bits_G[gate]:.2f} bits): {_sentence(rates_GC[gate], class_names)}"
        for gate in np.argsort(-bits_G, kind="stable")
    ]


def _sentence(rates_C: Floats, class_names: Sequence[str]) -> str:
    falling = np.argsort(-rates_C, kind="stable")
    serves = [number for number in falling if rates_C[number] > MOSTLY]
    leaves = [number for number in falling[::-1] if rates_C[number] < HARDLY]
    if max(len(serves), len(leaves)) in (0, len(rates_C)):
        most, least = falling[0], falling[-1]
        return (
            f"open for {rates_C[most]:.0%} of {class_names[most]}, down to {rates_C[least]:.0%} of {class_names[least]}"
        )
    told = (("serves", serves), ("leaves out", leaves))
    return "; ".join(f"{verb} {_listed(numbers, rates_C, class_names)}" for verb, numbers in told if numbers)


def _listed(numbers: Sequence[Any], rates_C: Floats, class_names: Sequence[str]) -> str:
    """Some classes with their rates, and how many more there are."""
    text = ", ".join(f"{class_names[number]} ({rates_C[number]:.0%})" for number in numbers[:NAMED])
    return text + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")
