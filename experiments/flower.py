"""Flower's settings, and how a SuperLink is spoken to.

The state and the output of a run are read from the SuperLink's database, opened read-only: half a millisecond, no
import of Flower, and the SuperLink itself keeps them up to date. `flwr list` and `flwr log` give the same and are the
fallback; each costs the better part of a second.

Flower cannot make its tables in a database file if it is installed below a folder with a space, a comma or a percent
sign in its name. Then the database is in memory, and the fallback is what is used.
"""

import contextlib
import importlib.util
import json
import os
import platform
import re
import sqlite3
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperfl_flwr.errors import InstallationError, RunFailedError

CONNECTION = "hyperfl"
"""The name under which the private SuperLink stands in the private configuration."""

_SETTINGS = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Freed blocks of tens of megabytes otherwise go back to the system and are zeroed page by page at the next use.
_MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "MALLOC_TOP_PAD_": "300000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
}
ASK_SECONDS = 5.0
"""How often Flower's command is asked for a run's state, where it is not read from the database."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STATE_QUERY = """
SELECT task.pending_at, task.starting_at, task.running_at, task.finished_at, task.sub_status, task.details
FROM run JOIN task ON task.task_id = run.primary_task_id WHERE run.run_id = ?"""
_LOG_QUERY = """
SELECT task_logs.rowid, task_logs.log FROM run JOIN task_logs ON task_logs.task_id = run.primary_task_id
WHERE run.run_id = ? AND task_logs.rowid > ? ORDER BY task_logs.rowid"""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What Flower says about a run.

    Attributes:
        status: "pending", "starting", "running", "finished:completed", "finished:failed" or "finished:stopped".
        details: Why it failed, if it did.
    """

    status: str
    details: str = ""

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether it came to its regular end."""
        return self.status == "finished:completed"


def federation_config(num_nodes: int, num_actors: int, num_gpus: int = 0, gpu_fraction: float = 1.0) -> str:
    """Return Flower's `--federation-config` for a simulation.

    Args:
        num_nodes: Simulated nodes.
        num_actors: Processes that run them, one core each.
        num_gpus: GPUs of the machine to use; 0 leaves every GPU setting out.
        gpu_fraction: What one node takes of a GPU, so that 1 / gpu_fraction of them share one.

    Raises:
        ValueError: A number is out of range.
    """
    if num_nodes < 1 or num_actors < 1 or num_gpus < 0 or not 0 < gpu_fraction <= 1:
        raise ValueError(f"out of range: {num_nodes=} {num_actors=} {num_gpus=} {gpu_fraction=}")
    settings = [
        f"num-supernodes={num_nodes}",
        "client-resources-num-cpus=1",
        f"init-args-num-cpus={num_actors}",
        "init-args-log-to-driver=false",
        "init-args-logging-level='ERROR'",
    ]
    if num_gpus:
        settings += [f"init-args-num-gpus={num_gpus}", f"client-resources-num-gpus={float(gpu_fraction)}"]
    return " ".join(settings)


def flower_environment(home: Path, temporary: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a private SuperLink and of the commands that talk to it.

    Args:
        home: Its FLWR_HOME.
        temporary: Where Ray keeps its sockets and logs; a short path, for the system limits a socket's to 107 bytes.
        base: The environment to start from.
    """
    environment = {**base, **_SETTINGS, "FLWR_HOME": str(home), "RAY_TMPDIR": str(temporary)}
    environment.pop("RAY_ADDRESS", None)  # a cluster of somebody else
    # SuperExec looks its helpers up in PATH: this installation's must be found first.
    environment["PATH"] = os.pathsep.join([str(flower_command("flwr-simulation").parent), base.get("PATH", os.defpath)])
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [base.get(name, ""), "127.0.0.1", "localhost"]))
    if platform.libc_ver()[0] == "glibc":
        environment = {**_MALLOC_SETTINGS, **environment}
    return environment


def training_environment(*, keeps_memory: bool = True, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process that trains on one thread, without Flower's own settings.

    Args:
        keeps_memory: Whether glibc is told to keep freed memory, as in a simulation; if not, it is told nothing.
        base: The environment to start from.
    """
    environment = {name: value for name, value in base.items() if keeps_memory or not name.startswith("MALLOC_")}
    environment |= {name: value for name, value in _SETTINGS.items() if name.endswith("_NUM_THREADS")}
    if keeps_memory and platform.libc_ver()[0] == "glibc":
        environment = {**_MALLOC_SETTINGS, **environment}
    return environment


def flower_command(name: str) -> Path:
    """Return the path of a command of this Python's installation, whatever PATH says."""
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (folder / name).is_file():
            return folder / name
    raise InstallationError(
        f"Flower's command {name} must stand beside {sys.executable}, but does not. "
        'Install the project again, or: python -m pip install "flwr[simulation]>=1.41.0,<1.42"'
    )


def can_use_database_file() -> bool:
    """Return whether Flower, where it is installed, can make its tables in a database file."""
    found = importlib.util.find_spec("flwr")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return not any(re.search("[ ,%]", str(Path(folder).resolve())) for folder in folders)


class FlowerClient:
    """Speaks to the SuperLink that has a private FLWR_HOME and listens on an address.

    Args:
        home: Its FLWR_HOME, which holds its database `state.db` and gets a `config.toml` here.
        address: Its host and port.
        environment: The environment for Flower's commands, see `flower_environment`.
    """

    def __init__(self, home: Path, address: str, environment: Mapping[str, str]) -> None:
        self._home = home
        self._environment = dict(environment)
        self._database = home / "state.db"
        self._asked: dict[int, tuple[float, RunStatus]] = {}
        configuration = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        (home / "config.toml").write_text(f'{configuration}address = "{address}"\ninsecure = true\n')

    @property
    def reads_database(self) -> bool:
        """Whether a run's state is read from the database, also of a SuperLink that has ended."""
        return self._database.is_file()

    def submit(self, app: Path, run_config: Path, federation: str) -> int:
        """Start a run.

        Args:
            app: The folder of the Flower app.
            run_config: A TOML file with the settings to override.
            federation: See `federation_config`.

        Returns:
            The run's id.

        Raises:
            RunFailedError: Flower did not accept it.
        """
        said = self._flwr(
            "run", str(app.resolve()), CONNECTION,
            "--run-config", str(run_config.resolve()), "--federation-config", federation, "--format", "json",
        )  # fmt: skip
        document = _json_in(said)
        if document.get("success") is not True or not str(document.get("run-id", "")).isdigit():
            # Flower puts its warnings before the error and sets them off by an empty line.
            message = str(document.get("error-message", said)).strip().rpartition("\n\n")[2]
            raise RunFailedError(f"Flower did not accept the run: {_COLOURS.sub('', message).strip()}")
        return int(str(document["run-id"]))

    def status(self, run_id: int, *, now: bool = False) -> RunStatus:
        """Return how a run stands.

        Args:
            run_id: The run's id.
            now: Whether the answer must not be some seconds old, as it may be when Flower's command has to be asked.

        Raises:
            RunFailedError: The SuperLink does not know the run.
        """
        if not self.reads_database:
            asked, status = self._asked.get(run_id, (-ASK_SECONDS, RunStatus(status="pending")))
            if now or (not status.finished and time.monotonic() - asked >= ASK_SECONDS):
                status = self._ask_status(run_id)
                self._asked[run_id] = time.monotonic(), status
            return status
        try:
            rows = self._query(_STATE_QUERY, (_signed(run_id),))
        except sqlite3.Error:
            return self._ask_status(run_id)
        if not rows:
            raise RunFailedError(f"The SuperLink does not know the run {run_id}.")
        _pending, starting, running, finished, sub_status, details = rows[0]
        if finished:
            return RunStatus(status=f"finished:{sub_status}", details=str(details or ""))
        return RunStatus(status="running" if running else "starting" if starting else "pending")

    def read_log(self, run_id: int, position: int = 0) -> tuple[str, int]:
        """Return what the run printed after `position`, and the position to go on from.

        Flower sends the output of the simulation's process to the SuperLink's database and nowhere else.
        """
        if not self.reads_database:
            said = plain_text(self._flwr("log", str(run_id), CONNECTION, "--show"))
            text = said.partition(f"logstream for run_id `{run_id}`\n")[2].removesuffix("\n")
            return text[position:], len(text)
        try:
            rows = self._query(_LOG_QUERY, (_signed(run_id), position))
        except sqlite3.Error:  # perhaps next time
            return "", position
        return plain_text("".join(str(row[1]) for row in rows)), int(str(rows[-1][0])) if rows else position

    def log_tail(self, run_id: int, lines: int = 20) -> str:
        """Return the last lines that the run printed, for an error message."""
        return "\n".join([line for line in self.read_log(run_id)[0].splitlines() if line.strip()][-lines:])

    def _ask_status(self, run_id: int) -> RunStatus:
        """Ask Flower's command; a second slower than reading the database."""
        said = self._flwr("list", CONNECTION, "--run-id", str(run_id), "--format", "json")
        runs = _json_in(said).get("runs")
        if not isinstance(runs, list) or not runs:
            raise RunFailedError(f"The SuperLink does not know the run {run_id}, or does not answer: {said.strip()}")
        details = str(runs[0].get("status-details", ""))
        return RunStatus(status=str(runs[0].get("status", "")), details="" if details == "N/A" else details)

    def _query(self, statement: str, values: tuple[int, ...]) -> list[tuple[object, ...]]:
        name = f"{self._database.as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(name, uri=True, timeout=5)) as connection:
            return connection.execute(statement, values).fetchall()

    def _flwr(self, *words: str) -> str:
        """Run a command of Flower's and return its output; with `--format json` it returns 0 also when it failed."""
        try:
            done = subprocess.run(
                [str(flower_command("flwr")), *words],
                env=self._environment, cwd=self._home / "empty", stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RunFailedError(f"`flwr {words[0]}` must end within two minutes, but did not.") from error
        return done.stdout


def plain_text(text: str) -> str:
    """Return `text` without the escape sequences that colour it."""
    return _COLOURS.sub("", text)


def _signed(run_id: int) -> int:
    """Return how the database holds a run id, which is unsigned and has 64 bits."""
    return run_id - 2**64 if run_id >= 2**63 else run_id


def _json_in(text: str) -> dict[str, object]:
    """Return the JSON object in what a command printed; the first call prints other text before it."""
    try:
        document = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
