"""Clipping and noise on uploads."""

import numpy as np
import pytest
from scipy import stats

from hyperfl_flwr.core.gaussian_noise import CHUNK, gaussian
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


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_any_number_of_values_can_be_drawn(size):
    assert gaussian(size, 1.0).shape == (size,)


@pytest.mark.parametrize(
    "wrong", [{"clip_norm": 0.0, "noise_multiplier": 1.0}, {"clip_norm": 1.0, "noise_multiplier": -1.0}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must be above 0"):
        protect(RECEIVED, TRAINED, **wrong)
