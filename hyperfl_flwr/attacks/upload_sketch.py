"""Shorten what a client uploads to a vector of features, for attacks that learn from many uploads.

Arrays with few entries are kept as they are. A longer array is hashed: each entry is added, with a random sign, to one
of L sums (Charikar, Chen, Farach-Colton: "Finding frequent items in data streams", ICALP 2002; Weinberger et al.:
"Feature Hashing for Large Scale Multitask Learning", ICML 2009). Inner products of the short vectors are on average
those of the arrays. The sketch is linear: that of a mean is the mean of the sketches.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.method import Form
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.runs.observation import Observation

LENGTH = 256
"""Number L of features of a long array."""

Sketch = dict[str, NDArray[np.float32]]
"""Features of each array, by its name."""

_TRAINED = ("model/", "layers/", "extractor/", "classifier/", "hypernetwork/")
"""Groups of arrays that local training changes, sent in the form that the method declares."""


def sketch(arrays: Mapping[str, NDArray[Any]]) -> Sketch:
    """Return at most `LENGTH` features of each array. They depend on its name and values, and on no seed of a run."""
    return {name: _hashed(name, np.asarray(array, np.float64).ravel()) for name, array in arrays.items()}


def sketch_of_upload(observation: Observation, form: Form) -> Sketch:
    """Return features of what a client has changed in a round, and of all else that it has sent.

    Args:
        observation: The observation.
        form: Form in which the parts that training changes are sent.
    """
    arrays = {
        key: value - observation.received[key] if form == "values" and key.startswith(_TRAINED) else value
        for key, value in observation.reply.items()
    }
    return sketch(arrays)


def _hashed(name: str, values: NDArray[np.float64]) -> NDArray[np.float32]:
    if len(values) <= LENGTH:
        return values.astype(np.float32)
    rng = numpy_generator(0, "sketch", name, len(values))
    places = rng.integers(LENGTH, size=len(values))
    signs = rng.integers(2, size=len(values)) * 2 - 1
    return np.bincount(places, signs * values, minlength=LENGTH).astype(np.float32)
