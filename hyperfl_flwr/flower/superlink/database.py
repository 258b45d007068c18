"""Read the SQLite database of a SuperLink, which need not run; the database is opened read-only.

Wraps the tables `run`, `task`, `task_logs` and `node`. Flower's commands `flwr list`, `flwr log` and
`flwr supernode list` need a running SuperLink and most of a second each; a query takes half a millisecond. This
module imports nothing of Flower, so that the process that follows a run stays small.
"""

import contextlib
import json
import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_STATE_QUERY = """
SELECT task.pending_at, task.starting_at, task.running_at, task.finished_at, task.sub_status, task.details
FROM run JOIN task ON task.task_id = run.primary_task_id WHERE run.run_id = ?"""
_LOG_QUERY = """
SELECT task_logs.rowid, task_logs.log FROM run JOIN task_logs ON task_logs.task_id = run.primary_task_id
WHERE run.run_id = ? AND task_logs.rowid > ? ORDER BY task_logs.rowid"""
_UNFINISHED_QUERY = """
SELECT run.run_id, run.override_config, task.pending_at FROM run JOIN task ON task.task_id = run.primary_task_id
WHERE task.finished_at IS NULL OR task.finished_at = ''"""
_LATEST_QUERY = """
SELECT run.run_id, run.override_config FROM run JOIN task ON task.task_id = run.primary_task_id
ORDER BY task.pending_at DESC LIMIT ?"""
_NODES_QUERY = """
SELECT node_id, status, online_until, last_activated_at, last_deactivated_at, public_key FROM node
WHERE unregistered_at IS NULL"""
_UNREGISTERED_QUERY = "SELECT public_key FROM node WHERE unregistered_at IS NOT NULL"


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A node that is registered at the SuperLink.

    Attributes:
        flower_id: Flower's id of the node, 0 .. 2^64-1.
        online: Whether the node is connected; a killed node counts as online for up to a minute.
        since: Time since when it is online or not, UTC, ISO 8601 in seconds; empty if it was never online.
        public_key: The node's registered public key, in PEM format.
    """

    flower_id: int
    online: bool
    since: str
    public_key: bytes


@dataclass(frozen=True, kw_only=True)
class UnfinishedRun:
    """A run that has not ended.

    Attributes:
        settings: The settings that override the app's.
        submitted: When the SuperLink accepted it.
    """

    settings: dict[str, object]
    submitted: datetime


def run_status(database: Path, run_id: int) -> tuple[str, str] | None:
    """Return the status of a run.

    Returns:
        "pending", "starting", "running", "finished:completed", "finished:failed" or "finished:stopped", and for a
        finished run Flower's details, which may be empty; None if the database does not contain the run.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    rows = _query(database, _STATE_QUERY, _signed(run_id))
    if not rows:
        return None
    _pending, starting, running, finished, sub_status, details = rows[0]
    if finished:
        return f"finished:{sub_status}", str(details or "")
    return "running" if running else "starting" if starting else "pending", ""


def run_log(database: Path, run_id: int, position: int = 0) -> tuple[str, int]:
    """Return a run's output after a position, with its colour codes, and the position to continue from.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    rows = _query(database, _LOG_QUERY, _signed(run_id), position)
    return "".join(text for _, text in rows), rows[-1][0] if rows else position


def unfinished_runs(database: Path) -> dict[int, UnfinishedRun]:
    """Return the unfinished runs by run id; none if the SuperLink has not created its tables yet.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    rows = _of_tables(database, _UNFINISHED_QUERY)
    return {
        _unsigned(run_id): UnfinishedRun(
            settings=json.loads(settings or "{}"), submitted=datetime.fromisoformat(pending).astimezone(UTC)
        )
        for run_id, settings, pending in rows
    }


def latest_runs(database: Path, number: int) -> dict[int, dict[str, object]]:
    """Return the last runs, the newest first: the settings that override the app's, by run id.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    rows = _of_tables(database, _LATEST_QUERY, number)
    return {_unsigned(run_id): json.loads(settings or "{}") for run_id, settings in rows}


def registered_nodes(database: Path) -> list[NodeRecord]:
    """Return the registered nodes; none if the SuperLink has not created its tables yet.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    rows = _of_tables(database, _NODES_QUERY)
    now = datetime.now(UTC).timestamp()
    return [
        NodeRecord(
            flower_id=_unsigned(flower_id),
            online=(is_online := status == "online" and until > now),
            # A node that says goodbye is deactivated; of one that falls silent, only the end of its lease is known.
            since=_time(activated if is_online else until if status == "online" else deactivated),
            public_key=key,
        )
        for flower_id, status, until, activated, deactivated, key in rows
    ]


def unregistered_keys(database: Path) -> set[bytes]:
    """Return the keys that were registered once, in PEM format; a SuperLink never registers such a key again.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    return {key for (key,) in _of_tables(database, _UNREGISTERED_QUERY)}


def _of_tables(database: Path, statement: str, *values: int) -> list[tuple[Any, ...]]:
    """Query a database; one in which the SuperLink has not created its tables yet has no rows.

    Raises:
        sqlite3.Error: The database cannot be read, for example because another process locks it for long.
    """
    try:
        return _query(database, statement, *values)
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return []
        raise


def _query(database: Path, statement: str, *values: int) -> list[tuple[Any, ...]]:
    name = f"{database.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(name, uri=True, timeout=5)) as connection:
        return connection.execute(statement, values).fetchall()


def _time(value: str | float | None) -> str:
    """Return a time of the database, seconds or a text, as a text in seconds; empty for no time."""
    if not value:
        return ""
    found = datetime.fromisoformat(value) if isinstance(value, str) else datetime.fromtimestamp(value, UTC)
    return found.astimezone(UTC).isoformat(timespec="seconds")


def _signed(number: int) -> int:
    """Return an unsigned 64-bit id as the database stores it: as a signed integer."""
    return number - 2**64 if number >= 2**63 else number


def _unsigned(number: int) -> int:
    return number % 2**64
