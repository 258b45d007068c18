"""Registry of partitions, which divide a data set among clients.

Every partition of training data takes the labels (or client ids) of the pool and a random generator, and returns one
sorted array of positions per client. `match_class_shares` gives the clients' test data the class shares of their
training data. Sizes, rounding and reuse are those of `allocation`. For partitions into equal sizes, ``auto`` (None
here) is the largest size without reuse, at most the recommended one; for the others it is all data, and a number is the
upper limit for a client.
"""

import numpy as np

from hyperfl_flwr.data.dataset import IntArray
from hyperfl_flwr.data.partition.allocation import draw_samples, matching_counts
from hyperfl_flwr.data.partition.equal_size import dirichlet, dominant_classes, iid, similarity
from hyperfl_flwr.data.partition.whole_pool import dirichlet_per_label, natural, shards

__all__ = [
    "EQUAL_SIZES",
    "PARTITIONS",
    "dirichlet",
    "dirichlet_per_label",
    "dominant_classes",
    "iid",
    "match_class_shares",
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
    "natural": "each client holds its own data, by the client ids of the data set",
}

EQUAL_SIZES = frozenset({"similarity", "iid", "dirichlet"})
"""Partitions into equal sizes; the data set's recommended sizes limit their automatic sizes."""


def match_class_shares(
    counts: IntArray,
    labels: IntArray,
    rng: np.random.Generator,
    *,
    samples: int | None = None,
    cap: int | None = None,
) -> list[IntArray]:
    """Partition test data in the class proportions of each client's training data (largest remainder).

    Args:
        counts: Numbers of training samples of each client and class [N, K].
        labels: Labels of the test pool [n], in 0..K-1.
        rng: Source of all choices.
        samples: Size per client; None for ``auto``: proportional to the training sizes, without reuse, at least 1.
        cap: The largest automatic size; None for no limit.

    Returns:
        Sorted positions in the test pool for each client.

    Raises:
        DataError: If no class of a client occurs in the test pool.
    """
    return draw_samples(labels, matching_counts(counts, labels, samples, cap, rng), rng)
