"""Runs with secure sums: exact for any number of nodes, equal to plain runs, and robust against drop-outs."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType

from clients.engine.base import BaseClient
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of, new_strategy
from hyperfl_flwr.app.secure_sums import secure_context
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import SMALL, Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics
from hyperfl_flwr.contract.grids import Settings, plain_grid, round_of
from hyperfl_flwr.core.errors import ConfigError, RunFailedError
from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.messages import record_of
from hyperfl_flwr.protocol.secure_sums import messages as records
from hyperfl_flwr.protocol.secure_sums.messages import UNMASK
from hyperfl_flwr.runs.failures import read_failures
from hyperfl_flwr.runs.observation import load_opening, opening_path
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.federation import Federation, handshake
from hyperfl_flwr.server.in_process_grid import InProcessGrid

SECURE: Settings = {"secagg.enabled": True, "target": "mlp", "num_clients": 8, "data.train-samples": 20}
"""Settings of a secure run of eight clients; the learning rate is lower in `summed`, where rounding is compared."""

SUMMED: dict[str, Settings] = {
    "fedavg": {},
    "fedprox": {},
    "prifedsync": {},
    "ppsgd": {},
    "fedrep": {},
    "hyperfl": {"hyperfl.embedding": "common-frozen"},
    "hyperfl-frozen": {},
    "priv-hfl": {"priv-hfl.distill": False},
}
"""Methods whose sums can be secure, with the settings that they need for it."""

of_each = pytest.mark.parametrize("method", SUMMED)


class DroppingGrid(InProcessGrid):
    """Loses the replies of some nodes to messages of one type in one round, after the nodes have handled them."""

    lost: Collection[int] = ()
    kind: str = MessageType.TRAIN
    in_round = 1

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        node = message.metadata.dst_node_id - 1000
        if message.metadata.message_type == self.kind and node in self.lost and round_of(message) == self.in_round:
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason="lost"), reply_to=message)
        return reply


def dropping(lost: Collection[int], kind: str = MessageType.TRAIN) -> Callable[[int, Settings], InProcessGrid]:
    """Return a function that makes a grid without the replies of some nodes to one type of message in round 1."""

    def make(num_nodes: int, settings: Settings) -> InProcessGrid:
        grid = DroppingGrid(app, num_nodes, settings, {"simulated": True})
        grid.lost, grid.kind = lost, kind
        return grid

    return make


def arrays_of(run: Path) -> dict[str, np.ndarray]:
    return last_checkpoint(run)[0]


@of_each
def test_the_number_of_nodes_changes_no_bit(method: str, federate: Federate) -> None:
    """The opened sum is an exact integer: checkpoints and metrics of 3, 5 and 8 nodes are equal."""
    runs = [federate(method, nodes, **SECURE, **SUMMED[method]) for nodes in (3, 5, 8)]
    first, *others = [exact(arrays_of(run)) for run in runs]
    assert all(other == first for other in others)
    drop = {"bytes_on_wire", "unmask_seconds"}
    lines = [[{key: value for key, value in row.items() if key not in drop} for row in metrics(run)] for run in runs]
    assert lines[0] == lines[1] == lines[2]


@of_each
def test_a_round_gives_the_mean_of_a_plain_round(method: str, federate: Federate) -> None:
    """The change of the shared parameters differs by less than 3e-6 of its norm; the mean accuracy by a rounding."""
    changes = SECURE | SUMMED[method] | {"num_rounds": 1, "local-epochs": 5, "learning-rate": 0.1}
    secure = federate(method, 4, **changes)
    plain = federate(method, 4, **changes | {"secagg.enabled": False})
    start = federate(method, 4, **changes | {"secagg.enabled": False, "learning-rate": 1e-30})
    opened, mean, before = (arrays_of(run) for run in (secure, plain, start))
    keys = [key for key in mean if not key.startswith("server/")]
    norm = np.sqrt(sum(float(np.sum((mean[key] - before[key]).astype(float) ** 2)) for key in keys))
    error = np.sqrt(sum(float(np.sum((opened[key] - mean[key]).astype(float) ** 2)) for key in keys))
    assert error <= 3e-6 * norm
    rows = [next(row for row in metrics(run) if row["kind"] == "train") for run in (secure, plain)]
    assert rows[0]["personalized_accuracy"] == pytest.approx(rows[1]["personalized_accuracy"], abs=2**-12)


def test_control_variates_fit_into_the_range_from_the_first_round_on(federate: Federate) -> None:
    """They begin at 0 and hold gradients, which are large for clients with few classes and few steps."""
    changes = SECURE | {"num_rounds": 1, "data.partition": "shards", "data.shards-per-client": 2, "learning-rate": 0.05}
    secure, plain = (federate("scaffold", 4, **changes | {"secagg.enabled": value}) for value in (True, False))
    assert [row["failed"] for row in metrics(secure) if row["kind"] == "train"] == [[]]
    opened, mean = arrays_of(secure), arrays_of(plain)
    for key in (key for key in mean if key.startswith("control/")):
        assert opened[key] == pytest.approx(mean[key], abs=1e-5)


@of_each
def test_no_file_of_the_server_has_numbers_of_one_client(method: str, federate: Federate) -> None:
    run = federate(method, 4, **SECURE, **SUMMED[method])
    assert {row["kind"] for row in metrics(run)} == {"train", "aggregate"}
    text = (run / "metrics.jsonl").read_text() + (run / "server.log").read_text()
    assert "num_examples" not in text
    assert not (run / "observations").exists()


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        ("hyperfl", {}, "use hyperfl-frozen, or hyperfl.embedding=common-frozen"),
        ("pfedhn", {}, "the server must see each client's model"),
        ("pfedhn-pc", {}, "the server must see each client's extractor"),
        ("it-pfl", {}, "so there is no sum to hide it in; take one of "),
        ("priv-hfl", {"priv-hfl.realisation": "chain"}, "the server must see each client's force"),
        ("local", {}, "its clients upload nothing"),
        ("fedrep", {"audit.clients": "all"}, "audit.clients must be empty with secagg.enabled"),
        ("fedavg", {"novel.clients": 1}, "novel.clients must be 0 with secagg.enabled"),
        ("fedavg", {"num_nodes": 2}, "start more nodes"),
        ("fedavg", {"secagg.threshold": 2}, "choose another secagg.threshold"),
        ("fedavg", {"secagg.colluding": 6}, "cannot cover 3 honest nodes"),
    ],
)
def test_everything_else_is_refused(
    method: str, changes: dict[str, Any], problem: str, federate: Federate, tmp_path: Path
) -> None:
    """The error names setting, reason and way out; nothing is written."""
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.")):
        federate(method, **{"num_nodes": 8} | SECURE | changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lost", "kind"),
    [((2,), MessageType.TRAIN), ((0, 7), MessageType.TRAIN), ((5,), UNMASK), ((1, 3), UNMASK)],
    ids=["one in TRAIN", "two in TRAIN", "one in UNMASK", "two in UNMASK"],
)
def test_nodes_that_drop_out(lost: tuple[int, ...], kind: str, federate: Federate) -> None:
    """Of eight nodes, two may be missing: the sum over the others is that of a run in which these clients fail."""
    run = federate("fedrep", 8, grid=dropping(lost, kind), **SECURE, num_rounds=1)
    row = next(row for row in metrics(run) if row["kind"] == "train")
    left_out = set(lost) if kind == MessageType.TRAIN else set()
    assert row["clients"] == 8 - len(left_out)
    assert set(row["failed"]) == left_out
    with pytest.MonkeyPatch.context() as patch:
        break_fit(patch, "fedrep", left_out)
        expected = federate("fedrep", 3, **SECURE, num_rounds=1, **{"failure-budget": 1.0})
    assert exact(arrays_of(run)) == exact(arrays_of(expected))


@pytest.mark.parametrize("kind", [MessageType.TRAIN, UNMASK])
def test_a_sum_with_too_few_nodes_is_not_opened(kind: str, federate: Federate) -> None:
    """Of eight nodes, three are missing in round 1: nothing is opened, and round 2 starts where round 1 did."""
    changes = SECURE | {"failure-budget": 1.0, "audit.rounds": "all"}
    run = federate("fedrep", 8, grid=dropping((0, 1, 2), kind), **changes)
    first, second = [row for row in metrics(run) if row["kind"] == "train"]
    assert (first["clients"], second["clients"]) == (0, 8)
    assert "personalized_accuracy" not in first
    assert any("the secure sum was not opened" in failure.reason for failure in read_failures(run))
    assert [path.name for path in (run / "openings").iterdir()] == [opening_path(run, 2).name]


def test_no_question_is_asked_before_a_sum_that_cannot_be_opened(federate: Federate) -> None:
    """With three uploads missing, no node is asked for shares, since shares of an unopened sum could be used later."""
    asked: list[str] = []

    class Counting(DroppingGrid):
        lost = (0, 1, 2)

        def answer(self, message: Message) -> Message:
            asked.append(message.metadata.message_type)
            return super().answer(message)

    with pytest.raises(RunFailedError):
        federate(
            "fedrep", 8, grid=lambda nodes, settings: Counting(app, nodes, settings, {"simulated": True}),
            **SECURE, num_rounds=1,
        )  # fmt: skip
    assert asked.count(MessageType.TRAIN) == 8
    assert UNMASK not in asked


def test_a_round_without_clients_fails_and_the_run_goes_on(make_settings: Callable[..., Settings]) -> None:
    """Of five nodes, only the two without clients are there."""
    settings = make_settings("fedavg", num_clients=3) | {"secagg.enabled": True}
    config, grid = RunConfig.from_flat(settings), plain_grid(5, settings)
    secure = secure_context(config)
    assert secure
    there = Federation(handshake(grid, 3, 10.0, secure.session).nodes[3:])
    strategy = new_strategy(config, there, experiment="e" * 16, run_directory="", secure=secure)
    assert not strategy.configure_train(1, strategy.initial_arrays(), ConfigRecord(), grid)
    assert strategy.reduce([])[0] is None
    assert strategy.progress.failed_rounds == 1


class LyingGrid(InProcessGrid):
    """Node 4 sends boxes that do not open (TRAIN), or says so of all others' (UNMASK); then node 3 does not answer."""

    kind: str

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if message.metadata.message_type != self.kind or message.metadata.dst_node_id not in (1003, 1004):
            return reply
        values = record_of(reply.content, records.SECURE, ConfigRecord)
        if message.metadata.dst_node_id == 1004 and self.kind == MessageType.TRAIN:
            values["boxes"] = [bytes(len(box)) for box in values["boxes"]]
        elif message.metadata.dst_node_id == 1004:
            reply.content[records.SECURE] = ConfigRecord({"question": values["question"], "bad": [0, 1, 2, 3]})
        elif self.kind == UNMASK:
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason="lost"), reply_to=message)
        return reply


@pytest.mark.parametrize(("kind", "refused"), [(MessageType.TRAIN, {1004}), (UNMASK, set())])
def test_the_sender_of_damaged_boxes_is_to_blame(
    make_settings: Callable[..., Settings], kind: str, refused: set[int]
) -> None:
    """One of five nodes may collude: two must say that boxes do not open, so that one cannot blame the others."""
    settings = make_settings("fedavg", num_clients=5) | {"secagg.enabled": True}
    config, grid = RunConfig.from_flat(settings), LyingGrid(app, 5, settings, {"simulated": True})
    grid.kind = kind
    secure = secure_context(config)
    assert secure
    federation = handshake(grid, 5, 10.0, secure.session)
    strategy = new_strategy(config, federation, experiment="e" * 16, run_directory="", secure=secure)
    messages = strategy.configure_train(1, strategy.initial_arrays(), ConfigRecord(), grid)
    strategy.reduce(exchange(grid, messages, 10.0))
    assert not strategy.outcome.finished
    assert set(strategy.outcome.blamed) == refused


def break_fit(patch: pytest.MonkeyPatch, method: str, clients: Collection[int]) -> None:
    client_class = client_of(method)
    fit = client_class.fit

    def broken(self: BaseClient, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        if self.context.client in clients:
            raise RuntimeError("the camera is broken")
        return fit(self, parameters, config)

    patch.setattr(client_class, "fit", broken)


def test_a_client_that_fails_is_left_out_and_its_reason_stays(federate: Federate, monkeypatch: Any) -> None:
    break_fit(monkeypatch, "fedrep", {4})
    run = federate("fedrep", 4, **SECURE, num_rounds=1, **{"failure-budget": 1.0})
    row = next(row for row in metrics(run) if row["kind"] == "train")
    assert (row["clients"], row["failed"]) == (7, [4])
    assert {failure.reason for failure in read_failures(run)} == {"it did not finish; the log of its node says why"}


def test_a_node_without_a_finished_client_does_not_count(federate: Federate, monkeypatch: Any) -> None:
    """Three nodes of one client each; two clients fail, so that the sum would be one client's: it stays closed."""
    break_fit(monkeypatch, "fedrep", {0, 1})
    with pytest.raises(RunFailedError) as caught:
        federate("fedrep", 3, **SECURE | {"num_clients": 3}, num_rounds=1, **{"failure-budget": 1.0})
    run = Path(str(caught.value).split("see ")[1].split("/failures")[0])
    (reason,) = [failure.reason for failure in read_failures(run) if failure.client == 2]
    assert reason == "the secure sum was not opened: 1 of 3 nodes have uploaded, 3 are needed"


def test_a_resumed_run_continues(federate: Federate, make_settings: Callable[..., Settings]) -> None:
    """A run of two rounds that is resumed to three ends as one of three rounds, bit for bit: the keys are new."""
    straight = federate("fedrep", 4, **SECURE, num_rounds=3)
    short = federate("fedrep", 4, **SECURE, num_rounds=2)
    resumed = federate("fedrep", 4, **SECURE, num_rounds=3, output="", resume=str(short))
    assert exact(arrays_of(resumed)) == exact(arrays_of(straight))


def test_rounds_are_recorded_as_they_were_opened(federate: Federate) -> None:
    run = federate("fedrep", 4, **SECURE, **{"audit.rounds": "2"})
    opening, clients = load_opening(opening_path(run, 2))
    assert clients == list(range(8))
    assert opening.num_examples == 8 * int(str(SECURE["data.train-samples"]))
    assert exact(opening.reply) == exact(arrays_of(run))
    assert int(str(SMALL["num-rounds"])) == 2
