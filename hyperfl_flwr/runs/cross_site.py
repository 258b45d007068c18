"""The cross-site matrix of a run: the accuracy of each client's model on each client's test data."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from hyperfl_flwr.core.errors import StateError


@dataclass(frozen=True, kw_only=True)
class CrossSite:
    """Accuracies of the personalized models of M >= 2 clients on the test data of the same clients.

    Attributes:
        clients: Ids of the clients [M], ascending.
        samples: Number of test samples of each client [M].
        accuracy: Accuracy of the model of the client in row i on the data of the client in column j, in [0, 1]
            [M, M].
        bytes_on_wire: Serialised size of all messages and replies for the matrix, in bytes.
    """

    FILE: ClassVar[str] = "cross_site.json"

    clients: Sequence[int]
    samples: Sequence[int]
    accuracy: Sequence[Sequence[float]]
    bytes_on_wire: int = 0

    @property
    def own(self) -> float:
        """Mean accuracy of the models on the data of their own clients."""
        return statistics.fmean(row[number] for number, row in enumerate(self.accuracy))

    @property
    def others(self) -> float:
        """Mean accuracy of the models on the data of other clients."""
        return statistics.fmean(value for first, second, value in self._cells() if first != second)

    @property
    def better_elsewhere(self) -> list[int]:
        """The clients on whose data the model of another client has a higher accuracy than their own."""
        return [
            client
            for number, client in enumerate(self.clients)
            if max(row[number] for row in self.accuracy) > self.accuracy[number][number]
        ]

    def text(self) -> str:
        """Describe the matrix in one line."""
        number = len(self.clients)
        return (
            f"the models of {number} clients have an accuracy of {100 * self.own:.2f} % on their own clients' test "
            f"data, and of {100 * self.others:.2f} % on those of others; for {len(self.better_elsewhere)} of {number} "
            f"clients another client's model is better than their own"
        )

    def rows(self) -> list[list[str]]:
        """Return the rows of a table in percent: the client of the model, and its accuracy on the data of each."""
        return [
            [str(client), *(f"{100 * value:.1f}" for value in row)]
            for client, row in zip(self.clients, self.accuracy, strict=True)
        ]

    def entries(self) -> dict[str, float]:
        """Return the numbers of summary.json."""
        return {
            "cross_site_own": self.own,
            "cross_site_others": self.others,
            "cross_site_better_elsewhere": len(self.better_elsewhere),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the format of the file."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> "CrossSite | None":
        """Read the matrix of a run's folder; None if it has none.

        Raises:
            StateError: If the file is damaged.
        """
        file = path / cls.FILE
        if not file.is_file():
            return None
        try:
            document: Mapping[str, Any] = json.loads(file.read_text())
            found = cls(**document)
            number = len(found.clients)
            if number < 2 or {len(found.samples), len(found.accuracy), *map(len, found.accuracy)} != {number}:
                raise ValueError("it is not a square matrix of two or more clients")
            if not all(type(value) in (int, float) and 0 <= value <= 1 for _, _, value in found._cells()):
                raise ValueError("its accuracies are not numbers in [0, 1]")
        except (OSError, TypeError, ValueError) as error:
            raise StateError(f"{file} is damaged ({error}); run the experiment again") from None
        return found

    def _cells(self) -> Iterator[tuple[int, int, float]]:
        for first, row in enumerate(self.accuracy):
            for second, value in enumerate(row):
                yield first, second, value
