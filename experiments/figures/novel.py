"""Compute the numbers of IT-PFL-HN's figures from the results of novel clients.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022. Its Figure 3 shows the accuracy of novel
clients against the Kullback-Leibler divergence to the nearest training client, "over the empirical distributions of
labels". It specifies neither the direction nor the treatment of classes that one of them lacks. Here, for the novel
client's counts n and a training client's m of K classes,

    KL(p || q) = sum_k p_k ln(p_k / q_k)  in nats,    p_k = (n_k + 1) / (sum n + K),    q_k = (m_k + 1) / (sum m + K),

and the nearest training client is the one with the smallest divergence.
"""

import itertools
import statistics
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.runs.listed_clients import label_rows
from hyperfl_flwr.runs.novel_results import Mean, NovelRecord, mean_of, read_novel
from hyperfl_flwr.runs.run_directory import read_manifest

Counts = Sequence[Sequence[int]] | npt.NDArray[np.int64]

Points = list[tuple[float, float]]
"""Divergence and accuracy of clients."""

Curve = dict[float | None, Mean]
"""Accuracy over the novel clients by epsilon; None is without noise."""


def nearest_divergence(novel: Sequence[int], training: Counts) -> float:
    """Return the divergence of a novel client's labels from those of the nearest training client, see the module.

    Args:
        novel: The novel client's number of samples of each class [K].
        training: The training clients' numbers of samples [N, K].

    Returns:
        The smallest KL(novel || training client) in nats.
    """
    p, q = (np.asarray(counts, dtype=np.float64) + 1 for counts in (novel, training))
    p, q = p / p.sum(), q / q.sum(axis=1, keepdims=True)
    return float(np.min(np.sum(p * np.log(p / q), axis=1)))


def divergence_points(run: Path, way: str) -> dict[int, tuple[float, float]]:
    """Return divergence and accuracy of each novel client of a run, from all its samples and without noise, by id."""
    manifest = read_manifest(run)
    counts, trained = label_rows(manifest), manifest["settings"]["num-clients"]
    return {
        record.client: (nearest_divergence(counts[record.client], counts[:trained]), record.accuracy)
        for record in _uncorrupted(run, way)
        if record.is_unlimited
    }


def means_of_clients(points: Iterable[tuple[Hashable, tuple[float, float]]]) -> Points:
    """Return the mean point of each client over its seeds, which are not independent of each other.

    Args:
        points: What identifies a client, and its point with one seed.
    """
    found: dict[Hashable, Points] = {}
    for client, point in points:
        found.setdefault(client, []).append(point)
    return [
        (statistics.fmean(x for x, _ in of_client), statistics.fmean(y for _, y in of_client))
        for of_client in found.values()
    ]


def quintiles(points: Points) -> list[tuple[float, Mean]]:
    """Divide points (x, accuracy) by x into five groups of nearly equal size.

    Returns:
        The mean x and the mean accuracy of each group that is not empty.
    """
    ordered = sorted(points)
    bounds = [round(len(ordered) * part / 5) for part in range(6)]
    groups = [ordered[start:end] for start, end in itertools.pairwise(bounds) if end > start]
    return [(statistics.fmean(x for x, _ in group), mean_of([y for _, y in group])) for group in groups]


def curves(run: Path, way: str) -> dict[int, Curve]:
    """Return the accuracy over a run's novel clients by number of samples, ascending, and epsilon.

    Results with all samples of each client are listed under the rounded mean of the clients' numbers of samples.
    Results with corrupted images are left out.
    """
    records = _uncorrupted(run, way)
    of_all = [record.samples for record in records if record.all_samples]
    groups: dict[int, dict[float | None, list[float]]] = {}
    for record in records:
        number = round(statistics.fmean(of_all)) if record.all_samples else record.samples
        groups.setdefault(number, {}).setdefault(record.epsilon, []).append(record.accuracy)
    return {
        number: {epsilon: mean_of(accuracies) for epsilon, accuracies in groups[number].items()}
        for number in sorted(groups)
    }


def _uncorrupted(run: Path, way: str) -> list[NovelRecord]:
    return [record for record in read_novel(run) if record.way == way and record.corruption == "none"]
