"""Clipping and noise on uploads."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hyperfl_flwr.core.noise import grid_noise
from hyperfl_flwr.core.noise.gaussian_noise import CHUNK, gaussian
from hyperfl_flwr.core.noise.grid_noise import grid_for, noisy_on_grid, sensitivity
from hyperfl_flwr.privacy.clip_and_noise import protect

RECEIVED = [np.array([[1.0, 2.0]], dtype=np.float32), np.array([3.0], dtype=np.float32)]
TRAINED = [np.array([[4.0, 2.0]], dtype=np.float32), np.array([7.0], dtype=np.float32)]
"""The change from RECEIVED to TRAINED has norm 5."""


def test_a_long_change_is_shortened_and_a_short_one_is_not():
    """A longer change is scaled to norm 2 over all arrays together, a shorter one is kept; inputs are not changed."""
    first, second = protect(RECEIVED, TRAINED, clip_norm=2.0, noise_multiplier=0.0)
    np.testing.assert_allclose(first, [[1 + 3 * 0.4, 2.0]], rtol=1e-6)
    np.testing.assert_allclose(second, [3 + 4 * 0.4], rtol=1e-6)
    assert first.dtype == second.dtype == np.float32
    same = protect(RECEIVED, TRAINED, clip_norm=6.0, noise_multiplier=0.0)
    assert all(np.array_equal(one, other) for one, other in zip(same, TRAINED, strict=True))
    still = protect(RECEIVED, RECEIVED, clip_norm=6.0, noise_multiplier=0.0)
    assert all(np.array_equal(one, other) for one, other in zip(still, RECEIVED, strict=True))
    assert TRAINED[1][0] == 7.0


def test_noise_is_gaussian_with_the_clip_norms_multiple_and_never_the_same():
    """Standard deviation 0.5 * 4, by Kolmogorov-Smirnov over 2^20 + 3 coordinates (an odd part in a second chunk)."""
    zeros = [np.zeros(CHUNK + 3, dtype=np.float32)]
    one, other = (protect(zeros, zeros, clip_norm=4.0, noise_multiplier=0.5)[0] for _ in range(2))
    assert stats.kstest(one, "norm", args=(0, 2.0)).pvalue > 1e-4
    assert one.std() == pytest.approx(2.0, rel=0.01)
    assert not np.array_equal(one, other)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.01
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.01
    half = CHUNK // 2
    assert abs(np.corrcoef(one[:half], one[half:CHUNK])[0, 1]) < 0.01  # the two halves of the pairs


def test_a_zero_has_no_sign():
    """The sign of a released 0 would be that of a change that is rounded to 0."""
    released = noisy_on_grid(np.full(1000, -1e-12), 1.0, 4.0)
    assert np.count_nonzero(released == 0) > 100
    assert not np.signbit(released[released == 0]).any()


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_any_number_of_values_can_be_drawn(size):
    assert gaussian(size, 1.0).shape == (size,)


@pytest.mark.parametrize(
    "wrong", [{"clip_norm": 0.0, "noise_multiplier": 1.0}, {"clip_norm": 1.0, "noise_multiplier": -1.0}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must be above 0"):
        protect(RECEIVED, TRAINED, **wrong)


def squared_norm(received, uploaded):
    """Return the squared norm of the change that the server sees, exactly."""
    pairs = [(np.ravel(one).tolist(), np.ravel(other).tolist()) for one, other in zip(received, uploaded, strict=True)]
    return sum((Fraction(b) - Fraction(a)) ** 2 for before, after in pairs for a, b in zip(before, after, strict=True))


FLOATS = st.one_of(st.floats(-1, 1, width=32), st.floats(width=32, allow_nan=False, allow_infinity=False))


@given(
    st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=6),
    st.floats(1e-6, 1e6),
    st.sampled_from([np.float32, np.float64]),
)
def test_what_is_uploaded_has_the_norm_exactly(pairs, clip_norm, dtype):
    """Computed in fractions, of the arrays as they are sent, after the rounding to their type."""
    received, trained = ([np.array([pair[side] for pair in pairs], dtype)] for side in (0, 1))
    uploaded = protect(received, trained, clip_norm=clip_norm, noise_multiplier=0.0)
    assert squared_norm(received, uploaded) <= Fraction(clip_norm) ** 2
    if squared_norm(received, trained) <= Fraction(clip_norm * 0.999) ** 2:
        assert np.array_equal(uploaded[0], trained[0])


def test_the_clipped_change_keeps_its_length_and_direction():
    """Of 10^5 parameters, which round up half of the time, no more than 10^-5 of the norm is lost."""
    rng = np.random.default_rng(0)
    received = [rng.normal(0, 0.1, 100_000).astype(np.float32)]
    trained = [(received[0] + rng.normal(0, 0.02, 100_000)).astype(np.float32)]
    uploaded = protect(received, trained, clip_norm=1.0, noise_multiplier=0.0)
    change, moved = (values[0].astype(float) - received[0] for values in (trained, uploaded))
    assert 1 - 1e-5 < np.linalg.norm(moved) <= 1
    assert change @ moved / np.linalg.norm(change) / np.linalg.norm(moved) == pytest.approx(1, abs=1e-6)


def test_a_norm_below_the_precision_of_the_type_leaves_no_change():
    """Beside 10^6, float32 holds no change below 0.03."""
    received, trained = [np.full(9, 1e6, np.float32)], [np.full(9, 1e6 + 5, np.float32)]
    assert np.array_equal(protect(received, trained, clip_norm=0.01, noise_multiplier=0.0)[0], received[0])


def test_noise_hides_the_low_order_bits_of_the_change():
    """Changes with noise are multiples of the grid, and those that round to the same integers upload the same."""
    grid = grid_for(2.0, 4.0)
    assert grid == 2.0**-23
    zeros = [np.zeros(1000)]
    noisy = protect(zeros, [np.full(1000, 0.01)], clip_norm=4.0, noise_multiplier=0.5)[0]
    assert np.array_equal(noisy, np.rint(noisy / grid) * grid)
    with pytest.MonkeyPatch.context() as patch:
        noise = np.random.default_rng(0).normal(0, 2, 1000)
        patch.setattr(grid_noise, "gaussian", lambda size, std: noise)
        one, other = (
            protect(zeros, [np.full(1000, 0.01 + shift)], clip_norm=4.0, noise_multiplier=0.5)[0]
            for shift in (0, grid / 20)
        )
    assert np.array_equal(one, other)


def test_the_noise_covers_the_rounding_to_the_grid(monkeypatch):
    """The deviation is z (C + g sqrt(P) / 2) over all arrays of a client; of a sum, each element is rounded twice."""
    asked = []
    monkeypatch.setattr(grid_noise, "gaussian", lambda size, std: asked.append(std) or np.zeros(size))
    arrays = [np.zeros((300, 5)), np.zeros(1000)]
    protect(arrays, arrays, clip_norm=4.0, noise_multiplier=0.5)
    expected = 0.5 * (4.0 + grid_for(2.0, 4.0) / 2 * np.sqrt(2500))
    assert asked == [pytest.approx(expected, rel=1e-15)] * 2
    assert sensitivity(1.0, [(9, 0.1), (16, 0.05)]) == pytest.approx(1 + np.sqrt(9 * 0.01 + 16 * 0.0025))


@pytest.mark.parametrize(("std", "largest"), [(1.0, 1.0), (1e-6, 1e3), (1e5, 1e-3)])
def test_sums_on_the_grid_are_exact(std, largest):
    """Values and noise are integers below 2^53 in units of the grid."""
    grid = grid_for(std, largest)
    assert np.frexp(grid)[0] == 0.5
    assert grid <= std * 2**-23 or grid <= largest * 2**-47
    values = np.array([largest, -largest, largest / 3, 0.0])
    noisy = noisy_on_grid(values, std, grid)
    assert np.array_equal(noisy, np.rint(noisy / grid) * grid)
    assert np.abs(noisy / grid).max() < 2**53
