"""Results of novel clients: the records of novel.json, and their means."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import StateError

FILE = "novel.json"

COSTS = ("bytes_down", "bytes_up", "bytes_of_others", "models")
"""Costs of providing a client with its model; attributes of `NovelRecord`."""


@dataclass(frozen=True, kw_only=True)
class NovelRecord:
    """Result of one novel client with one way of obtaining a model.

    Attributes:
        way: Name of the way, see `strategies.novel.assess`.
        client: The client's id.
        corruption: Corruption of its training and test samples; `none` without one.
        accuracy: Accuracy on its test samples, in [0, 1].
        num_examples: Number of its test samples.
        bytes_down: Bytes sent to the client for its model: the model itself, and an encoder or classifiers.
        bytes_up: Bytes sent by the client for its model.
        bytes_of_others: Bytes sent to and by training clients for this client's model.
        models: Number of models sent to the client.
        samples: Number of unlabelled samples used; 0 if the way needs none.
        all_samples: True if these are all samples that it could use.
        epsilon: Privacy parameter epsilon of the noise on its descriptor; None without noise.
    """

    way: str
    client: int
    corruption: str
    accuracy: float
    num_examples: int
    bytes_down: int
    models: int
    bytes_up: int = 0
    bytes_of_others: int = 0
    samples: int = 0
    all_samples: bool = True
    epsilon: float | None = None

    @property
    def is_unlimited(self) -> bool:
        """True if all samples were used, without noise."""
        return self.all_samples and self.epsilon is None

    def to_json(self) -> dict[str, Any]:
        """Return the record in the format of novel.json."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Mean accuracy over clients.

    Attributes:
        mean: Mean accuracy, in [0, 1].
        sem: Standard error of the mean over the clients (standard deviation with n - 1); None for a single client.
    """

    mean: float
    sem: float | None

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if self.sem is None else f" +- {100 * self.sem:.1f}")


def mean_of(accuracies: Sequence[float]) -> Mean:
    """Return the mean and standard error of one or more accuracies."""
    number = len(accuracies)
    sem = statistics.stdev(accuracies) / math.sqrt(number) if number > 1 else None
    return Mean(mean=statistics.fmean(accuracies), sem=sem)


def means(records: Iterable[NovelRecord]) -> Mapping[tuple[str, str], Mean]:
    """Return the mean over clients by (way, corruption), for records with all samples and without noise."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.is_unlimited:
            found.setdefault((record.way, record.corruption), []).append(record.accuracy)
    return {key: mean_of(accuracies) for key, accuracies in found.items()}


def flat_means(records: Sequence[NovelRecord]) -> dict[str, float | None]:
    """Return `means` by the names in summary.json: `novel_WAY[_CORRUPTION][_sem]`, and mean costs `novel_WAY_COST`."""
    flat: dict[str, float | None] = {}
    for (way, corruption), found in means(records).items():
        name = f"novel_{way}" if corruption == "none" else f"novel_{way}_{corruption}"
        flat |= {name: found.mean, f"{name}_sem": found.sem}
    for way in dict.fromkeys(record.way for record in records):
        plain = [record for record in records if record.way == way and _is_plain(record)]
        flat |= {
            f"novel_{way}_{cost}": statistics.fmean(getattr(record, cost) for record in plain)
            for cost in COSTS
            if plain
        }
    return flat


def _is_plain(record: NovelRecord) -> bool:
    return record.corruption == "none" and record.is_unlimited


def described(records: Sequence[NovelRecord]) -> str:
    """Return the means in per cent as one line of text."""
    number = len({record.client for record in records})
    parts = [
        f"{way} {found}" + ("" if corruption == "none" else f" ({corruption})")
        for (way, corruption), found in means(records).items()
    ]
    text = ", ".join(parts) or "none assessed with all samples and without noise, see novel.json"
    return f"{number} novel client{'s' if number > 1 else ''}: {text}"


def read_novel(path: Path) -> list[NovelRecord]:
    """Read the novel.json of a run folder; empty if there is none.

    Raises:
        StateError: If it is damaged.
    """
    file = path / FILE
    if not file.is_file():
        return []
    try:
        return [NovelRecord(**record) for record in json.loads(file.read_text())]
    except (ValueError, TypeError) as error:
        raise StateError(f"{file} is damaged ({error}); resume the run to create it again") from None
