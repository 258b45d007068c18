"""Partitions into equal sizes: uniform, by similarity, and by a Dirichlet distribution per client.

- similarity: the main setting of HyperFL's paper; the term "similarity" for the share of uniform data is from
  Karimireddy et al., SCAFFOLD, ICML 2020.
- dirichlet: Hsu, Qi and Brown, Measuring the effects of non-identical data distribution for federated visual
  classification, arXiv:1909.06335, 2019.
"""

from functools import partial

import numpy as np

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import IntArray
from hyperfl_flwr.data.partition.allocation import (
    FloatArray,
    available_proportions,
    draw_samples,
    equal_sizes,
    round_fairly,
)

_GROUPS = 5
_EMNIST_BYCLASS = (range(10), range(10, 36), range(36, 62))


def iid(
    labels: IntArray,
    rng: np.random.Generator,
    *,
    num_clients: int,
    samples: int | None = None,
    cap: int | None = None,
) -> list[IntArray]:
    """Partition samples uniformly at random, independently of their classes.

    Args:
        labels: Labels of the pool [n]; only their number is used.
        rng: Source of all choices.
        num_clients: Number of clients N.
        samples: Size per client. None: all data, in sizes that differ by at most 1, but at most `cap` each.
        cap: The largest automatic size; None for no limit.

    Returns:
        Sorted positions for each client.

    Raises:
        DataError: If there are more clients than samples.
    """
    count = len(labels)
    _check_clients(num_clients, count)
    sizes = count // num_clients + (rng.permutation(num_clients) < count % num_clients)
    if samples is not None:
        sizes = np.full(num_clients, samples)
    elif cap is not None:
        sizes = np.minimum(sizes, cap)
    # If the sizes add up to more than all samples, the clients wrap around the ring, so that reuse is even.
    ring = rng.permutation(count)
    stops = np.cumsum(sizes)
    return [
        np.sort(ring[np.arange(stop - size, stop) % count]) for stop, size in zip(stops.tolist(), sizes, strict=True)
    ]


def dominant_classes(num_classes: int) -> list[IntArray]:
    """Return the dominant classes of each group of the similarity partition.

    10 classes: {0,1,2}, {2,3,4}, {4,5,6}, {6,7,8}, {8,9,0}. 62 classes (EMNIST byclass): digits, upper case, lower
    case. Any other K generalises the case of 10: the classes are divided into min(5, K) blocks of consecutive classes,
    as equal as possible. A group's dominant classes are its block and the first class of the next block (with K < 3
    only its block, since all groups would be equal otherwise).
    """
    if num_classes == sum(len(group) for group in _EMNIST_BYCLASS):
        return [np.array(group) for group in _EMNIST_BYCLASS]
    blocks = np.array_split(np.arange(num_classes), min(_GROUPS, num_classes))
    if num_classes < 3:
        return list(blocks)
    following = [*blocks[1:], blocks[0]]
    return [np.append(block, after[0]) for block, after in zip(blocks, following, strict=True)]


def similarity(
    labels: IntArray,
    rng: np.random.Generator,
    *,
    num_classes: int,
    num_clients: int,
    iid_fraction: float,
    samples: int | None = None,
    cap: int | None = None,
) -> list[IntArray]:
    """Partition into equal sizes: a share uniform over all classes, the rest in equal parts from dominant classes.

    Args:
        labels: Labels of the pool [n], in 0..K-1.
        rng: Source of all choices.
        num_classes: Number of classes K.
        num_clients: Number of clients N; client i belongs to group i mod (number of groups), see `dominant_classes`.
        iid_fraction: Share of uniform data, in [0, 1]; 1 gives every client all classes in equal numbers.
        samples: Size per client; None for ``auto``.
        cap: The largest automatic size; None for no limit.

    Returns:
        Sorted positions for each client.

    Raises:
        DataError: If there are more clients than samples, or if a group's classes have no samples.
    """
    _check_clients(num_clients, len(labels))
    groups = dominant_classes(num_classes)
    group_proportions = np.full((len(groups), num_classes), iid_fraction / num_classes)
    for row, dominant in zip(group_proportions, groups, strict=True):
        row[dominant] += (1.0 - iid_fraction) / len(dominant)
    membership = np.arange(num_clients) % len(groups)
    proportions = available_proportions(group_proportions[membership], labels)

    def rounding(expected: FloatArray) -> IntArray:
        counts = np.zeros(expected.shape, dtype=np.int64)
        # `round_fairly` is exact for the sum over equal rows, so each group is rounded separately.
        for group in np.unique(membership):
            counts[membership == group] = round_fairly(expected[membership == group], rng)
        return counts

    return draw_samples(labels, equal_sizes(proportions, labels, samples, cap, rounding), rng)


def dirichlet(
    labels: IntArray,
    rng: np.random.Generator,
    *,
    num_classes: int,
    num_clients: int,
    alpha: float,
    samples: int | None = None,
    cap: int | None = None,
) -> list[IntArray]:
    """Partition into equal sizes, with class proportions q_i ~ Dir(alpha, ..., alpha) drawn per client.

    Hsu et al. write Dir(alpha p) with a prior p over the classes; with a uniform p their alpha is K times this one.
    Personalized federated learning uses the symmetric form. The proportions are rounded to whole numbers; samples of
    classes are not drawn one by one.

    Args:
        labels: Labels of the pool [n], in 0..K-1.
        rng: Source of all choices.
        num_classes: Number of classes K; classes without samples are left out.
        num_clients: Number of clients N.
        alpha: Concentration, > 0; large values give uniform classes, small values one class per client.
        samples: Size per client; None for ``auto``.
        cap: The largest automatic size; None for no limit.

    Returns:
        Sorted positions for each client.

    Raises:
        DataError: If there are more clients than samples.
    """
    _check_clients(num_clients, len(labels))
    present = np.unique(labels)
    proportions = np.zeros((num_clients, num_classes))
    proportions[:, present] = rng.dirichlet(np.full(len(present), alpha), size=num_clients)
    return draw_samples(labels, equal_sizes(proportions, labels, samples, cap, partial(round_fairly, rng=rng)), rng)


def _check_clients(num_clients: int, count: int) -> None:
    if num_clients > count:
        raise DataError(
            f"num-clients must be at most the number of training samples {count}, got {num_clients}; lower num-clients"
        )
