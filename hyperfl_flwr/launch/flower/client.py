"""Submit runs to a SuperLink, stop them, and read their status and output.

Status and output are read from the SuperLink's database, opened read-only (`hyperfl_flwr.flower.superlink.database`):
this takes half a millisecond and no import of Flower. Where there is no database file, `flwr list` and `flwr log` are
called instead; each takes most of a second.
"""

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.superlink.database import UnfinishedRun, run_log, run_status, unfinished_runs
from hyperfl_flwr.launch.flower.commands import FlowerCommands, json_in
from hyperfl_flwr.launch.flower.env import CONNECTION, plain_text

ASK_SECONDS = 5.0
"""Seconds between two calls of `flwr list`, where a run's status is not read from the database."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Status of a run as Flower reports it.

    Attributes:
        status: "pending", "starting", "running", "finished:completed", "finished:failed" or "finished:stopped".
        details: Reason of a failure; empty otherwise.
    """

    status: str
    details: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run has ended, in any way."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether the run has ended regularly."""
        return self.status == "finished:completed"


def write_connection(home: Path, address: str) -> None:
    """Configure a FLWR_HOME so that Flower's commands connect to the SuperLink at an address, without TLS."""
    text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
    (home / "config.toml").write_text(f'{text}address = "{address}"\ninsecure = true\n')


class FlowerClient:
    """Client of the SuperLink that is configured in a FLWR_HOME.

    Args:
        home: The FLWR_HOME; its `config.toml` has the SuperLink as the connection `CONNECTION`.
        database: The SuperLink's database file, which need not exist.
        environment: The environment for Flower's commands, see `hyperfl_flwr.launch.flower.env.flower_environment`.
        within: Returns the command that runs a given command in the SuperLink's network.
    """

    def __init__(
        self,
        home: Path,
        database: Path,
        environment: Mapping[str, str],
        *,
        within: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        self._commands = FlowerCommands(environment, home, within)
        self._database = database
        self._status_cache: dict[int, tuple[float, RunStatus]] = {}

    def prepare(self) -> None:
        """Start the process of the next command, which imports Flower meanwhile; `close` ends it if none follows."""
        self._commands.prepare()

    def close(self) -> None:
        """End a process that `prepare` has started and no command has used."""
        self._commands.close()

    @property
    def reads_database(self) -> bool:
        """Whether a run's status is read from the database, which also works after the SuperLink has ended."""
        return self._database.is_file()

    def submit(self, app: Path, run_config: Path, federation: str = "") -> int:
        """Start a run.

        Args:
            app: The folder of the Flower app.
            run_config: A TOML file with the settings to override.
            federation: Federation config of a simulation, see `hyperfl_flwr.launch.flower.env.federation_config`.

        Returns:
            The run's id.

        Raises:
            RunFailedError: If Flower did not accept the run.
        """
        words = ["run", str(app.resolve()), CONNECTION, "--run-config", str(run_config.resolve()), "--format", "json"]
        output = self._flwr(*words, *(["--federation-config", federation] if federation else []))
        document = json_in(output)
        if document.get("success") is not True or not str(document.get("run-id", "")).isdigit():
            raise RunFailedError(f"Flower did not accept the run: {_reason(output)}")
        return int(str(document["run-id"]))

    def stop(self, run_id: int) -> None:
        """Stop a run; no effect on a run that has ended.

        Raises:
            RunFailedError: If Flower did not stop it.
        """
        output = self._flwr("stop", str(run_id), CONNECTION, "--format", "json")
        if json_in(output).get("success") is not True and not self.status(run_id, now=True).finished:
            raise RunFailedError(f"Flower did not stop the run: {_reason(output)}")

    def unfinished(self) -> dict[int, UnfinishedRun]:
        """Return the runs that have not ended, from the database, by run id.

        Raises:
            sqlite3.Error: If the database cannot be read.
        """
        return unfinished_runs(self._database)

    def status(self, run_id: int, *, now: bool = False) -> RunStatus:
        """Return the status of a run.

        Args:
            run_id: The run's id.
            now: Whether to bypass the answer of `flwr list`, which is cached for `ASK_SECONDS`.

        Raises:
            RunFailedError: If the SuperLink does not know the run.
        """
        if not self.reads_database:
            time_asked, status = self._status_cache.get(run_id, (-ASK_SECONDS, RunStatus(status="pending")))
            if now or (not status.finished and time.monotonic() - time_asked >= ASK_SECONDS):
                status = self._ask_status(run_id)
                self._status_cache[run_id] = time.monotonic(), status
            return status
        try:
            found = run_status(self._database, run_id)
        except sqlite3.Error:
            return self._ask_status(run_id)
        if found is None:
            raise RunFailedError(f"The SuperLink does not know the run {run_id}.")
        return RunStatus(status=found[0], details=found[1])

    def read_log(self, run_id: int, position: int = 0) -> tuple[str, int]:
        """Return the run's output after `position`, and the position for the next call.

        Flower writes the output of a simulation's process to the SuperLink's database only.
        """
        if not self.reads_database:
            output = self._flwr("log", str(run_id), CONNECTION, "--show")
            text = output.partition(f"logstream for run_id `{run_id}`\n")[2].removesuffix("\n")
            return text[position:], len(text)
        try:
            text, position = run_log(self._database, run_id, position)
        except sqlite3.Error:  # locked or incomplete: the next call reads these lines
            return "", position
        return plain_text(text), position

    def log_tail(self, run_id: int, lines: int = 20) -> str:
        """Return the last lines of the run's output, for an error message."""
        return "\n".join([line for line in self.read_log(run_id)[0].splitlines() if line.strip()][-lines:])

    def _ask_status(self, run_id: int) -> RunStatus:
        """Return a run's status from `flwr list`, a second slower than from the database."""
        output = self._flwr("list", CONNECTION, "--run-id", str(run_id), "--format", "json")
        runs = json_in(output).get("runs")
        if not isinstance(runs, list) or not runs:
            raise RunFailedError(f"The SuperLink does not know the run {run_id}, or does not answer: {output.strip()}")
        details = str(runs[0].get("status-details", ""))
        return RunStatus(status=str(runs[0].get("status", "")), details="" if details == "N/A" else details)

    def _flwr(self, *words: str) -> str:
        """Run a `flwr` command and return its output."""
        with self._commands:  # the next one comes in minutes, if at all
            return self._commands.run(*words)


def _reason(output: str) -> str:
    """Return the error in a failed command's output, before which Flower prints warnings and an empty line."""
    return str(json_in(output).get("error-message", output)).strip().rpartition("\n\n")[2].strip()
