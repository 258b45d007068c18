"""Find the training client that is nearest to a novel client by A-distance.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 6.2 (3c); the mathematics is in
`hyperfl_flwr.training.a_distance`. Each pair of a novel and a training client has a linear classifier that learns to
distinguish their samples. The server sends its weights to both clients and steps them along the mean of the returned
gradients: full-batch gradient descent from zero. Then both clients return its error rate on their other samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import SharedArrays, num_bytes
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.protocol.queries import CLASSIFIERS, ERRORS, GRADIENTS, RATES, QuerySpec
from hyperfl_flwr.training.a_distance import a_distance
from strategies.engine.context import ServerContext
from strategies.engine.query_clients import Query, ask

LARGEST_GRADIENT = 1e6
"""Largest magnitude of a gradient's numbers.

Honest ones are at most the size of the samples' numbers. Numbers of 1e38 would make the classifiers infinite, which are
sent to all novel clients.
"""


@dataclass(kw_only=True)
class Distances:
    """A-distances of novel clients, and their communication costs.

    Attributes:
        between: Novel client -> training client -> A-distance, of the clients that answered until the end.
        samples: Number of unlabelled samples of each novel client.
        bytes_down: Bytes of weights sent to each novel client.
        bytes_up: Bytes of gradients and error rates received from each novel client.
        bytes_of_others: Bytes exchanged with all training clients for each novel client's classifiers.
        failures: Clients of either kind that were left out.
    """

    between: dict[int, dict[int, float]] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    bytes_down: dict[int, int] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)
    bytes_of_others: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def nearest(self, client: int) -> int:
        """Return the training client that is nearest to a novel client; of equally near ones the lowest id."""
        distances = self.between[client]
        return min(sorted(distances), key=distances.__getitem__)


def find_distances(grid: Grid, context: ServerContext, corruption: str) -> Distances:
    """Find the A-distance of every novel client to every training client.

    Args:
        grid: Flower's grid.
        context: Nodes and settings of the run.
        corruption: Corruption of the novel clients' samples.

    Raises:
        RunFailedError: If a node's process died twice in a row.
    """
    config = context.config
    pairs = _Pairs(grid, context, corruption)
    for _ in range(config.novel.a_distance_rounds):
        novel, training = pairs.ask(GRADIENTS)
        pairs.step(novel, training, config.novel.a_distance_learning_rate)
    return pairs.measured(*pairs.ask(ERRORS))


class _Pairs:
    """The classifiers of all pairs of clients that have not failed.

    Attributes:
        weights: Weights [K, N, D + 1] for K novel and N training clients, by position in `novel` and `training`.
        novel: Ids of novel clients, ascending.
        training: Ids of training clients, ascending.
    """

    def __init__(self, grid: Grid, context: ServerContext, corruption: str) -> None:
        config = context.config
        self._grid, self._setting, self._corruption = grid, context, corruption
        self.novel = list(range(config.num_clients, config.hosted_clients))
        self.training = list(range(config.num_clients))
        features = math.prod(context.federation.input_shape)
        self.weights = np.zeros((len(self.novel), len(self.training), features + 1), np.float32)
        zeros = dict.fromkeys(self.novel, 0)
        self._found = Distances(bytes_down=dict(zeros), bytes_up=dict(zeros), bytes_of_others=dict(zeros))

    def ask(self, kind: str) -> tuple[Mapping[int, SharedArrays], Mapping[int, SharedArrays]]:
        """Query both clients of every pair, drop the clients that fail, and return the others' answers.

        Args:
            kind: `GRADIENTS` or `ERRORS`.

        Returns:
            Answers of novel clients and of training clients, by client; rows are in the order of the pairs kept.
        """
        per_client = {client: {CLASSIFIERS: self.weights[row]} for row, client in enumerate(self.novel)}
        per_training_client = {client: {CLASSIFIERS: self.weights[:, row]} for row, client in enumerate(self.training)}
        novel = self._query(kind, per_client, self._corruption)
        training = self._query(kind, per_training_client, "none")  # only novel clients' samples are corrupted
        self._count(per_client, novel, training)
        rows = [row for row, client in enumerate(self.novel) if client in novel]
        columns = [row for row, client in enumerate(self.training) if client in training]
        kept: dict[int, Any] = {client: _select_rows(novel[client], columns) for client in novel}
        others: dict[int, Any] = {client: _select_rows(training[client], rows) for client in training}
        self.weights = self.weights[np.ix_(rows, columns)]
        self.novel, self.training = sorted(novel), sorted(training)
        return kept, others

    def _query(self, kind: str, per_client: Mapping[int, SharedArrays], corruption: str) -> Mapping[int, SharedArrays]:
        if not per_client or not next(iter(per_client.values()))[CLASSIFIERS].size:
            return {}
        expected = (
            per_client if kind == GRADIENTS else {client: _rates(arrays) for client, arrays in per_client.items()}
        )
        query = Query(
            kind=kind,
            clients=list(per_client),
            expected=expected,
            per_client=per_client,
            question=QuerySpec(corruption=corruption),
            largest=LARGEST_GRADIENT if kind == GRADIENTS else math.inf,
        )
        answers = ask(self._grid, self._setting, self._setting.config.num_rounds, query)
        self._found.failures += answers.failures
        if kind == ERRORS:
            self._refuse_impossible(answers.arrays)
        self._found.samples |= {
            client: count
            for client, count in answers.num_examples.items()
            if kind == GRADIENTS and client >= self._setting.config.num_clients
        }
        return answers.arrays

    def _refuse_impossible(self, rates: dict[int, SharedArrays]) -> None:
        """Drop clients with error rates outside [0, 1]: a client with impossible rates would always be nearest."""
        for client in [c for c, arrays in rates.items() if not ((arrays[RATES] >= 0) & (arrays[RATES] <= 1)).all()]:
            del rates[client]
            self._found.failures.append(Failure(client=client, reason="error rates must be between 0 and 1"))

    def _count(
        self, sent: Mapping[int, SharedArrays], novel: Mapping[int, SharedArrays], training: Mapping[int, SharedArrays]
    ) -> None:
        """Add the bytes of a query and its answers."""
        # An answer has a row per pair, so that a training client's answer divides equally among the novel clients.
        answered = sum(num_bytes(arrays) // len(self.novel) for arrays in training.values())
        for client, arrays in sent.items():
            self._found.bytes_down[client] += num_bytes(arrays)
            self._found.bytes_up[client] += num_bytes(novel.get(client, {}))
            self._found.bytes_of_others[client] += num_bytes(arrays) + answered

    def step(
        self, novel: Mapping[int, SharedArrays], training: Mapping[int, SharedArrays], learning_rate: float
    ) -> None:
        """Step all classifiers along the mean of both clients' gradients."""
        for row, client in enumerate(self.novel):
            self.weights[row] -= np.float32(learning_rate / 2) * novel[client][CLASSIFIERS]
        for row, client in enumerate(self.training):
            self.weights[:, row] -= np.float32(learning_rate / 2) * training[client][CLASSIFIERS]

    def measured(self, novel: Mapping[int, SharedArrays], training: Mapping[int, SharedArrays]) -> Distances:
        """Return the distances that follow from both clients' error rates."""
        for row, client in enumerate(self.novel):
            self._found.between[client] = {
                other: a_distance(float(training[other][RATES][row]), float(novel[client][RATES][column]))
                for column, other in enumerate(self.training)
            }
        failed = {failure.client for failure in self._found.failures}
        config = self._setting.config
        self._found.failures += [
            Failure(client=client, reason="no training client is left to compare with")
            for client in range(config.num_clients, config.hosted_clients)
            if client not in failed and not self._found.between.get(client)
        ]
        return self._found


def _select_rows(arrays: SharedArrays, rows: Sequence[int]) -> SharedArrays:
    return {key: value[rows] for key, value in arrays.items()}


def _rates(arrays: SharedArrays) -> SharedArrays:
    """Return the expected layout of the error rates of some classifiers."""
    rates: NDArray[np.float64] = np.zeros(len(arrays[CLASSIFIERS]))
    return {RATES: rates}
