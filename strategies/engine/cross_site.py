"""Evaluate the personalized model of each client on the test data of each client, after the last round.

The server collects the models of the clients whose nodes allow it (`hyperfl_flwr.protocol.queries.CROSS_SITE`), and
sends them to the same clients.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from flwr.serverapp import Grid

from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.arrays import SharedArrays, num_bytes
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.queries import CORRECT, CROSS_SITE, PERSONALIZED, SCORE_MODELS, SEND_MODEL
from hyperfl_flwr.runs.cross_site import CrossSite
from hyperfl_flwr.runs.run_directory import RunDirectory
from hyperfl_flwr.server.federation import Federation
from strategies.engine.context import ServerContext
from strategies.engine.query_clients import Answers, Query, ask

MESSAGE_BYTES = 1 << 22
"""Models of about this size are sent in one message; a larger model alone."""

MESSAGE_ARRAYS = 5000
"""Most arrays in one message, whose names and headers count, too."""


def evaluate_cross_site(
    grid: Grid, context: ServerContext, last_round: int, directory: RunDirectory, announce: Callable[[str], None]
) -> None:
    """Evaluate the clients' models on each other's test data, and write `cross_site.json`.

    Clients that fail are left out, with their reasons in `failures/`.

    Args:
        grid: Flower's grid.
        context: Nodes and settings of the run, after its last round.
        last_round: Number of that round.
        directory: The run's folder.
        announce: Receives the result in one line, a line for each client that is left out, and the reason if no matrix
            can be made.

    Raises:
        RunFailedError: If a node's process died twice in a row.
    """
    config = context.config
    clients = willing_clients(context.federation, config.num_clients)
    if len(clients) < 2:
        announce(
            f"cross-site: no matrix, because nodes with {len(clients)} of {config.num_clients} clients allow it; it "
            f"needs 2 clients. Owners allow it by cross-site = true in node.toml"
        )
        return
    asked = _Asked(grid, context, clients, last_round)
    found = asked.matrix()
    for failure in asked.failures:
        announce(f"cross-site: client {failure.client} is left out: {failure.reason}")
    directory.write_failures(f"round-{last_round:06d}-cross-site", asked.failures)
    if found is None:
        announce("cross-site: no matrix, because fewer than 2 clients have sent a model and evaluated those of others")
        return
    directory.write_json(CrossSite.FILE, found.to_json())
    announce(f"cross-site: {found.text()}")


def willing_clients(federation: Federation, num_clients: int) -> list[int]:
    """Return the trained clients of nodes that take part in cross-site matrices, ascending."""
    willing = [node for node in federation.nodes if node.properties.get(CROSS_SITE)]
    return sorted(client for node in willing for client in node.clients if client < num_clients)


class _Asked:
    """Queries to clients for a cross-site matrix.

    Attributes:
        failures: Clients that have not answered, each once.
    """

    def __init__(self, grid: Grid, context: ServerContext, clients: Sequence[int], last_round: int) -> None:
        self._grid, self._context, self._clients, self._round = grid, context, clients, last_round
        self._bytes = 0
        self.failures: list[Failure] = []

    def matrix(self) -> CrossSite | None:
        """Return the matrix over the clients that have answered everything; None if they are fewer than two."""
        layout = self._layout()
        expected = dict.fromkeys(self._clients, layout)
        size = max(1, min(MESSAGE_BYTES // max(1, num_bytes(layout)), MESSAGE_ARRAYS // len(layout)))
        models: dict[int, SharedArrays] = {}
        for some in _chunks(self._clients, size):
            models |= self._ask(Query(kind=SEND_MODEL, clients=some, expected=expected)).arrays
        correct: dict[int, list[int]] = {client: [] for client in models}
        samples: dict[int, int] = {}
        for some in _chunks(models, size):
            stacked = {key: np.stack([models[client][key] for client in some]) for key in layout}
            answers = self._ask(
                Query(
                    kind=SCORE_MODELS,
                    clients=list(correct),
                    expected={client: {CORRECT: np.zeros(len(some), np.int64)} for client in correct},
                    shared=pack_arrays(stacked),
                )
            )
            for client in list(correct):
                counts, total = answers.arrays.get(client, {}).get(CORRECT), answers.num_examples.get(client, 0)
                if counts is None or not self._plausible(client, counts.tolist(), total, samples):
                    del correct[client]  # its model stays in the columns that were sent, and is left out at the end
                else:
                    samples[client] = total
                    correct[client] += counts.tolist()
        if len(correct) < 2:
            return None
        rows = [number for number, client in enumerate(models) if client in correct]
        columns = [[counts[row] / samples[client] for row in rows] for client, counts in correct.items()]
        return CrossSite(
            clients=list(correct),
            samples=[samples[client] for client in correct],
            accuracy=[list(row) for row in zip(*columns, strict=True)],
            bytes_on_wire=self._bytes,
        )

    def _layout(self) -> SharedArrays:
        """Return the arrays of a model, with their shapes and types."""
        federation, config = self._context.federation, self._context.config
        target = build_target(config.of_client(0).target, federation.input_shape, federation.num_classes)
        return {
            f"{PERSONALIZED}/{name}": np.zeros(tuple(value.shape), _numpy_type(str(value.dtype)))
            for name, value in target.state_dict().items()
        }

    def _ask(self, query: Query) -> Answers:
        answers = ask(self._grid, self._context, self._round, query)
        self._bytes += answers.bytes_on_wire
        for failure in answers.failures:
            self._fail(failure)
        return answers

    def _plausible(self, client: int, counts: Sequence[int], total: int, samples: Mapping[int, int]) -> bool:
        """Return whether a client's counts are possible; a client of which they are not is a failure."""
        if all(0 <= count <= total for count in counts) and samples.get(client, total) == total:
            return True
        reason = (
            f"numbers of correct predictions must be between 0 and the number of test samples, {total}, which stays"
        )
        self._fail(Failure(client=client, reason=reason))
        return False

    def _fail(self, failure: Failure) -> None:
        if failure.client not in {known.client for known in self.failures}:
            self.failures.append(failure)


def _chunks(models: Iterable[int], size: int) -> Iterator[Sequence[int]]:
    clients = iter(models)
    while some := list(itertools.islice(clients, size)):
        yield some


def _numpy_type(torch_type: str) -> str:
    """Return numpy's name of a torch type; models leave a client in float32 where they are in bfloat16."""
    return torch_type.removeprefix("torch.").replace("bfloat16", "float32")
