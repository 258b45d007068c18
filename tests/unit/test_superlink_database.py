"""A SuperLink's database is read as Flower writes it; Flower's own code creates and fills each database."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from hyperfl_flwr.flower.superlink import database
from hyperfl_flwr.launch.flower.env import can_use_database_file

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator")  # from alembic, with Flower's settings


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[tuple[SqlLinkState, Path]]:
    """Return Flower's object that writes a SuperLink's database, and the database file."""
    if not can_use_database_file():
        pytest.skip("Flower cannot make a database where it is installed")
    file = tmp_path / "state.db"
    state = SqlLinkState(str(file), NoOpFederationManager(), ObjectStoreFactory().store())
    state.initialize()
    yield state, file
    state._engine.dispose()


COLUMNS = {
    "run": {"run_id", "primary_task_id", "override_config"},
    "task": {"task_id", "pending_at", "starting_at", "running_at", "finished_at", "sub_status", "details"},
    "task_logs": {"task_id", "log"},
    "node": {
        "node_id",
        "status",
        "online_until",
        "last_activated_at",
        "last_deactivated_at",
        "public_key",
        "unregistered_at",
    },
}


def test_flowers_tables_have_the_columns_that_are_read(superlink: tuple[SqlLinkState, Path]) -> None:
    with closing(sqlite3.connect(superlink[1])) as connection:
        for table, columns in COLUMNS.items():
            there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            assert columns <= there, f"Flower's table {table} has no {columns - there}"
        read = set()

        def note(action: int, table: str | None, column: str | None, *_: object) -> int:
            if action == sqlite3.SQLITE_READ and column != "ROWID":
                read.add((table, column))
            return sqlite3.SQLITE_OK

        connection.set_authorizer(note)
        for name in (
            "_STATE_QUERY",
            "_LOG_QUERY",
            "_UNFINISHED_QUERY",
            "_LATEST_QUERY",
            "_NODES_QUERY",
            "_UNREGISTERED_QUERY",
        ):
            statement = getattr(database, name)
            connection.execute(f"EXPLAIN {statement}", [0] * statement.count("?")).close()
    assert read == {(table, column) for table, columns in COLUMNS.items() for column in columns}


def new_run(state: SqlLinkState, **settings: str) -> tuple[int, int]:
    """Start a run as a SuperLink does; return the ids of the run and of its task."""
    run_id = state.create_run(
        fab_id=None, fab_version=None, fab_hash=None, override_config=settings, federation_id=NOOP_FEDERATION_ID,
        federation_config=None, flwr_aid=None, primary_task_type=TaskType.SERVER_APP,
    )  # fmt: skip
    (task,) = state.get_tasks(run_ids=[run_id])
    return run_id, task.task_id


def test_runs_are_read_as_flower_writes_them(superlink: tuple[SqlLinkState, Path]) -> None:
    state, file = superlink
    begin = datetime.now(UTC)
    runs = [new_run(state, output="first"), new_run(state, output="second")]
    while len({run_id >= 2**63 for run_id, _ in runs}) < 2:  # the database stores ids as signed numbers
        runs.append(new_run(state, output="more"))
    unfinished = database.unfinished_runs(file)
    assert {run_id: run.settings["output"] for run_id, run in unfinished.items()} == {
        run_id: ["first", "second", *["more"] * len(runs)][number] for number, (run_id, _) in enumerate(runs)
    }
    assert all(begin <= run.submitted <= datetime.now(UTC) for run in unfinished.values())
    for run_id, task_id in runs:
        assert database.run_status(file, run_id) == ("pending", "")
        assert state.claim_task(task_id) is not None
        assert database.run_status(file, run_id) == ("starting", "")
        assert state.activate_task(task_id)
        assert database.run_status(file, run_id) == ("running", "")
        assert database.run_log(file, run_id) == ("", 0)
        state.add_task_log(task_id, "one\n")
        text, position = database.run_log(file, run_id)
        state.add_task_log(task_id, "two\n")
        assert (text, database.run_log(file, run_id, position)[0]) == ("one\n", "two\n")
        assert database.run_log(file, run_id)[0] == "one\ntwo\n"
        assert state.finish_task(task_id, "failed", "no disk")
        assert database.run_status(file, run_id) == ("finished:failed", "no disk")
        flowers = state.get_run_status({run_id})[run_id]
        assert f"{flowers.status}:{flowers.sub_status}" == "finished:failed"
    assert database.unfinished_runs(file) == {}
    assert database.run_status(file, 1) is None


def test_nodes_are_read_as_flower_writes_them(superlink: tuple[SqlLinkState, Path]) -> None:
    state, file = superlink
    ids = [state.create_node("owner", "owner", b"key 0", 30.0)]
    while len({node >= 2**63 for node in ids}) < 2:
        ids.append(state.create_node("owner", "owner", f"key {len(ids)}".encode(), 30.0))

    def found() -> dict[int, tuple[bytes, bool]]:
        return {node.flower_id: (node.public_key, node.online) for node in database.registered_nodes(file)}

    assert found() == {node: (f"key {number}".encode(), False) for number, node in enumerate(ids)}
    for node in ids:
        assert state.activate_node(node, 30.0)
    assert all(online for _, online in found().values())
    assert state.deactivate_node(ids[0])
    assert found()[ids[0]] == (b"key 0", False)
    assert database.unregistered_keys(file) == set()
    state.delete_node("owner", ids[0])
    assert list(found()) == ids[1:]
    assert database.unregistered_keys(file) == {b"key 0"}
    with pytest.raises(ValueError, match="Public key already in use"):  # Flower never takes it again
        state.create_node("owner", "owner", b"key 0", 30.0)


def test_a_database_without_tables_has_no_nodes_and_no_runs(tmp_path: Path) -> None:
    (tmp_path / "state.db").touch()
    assert database.registered_nodes(tmp_path / "state.db") == []
    assert database.unregistered_keys(tmp_path / "state.db") == set()
    assert database.unfinished_runs(tmp_path / "state.db") == {}
