"""The results of clients' training, on their way from a trainer to the node's reply."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyperfl_flwr.protocol.arrays import SharedArrays, Uploads


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of C clients that were trained together.

    Attributes:
        clients: Their ids [C].
        stacked: Their shared arrays, each [C, *shape]; the trainer does not write to them again.
        num_examples: Their numbers of training samples [C].
        metrics: Their metrics [C].
    """

    clients: Sequence[int]
    stacked: SharedArrays
    num_examples: Sequence[int]
    metrics: Sequence[Mapping[str, Any]]

    @property
    def each(self) -> Iterator["TrainedOne"]:
        """The results of each client."""
        for row, (client, num_examples, metrics) in enumerate(
            zip(self.clients, self.num_examples, self.metrics, strict=True)
        ):
            arrays = {key: value[row] for key, value in self.stacked.items()}
            yield TrainedOne(client=client, arrays=arrays, num_examples=num_examples, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class TrainedOne:
    """Results of one client.

    Attributes:
        client: Its id.
        arrays: Its shared arrays; the trainer does not write to them again.
        num_examples: Its number of training samples.
        metrics: Its metrics.
    """

    client: int
    arrays: Uploads
    num_examples: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A client that could not be trained, with the error."""

    client: int
    error: Exception
