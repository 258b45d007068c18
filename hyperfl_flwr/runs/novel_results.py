"""The accuracies of novel clients: the records of novel.json, and their means."""

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
"""What giving a client its model takes; attributes of `NovelRecord`."""


@dataclass(frozen=True, kw_only=True)
class NovelRecord:
    """What one novel client got in one way.

    Attributes:
        way: See `strategies.novel.assess`.
        client: Its id.
        corruption: Of its samples, both kinds; `none`.
        accuracy: On its test samples, a share in [0, 1].
        num_examples: Their number.
        bytes_down: What it was sent to get its model: that, and encoder or classifiers.
        bytes_up: What it has sent for it.
        bytes_of_others: What training clients were sent and have sent for it.
        models: How many models it was sent.
        samples: Unlabelled samples that it used; 0 where a way needs none.
        all_samples: Whether these are all that it could use.
        epsilon: Of the noise on its descriptor; None without noise.
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
        """Whether all samples were used, without noise."""
        return self.all_samples and self.epsilon is None

    def to_json(self) -> dict[str, Any]:
        """Return it as novel.json has it."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The mean accuracy of some clients.

    Attributes:
        mean: A share in [0, 1].
        sem: Its standard error over the clients, of the standard deviation with n - 1; None of a single client.
    """

    mean: float
    sem: float | None

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if self.sem is None else f" +- {100 * self.sem:.1f}")


def mean_of(accuracies: Sequence[float]) -> Mean:
    """Return mean and standard error of at least one accuracy."""
    number = len(accuracies)
    sem = statistics.stdev(accuracies) / math.sqrt(number) if number > 1 else None
    return Mean(mean=statistics.fmean(accuracies), sem=sem)


def means(records: Iterable[NovelRecord]) -> Mapping[tuple[str, str], Mean]:
    """Return the means by way and corruption over the clients, of records with all samples and without noise."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.is_unlimited:
            found.setdefault((record.way, record.corruption), []).append(record.accuracy)
    return {key: mean_of(accuracies) for key, accuracies in found.items()}


def flat_means(records: Sequence[NovelRecord]) -> dict[str, float | None]:
    """Return `means` as summary.json has them: `novel_WAY[_CORRUPTION][_sem]`, and the mean costs: `novel_WAY_COST`."""
    flat: dict[str, float | None] = {}
    for (way, corruption), found in means(records).items():
        name = f"novel_{way}" if corruption == "none" else f"novel_{way}_{corruption}"
        flat |= {name: found.mean, f"{name}_sem": found.sem}
    for way in dict.fromkeys(record.way for record in records):
        plain = [record for record in records if record.way == way and _is_plain(record)]
        flat |= {
            f"novel_{way}_{cost}": statistics.fmean(getattr(each, cost) for each in plain) for cost in COSTS if plain
        }
    return flat


def _is_plain(record: NovelRecord) -> bool:
    return record.corruption == "none" and record.is_unlimited


def described(records: Sequence[NovelRecord]) -> str:
    """Return the means in one line, in per cent."""
    number = len({record.client for record in records})
    parts = [
        f"{way} {found}" + ("" if corruption == "none" else f" ({corruption})")
        for (way, corruption), found in means(records).items()
    ]
    text = ", ".join(parts) or "see novel.json, none was assessed with all samples and without noise"
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
        raise StateError(f"{file} is damaged ({error}); resume the run to have it made again") from None
