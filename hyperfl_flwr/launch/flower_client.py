"""Speaks to a SuperLink.

The state and the output of a run are read from the SuperLink's database (`hyperfl_flwr.flower.superlink.database`).
`flwr list` and `flwr log` give the same and are the fallback; each costs the better part of a second.
"""

import json
import sqlite3
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.superlink.database import run_log, run_status, unfinished_runs
from hyperfl_flwr.launch.flower_env import CONNECTION, flower_command, plain_text

ASK_SECONDS = 5.0
"""How often Flower's command is asked for a run's state, where it is not read from the database."""


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


def write_connection(home: Path, address: str) -> None:
    """Let Flower's commands with this FLWR_HOME find the SuperLink at an address, without TLS."""
    text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
    (home / "config.toml").write_text(f'{text}address = "{address}"\ninsecure = true\n')


class FlowerClient:
    """Speaks to the SuperLink that the configuration of a FLWR_HOME names.

    Args:
        home: The FLWR_HOME; its `config.toml` has the SuperLink as the connection `CONNECTION`.
        database: The SuperLink's database; there may be none.
        environment: The environment for Flower's commands, see `hyperfl_flwr.launch.flower_env.flower_environment`.
        within: Returns the command that runs another one where the SuperLink can be reached.
    """

    def __init__(
        self,
        home: Path,
        database: Path,
        environment: Mapping[str, str],
        *,
        within: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        self._home = home
        self._within = within
        self._environment = dict(environment)
        self._database = database
        self._asked: dict[int, tuple[float, RunStatus]] = {}

    @property
    def reads_database(self) -> bool:
        """Whether a run's state is read from the database, also of a SuperLink that has ended."""
        return self._database.is_file()

    def submit(self, app: Path, run_config: Path, federation: str = "") -> int:
        """Start a run.

        Args:
            app: The folder of the Flower app.
            run_config: A TOML file with the settings to override.
            federation: For a simulation: see `hyperfl_flwr.launch.flower_env.federation_config`.

        Returns:
            The run's id.

        Raises:
            RunFailedError: Flower did not accept it.
        """
        words = ["run", str(app.resolve()), CONNECTION, "--run-config", str(run_config.resolve()), "--format", "json"]
        said = self._flwr(*words, *(["--federation-config", federation] if federation else []))
        document = _json_in(said)
        if document.get("success") is not True or not str(document.get("run-id", "")).isdigit():
            # Flower puts its warnings before the error and sets them off by an empty line.
            message = str(document.get("error-message", said)).strip().rpartition("\n\n")[2]
            raise RunFailedError(f"Flower did not accept the run: {plain_text(message).strip()}")
        return int(str(document["run-id"]))

    def stop(self, run_id: int) -> None:
        """Stop a run; one that has ended stays as it is."""
        self._flwr("stop", str(run_id), CONNECTION)

    def unfinished(self) -> dict[int, dict[str, object]]:
        """Return the settings of the runs that have not ended, from the database: run id -> settings.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        return unfinished_runs(self._database)

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
            found = run_status(self._database, run_id)
        except sqlite3.Error:
            return self._ask_status(run_id)
        if found is None:
            raise RunFailedError(f"The SuperLink does not know the run {run_id}.")
        return RunStatus(status=found[0], details=found[1])

    def read_log(self, run_id: int, position: int = 0) -> tuple[str, int]:
        """Return what the run printed after `position`, and the position to go on from.

        Flower sends the output of the simulation's process to the SuperLink's database and nowhere else.
        """
        if not self.reads_database:
            said = plain_text(self._flwr("log", str(run_id), CONNECTION, "--show"))
            text = said.partition(f"logstream for run_id `{run_id}`\n")[2].removesuffix("\n")
            return text[position:], len(text)
        try:
            text, position = run_log(self._database, run_id, position)
        except sqlite3.Error:  # perhaps next time
            return "", position
        return plain_text(text), position

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

    def _flwr(self, *words: str) -> str:
        """Run a command of Flower's and return its output; with `--format json` it returns 0 also when it failed."""
        try:
            done = subprocess.run(
                self._within([str(flower_command("flwr")), *words]),
                env=self._environment, cwd=self._home, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RunFailedError(f"`flwr {words[0]}` must end within two minutes, but did not.") from error
        return done.stdout


def _json_in(text: str) -> dict[str, object]:
    """Return the JSON object in what a command printed; the first call prints other text before it."""
    try:
        document = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
