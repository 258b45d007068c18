"""Statistics of a data set's images, and the split into training and test data."""

import numpy as np
import pytest

from hyperfl_flwr.data.dataset import channel_statistics, split_train_test


def test_channel_statistics_leave_out_nan():
    """Channel 0 holds 0, 1 and NaN: mean 1/2, std 1/2. A constant channel and one of NaN have std 1."""
    images = np.zeros((3, 3, 1, 1), dtype=np.float32)
    images[:, 0, 0, 0] = [0, 1, np.nan]
    images[:, 1] = 0.25
    images[:, 2] = np.nan
    assert channel_statistics(images) == ((0.5, 0.25, 0.0), (0.5, 1.0, 1.0))
    grey = np.random.default_rng(0).integers(0, 256, (5000, 1, 2, 2)).astype(np.uint8)
    mean, std = channel_statistics(grey)
    assert mean == pytest.approx([grey.mean() / 255])
    assert std == pytest.approx([grey.std() / 255])


def test_split_takes_a_quarter_of_every_group():
    """Test samples of 4: 1, of 2: 1 (at least one), of 1: 0 (training comes first), of 10: 2 (2.5 rounds to even)."""
    groups = np.repeat([0, 1, 2, 3], [4, 2, 1, 10])
    train, test = split_train_test(groups, np.random.default_rng(0))
    assert np.bincount(groups[test], minlength=4).tolist() == [1, 1, 0, 2]
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(17))
