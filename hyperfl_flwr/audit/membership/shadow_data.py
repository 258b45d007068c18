"""Draw the training samples of shadow federations: each sample in exactly half of them.

The samples that the settings give to a client are its pool. The federations come in pairs: of each client, the first of
a pair trains on a random half of the pool and the second on the other half. Every federation is attacked in turn, with
all federations but its own pair as shadows. Of these, exactly half were trained on each sample, whether or not the
attacked one was: the draws alone reveal nothing.

The data set's test part is divided: the attacker has one half of it, with labels. Of the other half, which nothing is
trained on either, controls are drawn, and equally many members among them in name only: whoever recognises these
would be wrong about all others, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.storage import write_npz
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.dataset import Dataset, IntArray, Split
from hyperfl_flwr.data.federated_data import load_federated_data, normalised

Draws = NDArray[np.bool_]
"""Whether each federation trains on each sample [M, n]."""

LEAST_FEDERATIONS = 8
"""Smallest number M of federations. Intervals repeat the attacks without a pair; of the M - 4 shadows that remain, each
sample is in two, and not in two."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GameData:
    """The samples of a game with shadow federations.

    Attributes:
        dataset: The data set.
        known: Positions in its test part of the attacker's own labelled samples.
    """

    dataset: Dataset
    known: IntArray

    @property
    def normalisation(self) -> str:
        """The data set's normalisation as the setting `data.normalisation`, the same for all federations."""
        return "/".join(",".join(f"{value:.9g}" for value in part) for part in (self.dataset.mean, self.dataset.std))

    def attackers(self) -> tuple[Tensor, Tensor]:
        """Return the attacker's own samples, normalised, and their labels."""
        return self._tensors(self.dataset.test, self.known)

    def write_clients(self, parts: Sequence[IntArray], path: Path) -> None:
        """Write the samples of one federation to an `.npz` file, as `hyperfl_flwr.data.sources.npz` reads it.

        Args:
            parts: Positions in the training part of the samples of each client.
            path: The file. Its test samples are the attacker's.
        """
        train, test = self.dataset.train, self.dataset.test
        kind = "features" if train.images.ndim == 2 else "images"
        chosen = np.concatenate(parts)
        arrays = {
            kind: train.images[chosen], "labels": train.labels[chosen],
            "clients": np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
            f"test_{kind}": test.images[self.known], "test_labels": test.labels[self.known],
        }  # fmt: skip
        write_npz(path, arrays, mode=0o600)

    def _tensors(self, split: Split, indices: IntArray) -> tuple[Tensor, Tensor]:
        images = normalised(split.scaled(indices), self.dataset.mean, self.dataset.std)
        return images, torch.tensor(split.labels[indices])


@dataclass(frozen=True, kw_only=True, eq=False)
class ShadowData(GameData):
    """The samples of a game of membership inference.

    Attributes:
        pools: Positions [n] in its training part of the samples of each client, an even number.
        controls: Positions in its test part of samples that nobody trains on.
    """

    pools: tuple[IntArray, ...]
    controls: IntArray

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's pool followed by the controls: normalised samples [n + c, ...] and labels [n + c]."""
        parts = ((self.dataset.train, self.pools[client]), (self.dataset.test, self.controls))
        found = [self._tensors(split, indices) for split, indices in parts]
        images, labels = zip(*found, strict=True)
        return torch.cat(images), torch.cat(labels)

    def drawn(self, draws: Sequence[Draws], number: int) -> list[IntArray]:
        """Return the positions in the training part of the samples of each client in one federation.

        Args:
            draws: The draws of each client's pool.
            number: Number of the federation, from 0.
        """
        return [pool[draws[client][number]] for client, pool in enumerate(self.pools)]


def load_shadow_data(config: RunConfig) -> ShadowData:
    """Load the data of the settings and divide it into pools, the attacker's samples and controls.

    Raises:
        ConfigError: If clients share samples, or have too few.
        DataError: If the data set cannot be loaded, or is too small.
    """
    data = load_federated_data(config.data_settings())
    pools = tuple(_even(data.train_indices(client)) for client in range(config.num_clients))
    together = np.concatenate(pools)
    if len(np.unique(together)) < len(together):
        raise ConfigError(
            f"the clients share training samples, so that a member of one could be a non-member of another; lower "
            f"data.train-samples or num-clients, or take another data.partition (now {data.partition})"
        )
    if (smallest := min(map(len, pools))) < 4:
        raise ConfigError(f"each client needs at least 4 training samples, got {smallest}; raise data.train-samples")
    order = numpy_generator(config.seed, "membership", "test").permutation(len(data.dataset.test))
    known, others = np.sort(order[::2]), np.sort(order[1::2])
    controls = _even(others[: max(map(len, pools))])
    if len(controls) < 4:
        raise ConfigError(
            f"half of the data set's test part, of which controls are drawn, must be at least 4 samples, got "
            f"{len(others)}; take a data set with more test data"
        )
    return ShadowData(dataset=data.dataset, pools=pools, known=known, controls=controls)


def draw(seed: int, purpose: str, size: int, federations: int) -> Draws:
    """Draw which samples each federation trains on: half of them, and each sample in exactly half of the federations.

    Args:
        seed: The seed.
        purpose: Name of the samples.
        size: Number n of samples, even.
        federations: Number M of federations, even.

    Returns:
        [M, n]; rows 2k + 1 are the complements of rows 2k.

    Raises:
        ConfigError: If a number is odd, or there are fewer than `LEAST_FEDERATIONS`.
    """
    if federations < LEAST_FEDERATIONS or federations % 2 or size % 2:
        raise ConfigError(
            f"shadow federations come in pairs, at least {LEAST_FEDERATIONS} in all, and divide an even number of "
            f"samples, got {federations} federations and {size} samples"
        )
    drawn = np.zeros((federations, size), bool)
    for pair in range(federations // 2):
        order = numpy_generator(seed, "membership", purpose, pair).permutation(size)
        drawn[2 * pair, order[: size // 2]] = True
        drawn[2 * pair + 1] = ~drawn[2 * pair]
    return drawn


def draws_of(data: ShadowData, seed: int, federations: int) -> tuple[list[Draws], list[Draws]]:
    """Return the draws of each client's pool, and for each client those of the controls, members in name only."""
    return (
        [draw(seed, f"client-{client}", len(pool), federations) for client, pool in enumerate(data.pools)],
        [draw(seed, f"controls-{client}", len(data.controls), federations) for client in range(len(data.pools))],
    )


def _even(indices: IntArray) -> IntArray:
    return indices[: len(indices) // 2 * 2]
