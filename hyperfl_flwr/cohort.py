"""A node hosts a cohort of clients.

Client is this project's word, node is Flower's. Node p of P hosts the clients p, p+P, p+2P, ...: with P = N it is one
client per node, as in a deployment; with P = 2 two Ray actors run a hundred clients. A node trains its sampled clients
one after the other and answers once, with the weighted sum of their shared parameters, so that a 60 MB hypernetwork
crosses the wire once per node and not once per client. A client that fails is named and left out; the node goes on.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import ERROR
from typing import Any, Protocol

import numpy as np
from flwr.supercore import log
from numpy.typing import NDArray

from hyperfl_flwr.arrays import SharedArrays, layout_problem, not_finite
from hyperfl_flwr.messages import ClientResult, Failure, Reduction, Request, group_of, printable


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


def clients_of_node(partition: int, num_nodes: int, num_clients: int) -> list[int]:
    """Return the ids of the clients that a node hosts; none if there are more nodes than clients."""
    return list(range(partition, num_clients, num_nodes))


@dataclass
class CohortResult:
    """What a node's clients did together.

    Attributes:
        sums: Weighted sums of the shared parameters over the clients that finished; empty if none did.
        num_examples: Sum of their training samples.
        results: Their numbers, by ascending id.
        failures: The others.
    """

    sums: SharedArrays = field(default_factory=dict)
    num_examples: int = 0
    results: list[ClientResult] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def train_cohort(
    make_client: MakeClient,
    request: Request,
    received: SharedArrays,
    reductions: Mapping[str, Reduction],
    *,
    send_details: bool,
) -> CohortResult:
    """Train the requested clients one after the other and sum what they share.

    Args:
        make_client: Builds a client.
        request: Which clients, and the private versions that they start from.
        received: The server's shared parameters; not changed.
        reductions: How each shared group is reduced.
        send_details: Whether a failure's text and traceback leave the node.
    """
    result = CohortResult()
    for client, config in _each(request):
        try:
            member = make_client(client)
            arrays, num_examples, metrics = member.fit(_in_order(member, received), config)
            shared = dict(zip(member.keys(), arrays, strict=True))
            if problem := layout_problem(received, shared):
                raise ValueError(f"after training {problem}")
            if key := not_finite(shared):
                raise FloatingPointError(f"{key} is not finite after training")
        except Exception as error:  # noqa: BLE001 - a failing client must not stop its neighbours
            result.failures.append(_failure(client, error, send_details))
            continue
        _add(result.sums, shared, received, reductions, num_examples)
        result.num_examples += num_examples
        result.results.append(_result(client, num_examples, metrics))
    return result


def evaluate_cohort(
    make_client: MakeClient, request: Request, received: SharedArrays, *, send_details: bool
) -> CohortResult:
    """Evaluate the received shared parameters, with each requested client's private ones, on its test data."""
    result = CohortResult()
    for client, config in _each(request):
        try:
            member = make_client(client)
            _, num_examples, metrics = member.evaluate(_in_order(member, received), config)
        except Exception as error:  # noqa: BLE001 - a failing client must not stop its neighbours
            result.failures.append(_failure(client, error, send_details))
            continue
        result.results.append(_result(client, num_examples, metrics))
    return result


def _each(request: Request) -> Sequence[tuple[int, dict[str, int]]]:
    """Return (client, its NumPyClient config) of the requested clients."""
    rows = zip(request.clients, request.versions, request.kept_versions, strict=True)
    return [
        (client, {"round": request.round, "version": version, "kept-version": kept}) for client, version, kept in rows
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


def _add(
    sums: SharedArrays,
    shared: SharedArrays,
    received: SharedArrays,
    reductions: Mapping[str, Reduction],
    num_examples: int,
) -> None:
    """Add weight times parameters to the sums, in place; the first client's arrays become the sums.

    Arrays that a client returns as it received them are not changed: its neighbours are yet to receive them.
    """
    first = not sums
    for key, value in shared.items():
        weight = np.asarray(reductions[group_of(key)].weight(num_examples), value.dtype)
        is_own = value.flags.writeable and not np.may_share_memory(value, received[key])
        weighted = np.multiply(value, weight, out=value) if is_own else value * weight
        if first:
            sums[key] = weighted
        else:
            sums[key] += weighted


def _failure(client: int, error: Exception, send_details: bool) -> Failure:
    """Return what the server learns of a failure; without details its kind only, and the node's log has the rest."""
    kind, details = type(error).__name__, "".join(traceback.format_exception(error))
    if send_details:
        return Failure(client=client, reason=printable(f"{kind}: {error}"), details=details)
    log(ERROR, "client %s failed:\n%s", client, details)
    return Failure(client=client, reason=f"{kind}, see the node's log")
