"""The metrics of secure steps: a method declares the names that all of its clients report."""

import pytest
from flwr.app import ConfigRecord, Message

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.protocol.messages import CLIENTS, CONFIG, Report, Request, record_of
from hyperfl_flwr.server.in_process_grid import InProcessGrid


class ReadingGrid(InProcessGrid):
    """Keeps the names of the metrics of all reports, by phase and round."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(app, 1, settings, {"simulated": True})
        self.settings = settings
        self.names: dict[tuple[str, int], list[set[str]]] = {}

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if CONFIG in message.content:
            report = Report.from_record(record_of(reply.content, CLIENTS, ConfigRecord))
            step = (message.metadata.message_type, Request.of(message.content).round)
            self.names.setdefault(step, []).extend(set(result.metrics) for result in report.results)
        return reply


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {"data.global-test": True}),
        ("fedprox", {}),
        ("fedrod", {}),
        ("knn-per", {}),
        ("moon", {}),
        ("prifedsync", {}),
        ("per-fedavg", {}),
        ("fedakd", {}),
        ("ppsgd", {}),
        ("fedrep", {}),
        ("hyperfl-frozen", {}),
        ("hyperfl", {"hyperfl.embedding": "common-frozen"}),
        ("priv-hfl", {"priv-hfl.distill": True}),
        ("priv-hfl", {"priv-hfl.distill": False, "data.global-test": True}),
    ],
)
def test_clients_report_what_their_method_declares(federate: Federate, method: str, changes: Settings) -> None:
    """Times, counts, and HyperFL's change since the client's round before are not sums of a secure step."""
    grids: list[ReadingGrid] = []

    def make_grid(_: int, settings: Settings) -> ReadingGrid:
        grids.append(ReadingGrid(settings))
        return grids[0]

    federate(method, grid=make_grid, **changes)
    (grid,) = grids
    config = RunConfig.from_flat(grid.settings)
    assert {phase for phase, _ in grid.names} == {"train", "evaluate"}
    for (phase, number), clients in grid.names.items():
        assert clients
        expected = set(client_of(method).metric_names(config, "train" if phase == "train" else "evaluate", number))
        for names in clients:
            sent = {name for name in names if not name.endswith(("seconds", "examples"))}
            # Not every client has an AUC, and the share of the largest class is of the data.
            assert sent - {"theta-change", "majority-share", "aggregate-auc", "personalized-auc"} == expected
