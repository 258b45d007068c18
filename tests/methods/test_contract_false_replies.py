"""Contract tests for a node that sends false replies: it is refused by number, and the round continues without it."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from federations import of_every_method_if_extended, of_representatives
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import metrics
from hyperfl_flwr.contract.grids import Settings, plain_grid, round_of
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CLIENTS,
    LABEL_COUNTS,
    PER_CLIENT_ARRAYS,
    WEIGHTS,
    Report,
    record_of,
    weights_record,
)
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid

MALICIOUS, ITS_CLIENTS = 1, [1, 3]
"""Number and clients of the malicious node, of two nodes and five clients."""

Falsify = Callable[[RecordDict], None]


def long_update(content: RecordDict) -> None:
    """Replace all arrays but label counts by finite values that are far too large."""
    for name in (ARRAYS, PER_CLIENT_ARRAYS):
        if name in content:
            arrays = unpack_arrays(record_of(content, name, ArrayRecord))
            large = {key: value * 0 + value.dtype.type(1e6) for key, value in arrays.items()}
            counts = {key: value for key, value in arrays.items() if key.endswith(LABEL_COUNTS)}
            content[name] = pack_arrays(large | counts)


def with_changes(content: RecordDict, **changes: Any) -> None:
    """Apply changes to the fields of every client's result, and make the sent weights consistent with them."""
    report = Report.from_record(record_of(content, CLIENTS, ConfigRecord))
    results = [
        replace(result, **{key: change(getattr(result, key)) for key, change in changes.items()})
        for result in report.results
    ]
    content[CLIENTS] = replace(report, results=results).to_record()
    content[WEIGHTS] = weights_record(sum(result.num_examples for result in results), len(results))


FALSE_REPLIES: dict[str, tuple[Falsify, str]] = {
    "update": (long_update, "its update of .* times the norm of the values that it received, more than max-update"),
    "weight": (
        partial(with_changes, num_examples=lambda _: 10**12),
        "client 1 reports 1000000000000 training samples but announced 40",
    ),
    "accuracy": (
        partial(with_changes, metrics=lambda numbers: {**numbers, "personalized-accuracy": 7.0}),
        "the personalized-accuracy of client 1 must be between 0 and 1, got 7",
    ),
    "unasked": (
        partial(with_changes, metrics=lambda numbers: {**numbers, "personalized-validation-mse": 1.0}),
        "client 1 reports personalized-validation-mse, which the run's settings do not ask for",
    ),
    "no-count": (
        partial(with_changes, metrics=lambda numbers: {**numbers, "test-examples": float("inf")}),
        "the test-examples of client 1 must be a whole number of at least 0, got inf",
    ),
    "no-number": (
        partial(with_changes, metrics=lambda numbers: {**numbers, "personalized-accuracy": float("nan")}),
        "client 1 reports no personalized-accuracy, or one that is not a number",
    ),
}


class FalseReplyGrid(InProcessGrid):
    """A grid whose node 1 trains as it should in round 2, but has its reply changed by `falsify`."""

    def __init__(self, num_nodes: int, settings: Settings, *, falsify: Falsify) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.falsify = falsify

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        is_training = message.metadata.message_type == MessageType.TRAIN and round_of(message) == 2
        if is_training and message.metadata.dst_node_id == FIRST_NODE_ID + MALICIOUS:
            self.falsify(reply.content)
        return reply


@of_representatives
@pytest.mark.parametrize("name", FALSE_REPLIES)
def test_a_malicious_node_is_left_out_by_name(method: str, name: str, federate: Federate) -> None:
    """The node's clients fail in the round of the false reply only; failures/ names the node and the reason."""
    falsify, reason = FALSE_REPLIES[name]
    if name == "update" and not client_of(method).shared:
        pytest.skip("returns no arrays that could be wrong")
    run = federate(method, grid=partial(FalseReplyGrid, falsify=falsify), num_rounds=3)
    assert [row["failed"] for row in metrics(run) if row["kind"] == "train"] == [[], ITS_CLIENTS, []]
    texts = [path.read_text() for path in sorted((run / "failures").iterdir())]
    assert len(texts) == len(ITS_CLIENTS)
    for text in texts:
        assert re.match(f"node {MALICIOUS}: .*{reason}", text)


@of_every_method_if_extended
def test_no_honest_node_is_taken_for_a_malicious_node(method: str, federate: Federate) -> None:
    """Honest updates pass even with max-update-ratio = 1.01, about a tenth of the default of 10."""
    run = federate(method, grid=plain_grid, num_rounds=3, max_update_ratio=1.01)
    assert [row["failed"] for row in metrics(run) if row["kind"] == "train"] == [[], [], []]
