from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.analysis.specialisation import in_words, order, specialisation
from headgate.errors import HeadgateError

LABELS = np.arange(400) % 4


def gates(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, 1).astype(bool)


def test_a_gate_for_half_of_the_classes_tells_one_bit_and_a_constant_one_nothing() -> None:
    found = specialisation(gates(LABELS < 2, LABELS >= 0, LABELS < 0, LABELS == 3), LABELS, 4)
    quarter = 0.25 * np.log2(4) + 0.75 * np.log2(4 / 3)  # H(Z), for Z is a function of the class
    np.testing.assert_allclose(found.bits_G, [1, 0, 0, quarter], atol=1e-12)
    np.testing.assert_array_equal(found.rates_GC[0], [1, 1, 0, 0])
    np.testing.assert_array_equal(found.deciding_G, [True, False, False, True])
    np.testing.assert_array_equal(found.specialised_G, [True, False, False, True])


def test_chance_is_told_apart_from_specialisation() -> None:
    randomness = np.random.default_rng(0)
    coin = randomness.random((400, 30)) < 0.5
    found = specialisation(coin, LABELS, 4)
    assert found.as_record()["specialised_gates"] <= 1  # of 30, with 20 shuffles of 30 gates each to beat
    assert found.bits_G.mean() == pytest.approx(found.shuffled_bits_G.mean(), abs=0.002)
    assert found.shuffled_bits_G.mean() == pytest.approx(3 / (2 * 400 * np.log(2)), rel=0.3)  # the known bias


@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 2**31))
def test_information_lies_between_nothing_and_the_entropy_of_gate_and_class(
    classes: int, count: int, seed: int
) -> None:
    randomness = np.random.default_rng(seed)
    labels = randomness.integers(0, classes, 50)
    drawn = randomness.random((50, count)) < randomness.random(count)
    bits = specialisation(drawn, labels, classes, shuffles=1).bits_G
    p = drawn.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = np.nan_to_num(-p * np.log2(p)) + np.nan_to_num(-(1 - p) * np.log2(1 - p))
    assert (bits >= 0).all() and (bits <= entropy + 1e-9).all() and (bits <= np.log2(classes) + 1e-9).all()


def test_the_order_brings_gates_of_a_class_and_classes_of_a_kind_together() -> None:
    animals, vehicles = [1, 0, 1, 0], [0, 1, 0, 1]
    rates = np.array([animals, vehicles, animals, vehicles], dtype=float)
    gate_order, class_order = order(rates)
    shown = rates[gate_order][:, class_order]
    assert shown.tolist() in ([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]],)
    assert sorted(gate_order) == sorted(class_order) == [0, 1, 2, 3]


def test_words_name_who_is_served_and_who_is_left_out() -> None:
    rates = np.array([[0.5, 0.6, 0.4], [1.0, 0.0, 0.5]])
    words = in_words(rates, np.array([0.1, 0.9]), ["a[0]", "a[1]"], ["cat", "ship", "dog"])
    assert words[0] == "a[1] (0.90 bits): serves cat (100%); leaves out ship (0%)"
    assert words[1] == "a[0] (0.10 bits): open for 60% of ship, down to 40% of dog"


def test_a_gate_that_does_the_same_to_all_classes_is_told_by_most_and_least() -> None:
    rates = np.array([[0.19, 0.01, 0.1], [0.81, 0.99, 0.9]])
    words = in_words(rates, np.array([0.2, 0.1]), ["a[0]", "a[1]"], ["cat", "ship", "dog"])
    assert words[0] == "a[0] (0.20 bits): open for 19% of cat, down to 1% of ship"
    assert words[1] == "a[1] (0.10 bits): open for 99% of ship, down to 81% of cat"


def test_classes_without_images_say_nothing() -> None:
    labels = np.arange(40) % 2 * 3  # classes 0 and 3 of 5
    found = specialisation(gates(labels >= 0, labels == 3), labels, 5)
    np.testing.assert_array_equal(found.deciding_G, [False, True])
    assert np.isnan(found.rates_GC[:, [1, 2, 4]]).all() and found.bits_of_class == pytest.approx(1)


def test_long_lists_of_classes_are_cut() -> None:
    rates = np.append(np.ones((1, 30)), [[0.5]], 1)
    (words,) = in_words(rates, np.array([0.5]), ["a[0]"], [f"c{n}" for n in range(31)])
    assert words.endswith("c5 (100%) and 24 more")


def test_rows_and_labels_must_fit() -> None:
    with pytest.raises(HeadgateError, match="one row an image"):
        specialisation(np.zeros((3, 2), bool), LABELS, 4)
