"""Weighted sums over clients: any order and grouping gives the same, correct bits."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperfl_flwr.protocol.arrays import BLOCK, SharedArrays
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.reproducible_sum import (
    HEADROOM_BITS,
    LEAST_EXPONENT,
    MOST_LEVELS,
    STEP_BITS,
    ReproducibleSum,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR = st.floats(-0.5, 0.5, width=32)
"""Values of the size of parameters, including zeros and the smallest numbers."""

WEIGHTS = st.one_of(st.integers(1, 5_000), st.integers(1, 2**40))
REDUCTIONS = st.sampled_from([Reduction.MEAN_BY_EXAMPLES, Reduction.MEAN, Reduction.SUM])

Client = tuple[SharedArrays, int]
"""A client's arrays and its number of samples."""


@st.composite
def rounds(draw: st.DrawFn) -> tuple[SharedArrays, list[Client]]:
    """Return what the clients of a round received, and what they upload: usual numbers, extreme ones, or both."""
    size, numbers = draw(st.integers(1, 4)), draw(st.sampled_from([FLOATS, NEAR, st.one_of(FLOATS, NEAR)]))
    array = st.lists(numbers, min_size=size, max_size=size).map(lambda row: {"net/x": np.array(row, np.float32)})
    clients = draw(st.lists(st.tuples(array, WEIGHTS), min_size=1, max_size=9))
    return draw(array), clients


def new_sum(received: SharedArrays, clients: Sequence[Client], reduction: Reduction) -> ReproducibleSum:
    largest = max(count for _, count in clients) // 3 + 1  # a client may have more samples than the server knows of
    return ReproducibleSum(received, {"net": reduction}, num_clients=len(clients), max_num_examples=largest)


def mean_of(total: ReproducibleSum, clients: Sequence[Client]) -> SharedArrays:
    return total.take_mean(sum(count for _, count in clients), len(clients))


def bits(total: ReproducibleSum) -> dict[int, bytes]:
    """Return all sums so far, which have more bits than the means rounded to float32."""
    return {level: arrays["net/x"].tobytes() for level, arrays in sorted(total.levels.items())}


@settings(max_examples=300, deadline=None)
@given(setting=rounds(), reduction=REDUCTIONS, data=st.data())
def test_order_and_grouping_change_no_bit(
    setting: tuple[SharedArrays, list[Client]], reduction: Reduction, data: st.DataObject
) -> None:
    """Adding clients one by one in order equals adding them in any order and in any groups, merged in any order.

    A group of one client is added directly, as a node with one client does it.
    """
    received, clients = setting
    straight = new_sum(received, clients, reduction)
    for arrays, count in clients:
        straight.add(arrays, count)
    groups: dict[int, list[Client]] = {}
    for client in data.draw(st.permutations(clients)):
        groups.setdefault(data.draw(st.integers(0, 3)), []).append(client)
    grouped = new_sum(received, clients, reduction)
    for group in groups.values():
        if len(group) == 1:
            grouped.add(*group[0])
            continue
        part = new_sum(received, clients, reduction)
        for arrays, count in group:
            part.add(arrays, count)
        grouped.merge({level: part.sums(level) for level in part.levels})
    assert bits(grouped) == bits(straight)
    expected, found = mean_of(straight, clients), mean_of(grouped, clients)
    assert found["net/x"].dtype == np.float32
    assert found["net/x"].tobytes() == expected["net/x"].tobytes()


def bound_of(exponent: int, terms: Sequence[Fraction]) -> Fraction:
    """Return the maximal error of a sum: half a unit of its level's grid for each term."""
    carry = len(terms).bit_length()
    error = Fraction(0)
    for term in terms:
        level = 0
        while abs(term) >= Fraction(2) ** (exponent + level * STEP_BITS):
            level += 1
        error += Fraction(2) ** (exponent + level * STEP_BITS + carry - 54)
    return error


@settings(max_examples=300, deadline=None)
@given(setting=rounds(), reduction=REDUCTIONS)
def test_the_mean_is_that_of_fractions(setting: tuple[SharedArrays, list[Client]], reduction: Reduction) -> None:
    """The mean differs from the exact one by at most half a float32 ulp, plus half a grid unit for each term.

    If terms are in several levels, the levels' sums are added in float64, with a relative error of 2^-50.
    """
    received, clients = setting
    total = new_sum(received, clients, reduction)
    exponent = total.exponent("net/x")
    for arrays, count in clients:
        total.add(arrays, count)
    with np.errstate(over="ignore"):
        found = mean_of(total, clients)["net/x"]
    divisor = Fraction(reduction.divisor(sum(count for _, count in clients), len(clients)))
    for position, got in enumerate(found.tolist()):
        terms = [Fraction(float(arrays["net/x"][position])) * Fraction(reduction.weight(n)) for arrays, n in clients]
        exact = sum(terms, Fraction(0)) / divisor
        error = bound_of(exponent, terms) / divisor + sum(map(abs, terms), Fraction(0)) / divisor / 2**50
        if math.isinf(got):
            assert abs(exact) + error > Fraction(float(np.finfo(np.float32).max))
        else:
            rounding = max(abs(Fraction(got)), abs(exact)) * Fraction(9, 16) / 2**23 + Fraction(1, 2**149)
            assert abs(Fraction(got) - exact) <= error + rounding


@pytest.mark.parametrize("num_large", [1, 2, 3, 5, 6, 7, 12, 15])
def test_no_addition_rounds(num_large: int) -> None:
    """The sum of the largest level-0 terms (below 2^3) and of small ones of 1.5 grid units is exact in either order.

    By hand: with N < 2^n clients the grid is 2^(3 + n - 53), and each small term is rounded to 2 units.
    """
    large, num_small = float(np.nextafter(np.float32(8), np.float32(0))), 3
    num_clients = num_large + num_small
    grid = 2.0 ** (3 + num_clients.bit_length() - 53)
    large_ones, small_ones = [large] * num_large, [1.5 * grid] * num_small
    expected = Fraction(large) * num_large + Fraction(2 * grid) * num_small
    for terms in (large_ones + small_ones, small_ones + large_ones):
        total = ReproducibleSum(
            {"net/x": np.zeros(1, np.float32)}, {"net": Reduction.MEAN}, num_clients=num_clients, max_num_examples=1
        )
        for term in terms:
            total.add({"net/x": np.array([term], np.float32)}, 1)
        assert Fraction(total.sums(0)["net/x"].item()) == expected


def test_usual_parameters_are_exact_to_the_last_bit() -> None:
    """The mean of 100 clients with 600 samples each is the exact mean, rounded once, in 50 places."""
    rng = np.random.default_rng(0)
    received = {"net/x": rng.normal(0, 0.05, 50).astype(np.float32)}
    clients = [({"net/x": received["net/x"] + rng.normal(0, 0.01, 50).astype(np.float32)}, 600) for _ in range(100)]
    total = ReproducibleSum(received, {"net": Reduction.MEAN_BY_EXAMPLES}, num_clients=100, max_num_examples=600)
    for arrays, count in clients:
        total.add(arrays, count)
    assert list(total.levels) == [0]
    columns = zip(*(arrays["net/x"].tolist() for arrays, _ in clients), strict=True)
    expected = [float(sum(map(Fraction, column), Fraction(0)) / 100) for column in columns]
    np.testing.assert_array_equal(total.take_mean(60_000, 100)["net/x"], np.array(expected).astype(np.float32))


def test_what_is_too_large_is_in_a_level_of_its_own() -> None:
    """A received 0 counts as 2^LEAST_EXPONENT and weights are 1 < 2^1, so level 0 is below 2^3 = 8.

    7 is in level 0, 8 and 2^19 - 1/16 in level 1, 2^19 in level 2; the mean of the largest float32 is itself.
    """
    largest = float(np.finfo(np.float32).max)
    assert LEAST_EXPONENT + 1 + HEADROOM_BITS == 3
    received = {"net/x": np.zeros(5, np.float32)}
    values = np.array([7, -8, 2.0**19 - 1 / 16, 2.0**19, largest], np.float32)
    total = ReproducibleSum(received, {"net": Reduction.MEAN}, num_clients=2, max_num_examples=1)
    for _ in range(2):
        total.add({"net/x": values}, 1)
    found = {level: np.flatnonzero(arrays["net/x"]).tolist() for level, arrays in total.levels.items()}
    assert found == {0: [0], 1: [1, 2], 2: [3], 8: [4]}
    np.testing.assert_array_equal(total.take_mean(2, 2)["net/x"], values)


def test_the_last_level_holds_the_largest_products() -> None:
    """The largest float32 times the largest number of samples in a message is in level MOST_LEVELS."""
    received = {"net/x": np.zeros(1, np.float32)}
    total = ReproducibleSum(received, {"net": Reduction.MEAN_BY_EXAMPLES}, num_clients=1, max_num_examples=1)
    total.add({"net/x": np.full(1, np.finfo(np.float32).max)}, 2**63 - 1)
    assert max(total.levels) == MOST_LEVELS


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 4), (BLOCK - 1,), (2, BLOCK), (BLOCK + 1,)])
def test_shapes_and_blocks(shape: tuple[int, ...]) -> None:
    """Sums have the received shapes, also for arrays in Fortran order, and each block is in its place."""
    rng = np.random.default_rng(0)
    received = {"net/x": np.zeros(shape, np.float32)}
    one, two = (np.array(rng.integers(-4, 4, shape), np.float32, order="F") for _ in range(2))
    total = ReproducibleSum(received, {"net": Reduction.SUM}, num_clients=2, max_num_examples=1)
    total.add({"net/x": one}, 7)
    total.add({"net/x": two}, 9)
    assert total.sums(0)["net/x"].dtype == np.float64
    np.testing.assert_array_equal(total.sums(0)["net/x"], one + two)
    np.testing.assert_array_equal(total.take_mean(16, 2)["net/x"], one + two, strict=True)
    assert total.sums(0) == {}


@settings(max_examples=200, deadline=None)
@given(setting=rounds(), data=st.data())
def test_sums_of_changes(setting: tuple[SharedArrays, list[Client]], data: st.DataObject) -> None:
    """With and without one client they differ by its exact change, up to `rounding`, which is far below a change."""
    received, clients = setting
    left_out = data.draw(st.integers(0, len(clients) - 1))
    change = max(float(np.abs(arrays["net/x"].astype(float) - received["net/x"]).max()) for arrays, _ in clients)
    sums = []
    others = [client for number, client in enumerate(clients) if number != left_out] + [(received, 1)]
    for present in ([*others, clients[left_out]], others):  # one client, at least, of which nothing has changed
        total = new_sum(received, [*others, clients[left_out]], Reduction.MEAN)
        for arrays, num_examples in present:
            total.add(arrays, num_examples)
        rounding = total.rounding("net/x", change)
        sums.append(total.take_changes(len(present))["net/x"])
        assert not any(total.levels.values())
    moved = [Fraction(one) - Fraction(other) for one, other in zip(*(found.tolist() for found in sums), strict=True)]
    arrays, _ = clients[left_out]
    own = [Fraction(b) - Fraction(a) for a, b in zip(received["net/x"].tolist(), arrays["net/x"].tolist(), strict=True)]
    assert max(abs(one - other) for one, other in zip(moved, own, strict=True)) <= rounding
    largest = change + float(np.abs(received["net/x"]).max()) + 1
    assert rounding < largest * 2.0**-20
