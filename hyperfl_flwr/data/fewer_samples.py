"""Give clients a part of their own training samples, as an audit of a trained run does, which attacks small clients.

The division of the data stays that of the run: each client's samples are drawn from those that are its own. It holds
for all that is loaded within the context, also by nodes that run in this process, and is no setting of a run: no server
can ask for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.dataset import IntArray

_most: ContextVar[int] = ContextVar("most", default=0)


@contextmanager
def fewer_samples(most: int) -> Iterator[None]:
    """Load at most so many training samples of each client within the context; 0 for all."""
    token = _most.set(most)
    try:
        yield
    finally:
        _most.reset(token)


def most_samples() -> int:
    """Return the largest number of training samples of each client; 0 for all."""
    return _most.get()


def drawn(train: Sequence[IntArray], most: int, seed: int) -> list[IntArray]:
    """Return at most so many of the positions of each client's training samples, drawn at random and sorted.

    Args:
        train: Positions of each client's training samples.
        most: Largest number of positions of a client; 0 for all.
        seed: Seed of the partition.
    """
    if not most:
        return list(train)
    return [
        np.sort(numpy_generator(seed, "fewer-samples", client).permutation(indices)[:most])
        for client, indices in enumerate(train)
    ]
