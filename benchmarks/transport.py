"""Measure the memory and time that the transport of a message's arrays takes, without training."""

import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.workload import Workload, initial_arrays, strategy
from hyperfl_flwr.protocol import reproducible_sum
from hyperfl_flwr.protocol.messages import ARRAYS, CLIENTS, WEIGHTS, ClientResult, Report, Request, weights_record
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.in_process_grid import InProcessGrid

NODES = (2, 10)
REPETITIONS = 5


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step in the transport of arrays.

    Attributes:
        name: Title in the page.
        copies: Peak of the additional memory, in units of the arrays' size.
        seconds: Median wall time.
    """

    name: str
    copies: float
    seconds: float


def measure_transport(work: Workload) -> list[Step]:
    """Measure packing, unpacking, and the server's reduction of the replies of few and of more nodes."""
    arrays = initial_arrays(work)
    size = sum(value.nbytes for value in arrays.values())
    record = pack_arrays(arrays)
    steps = [
        _step("pack arrays for a message", lambda: pack_arrays(arrays), size),
        _step("read a message's arrays", lambda: unpack_arrays(record), size),
    ]
    for num_nodes in NODES:
        held = work.clients // num_nodes
        replies = "sums" if held > 1 else "single clients' arrays"
        name = f"receive and reduce the replies of {num_nodes} nodes, {replies}, each made when it is fetched"
        shared = pack_arrays({key: value * np.float64(held) for key, value in arrays.items()} if held > 1 else arrays)
        steps.append(_step(name, partial(_reduce, work, record, shared, num_nodes), size))
    return steps


def _step(name: str, action: Callable[[], object], size: int) -> Step:
    times = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with patch.object(reproducible_sum, "zeros_in_pages", np.zeros):  # memory that tracemalloc sees
            action()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Step(name=name, copies=(peak - before) / size, seconds=statistics.median(times))


def _reduce(work: Workload, record: ArrayRecord, shared: ArrayRecord, num_nodes: int) -> object:
    server = strategy(work, num_nodes)
    grid = InProcessGrid(_replying(shared), num_nodes, {})
    messages = server.configure_train(1, record, ConfigRecord(), grid)
    reduced = server.reduce(exchange(grid, messages, 60.0))
    if server.outcome.failures:
        raise RuntimeError(server.outcome.failures[0].reason)
    return reduced


def _replying(shared: ArrayRecord) -> ClientApp:
    """Return an app that answers TRAIN messages with a copy of some arrays, as the clients' shared arrays."""
    app = ClientApp()

    @app.train()
    def reply(message: Message, context: Context) -> Message:
        clients = Request.of(message.content).clients
        results = [
            ClientResult(client=client, num_examples=1, metrics={"personalized-accuracy": 0.0}) for client in clients
        ]
        content = RecordDict(
            {
                ARRAYS: pack_arrays(unpack_arrays(shared)),
                WEIGHTS: weights_record(len(clients), len(clients)),
                CLIENTS: Report(results=results, process="benchmark").to_record(),
            }
        )
        return Message(content, reply_to=message)

    return app
