"""A node hosts a cohort of clients.

Client is this project's word, node is Flower's. Node p of P hosts the clients p, p+P, p+2P, ...: with P = N it is one
client per node, as in a deployment; with P = 2 two Ray actors run a hundred clients. A node trains its sampled clients
and answers once, with the weighted sum of their shared parameters, so that a 60 MB hypernetwork crosses the wire once
per node and not once per client. The sum is made so that the number of nodes changes no bit of the result, see
`hyperfl_flwr.protocol.reproducible_sum`. A client that fails is named and left out; the node goes on.

How the clients are trained is a `Trainer`'s choice: one after the other (`OneByOne`), or together, with the parameters
of all of them stacked.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import ERROR
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import for_others
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.protocol.arrays import SharedArrays, layout_problem, not_finite
from hyperfl_flwr.protocol.messages import ClientResult, Failure, Reduction, Request, printable
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum


class CohortClient(Protocol):
    """A Flower NumPyClient that names its shared arrays."""

    def keys(self) -> list[str]:
        """Return the names `group/name` of the shared arrays, in the order in which it takes and returns them."""

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Train; see `flwr.client.NumPyClient.fit`."""

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Evaluate; see `flwr.client.NumPyClient.evaluate`."""


MakeClient = Callable[[int], CohortClient]
"""Builds the client with an id."""


@dataclass(frozen=True, kw_only=True)
class Received:
    """What the server has sent to a node; not changed here.

    Attributes:
        shared: What all its clients get.
        own: What each of them gets alone, by id; empty where no group is per client.
    """

    shared: SharedArrays
    own: Mapping[int, SharedArrays] = field(default_factory=dict)

    def of(self, client: int) -> SharedArrays:
        """Return all that a client gets."""
        return {**self.shared, **self.own.get(client, {})}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one client is asked for.

    Attributes:
        client: Its id.
        config: Its NumPyClient's config: `round`, `version` and `kept-version`.
    """

    client: int
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Clients that have been trained, C of them together.

    Attributes:
        clients: Their ids [C].
        stacked: Their shared arrays, each [C, *shape]; the trainer does not write into them again.
        num_examples: Their training samples [C].
        metrics: Their numbers [C].
    """

    clients: Sequence[int]
    stacked: SharedArrays
    num_examples: Sequence[int]
    metrics: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A client that could not be trained, and why."""

    client: int
    error: Exception


class Trainer(Protocol):
    """Trains the clients of a node."""

    def train(self, jobs: Sequence[Job], received: Received) -> Iterator[Trained | Failed]:
        """Train clients, all of them once, in groups of any size.

        Args:
            jobs: The clients, by ascending id.
            received: What the server has sent.
        """


class OneByOne:
    """Trains one client after the other: no more than one client's parameters are in memory.

    Args:
        make_client: Builds a client.
    """

    def __init__(self, make_client: MakeClient) -> None:
        self._make_client = make_client

    def train(self, jobs: Sequence[Job], received: Received) -> Iterator[Trained | Failed]:
        """Train the clients, see `Trainer`."""
        for job in jobs:
            try:
                yield self._train(job, received.of(job.client))
            except Exception as error:  # noqa: BLE001 - a failing client must not stop its neighbours
                yield Failed(client=job.client, error=error)

    def _train(self, job: Job, received: SharedArrays) -> Trained:
        member = self._make_client(job.client)
        arrays, num_examples, metrics = member.fit(_in_order(member, received), job.config)
        stacked = {key: value[np.newaxis] for key, value in zip(member.keys(), arrays, strict=True)}
        return Trained(clients=[job.client], stacked=stacked, num_examples=[num_examples], metrics=[metrics])


@dataclass
class CohortResult:
    """What a node's clients did together.

    Attributes:
        arrays: The shared parameters of the one client that finished, or their weighted sums over several; empty if
            none did.
        outliers: By level, what the sums lack of terms that are too large for them.
        own: The per-client groups of each client that finished.
        num_examples: Sum of their training samples.
        results: Their numbers, by ascending id.
        failures: The others.
    """

    arrays: SharedArrays = field(default_factory=dict)
    outliers: dict[int, SharedArrays] = field(default_factory=dict)
    own: dict[int, SharedArrays] = field(default_factory=dict)
    num_examples: int = 0
    results: list[ClientResult] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def train_cohort(
    trainer: Trainer,
    request: Request,
    received: Received,
    reductions: Mapping[str, Reduction],
    *,
    send_details: bool,
) -> CohortResult:
    """Train the requested clients and add up what they share.

    Args:
        trainer: Trains them.
        request: Which clients, and the private versions that they start from.
        received: What the server has sent.
        reductions: How each shared group is reduced.
        send_details: Whether a failure's text and traceback leave the node.
    """
    result = CohortResult()
    rounding = {"num_clients": request.num_clients, "max_num_examples": request.max_num_examples}
    shared = _Shared(ReproducibleSum(received.shared, reductions, **rounding))
    for part in trainer.train(_jobs(request), received):
        if isinstance(part, Failed):
            result.failures.append(failure_of(part.client, part.error, send_details=send_details))
        else:
            for row in range(len(part.clients)):
                _take(part, row, result, received, shared, send_details=send_details)
        del part  # the next clients' parameters take the place of these
    result.arrays, result.outliers = shared.arrays, shared.outliers
    return result


class _Shared:
    """The shared arrays of a node's clients: those of the first as they are, until there is a second to add.

    Args:
        total: Adds them up.
    """

    def __init__(self, total: ReproducibleSum) -> None:
        self._total = total
        self._waiting: list[tuple[SharedArrays, int]] = []
        self._count = 0

    def add(self, arrays: SharedArrays, num_examples: int) -> None:
        """Take the arrays of one more client."""
        self._waiting.append((arrays, num_examples))
        self._count += 1
        while self._count > 1 and self._waiting:
            self._total.add(*self._waiting.pop(0))

    @property
    def arrays(self) -> SharedArrays:
        """See `CohortResult`."""
        return self._waiting[0][0] if self._waiting else self._total.sums(0)

    @property
    def outliers(self) -> dict[int, SharedArrays]:
        """See `CohortResult`."""
        return {level: self._total.sums(level) for level in self._total.levels if level}


def _take(
    part: Trained, row: int, result: CohortResult, received: Received, shared: _Shared, *, send_details: bool
) -> None:
    """Add one trained client to the result."""
    client, num_examples = part.clients[row], part.num_examples[row]
    arrays, got = {key: value[row] for key, value in part.stacked.items()}, received.of(client)
    try:
        _check(arrays, got)
    except (ValueError, FloatingPointError) as error:
        result.failures.append(failure_of(client, error, send_details=send_details))
        return
    shared.add({key: value for key, value in arrays.items() if key in received.shared}, num_examples)
    if own := {key: value for key, value in arrays.items() if key not in received.shared}:
        result.own[client] = own
    result.num_examples += num_examples
    result.results.append(_result(client, num_examples, part.metrics[row]))


def _check(shared: SharedArrays, received: SharedArrays) -> None:
    """Raise what is wrong with a client's arrays after training."""
    if problem := layout_problem(received, shared):
        raise ValueError(f"after training {problem}")
    if key := not_finite(shared):
        raise FloatingPointError(f"{key} is not finite after training")


def evaluate_cohort(
    make_client: MakeClient, request: Request, received: Received, *, send_details: bool
) -> CohortResult:
    """Evaluate what each requested client has received, with its private parameters, on its test data."""
    result = CohortResult()
    for job in _jobs(request):
        try:
            member = make_client(job.client)
            _, num_examples, metrics = member.evaluate(_in_order(member, received.of(job.client)), job.config)
        except Exception as error:  # noqa: BLE001 - a failing client must not stop its neighbours
            result.failures.append(failure_of(job.client, error, send_details=send_details))
            continue
        result.results.append(_result(job.client, num_examples, metrics))
    return result


def _jobs(request: Request) -> Sequence[Job]:
    rows = zip(request.clients, request.versions, request.kept_versions, strict=True)
    return [
        Job(client=client, config={"round": request.round, "version": version, "kept-version": kept})
        for client, version, kept in rows
    ]


def _in_order(member: CohortClient, received: SharedArrays) -> list[NDArray[Any]]:
    """Return the received arrays in the client's order."""
    keys = member.keys()
    if set(keys) != set(received):
        raise ValueError(f"received the arrays {sorted(received)}, expected {sorted(keys)}")
    return [received[key] for key in keys]


def _result(client: int, num_examples: int, metrics: Mapping[str, object]) -> ClientResult:
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return ClientResult(client=client, num_examples=num_examples, metrics=numbers)


def failure_of(client: int, error: Exception, *, send_details: bool) -> Failure:
    """Return what the server learns of a failure; without details its kind only, and the node's log has the rest."""
    kind, details = type(error).__name__, "".join(traceback.format_exception(error))
    if send_details:
        return Failure(client=client, reason=printable(f"{kind}: {error}"), details=details)
    log(ERROR, "client %s failed:\n%s", client, details)
    return Failure(client=client, reason=for_others(error))
