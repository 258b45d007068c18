"""How data are shared out among clients: the partitions by name.

Every partition of training data takes the labels (or client ids) of the pool and a random generator, and returns one
sorted array of positions per client; the clients' test data `follow`. Sizes, rounding and reuse are those of
`allocation`: ``auto`` (None here) is the largest size without reuse, at most the recommended one, for the partitions
into equal sizes, and all data for the others (where a number is the most that a client gets).
"""

import numpy as np

from hyperfl_flwr.data.dataset import IntArray
from hyperfl_flwr.data.partition.allocation import deal, following_sizes
from hyperfl_flwr.data.partition.equal_size import dirichlet, dominant_classes, iid, similarity
from hyperfl_flwr.data.partition.whole_pool import dirichlet_per_label, natural, shards

__all__ = [
    "EQUAL_SIZES",
    "PARTITIONS",
    "dirichlet",
    "dirichlet_per_label",
    "dominant_classes",
    "follow",
    "iid",
    "natural",
    "shards",
    "similarity",
]

PARTITIONS: dict[str, str] = {
    "similarity": "equal sizes; a share of uniform data, the rest from the dominant classes of the client's group",
    "iid": "equal sizes, drawn uniformly",
    "dirichlet": "equal sizes; class proportions drawn from a Dirichlet distribution per client",
    "dirichlet-per-label": "unequal sizes; every class divided among the clients by a Dirichlet distribution",
    "shards": "data sorted by class, cut into shards, each client gets a few of them",
    "natural": "each client holds its own data, as the data set says",
}

EQUAL_SIZES = frozenset({"similarity", "iid", "dirichlet"})
"""The partitions whose automatic sizes the data set's recommended ones limit."""


def follow(
    counts: IntArray,
    labels: IntArray,
    rng: np.random.Generator,
    *,
    samples: int | None = None,
    cap: int | None = None,
) -> list[IntArray]:
    """Share out test data in the class proportions of each client's training data (largest remainder).

    Args:
        counts: [N, K], every client's training samples of each class.
        labels: [n], of the test pool, in 0..K-1.
        rng: Source of all choices.
        samples: Size per client, None for ``auto``: proportional to the training sizes, without reuse, at least 1.
        cap: The largest automatic size.

    Returns:
        Per client, sorted positions in the test pool.

    Raises:
        DataError: A client's classes do not occur in the test pool.
    """
    return deal(labels, following_sizes(counts, labels, samples, cap, rng), rng)
