"""Train and evaluate a node's cohort of clients, and combine their results into one reply.

Client is this project's term, node is Flower's. Node p of P hosts the clients p, p+P, p+2P, ...: with P = N there is
one client per node, as in a deployment; with P = 2 two Ray actors run a hundred clients. A node trains its sampled
clients and sends one reply, with the weighted sum of their shared parameters. So a 60 MB hypernetwork is transferred
once per node and not once per client. `hyperfl_flwr.node.array_sums` has the sums. A client that fails is reported and
left out; the node continues.

A `Trainer` decides how to train the clients: one after another (`SequentialTrainer`), or together.
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
from hyperfl_flwr.node.trained import Failed, Trained, TrainedOne
from hyperfl_flwr.protocol.arrays import SharedArrays, Uploads, all_formed, diverged, layout_problem, not_finite
from hyperfl_flwr.protocol.messages import ClientResult, Failure, Request, printable


class CohortClient(Protocol):
    """Interface of a client: a Flower NumPyClient that also names its shared arrays."""

    def keys(self) -> list[str]:
        """Return the names `group/name` of the shared arrays, in the order of the parameter lists."""

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Train; see `flwr.client.NumPyClient.fit`. Arrays of `DOWN` groups are not returned."""

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Evaluate; see `flwr.client.NumPyClient.evaluate`."""


MakeClient = Callable[[int], CohortClient]
"""Function that builds the client with the given id."""


@dataclass(frozen=True, kw_only=True)
class Received:
    """Arrays that a node has received from the server; read-only.

    Attributes:
        shared: Arrays for all clients, of groups that are summed.
        per_client: Arrays for one client each, by client id; empty if no group is `PER_CLIENT`.
        each: Arrays for all clients, of which each client's answer is sent alone (`EACH`).
        down: Arrays for all clients, which no client sends back (`DOWN`).
    """

    shared: SharedArrays
    per_client: Mapping[int, SharedArrays] = field(default_factory=dict)
    each: SharedArrays = field(default_factory=dict)
    down: SharedArrays = field(default_factory=dict)

    @property
    def alike(self) -> SharedArrays:
        """All arrays that the clients receive alike."""
        return {**self.shared, **self.each, **self.down}

    def of(self, client: int) -> SharedArrays:
        """Return all arrays for one client."""
        return {**self.alike, **self.per_client.get(client, {})}

    def returned_by(self, client: int) -> SharedArrays:
        """Return the arrays for one client that it sends back after training, as it receives them."""
        return {**self.shared, **self.each, **self.per_client.get(client, {})}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Request to train or evaluate one client.

    Attributes:
        client: The client's id.
        config: Config of its NumPyClient: `round`, `version` and `kept-version`.
    """

    client: int
    config: dict[str, Any]


class Trainer(Protocol):
    """Interface: train the clients of a node."""

    def train(self, jobs: Sequence[Job], received: Received) -> Iterator[Trained | TrainedOne | Failed]:
        """Train each client once, in groups of any size.

        Args:
            jobs: Jobs of the clients, by ascending id.
            received: Arrays from the server.
        """


class SequentialTrainer:
    """Train one client after another, with the parameters of only one client in memory.

    Args:
        make_client: Function that builds a client.
    """

    def __init__(self, make_client: MakeClient) -> None:
        self._make_client = make_client

    def train(self, jobs: Sequence[Job], received: Received) -> Iterator[Trained | Failed]:
        """Train the clients, one per group; see `Trainer`."""
        for job in jobs:
            try:
                yield train_alone(self._make_client(job.client), job, received)
            except Exception as error:  # noqa: BLE001 - a failing client must not stop the others
                yield Failed(client=job.client, error=error)


def train_alone(member: CohortClient, job: Job, received: Received) -> Trained:
    """Train one client and return its results."""
    arrays, num_examples, metrics = member.fit(in_order(member, received.of(job.client)), job.config)
    keys = [key for key in member.keys() if key not in received.down]  # noqa: SIM118 - a client is no dict
    stacked = {key: value[np.newaxis] for key, value in zip(keys, arrays, strict=True)}
    return Trained(clients=[job.client], stacked=stacked, num_examples=[num_examples], metrics=[metrics])


class ArraySum(Protocol):
    """Interface: add up the shared arrays of a node's clients, see `hyperfl_flwr.node.array_sums`."""

    def add(self, arrays: Uploads, num_examples: int) -> None:
        """Add one client's arrays.

        Args:
            arrays: Its shared arrays after training: finite, with the names, shapes and types of those received.
            num_examples: Number of its training samples.

        Raises:
            ValueError: If the client may not take part; the sum is unchanged.
        """


@dataclass
class CohortResult:
    """Combined results of a node's clients, without the sum of their shared arrays.

    Attributes:
        per_client: The arrays of each finished client that are sent alone.
        num_examples: Total number of training samples of the finished clients.
        results: Numbers of each finished client, by ascending id.
        failures: Failures of the other clients.
    """

    per_client: dict[int, SharedArrays] = field(default_factory=dict)
    num_examples: int = 0
    results: list[ClientResult] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def train_cohort(
    trainer: Trainer, request: Request, received: Received, total: ArraySum, *, send_details: bool
) -> CohortResult:
    """Train the requested clients and sum their shared parameters.

    Args:
        trainer: Trains the clients.
        request: The clients, and the versions of private state that they start from.
        received: Arrays from the server.
        total: The sum to add to.
        send_details: True to send the message and traceback of a failure to the server.
    """
    result = CohortResult()
    for part in trainer.train(_jobs(request), received):
        if isinstance(part, Failed):
            result.failures.append(failure_of(part.client, part.error, send_details=send_details))
        else:
            for one in part.each if isinstance(part, Trained) else [part]:
                _take(one, result, received, total, send_details=send_details)
                del one
        del part  # frees these parameters before the next clients are trained
    return result


def _take(one: TrainedOne, result: CohortResult, received: Received, total: ArraySum, *, send_details: bool) -> None:
    """Add one trained client to the result."""
    client, arrays, before = one.client, one.arrays, received.returned_by(one.client)
    try:
        _check(arrays, before)
        total.add({key: value for key, value in arrays.items() if key in received.shared}, one.num_examples)
    except (ValueError, FloatingPointError) as error:
        result.failures.append(failure_of(client, error, send_details=send_details))
        return
    if per_client := {key: value for key, value in arrays.items() if key not in received.shared}:
        result.per_client[client] = all_formed(per_client)
    result.num_examples += one.num_examples
    result.results.append(_result(client, one.num_examples, one.metrics))


def _check(shared: Uploads, received: SharedArrays) -> None:
    """Check a client's arrays after training; raises ValueError or FloatingPointError."""
    if problem := layout_problem(received, shared):
        raise ValueError(f"after training {problem}")
    if key := not_finite(shared):
        raise diverged(key)


def evaluate_cohort(
    make_client: MakeClient, request: Request, received: Received, *, send_details: bool
) -> CohortResult:
    """Evaluate the received parameters of each requested client, with its private ones, on its test data."""
    result = CohortResult()
    for job in _jobs(request):
        try:
            member = make_client(job.client)
            _, num_examples, metrics = member.evaluate(in_order(member, received.of(job.client)), job.config)
        except Exception as error:  # noqa: BLE001 - a failing client must not stop the others
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


def in_order(member: CohortClient, received: SharedArrays) -> list[NDArray[Any]]:
    """Return the received arrays in the client's order."""
    keys = member.keys()
    if set(keys) != set(received):
        raise ValueError(f"the client must receive the arrays {sorted(keys)}, got {sorted(received)}")
    return [received[key] for key in keys]


def _result(client: int, num_examples: int, metrics: Mapping[str, object]) -> ClientResult:
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return ClientResult(client=client, num_examples=num_examples, metrics=numbers)


def failure_of(client: int, error: Exception, *, send_details: bool) -> Failure:
    """Return the failure to report to the server: in full with `send_details`, else as `for_others` allows.

    Without `send_details`, the message and the traceback go to the node's log instead.
    """
    kind, details = type(error).__name__, "".join(traceback.format_exception(error))
    if send_details:
        return Failure(client=client, reason=printable(f"{kind}: {error}"), details=details)
    log(ERROR, "client %s failed:\n%s", client, details)
    return Failure(client=client, reason=for_others(error))
