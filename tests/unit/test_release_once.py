"""A vector is released once for the same inputs, and not at all for others."""

from pathlib import Path

import numpy as np
import pytest

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.privacy.release_once import digest, release_once

MADE_OF: dict[str, str | float | None] = {"samples": "ab", "epsilon": 1.0, "clip-norm": None}


def test_a_repeated_request_gets_the_same_vector(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "release.npz"
    first, again = (release_once(path, MADE_OF, lambda: rng.normal(size=3)) for _ in range(2))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("stored", [{**MADE_OF, "epsilon": 2.0}, {"samples": "ab", "clip-norm": None}])
def test_a_vector_with_other_or_unknown_inputs_is_not_released(
    tmp_path: Path, stored: dict[str, str | float | None]
) -> None:
    """A file of an earlier version may lack an input, so that it is not known whether it was the same."""
    path = tmp_path / "release.npz"
    release_once(path, stored, lambda: np.zeros(3))
    with pytest.raises(StateError, match="has already been released with other epsilon; each release spends another"):
        release_once(path, MADE_OF, lambda: np.zeros(3))


def test_arrays_of_another_shape_or_type_are_other_inputs() -> None:
    arrays: list[np.ndarray] = [np.zeros(shape) for shape in (4, (2, 2), (4, 1))]
    arrays += [np.zeros(shape, np.float32) for shape in (8, (2, 2, 2))]
    assert len({digest([array]) for array in arrays}) == len(arrays)
    assert digest([arrays[0]]) == digest([np.zeros(4)])
