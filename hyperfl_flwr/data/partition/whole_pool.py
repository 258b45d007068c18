"""Partitions of the whole pool into unequal sizes: shards, a Dirichlet distribution per label, natural clients.

- shards: McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017.
- dirichlet-per-label: Yurochkin et al., Bayesian nonparametric federated learning of neural networks, ICML 2019.
"""

import heapq

import numpy as np

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import IntArray, positions_by_group

_MIN_SAMPLES = 5
_MAX_TRIES = 10


def shards(
    labels: IntArray,
    rng: np.random.Generator,
    *,
    num_clients: int,
    shards_per_client: int,
    samples: int | None = None,
) -> list[IntArray]:
    """Sort by label, divide into N * K' shards, and give K' random shards to each client.

    Args:
        labels: Labels of the pool [n].
        rng: Source of all choices.
        num_clients: Number of clients N.
        shards_per_client: Number of shards per client K', at least 1.
        samples: The largest size per client, chosen at random from its shards; None for all data.

    Returns:
        Sorted positions for each client. Shard sizes differ by at most 1.

    Raises:
        DataError: If there are more shards than samples.
    """
    count, number = len(labels), num_clients * shards_per_client
    if number > count:
        raise DataError(
            f"data.shards-per-client times num-clients must be at most the number of training samples {count}, "
            f"got {shards_per_client} x {num_clients}; lower one of them"
        )
    order = rng.permutation(number)
    sizes = count // number + (rng.permutation(number) < count % number)
    # The stable sort makes the shards the same on all platforms; only their owners are random.
    pieces = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
    owned = order.reshape(num_clients, shards_per_client)
    return _at_most([np.concatenate([pieces[shard] for shard in row]) for row in owned], samples, rng)


def dirichlet_per_label(
    labels: IntArray,
    rng: np.random.Generator,
    *,
    num_clients: int,
    alpha: float,
    samples: int | None = None,
    min_samples: int = _MIN_SAMPLES,
) -> list[IntArray]:
    """Divide every class among the clients with proportions from Dir(alpha, ..., alpha) over the clients.

    The algorithm of Flower's DirichletPartitioner (same generator, same result), with one exception: if a client still
    has too few samples after ten more tries, it gets random samples of the largest clients instead of an error.

    Args:
        labels: Labels of the pool [n].
        rng: Source of all choices.
        num_clients: Number of clients N.
        alpha: Concentration, > 0.
        samples: The largest size per client, chosen at random; None for all data.
        min_samples: The smallest size per client.

    Returns:
        Sorted positions for each client; the sizes differ.

    Raises:
        DataError: If there are fewer than `min_samples` samples per client.
    """
    if num_clients * min_samples > len(labels):
        raise DataError(
            f"partition dirichlet-per-label needs {min_samples} training samples per client, "
            f"got {len(labels)} for {num_clients} clients; lower num-clients"
        )
    for _ in range(_MAX_TRIES + 1):
        owned: list[list[int]] = [[] for _ in range(num_clients)]
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            ends = np.cumsum(rng.dirichlet(np.full(num_clients, alpha))) * len(members)
            for positions, piece in zip(owned, np.split(members, ends.astype(np.int64)[:-1]), strict=True):
                positions.extend(piece.tolist())
        if min(map(len, owned)) >= min_samples:
            break
    # Has an effect only if the last try failed, too. The heap's first entry is the first of the largest clients.
    largest = [(-len(positions), client) for client, positions in enumerate(owned)]
    heapq.heapify(largest)
    for positions in owned:
        while len(positions) < min_samples:
            size, client = largest[0]
            positions.append(owned[client].pop(int(rng.integers(-size))))
            heapq.heapreplace(largest, (size + 1, client))
    return _at_most([np.array(positions, dtype=np.int64) for positions in owned], samples, rng)


def natural(
    clients: IntArray, rng: np.random.Generator, *, num_clients: int, samples: int | None = None
) -> list[IntArray]:
    """Give every client the samples with its client id.

    Args:
        clients: The client of each sample [n], in 0..N-1.
        rng: Source of the choice if `samples` limits the size.
        num_clients: Number of clients N.
        samples: The largest size per client, chosen at random; None for all data.

    Returns:
        Sorted positions for each client.
    """
    owned = [np.arange(0)] * num_clients
    for positions in positions_by_group(clients):
        owned[clients[positions[0]]] = positions
    return _at_most(owned, samples, rng)


def _at_most(owned: list[IntArray], samples: int | None, rng: np.random.Generator) -> list[IntArray]:
    if samples is None:
        return [np.sort(positions) for positions in owned]
    return [np.sort(rng.permutation(positions)[:samples]) for positions in owned]
