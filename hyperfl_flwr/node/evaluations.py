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
from hyperfl_flwr.core.storage import unwritable, write_atomically
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
        loss: Mean cross-entropy in nats.
        accuracy: Share of correctly classified samples, as the other numbers in [0, 1].
        interval: Ends of its 95 % interval over samples of the same kind; None without samples.
        balanced_accuracy: Mean recall over the classes that have samples.
        macro_f1: Mean F1 over the classes.
        auc: Mean area under the ROC curves; NaN if all samples have the same label.
        majority_share: Share of the most common class.
    """

    round: int
    kind: str
    samples: int
    loss: float
    accuracy: float
    interval: Sequence[float] | None
    balanced_accuracy: float
    macro_f1: float
    auc: float
    majority_share: float


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """All evaluations of a client in a run.

    Attributes:
        client: The client's id.
        experiment: Identity of the run.
        method: The run's method.
        dataset: Name of the client's data, without a path.
        classes: Names of the classes [K].
        entries: The last `MOST` evaluations, in the order of their time. A run that is resumed from an earlier round
            repeats those of the rounds after it.
        confusion: Of the newest evaluation of each kind, the kinds of predictions that occur: true class, predicted
            class, number of samples.
    """

    client: int
    experiment: str
    method: str
    dataset: str
    classes: Sequence[str]
    entries: Sequence[Evaluation] = ()
    confusion: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    def newest(self, kind: str) -> Evaluation | None:
        """Return the last evaluation of a kind; None if there is none."""
        return next((entry for entry in reversed(self.entries) if entry.kind == kind), None)

    def curve(self, kind: str) -> dict[int, float]:
        """Return the accuracy after each round, the last one where a round was repeated."""
        found = {entry.round: entry.accuracy for entry in self.entries if entry.kind == kind}
        return dict(sorted(found.items()))

    def added(self, entry: Evaluation, confusion: Sequence[Sequence[int]]) -> "Evaluations":
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
        document = {**vars(self), "entries": [_values(entry) for entry in self.entries]}
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
            return cls(entries=[_entry(values) for values in document.pop("entries")], **document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"{path} is not a file of evaluations that this version of hyperfl-flwr can read ({error}); move it "
                f"away"
            ) from None


def _values(entry: Evaluation) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value for name, value in vars(entry).items()
    }


def _entry(values: Mapping[str, Any]) -> Evaluation:
    known: dict[str, Any] = {
        name: math.nan if value is None and name != "interval" else value for name, value in values.items()
    }
    return Evaluation(**known)
