"""The node's ledger records exactly what leaves the node, and nothing leaves without being recorded."""

import json
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from federations import Call, of_representatives
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import hyperfl_flwr.app.server
from clients.engine import adapter
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.deploy.ledger_view import RunLedger, runs_of
from hyperfl_flwr.node.ledger import LEDGER, LedgerEntry
from hyperfl_flwr.protocol.messages import CONFIG, HELLO, PROPERTIES, record_of
from hyperfl_flwr.protocol.packing import PACKED, PACKED_TYPE, pack_arrays
from hyperfl_flwr.protocol.queries import PERSONALIZE
from hyperfl_flwr.protocol.sizes import content_bytes
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics
from hyperfl_flwr.server.in_process_grid import InProcessGrid

MakeSettings = Callable[..., Settings]


class OwnedGrid(InProcessGrid):
    """Nodes with owners and separate state folders; keeps the sizes of all message contents."""

    def __init__(self, settings: Settings, folder: Path, num_nodes: int = NUM_CLIENTS) -> None:
        super().__init__(app, num_nodes, settings)
        self.folders = []
        self.passed: list[list[tuple[str, str, int]]] = [[] for _ in range(num_nodes)]
        for number, context in enumerate(self._contexts.values()):
            self.folders.append(folder / f"node-{number}")
            context.node_config["state-dir"] = str(self.folders[-1])

    def answer(self, message: Message) -> Message:
        number = list(self._contexts).index(message.metadata.dst_node_id)
        kind = message.metadata.message_type
        self.passed[number].append(("in", kind, content_bytes([message.content])))
        reply = super().answer(message)
        size = content_bytes([reply.content]) if reply.has_content() else len(str(reply.error.reason))
        self.passed[number].append(("out", kind, size))
        return reply


def federate_owned(settings: Settings, folder: Path) -> tuple[OwnedGrid, Path]:
    grid = OwnedGrid(settings, folder)
    return grid, hyperfl_flwr.app.server.run(grid, RunConfig.from_flat(settings))


def run_in(folder: Path) -> RunLedger:
    (run,), damaged = runs_of(folder)
    assert damaged == []
    return run


def in_round(entries: Sequence[LedgerEntry], number: int) -> list[LedgerEntry]:
    return [entry for entry in entries if entry.round == number and entry.kind == "train"]


@of_representatives
def test_it_holds_what_the_server_counts(method: str, make_settings: MakeSettings, tmp_path: Path) -> None:
    """Recorded bytes equal `content_bytes`, the sizes seen by the grid, and the server's metrics.jsonl."""
    grid, run = federate_owned(make_settings(method), tmp_path / "nodes")
    ledgers = [run_in(folder) for folder in grid.folders]
    for found, passed in zip(ledgers, grid.passed, strict=True):
        assert [(entry.direction, entry.kind, entry.bytes) for entry in found.entries] == passed
        assert found.experiment == read_manifest(run)["experiment"]
        assert sum(map(sum, found.totals().values())) == sum(size for _, _, size in passed)
        assert found.private == tuple(sorted(client_of(method).private))
        assert found.leaked == []
    (told,) = [row for row in read_metrics(run) if row["kind"] == "train" and row["round"] == 1]
    entries = [entry for found in ledgers for entry in in_round(found.entries, 1)]
    assert sum(entry.bytes for entry in entries) == told["bytes_on_wire"]
    sizes = [sum(array.bytes for record in entry.records for array in record.arrays) for entry in entries]
    received, sent = sizes[::2], sizes[1::2]
    assert max(sent) == told["bytes_up_per_client"]
    assert max(received) == told["bytes_down_per_client"]


def test_an_empty_novel_data_leaves_the_run_s_private_groups_guarded(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    """A node with empty novel-data trains, and its ledger lists the private groups of the run's method."""
    settings = make_settings("hyperfl")
    grid = OwnedGrid(settings, tmp_path)
    for context in grid._contexts.values():
        context.node_config["novel-data"] = ""
    hyperfl_flwr.app.server.run(grid, RunConfig.from_flat(settings))
    for folder in grid.folders:
        assert run_in(folder).methods == ["hyperfl"]
        assert run_in(folder).private == tuple(sorted(client_of("hyperfl").private))


def test_a_client_s_numbers_are_those_of_metrics_jsonl(make_settings: MakeSettings, tmp_path: Path) -> None:
    grid, run = federate_owned(make_settings("hyperfl"), tmp_path)
    rows = {row["client"]: row for row in read_metrics(run) if row["kind"] == "client" and row["round"] == 2}
    for number, folder in enumerate(grid.folders):
        (entry,) = [entry for entry in in_round(run_in(folder).entries, 2) if entry.direction == "out"]
        (report,) = [record.values for record in entry.records if record.name == "clients"]
        assert report is not None
        assert report["client"] == [number]
        assert report["metric/personalized-accuracy"] == [rows[number]["personalized_accuracy"]]


def test_it_is_its_owner_s_and_only_grows(make_settings: MakeSettings, tmp_path: Path) -> None:
    """The ledger is readable by its owner only, and a second run on the same nodes appends to the same file."""
    grid, _ = federate_owned(make_settings("local"), tmp_path)
    path = grid.folders[0] / LEDGER
    first = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    federate_owned(make_settings("fedavg"), tmp_path)
    assert path.read_bytes().startswith(first)
    assert [run.methods for run in runs_of(grid.folders[0])[0]] == [["local"], ["fedavg"]]


@pytest.mark.parametrize("asked", [False, True])
def test_a_simulation_writes_one_on_request(make_settings: MakeSettings, asked: bool) -> None:
    settings = make_settings("local", ledger=asked)
    grid = InProcessGrid(app, 2, settings, {"simulated": True})
    run = hyperfl_flwr.app.server.run(grid, RunConfig.from_flat(settings))
    assert (run / "clients" / LEDGER).is_file() == asked
    if asked:
        assert {entry.node for entry in run_in(run).entries} == {0, 1}


def reply_of(settings: Settings, state: Path, kind: str = HELLO, **node: Scalar) -> Message:
    grid = InProcessGrid(app, 1, settings, {"state-dir": str(state), **node})
    (number,) = grid.get_node_ids()
    return grid.answer(Message(RecordDict(), dst_node_id=number, message_type=kind))


def last_out(state: Path) -> LedgerEntry:
    runs, _ = runs_of(state)
    return [entry for entry in runs[-1].entries if entry.direction == "out"][-1]


def test_an_error_for_the_operator_leaves_with_its_text(make_settings: MakeSettings, tmp_path: Path) -> None:
    reply = reply_of(make_settings() | {"seed": "x"}, tmp_path)
    text = "seed must be a valid integer; got 'x'"
    assert dict(record_of(reply.content, PROPERTIES, ConfigRecord)) == {"partition": 0, "problem": text}
    assert last_out(tmp_path).records[0].values == {"partition": 0, "problem": text}
    reply = reply_of(make_settings(), tmp_path, PERSONALIZE)
    assert reply.error.reason == "this node is not a novel client and does not accept a model on demand"
    assert last_out(tmp_path).error == reply.error.reason


def test_why_a_node_cannot_take_part_is_recorded_in_full(make_settings: MakeSettings, tmp_path: Path) -> None:
    reply = reply_of(make_settings() | {"seed": "x"}, tmp_path)
    (record,) = last_out(tmp_path).records
    assert record.values == dict(record_of(reply.content, PROPERTIES, ConfigRecord))
    assert "seed must be a valid integer" in str(record.values)


def test_of_any_other_error_the_kind_leaves(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Message:
        raise ValueError("could not read 'patient 4711'")

    monkeypatch.setattr(adapter, "handshake_reply", fails)
    reply = reply_of(make_settings(), tmp_path)
    assert reply.error.reason == last_out(tmp_path).error == "ValueError, see the node's log"
    simulated = InProcessGrid(app, 1, make_settings(), {"simulated": True})
    (number,) = simulated.get_node_ids()
    told = simulated.answer(Message(RecordDict(), dst_node_id=number, message_type=HELLO)).error.reason
    assert "patient 4711" in told


def test_a_message_that_no_handler_takes_is_recorded(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Flower refuses the message itself, and the ledger still has the error."""
    reply = reply_of(make_settings(), tmp_path, "query.everything")
    assert reply.error.reason == last_out(tmp_path).error == "ValueError, see the node's log"
    assert last_out(tmp_path).kind == "query.everything"


def test_without_room_for_the_ledger_nothing_is_done_and_nothing_leaves(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full disk (writes to /dev/full end with ENOSPC), the node does no work and replies with an error only."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    done: list[str] = []
    monkeypatch.setattr(adapter, "handshake_reply", lambda *_: done.append("replied"))
    (tmp_path / LEDGER).symlink_to("/dev/full")
    reply = reply_of(make_settings(), tmp_path)
    assert (
        reply.error.reason
        == "LedgerError: the node's ledger cannot be written, so nothing else leaves it; its log says why"
    )
    assert done == []


@pytest.mark.parametrize(
    ("record", "key"),
    [
        ("per-client-arrays", "0/embedding/weight"),
        ("per-client-arrays", "embedding/weight"),
        ("outlier-sums", "0/1/embedding/weight"),
        ("arrays", "embedding/weight"),
        ("arrays", "1/embedding/weight"),
    ],
)
def test_a_private_group_s_array_is_stopped(
    record: str, key: str, make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HyperFL's embedding is private, so a reply that contains it, in any place, is replaced by an error."""
    secret = pack_arrays({key: np.zeros(3, np.float32)})
    monkeypatch.setattr(
        adapter, "handshake_reply", lambda message, _: Message(RecordDict({record: secret}), reply_to=message)
    )
    reply = reply_of(make_settings("hyperfl"), tmp_path)
    assert reply.error.reason == last_out(tmp_path).error == "ValueError: the reply contains arrays of private groups"
    assert reply_of(make_settings("pfedhn"), tmp_path).has_content()


def test_arrays_whose_names_cannot_be_read_do_not_leave(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could be of a private group, and the ledger could not name them."""
    data = pack_arrays({"0/embedding/weight": np.zeros(3, np.float32)})[PACKED].data + bytes(64)
    damaged = ArrayRecord({PACKED: Array(dtype="uint8", shape=(len(data),), stype=PACKED_TYPE, data=data)})
    monkeypatch.setattr(
        adapter,
        "handshake_reply",
        lambda message, _: Message(RecordDict({"per-client-arrays": damaged}), reply_to=message),
    )
    reply = reply_of(make_settings("hyperfl"), tmp_path)
    assert reply.error.reason == last_out(tmp_path).error == "ValueError: the reply contains arrays that cannot be read"


def test_a_server_s_nonsense_is_recorded(make_settings: MakeSettings, tmp_path: Path) -> None:
    """A malformed message is refused, and both the message and the refusal are recorded."""
    grid = InProcessGrid(app, 1, make_settings(), {"state-dir": str(tmp_path)})
    (number,) = grid.get_node_ids()
    content = RecordDict({CONFIG: ConfigRecord({"experiment": 7, "round": "\x1b[2J", "empty": [], "none": ""})})
    assert grid.answer(Message(content, dst_node_id=number, message_type="train")).has_error()
    (run,), _ = runs_of(tmp_path)
    assert [(entry.direction, entry.experiment, entry.round) for entry in run.entries] == [
        ("in", "7", 0),
        ("out", "7", 0),
    ]


def test_the_command_shows_every_message(make_settings: MakeSettings, tmp_path: Path, call: Call) -> None:
    grid, run = federate_owned(make_settings("hyperfl"), tmp_path)
    folder = grid.folders[3]
    code, shown, _ = call("ledger", str(folder))
    assert code == 0
    experiment = read_manifest(run)["experiment"]
    found = run_in(folder)
    sent = [entry for entry in found.entries if entry.direction == "out"]
    assert shown.splitlines()[0] == f"run {experiment} (hyperfl)"
    assert [line for line in shown.splitlines() if "  sent  " in line] == [
        f"{e.time}  sent  {e.kind}  {f'round {e.round}' if e.round else 'before the rounds'}  {e.bytes} bytes"
        for e in sent
    ]
    assert "hypernetwork/head_weight" in shown
    assert "metric/personalized-accuracy=[" in shown
    assert shown.rstrip().endswith("These groups are private and stayed on the node: classifier, embedding, last.")
    node = tmp_path / "node"  # as `hyperfl deploy init` creates it
    node.mkdir()
    (node / "node.toml").write_text(f'state-dir = "{folder}"\n')
    assert call("ledger", node) == (0, shown, "")
    code, text, _ = call("ledger", str(folder), "--json", "--run", experiment[:4])
    (document,) = json.loads(text)
    assert code == 0
    assert sum(message["bytes"] for message in document["messages"]) == sum(entry.bytes for entry in found.entries)
    assert document["private_arrays_that_left"] == []
    code, _, problem = call("ledger", str(folder), "--run", "zz")
    assert code == 2
    assert f"the ledger has no run 'zz'; it has {experiment}" in problem
    code, _, problem = call("ledger", str(tmp_path / "nowhere"))
    assert code == 2
    assert "holds no ledger.jsonl" in problem


def test_the_command_fails_if_a_private_array_has_left(make_settings: MakeSettings, tmp_path: Path, call: Call) -> None:
    """The command exits with 1 if a ledger, which another version may have written, lists a private array."""
    grid, _ = federate_owned(make_settings("hyperfl"), tmp_path)
    path = grid.folders[0] / LEDGER
    path.write_text(path.read_text().replace("hypernetwork/head_bias", "classifier/head_bias"))
    code, shown, _ = call("ledger", str(grid.folders[0]))
    assert code == 1
    assert "ERROR: arrays of private groups have left the node: classifier/head_bias" in shown
