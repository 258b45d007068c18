"""Data of one class, for the study `fishing`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.one_class import one_class
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.registry import load_dataset


def test_the_file_has_all_images_of_the_class(tmp_path: Path) -> None:
    """It is a data set of its own, with the same training and test images."""
    words = [sys.executable, "-m", "experiments.one_class", "digits", "3", str(tmp_path / "threes.npz")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    whole, found = load_dataset("digits"), load_dataset(f"npz:{tmp_path / 'threes.npz'}")
    for before, after in ((whole.train, found.train), (whole.test, found.test)):
        assert len(after) > 20
        assert np.array_equal(before.images[before.labels == 3], after.images)


def test_a_class_that_the_data_lack_is_refused() -> None:
    with pytest.raises(DataError, match="digits has no images of class 10; its classes are 0 to 9"):
        one_class("digits", 10, None)
