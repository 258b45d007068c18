"""From class proportions to samples: rounding to whole numbers, sizes that need no reuse, and dealing out.

Sizes. ``auto`` is the largest size per client for which no sample is needed twice, at most the size that the data set
recommends. Class k limits it to (samples of class k) / (sum over the clients of their proportion of k); the size is
lowered from the smallest of these limits until the whole numbers fit too (a few random roundings are tried for each
size). Where not even one sample per client fits, the size is 1 and samples are reused. A size given as a number is
kept, and samples are reused where classes run short.

Reuse is even: within a class no sample is used twice before all are used once, and no client holds a sample twice
unless it needs more than there are.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import IntArray

FloatArray = npt.NDArray[np.float64]
_DECIMALS = 9
_ROUNDINGS = 10


def class_counts(indices: Sequence[IntArray], labels: IntArray, num_classes: int) -> IntArray:
    """Count the classes of every client.

    Args:
        indices: Per client, positions in `labels`.
        labels: [n], in 0..K-1.
        num_classes: K.

    Returns:
        [N, K] numbers of samples.
    """
    counts = [np.bincount(labels[chosen], minlength=num_classes) for chosen in indices]
    return np.stack(counts).astype(np.int64)


def available_proportions(proportions: FloatArray, labels: IntArray) -> FloatArray:
    """Leave out classes without samples and share their part out among the others.

    Args:
        proportions: [N, K], non-negative.
        labels: [n], in 0..K-1.

    Returns:
        [N, K], every row summing to 1.

    Raises:
        DataError: A client's classes have no samples at all.
    """
    present = np.bincount(labels, minlength=proportions.shape[1]) > 0
    kept = proportions * present
    total = kept.sum(axis=1, keepdims=True)
    if (total <= 0).any():
        client = int(np.flatnonzero(total[:, 0] <= 0)[0])
        classes = np.flatnonzero(proportions[client] > 0).tolist()
        raise DataError(
            f"every client must find samples of its classes, but there is none of the classes {classes} of client "
            f"{client}; add such samples or choose another partition"
        )
    return np.asarray(kept / total)


def round_fairly(expected: FloatArray, rng: np.random.Generator) -> IntArray:
    """Round every row to whole numbers with the same sum, so that nothing is favoured.

    Systematic sampling: a row's fractions are laid end to end, in a random order of the classes, and points at distance
    1 are put on them. The offset of the points is spread evenly over the rows, in random order. The expected value of
    every count is exactly `expected`, and over equal rows the sum of a class is the expected sum rounded up or down.

    Args:
        expected: [N, K], non-negative, the rows summing to whole numbers.
        rng: Source of the order and the offsets.

    Returns:
        [N, K], each `expected` rounded up or down.
    """
    num_rows, num_classes = expected.shape
    exact = np.round(expected, _DECIMALS)
    order = rng.permutation(num_classes)
    offset = (rng.permutation(num_rows) + rng.random())[:, None] / num_rows
    whole = np.floor(exact)
    ends = np.cumsum((exact - whole)[:, order], axis=1)
    ends[:, -1] = np.rint(ends[:, -1])
    points = np.floor(ends + offset)
    counts = whole.astype(np.int64)
    counts[:, order] += np.diff(points, axis=1, prepend=0).astype(np.int64)
    return counts


def largest_remainder(proportions: FloatArray, sizes: IntArray, rng: np.random.Generator) -> IntArray:
    """Round `sizes * proportions` to whole numbers that add up to the sizes (Hamilton's method).

    Args:
        proportions: [N, K], every row summing to 1.
        sizes: [N].
        rng: Decides between equal remainders.

    Returns:
        [N, K], the rows summing to `sizes`.
    """
    exact = np.round(proportions * sizes[:, None], _DECIMALS)
    counts = np.floor(exact).astype(np.int64)
    remainders = np.round(exact - counts, _DECIMALS)
    order = np.lexsort((rng.random(exact.shape), -remainders), axis=1)
    rank = np.argsort(order, axis=1)
    extra = rank < (sizes - counts.sum(axis=1))[:, None]
    return np.asarray(counts + extra, dtype=np.int64)


def equal_sizes(
    proportions: FloatArray,
    labels: IntArray,
    samples: int | None,
    cap: int | None,
    rounding: Callable[[FloatArray], IntArray],
) -> IntArray:
    """Decide how many samples of each class every client gets, all clients the same number.

    Args:
        proportions: [N, K], every row summing to 1.
        labels: [n], in 0..K-1.
        samples: Size per client; None for ``auto``, see the module's docstring.
        cap: The largest automatic size, None for no limit.
        rounding: Rounds [N, K] expected numbers, keeping the sums of the rows.

    Returns:
        [N, K] numbers of samples.
    """
    if samples is not None:
        return rounding(samples * proportions)
    available = np.bincount(labels, minlength=proportions.shape[1])
    size = _limit(proportions, available, cap)
    return _first_fit(size, available, lambda size: rounding(size * proportions))


def following_sizes(
    counts: IntArray, labels: IntArray, samples: int | None, cap: int | None, rng: np.random.Generator
) -> IntArray:
    """Decide how many test samples of each class every client gets: in the proportions of its training data.

    Args:
        counts: [N, K], the clients' training samples.
        labels: [n], of the test pool, in 0..K-1.
        samples: Size per client. None for ``auto``: sizes proportional to those of the training data, at least 1, as
            large as possible without reuse.
        cap: The largest automatic size, None for no limit.
        rng: Decides between equal remainders.

    Returns:
        [N, K] numbers of samples.
    """
    totals = counts.sum(axis=1)
    proportions = available_proportions(counts.astype(np.float64), labels)
    if samples is not None:
        return largest_remainder(proportions, np.full(len(totals), samples), rng)
    available = np.bincount(labels, minlength=counts.shape[1])
    relative = totals / totals.max()
    size = _limit(proportions * relative[:, None], available, cap)

    def demand(size: int) -> IntArray:
        sizes = np.maximum(1, np.floor(np.round(size * relative, _DECIMALS))).astype(np.int64)
        return largest_remainder(proportions, sizes, rng)

    return _first_fit(size, available, demand)


def _limit(weights: FloatArray, available: IntArray, cap: int | None) -> int:
    """Return the largest size for which the expected demand fits, between 1 and the cap."""
    demand = weights.sum(axis=0)
    needed = demand > 0
    size = int(np.floor(np.round((available[needed] / demand[needed]).min(), _DECIMALS)))
    return max(1, size if cap is None else min(size, cap))


def _first_fit(size: int, available: IntArray, demand: Callable[[int], IntArray]) -> IntArray:
    """Lower the size until a random rounding of its demand [N, K] fits the available samples [K], or the size is 1."""
    while True:
        for _ in range(_ROUNDINGS):
            counts = demand(size)
            if (counts.sum(axis=0) <= available).all():
                return counts
        if size == 1:
            return counts
        size -= 1


def deal(labels: IntArray, demand: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Give every client its number of samples of every class.

    Each class's samples are shuffled into a ring; the clients, in random order, cut consecutive pieces from it.

    Args:
        labels: [n], in 0..K-1.
        demand: [N, K] numbers of samples; of classes without samples 0.
        rng: Source of the orders.

    Returns:
        Per client, sorted positions in `labels`.
    """
    num_clients, num_classes = demand.shape
    pieces: list[list[IntArray]] = [[] for _ in range(num_clients)]
    for label in range(num_classes):
        ring = rng.permutation(np.flatnonzero(labels == label))
        start = 0
        for client in rng.permutation(num_clients):
            stop = start + int(demand[client, label])
            if stop > start:
                pieces[client].append(ring[np.arange(start, stop) % len(ring)])
            start = stop
    return [np.sort(np.concatenate(piece)) for piece in pieces]


def reuse_report(indices: Sequence[IntArray], labels: IntArray, num_classes: int) -> dict[str, object]:
    """Say how often samples are used.

    Args:
        indices: Per client, positions in `labels`.
        labels: [n], of the pool, in 0..K-1.
        num_classes: K.

    Returns:
        Plain numbers and lists: ``reused`` (is any sample used more than once), ``draws`` (samples over all clients),
        ``distinct`` (different samples among them), ``available`` (samples in the pool), ``largest_ratio`` (the largest
        draws / available of a class), ``max_uses`` (of one sample), and ``per_class`` with lists of draws, available
        and max_uses.
    """
    uses = np.bincount(np.concatenate(indices), minlength=len(labels))
    draws = np.bincount(labels, weights=uses, minlength=num_classes).astype(np.int64)
    available = np.bincount(labels, minlength=num_classes)
    max_uses = np.zeros(num_classes, dtype=np.int64)
    np.maximum.at(max_uses, labels, uses)
    return {
        "reused": bool(uses.max() > 1),
        "draws": int(draws.sum()),
        "distinct": int(np.count_nonzero(uses)),
        "available": len(labels),
        "largest_ratio": round(float((draws / np.maximum(available, 1)).max()), 4),
        "max_uses": int(uses.max()),
        "per_class": {
            "draws": draws.tolist(),
            "available": available.tolist(),
            "max_uses": max_uses.tolist(),
        },
    }
