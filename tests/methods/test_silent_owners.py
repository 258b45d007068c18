"""Owners with `max-epsilon`: no metric of their clients leaves, neither alone nor in a secure sum."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from secure_federation import SecureFederation

from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.protocol.messages import CLIENTS, Report, record_of
from hyperfl_flwr.protocol.queries import WITHHOLDS_METRICS
from hyperfl_flwr.protocol.secure_sums.header import Phase
from hyperfl_flwr.protocol.secure_sums.messages import SECURE, step_in
from hyperfl_flwr.results.export import model_of_run
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.figures.plots import plot_run
from hyperfl_flwr.runs.run_directory import read_metrics
from hyperfl_flwr.runs.summary import summarise
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid

PRIVATE: Settings = {"dp.epsilon": 4.0, "dp.delta": 1e-5}
WHY = "the step sums metrics, which have no noise, but the owner of this node has set max-epsilon"


class SilentGrid(InProcessGrid):
    """The owners of some nodes have set `max-epsilon`, which keeps their clients' metrics on the node.

    Attributes:
        sent: Metrics in the replies of these nodes.
        results: Number of clients that finished in these replies.
    """

    def __init__(self, num_nodes: int, settings: Settings, limited: Collection[int]) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self._limited = {FIRST_NODE_ID + partition for partition in limited}
        for number in self._limited:
            self._contexts[number].node_config["max-epsilon"] = 4.0
        self.sent: list[str] = []
        self.results = 0

    def answer(self, message: Message) -> Message:
        number, reply = message.metadata.dst_node_id, super().answer(message)
        if number in self._limited and CLIENTS in reply.content:
            report = Report.from_record(record_of(reply.content, CLIENTS, ConfigRecord))
            self.sent += [name for result in report.results for name in result.metrics]
            self.results += len(report.results)
        return reply


def test_an_owner_with_a_limit_sends_no_metrics(federate: Federate) -> None:
    """A loss of chosen parameters over one sample is a number about that sample, so none may leave such a node."""
    grids: list[SilentGrid] = []

    def make(num_nodes: int, settings: Settings) -> SilentGrid:
        grids.append(SilentGrid(num_nodes, settings, limited=[1]))
        return grids[-1]

    run = federate("fedavg", grid=make, num_clients=3, num_nodes=3, **PRIVATE)
    assert (grids[0].sent, grids[0].results) == ([], 3)  # two rounds and the evaluation
    known = [line for line in read_metrics(run) if line["kind"] == "client"]
    assert [("personalized_accuracy" in line) for line in known] == [True, False, True] * 2
    found = summarise(run)
    assert found["test_accuracy_num_clients"] == 2
    assert found["test_accuracy_per_client"][1] is None
    assert found["test_accuracy"] == pytest.approx(np.mean([line["personalized_accuracy"] for line in known[3::2]]))


def test_a_run_in_which_no_node_sends_metrics(federate: Federate, caplog: pytest.LogCaptureFixture) -> None:
    """It ends, its lines say that no accuracy is known, and its numbers are None."""
    run = federate(
        "fedrep", grid=lambda number, settings: SilentGrid(number, settings, range(2)), num_clients=2, num_nodes=2,
        **PRIVATE,
    )  # fmt: skip
    assert "round 2/2: accuracy not known, 2 of 2 clients" in caplog.text
    found = summarise(run)
    numbers = ("test_accuracy", "test_accuracy_aggregate", "test_accuracy_worst", "test_accuracy_std")
    assert [found[name] for name in numbers] == [None] * 4
    assert found["privacy"]["epsilon"] == pytest.approx(4.0, abs=0.01)
    assert plot_run(run).is_file()
    assert write_report(run).is_file()
    assert model_of_run(run, client=0, state="aggregate").score is None


class HeaderGrid(SilentGrid):
    """Keeps what secure steps ask for.

    Attributes:
        summed: Names of the metrics that are summed, for each message.
        trained: Rounds and nodes of the trainings.
    """

    def __init__(self, num_nodes: int, settings: Settings, limited: Collection[int]) -> None:
        super().__init__(num_nodes, settings, limited)
        self.summed: list[tuple[str, ...]] = []
        self.trained: set[tuple[int, int]] = set()

    def answer(self, message: Message) -> Message:
        if SECURE in message.content and message.metadata.message_type in ("train", "evaluate"):
            header = step_in(message.content).header
            self.summed.append(header.metrics)
            if header.phase == "train":
                self.trained.add((header.round, message.metadata.dst_node_id - FIRST_NODE_ID))
        return super().answer(message)


def with_limited(federate: Federate, limited: Collection[int], **changes: Any) -> tuple[Path, HeaderGrid]:
    """Run FedAvg with a node for each client, of which some have an owner with a limit."""
    grids: list[HeaderGrid] = []

    def make(num_nodes: int, settings: Settings) -> HeaderGrid:
        grids.append(HeaderGrid(num_nodes, settings, limited))
        return grids[-1]

    run = federate("fedavg", changes["num_clients"], grid=make, **changes)
    return run, grids[0]


def test_a_secure_sum_with_a_limited_node_has_no_metrics(federate: Federate, caplog: pytest.LogCaptureFixture) -> None:
    """All sums are opened, and the run ends without an accuracy."""
    changes = PRIVATE | {"secagg.enabled": True, "num_clients": 4}
    free, of_free = with_limited(federate, [], **changes)
    assert "accuracy not known" not in caplog.text
    limited, of_limited = with_limited(federate, [2], **changes)
    assert "round 2/2: accuracy not known, 4 of 4 clients" in caplog.text
    assert len(of_free.summed) == len(of_limited.summed) == 3 * 4  # two rounds and the evaluation
    assert all(of_free.summed)
    assert set(of_limited.summed) == {()}
    assert [row["failed"] for row in read_metrics(limited) if row["kind"] == "train"] == [[], []]
    assert summarise(free)["test_accuracy"] is not None
    numbers = ("test_accuracy", "test_accuracy_num_clients", "test_accuracy_aggregate_num_clients")
    assert [summarise(limited)[name] for name in numbers] == [None, 0, 0]
    assert [row["measured"] for row in read_metrics(limited)] == [0] * 5


def test_a_limited_node_that_trains_later_is_warned_of(federate: Federate, caplog: pytest.LogCaptureFixture) -> None:
    """Early stopping and the choice of the best round leave out its rounds; the warning comes once, with the first."""
    changes = PRIVATE | {"secagg.enabled": True, "num_clients": 8, "num_rounds": 4, "fraction-train": 0.5}
    changes |= {"secagg.colluding": 0, "early-stopping": 4, "data.validation-fraction": 0.2, "last-round": "sampled"}
    _, grid = with_limited(federate, [], **changes)
    nodes = {number: {node for round_, node in grid.trained if round_ == number} for number in (1, 2, 3, 4)}
    late = min(nodes[3] - nodes[1] - nodes[2])
    assert "is not known in round" not in caplog.text
    run, _ = with_limited(federate, [late], **changes)
    assert caplog.text.count("is not known in round") == 1
    assert "warning: the accuracy on validation data is not known in round 3, since nodes with" in caplog.text
    known = ["personalized_accuracy" in row for row in read_metrics(run) if row["kind"] == "train"]
    assert known == [late not in nodes[number] for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_a_limited_node_takes_part_in_no_sum_of_metrics(
    phase: Phase, tmp_path: Path, make_settings: Callable[..., Settings]
) -> None:
    """A malicious server asks for some all the same; the node that refuses takes part in a sum without them."""
    grid = SecureFederation(make_settings("fedavg", **PRIVATE), tmp_path)
    grid.context(1).node_config["max-epsilon"] = 4.0
    assert [bool(grid.handshake(number).get(WITHHOLDS_METRICS)) for number in range(3)] == [False, True, False]
    asking = grid.header(phase)
    for metrics in (asking.metrics, asking.metrics[:1]):
        header = replace(asking, metrics=metrics)
        reply = grid.ask(1, phase, grid.content(header, 1))
        assert reply.has_error()
        assert reply.error.reason == WHY
    header = replace(asking, metrics=())
    tally = grid.open(header, grid.replies(header, range(3)), range(3))[1]
    assert (tally.nodes, tally.means, tally.stds) == (3, {}, {})
