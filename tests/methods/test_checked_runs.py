"""A node's checks in rounds: they change nothing that is trained, and notice a network that the server has forged."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Call
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from torch.nn.utils import parameters_to_vector

import hyperfl_flwr.app.server
from benchmarks.forged_networks import bins
from benchmarks.measure_node_checks import digits
from clients.engine.node_checks import REFUSED
from hyperfl_flwr.app.client import app
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.deploy.ledger_page import write_ledger
from hyperfl_flwr.deploy.ledger_view import runs_of
from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.privacy.received_network import STATISTICS
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import ARRAYS, CLIENTS, CONFIG, PER_CLIENT_ARRAYS, Report, Request, record_of
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.server.in_process_grid import InProcessGrid

MakeSettings = Callable[..., Settings]
Forge = Callable[[SharedArrays], SharedArrays]

REFUSE: Mapping[str, Scalar] = {f"check-{statistic}": "refuse" for statistic in STATISTICS}
OFF: Mapping[str, Scalar] = {f"check-{statistic}": "off" for statistic in STATISTICS}


class CheckingGrid(InProcessGrid):
    """Nodes with an owner's checks; keeps what each training sends, and may forge what one round sends to the nodes."""

    def __init__(self, settings: Settings, node: Mapping[str, Scalar], forge: Forge | None = None) -> None:
        super().__init__(app, 1, settings, node)
        self.forge = forge
        self.sent: list[SharedArrays] = []
        self.reports: list[Report] = []

    def answer(self, message: Message) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return super().answer(message)
        if self.forge and Request.of(message.content).round == 2:
            arrays = unpack_arrays(record_of(message.content, ARRAYS, ArrayRecord))
            message.content[ARRAYS] = pack_arrays({**arrays, **self.forge(arrays)})
        reply = super().answer(message)
        records = [name for name in (ARRAYS, PER_CLIENT_ARRAYS) if name in reply.content]
        for name in records:
            self.sent.append(unpack_arrays(record_of(reply.content, name, ArrayRecord)))
        self.reports.append(Report.from_record(record_of(reply.content, CLIENTS, ConfigRecord)))
        return reply


def train(settings: Settings, node: Mapping[str, Scalar], forge: Forge | None = None) -> CheckingGrid:
    grid = CheckingGrid(settings, node, forge)
    hyperfl_flwr.app.server.run(grid, RunConfig.from_flat(settings), plots=False)
    return grid


def findings(state: Path) -> Sequence[str]:
    (run,), damaged = runs_of(state)
    assert damaged == []
    assert sum(map(sum, run.totals().values())) == sum(entry.bytes for entry in run.entries if not entry.finding)
    return run.findings


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "hyperfl", "pfedhn"])
def test_honest_rounds_are_bit_equal_and_raise_no_alarm(
    method: str, make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = partial(make_settings, method, num_clients=2)
    grids = [
        train(settings(output=str(tmp_path / name)), {"simulated": True, **checks})
        for name, checks in (("checked", REFUSE), ("unchecked", {}))
    ]
    checked, unchecked = (grid.sent for grid in grids)
    assert len(checked) == len(unchecked) >= 2
    assert sum(map(len, checked)) > 0
    for one, other in zip(checked, unchecked, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)
    assert not any(report.failures for grid in grids for report in grid.reports)
    kept = {name: len(list((tmp_path / name).rglob("received-*.npz"))) for name in ("checked", "unchecked")}
    assert kept == {"checked": 4, "unchecked": 0}


def forged_model(_: SharedArrays) -> SharedArrays:
    """Return a model of which one layer divides samples into bins."""
    images, _labels = digits(1)
    network = build_target("cnn", tuple(images.shape[1:]), 10)
    network.load_state_dict(initial_model(network, 0), assign=True)
    bins(network, images, torch.Generator().manual_seed(0))
    return {f"model/{name}": value.numpy() for name, value in network.state_dict().items()}


def forged_hypernetwork(received: SharedArrays) -> SharedArrays:
    """Return heads that generate the extractor of `forged_model` from every embedding: H = 0, c is the extractor."""
    images, _labels = digits(1)
    network = build_target("cnn", tuple(images.shape[1:]), 10)
    network.load_state_dict(initial_model(network, 0), assign=True)
    bins(network, images, torch.Generator().manual_seed(0))
    weight = np.zeros_like(received["hypernetwork/head_weight"])
    theta = parameters_to_vector(network.extractor.parameters()).detach().numpy()
    return {"hypernetwork/head_weight": weight, "hypernetwork/head_bias": theta}


@pytest.mark.parametrize(("method", "forge"), [("fedavg", forged_model), ("hyperfl", forged_hypernetwork)])
def test_a_forged_network_is_refused_and_only_the_owner_learns_why(
    method: str, forge: Forge, make_settings: MakeSettings, tmp_path: Path, call: Call
) -> None:
    """In round 2 nothing is trained; the bins are found in what a hypernetwork generates, too."""
    state = tmp_path / "state"
    settings = make_settings(
        method, num_clients=2, output=str(tmp_path / "run"), max_failed_rounds=5, failure_budget=1.0
    )
    grid = train(settings, {"state-dir": str(state), **REFUSE}, forge)
    first, second = grid.reports
    assert (len(first.results), first.failures) == (2, [])
    assert [(failure.client, failure.reason, failure.details) for failure in second.failures] == [
        (client, REFUSED, "") for client in (0, 1)
    ]
    found = findings(state)
    for client in (0, 1):
        for check in ("duplicates", "nested"):
            assert any(
                text.startswith(f"round 2: client {client}: check-{check}: the value 1 of layer extractor.fc")
                for text in found
            )
    names = {path.name for path in state.rglob("received-*")}
    assert names == {"received-000001.npz"}  # what is refused is not remembered
    _, printed, _ = call("ledger", state)
    assert "  found  train  round 2  0 bytes\n    round 2: client 0: check-" in printed
    assert "check-nested" in write_ledger(tmp_path / "page.html", runs_of(state)[0], [], received=False).read_text()


@pytest.mark.parametrize(("checks", "found"), [({}, True), (OFF, False)])
def test_a_warning_or_no_check_lets_the_client_train(
    checks: Mapping[str, Scalar], found: bool, make_settings: MakeSettings, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    settings = make_settings("fedavg", num_clients=2, output=str(tmp_path / "run"))
    grid = train(settings, {"state-dir": str(state), **checks}, forged_model)
    assert [len(report.results) for report in grid.reports] == [2, 2]
    assert bool(findings(state)) is found


def test_nothing_is_kept_for_checks_that_compare_nothing(make_settings: MakeSettings, tmp_path: Path) -> None:
    """A node with many clients can so do without two models of each on its disk."""
    node: Mapping[str, Scalar] = {"simulated": True, "check-nested": "refuse", "check-rare": "warn"}
    train(make_settings("fedavg", num_clients=2, num_rounds=1, output=str(tmp_path / "run")), node)
    assert not list(tmp_path.rglob("received-*"))


class NovelGrid(InProcessGrid):
    """A server that trains the only client as the novel one that follows it."""

    replies: Sequence[Report] = ()

    def answer(self, message: Message) -> Message:
        if message.metadata.message_type == MessageType.TRAIN:
            message.content[CONFIG]["clients"] = [1]
        reply = super().answer(message)
        if message.metadata.message_type == MessageType.TRAIN:
            self.replies = [Report.from_record(record_of(reply.content, CLIENTS, ConfigRecord))]
        return reply


@pytest.mark.parametrize(
    ("node", "reason"), [({"min-samples": 1000}, REFUSED), ({}, "is a novel client, which is never")]
)
def test_a_server_cannot_train_a_client_as_a_novel_one(
    node: Mapping[str, Scalar], reason: str, make_settings: MakeSettings, tmp_path: Path
) -> None:
    """The run's settings say which clients are novel, and the owner's smallest numbers hold for them, too."""
    changes = {"novel.clients": 1, "node-timeout": 0.1}  # no other node is waited for
    settings = make_settings("fedavg", num_clients=1, output=str(tmp_path / "run"), **changes)
    grid = NovelGrid(app, 1, settings, {"state-dir": str(tmp_path / "state"), **node})
    with pytest.raises(RunFailedError):
        hyperfl_flwr.app.server.run(grid, RunConfig.from_flat(settings), plots=False)
    (report,) = grid.replies
    assert report.results == []
    assert reason in report.failures[0].reason


def test_too_few_samples_and_steps_are_refused(make_settings: MakeSettings, tmp_path: Path) -> None:
    """The clients have 40 samples and take two steps in a round."""
    for key, least in (("min-samples", 40), ("min-steps", 2)):
        settings = partial(
            make_settings, "fedavg", num_clients=2, num_rounds=1, max_failed_rounds=5, failure_budget=1.0
        )
        grid = train(settings(output=str(tmp_path / key)), {"simulated": True, key: least})
        assert len(grid.reports[0].results) == 2
        state = tmp_path / f"{key}-state"
        above = settings(output=str(tmp_path / f"{key}-above"))
        grid = CheckingGrid(above, {"state-dir": str(state), key: least + 1})
        with pytest.raises(RunFailedError, match="every client failed: a check of this node's owner"):
            hyperfl_flwr.app.server.run(grid, RunConfig.from_flat(above), plots=False)
        assert {failure.reason for failure in grid.reports[0].failures} == {REFUSED}
        assert findings(state)[0].startswith(
            f"round 1: client 0: {key} = {least + 1}, but the answer would come from {least} "
        )
