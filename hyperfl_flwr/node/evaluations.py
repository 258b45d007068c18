"""Keep the results of a client's evaluations on the node's disk, for the node's owner.

The file lies next to the private state. It has what leaves the node in no message: numbers of single classes. A
simulated node keeps none.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import unwritable, write_atomically
from hyperfl_flwr.core.tasks import CLASSIFICATION, TASKS, Task
from hyperfl_flwr.node.private_state import create_client_folder

FILE = "evaluations.json"

MOST = 2000
"""Largest number of evaluations that are kept: the file is written anew for each."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Numbers of one evaluation on a client's test data.

    Attributes:
        round: The federated round: of the local training (`personalized`), or after which the received state was
            aggregated (`aggregate`); 0 for the initial state.
        kind: `personalized` or `aggregate`.
        samples: Number of test samples.
        loss: Mean loss, see `hyperfl_flwr.models.losses`.
        score: Main score of the task.
        interval: Ends of its 95 % interval over samples of the same kind; None if it is not known.
        scores: The other scores by name, see `other_scores`; NaN for those that are not defined.
    """

    round: int
    kind: str
    samples: int
    loss: float
    score: float
    interval: Sequence[float] | None
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """All evaluations of a client in a run.

    Attributes:
        client: The client's id.
        experiment: Identity of the run.
        method: The run's method.
        dataset: Name of the client's data, without a path.
        classes: Names of the classes, labels or targets [K].
        entries: The last `MOST` evaluations, in the order of their time. A run that is resumed from an earlier round
            repeats those of the rounds after it.
        confusion: Of the newest evaluation of each kind, what is known of single classes, labels or targets, see
            `hyperfl_flwr.metrics.scores.Scores.details`.
        task: Name of the task.
    """

    client: int
    experiment: str
    method: str
    dataset: str
    classes: Sequence[str]
    entries: Sequence[Evaluation] = ()
    confusion: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    task: str = CLASSIFICATION.name  # files of earlier versions have none

    def newest(self, kind: str) -> Evaluation | None:
        """Return the last evaluation of a kind; None if there is none."""
        return next((entry for entry in reversed(self.entries) if entry.kind == kind), None)

    def curve(self, kind: str) -> dict[int, float]:
        """Return the main score after each round, the last one where a round was repeated."""
        found = {entry.round: entry.score for entry in self.entries if entry.kind == kind}
        return dict(sorted(found.items()))

    def added(self, entry: Evaluation, confusion: Sequence[Sequence[float]]) -> "Evaluations":
        """Return the evaluations with one more."""
        return replace(
            self,
            entries=[*self.entries, entry][-MOST:],
            confusion={**self.confusion, entry.kind: confusion},
        )

    def write(self, folder: Path) -> None:
        """Write to a client's folder, which only its owner can read, replacing an earlier file.

        Raises:
            StateError: If the file cannot be written, for example on a full disk; an earlier one is unchanged.
        """
        details = {
            kind: [[value if math.isfinite(value) else None for value in row] for row in rows]
            for kind, rows in self.confusion.items()
        }
        entries = [_values(entry, TASKS[self.task]) for entry in self.entries]
        document = {**vars(self), "entries": entries, "confusion": details}
        data = json.dumps(document).encode()
        try:
            create_client_folder(folder)
            write_atomically(folder / FILE, data, mode=0o600)
        except OSError as error:
            raise StateError(
                f"the evaluations of client {self.client} are not stored: {unwritable(folder, error, len(data))}"
            ) from error

    @staticmethod
    def stored(folder: Path) -> float:
        """Return when the evaluations in a client's folder were written, in seconds since 1970; 0 without any."""
        path = folder / FILE
        return path.stat().st_mtime if path.is_file() else 0.0

    @staticmethod
    def set_aside(folder: Path) -> None:
        """Rename a file that cannot be read, so that the results of a run do not stop its training."""
        (folder / FILE).rename(folder / f"{FILE}.unreadable")

    @classmethod
    def read(cls, folder: Path) -> "Evaluations | None":
        """Read what `write` has written; None if there is no file.

        Raises:
            StateError: If the file is damaged or of an incompatible version.
        """
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            document: dict[str, Any] = json.loads(path.read_bytes())
            task = TASKS[document.get("task", CLASSIFICATION.name)]
            details = {
                kind: [[math.nan if value is None else value for value in row] for row in rows]
                for kind, rows in document.pop("confusion").items()
            }
            entries = [_entry(values, task) for values in document.pop("entries")]
            return cls(entries=entries, confusion=details, **document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"{path} is not a file of evaluations that this version of hyperfl-flwr can read ({error}); move it "
                f"away"
            ) from None


def other_scores(task: Task) -> tuple[str, ...]:
    """Return the names of all scores but the main one that are kept of an evaluation."""
    return (*task.all_scores, *(("majority_share",) if task.has_shares else ()))


def _values(entry: Evaluation, task: Task) -> dict[str, Any]:
    numbers = {"loss": entry.loss, task.score: entry.score, **entry.scores}
    return {
        "round": entry.round,
        "kind": entry.kind,
        "samples": entry.samples,
        "interval": entry.interval,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
    }


def _entry(values: Mapping[str, Any], task: Task) -> Evaluation:
    def number(name: str) -> float:
        return math.nan if values[name] is None else float(values[name])

    return Evaluation(
        round=values["round"],
        kind=values["kind"],
        samples=values["samples"],
        loss=number("loss"),
        score=number(task.score),
        interval=values["interval"],
        scores={name: number(name) for name in other_scores(task)},
    )
