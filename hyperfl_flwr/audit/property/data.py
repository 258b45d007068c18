"""Draw the training samples of the federations of a property game: the share of one class differs between clients.

The data set's training part is divided into two halves without a common sample. Federations with even numbers train on
the first half, those with odd ones on the second; each is attacked with the federations of the other half as shadows,
so that no attacker has seen a sample of whom it attacks. Every client of a federation draws its own number of samples
of the class, uniformly from 0 to the largest share; the rest is balanced over the other classes. The clients of a
federation share no sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.audit.membership.shadow_data import GameData
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.dataset import Dataset, IntArray
from hyperfl_flwr.data.registry import load_dataset

Shares = NDArray[np.float64]

LEAST_SAMPLES = 5
"""Smallest number of samples of a client; with fewer, hardly any share can be told from another."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PropertyData(GameData):
    """The samples of a property game.

    Attributes:
        halves: Positions in the training part of each half's samples, by class.
        label: The class whose share is estimated, in 0..K-1.
        counts: Number of samples of this class of each client in each federation [M, N].
        samples: Number n of training samples of each client.
        seed: Seed of the draws.
    """

    halves: tuple[tuple[IntArray, ...], tuple[IntArray, ...]]
    label: int
    counts: IntArray
    samples: int
    seed: int

    @property
    def shares(self) -> Shares:
        """The share of the class among each client's samples [M, N]."""
        return self.counts / self.samples

    def drawn(self, number: int) -> list[IntArray]:
        """Return the positions in the training part of each client's samples in one federation, from 0."""
        rng = numpy_generator(self.seed, "property", "samples", number)
        orders = [rng.permutation(positions) for positions in self.halves[number % 2]]
        ends = np.zeros(len(orders), np.int64)
        found = []
        for counts in self._class_counts(number, rng):
            chosen = zip(orders, ends, ends + counts, strict=True)
            found.append(np.sort(np.concatenate([order[start:end] for order, start, end in chosen])))
            ends += counts
        return found

    def _class_counts(self, number: int, rng: np.random.Generator) -> Iterator[IntArray]:
        """Yield each client's number of samples of each class [K]."""
        others = np.delete(np.arange(len(self.halves[0])), self.label)
        for count in self.counts[number]:
            each, more = divmod(self.samples - int(count), len(others))
            counts = np.full(len(others) + 1, each)
            counts[rng.choice(others, more, replace=False)] += 1
            counts[self.label] = count
            yield counts


def load_property_data(config: RunConfig, federations: int, label: int, largest_share: float) -> PropertyData:
    """Load the data of the settings, and draw the shares.

    Args:
        config: The settings; of the partition they give only the number of samples of a client.
        federations: Number M of federations.
        label: The class whose share is estimated.
        largest_share: Its largest share, in (0, 1].

    Raises:
        ConfigError: If there is no such class, the share is out of range, or clients have too few or too many samples.
        DataError: If the data set cannot be loaded.
    """
    settings = config.data_settings()
    root = Path(settings.data_root) if settings.data_root else None
    dataset = load_dataset(settings.dataset, root, settings.sample_format)
    classes = dataset.num_classes
    if not 0 <= label < classes:
        raise ConfigError(f"the class must be one of 0 to {classes - 1} of {dataset.name}, got {label}")
    if not 0 < largest_share <= 1:
        raise ConfigError(f"the largest share of the class must be above 0 and at most 1, got {largest_share:g}")
    halves = _halves(dataset, config.seed)
    samples = _samples(config, halves, label, largest_share)
    if not (most := _most(samples, largest_share)):
        raise ConfigError(
            f"the largest share of the class must be at least one of a client's {samples} samples, got "
            f"{largest_share:g}; raise it, or data.train-samples"
        )
    draws = numpy_generator(config.seed, "property", "shares")
    return PropertyData(
        dataset=dataset,
        known=np.arange(len(dataset.test)),
        halves=halves,
        label=label,
        counts=draws.integers(most + 1, size=(federations, config.num_clients)),
        samples=samples,
        seed=config.seed,
    )


def _halves(dataset: Dataset, seed: int) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
    rng = numpy_generator(seed, "property", "halves")
    members = [rng.permutation(np.flatnonzero(dataset.train.labels == label)) for label in range(dataset.num_classes)]
    return tuple(each[::2] for each in members), tuple(each[1::2] for each in members)


def _samples(
    config: RunConfig, halves: tuple[tuple[IntArray, ...], tuple[IntArray, ...]], label: int, largest_share: float
) -> int:
    """Return the number of samples of a client: that of the settings, or the largest that suits the data set."""
    sizes = np.min([[len(positions) for positions in half] for half in halves], axis=0)
    others = int(np.delete(sizes, label).min())

    def fits(samples: int) -> bool:
        of_class, of_others = _most(samples, largest_share), -(-samples // (len(sizes) - 1))
        return config.num_clients * of_class <= sizes[label] and config.num_clients * of_others <= others

    largest = next((number for number in range(int(sizes.sum()), 0, -1) if fits(number)), 0)
    given = config.data.train_samples
    samples = largest if given == "auto" else given
    if largest < LEAST_SAMPLES:
        raise ConfigError(
            f"each client needs at least {LEAST_SAMPLES} training samples, but half of the training data has "
            f"{largest} for each of {config.num_clients} clients, with up to {100 * largest_share:g} % of one class; "
            f"lower num-clients, or take a larger data set"
        )
    if not LEAST_SAMPLES <= samples <= largest:
        raise ConfigError(
            f"data.train-samples must be {LEAST_SAMPLES} to {largest} for {config.num_clients} clients that share half "
            f"of the data set's training part, with up to {100 * largest_share:g} % of one class; got {given}"
        )
    return samples


def _most(samples: int, largest_share: float) -> int:
    """Return the largest number of samples of the class among a client's samples."""
    return int(largest_share * samples + 1e-9)
