"""Staircase randomised response: its probabilities, what it returns, and runs with it."""

import itertools
import math

import numpy as np
import pytest

from hyperfl_flwr.privacy.staircase import LARGEST_EPSILON, Staircase

SMALL = Staircase(epsilon=1.5, radius=0.6, centre=0.1, precision=1, groups=4, growth=1)
"""13 points, in groups of 2, 3, 4 and 4 or so."""


def probabilities(mechanism: Staircase) -> list[list[int]]:
    """Return the share of each result (columns) for each number of the grid (rows), in units of 1 / `total`.

    The order by distance is that of Python's sort, not the one of `point_at`.
    """
    by_place = np.repeat(mechanism.shares, mechanism.group_sizes).tolist()
    rows = []
    for number in range(mechanism.size):
        order = sorted(range(mechanism.size), key=lambda point: (abs(point - number), point))
        rows.append([by_place[order.index(point)] for point in range(mechanism.size)])
    return rows


@pytest.mark.parametrize(
    "mechanism",
    [
        SMALL,
        Staircase(epsilon=0.01, radius=3.0, precision=0, groups=2),
        Staircase(epsilon=LARGEST_EPSILON, radius=0.02, precision=3, groups=41),
        Staircase(epsilon=5.0, radius=0.05, precision=3, groups=10, growth=2),
    ],
)
def test_no_two_probabilities_of_a_result_differ_by_more_than_epsilon(mechanism: Staircase) -> None:
    """All D x D of them, as exact integers: rows sum to 1, and the largest ratio in a column is e^epsilon or less."""
    rows = probabilities(mechanism)
    assert {sum(row) for row in rows} == {mechanism.total}
    worst = max(max(column) / min(column) for column in zip(*rows, strict=True))
    assert worst <= math.exp(mechanism.epsilon)
    assert worst == pytest.approx(math.exp(mechanism.epsilon), rel=1e-3)  # and none of it is wasted


@pytest.mark.parametrize("growth", [0, 20])
def test_the_probabilities_are_the_papers(growth: int) -> None:
    """The published settings: the closed form of a_min, and equal steps from group to group."""
    mechanism = Staircase(epsilon=5.0, radius=0.075, growth=growth)
    sizes, power = mechanism.group_sizes.tolist(), math.exp(5)
    assert (mechanism.size, sum(sizes)) == (1501, 1501)
    assert max(abs(second - first - growth) for first, second in itertools.pairwise(sizes)) <= 1
    least = 9 / (9 * 1501 * power - (power - 1) * sum(number * size for number, size in enumerate(sizes)))
    expected = [least * (power - number * (power - 1) / 9) for number in range(10)]
    np.testing.assert_allclose(mechanism.shares / mechanism.total, expected, rtol=1e-9)


@pytest.mark.parametrize("mechanism", [SMALL, Staircase(epsilon=1.0, radius=7.0, precision=0, groups=3)])
def test_places_are_in_the_order_by_distance(mechanism: Staircase) -> None:
    """Of two points at the same distance the lower one is first; beyond an end only the other side is left."""
    for number in range(mechanism.size):
        order = sorted(range(mechanism.size), key=lambda point: (abs(point - number), point))
        places = np.arange(mechanism.size)
        assert mechanism.point_at(np.full(mechanism.size, number), places).tolist() == order


@pytest.mark.parametrize("value", [-5.0, -0.5, 0.11, 0.4])
def test_results_have_these_probabilities(value: float) -> None:
    """A chi-squared test with fixed random bits: 12 degrees of freedom, whose 99.9 % quantile is 32.9."""
    draws, rng = 40_000, np.random.default_rng(5)
    found = SMALL.randomise(np.full(draws, value), lambda count: rng.integers(0, 2**64, count, np.uint64))
    point = int(SMALL.nearest(np.array([value]))[0])
    expected = np.array(probabilities(SMALL)[point]) / SMALL.total * draws
    counts = np.bincount(np.rint((found - 0.1) * 10).astype(int) + 6, minlength=13)
    assert float(((counts - expected) ** 2 / expected).sum()) < 32.9


def test_no_integer_is_more_likely_than_another() -> None:
    """Integers from the last incomplete range are drawn again: a remainder alone would favour the small ones."""
    given = iter([np.array([2**64 - 1, 5], np.uint64), np.array([2**64 // SMALL.total * SMALL.total], np.uint64)])
    last = np.array([SMALL.total - 1], np.uint64)

    def bits(count: int) -> np.ndarray:
        return next(given, last)[:count].copy()

    assert SMALL.places(2, bits).tolist() == [12, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_only_points_of_the_grid_leave(dtype: type) -> None:
    """Whatever the weights are: far outside, not finite, tiny, or between two points; all bits are those of a point."""
    mechanism = Staircase(epsilon=3.0, radius=0.02, precision=3)
    points = {(number / 1000) for number in range(-20, 21)}
    grid = {np.array(point, dtype).tobytes() for point in points}
    values = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-40, -0.0, 0.0004999, 0.01] * 40, dtype).reshape(20, 18)
    found = mechanism.randomise(values)
    assert (found.shape, found.dtype) == (values.shape, values.dtype)
    assert {value.tobytes() for value in found.ravel()} <= grid
    assert mechanism.nearest(values[0, :4]).tolist() == [20, 40, 0, 40]


def test_the_noise_is_not_repeatable() -> None:
    values = np.zeros(1000, np.float32)
    mechanism = Staircase(epsilon=5.0, radius=0.075)
    assert (mechanism.randomise(values) != mechanism.randomise(values)).any()


def test_the_deviation_of_the_published_settings() -> None:
    """0.39 r at the centre, and a mean that is nearer to the centre than the weight: randomised means are biased."""
    mechanism = Staircase(epsilon=5.0, radius=0.075)
    by_place = np.repeat(mechanism.shares, mechanism.group_sizes) / mechanism.total
    values = {}
    for weight in (0.0, 0.02, 0.075):
        number = mechanism.nearest(np.array([weight]))
        points = mechanism.point_at(np.repeat(number, 1501), np.arange(1501))
        values[weight] = (points - 750) / 1e4
    assert float(np.sqrt(by_place @ values[0.0] ** 2)) == pytest.approx(0.39 * 0.075, rel=0.01)
    assert abs(float(by_place @ values[0.0])) < 1e-4
    assert float(by_place @ values[0.02]) == pytest.approx(0.0164, abs=1e-4)
    assert float(by_place @ values[0.075]) == pytest.approx(0.0271, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"epsilon": 20.1}, "at most 20"),
        ({"centre": math.nan}, "the centre finite"),
        ({"radius": 1e-5}, "at least 3 and at most 1048576 points"),
        ({"radius": 60.0}, "at least 3 and at most 1048576 points"),
        ({"groups": 1}, "at least 2 groups"),
        ({"groups": 2000}, "each needs at least one point"),
        ({"growth": 40}, "cannot divide 1501 points"),
    ],
)
def test_grids_that_do_not_exist_are_refused(changes: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Staircase(**({"epsilon": 5.0, "radius": 0.075} | changes))  # type: ignore[arg-type]


def test_whole_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="only floating-point numbers"):
        SMALL.randomise(np.zeros(3, np.int64))
