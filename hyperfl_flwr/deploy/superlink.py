"""Submit, follow and stop runs on the running SuperLink of a deployment, from the SuperLink's machine.

The SuperLink executes the run: it continues when the terminal that started it is closed. Nothing here ends the
SuperLink or a node.
"""

import os
import shlex
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

import httpx

from hyperfl_flwr.core.errors import HyperFLError, RunDirectoryError, RunFailedError, StateError
from hyperfl_flwr.core.files.folder_lock import lock_folder
from hyperfl_flwr.deploy.checks.probe import ask_health, is_refused
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.register import commands_environment
from hyperfl_flwr.deploy.registered_nodes import readable, registered_nodes
from hyperfl_flwr.launch.flower.client import FlowerClient, RunStatus

HEALTH_SECONDS = 3.0
"""Seconds between two checks that the SuperLink still answers."""

HEALTH_TIMEOUT_SECONDS = 5.0
"""Longest wait for the answer to such a check."""

SILENT_SECONDS = 60.0
"""Seconds after which a SuperLink that does not answer, but has its port open, counts as ended; shorter silences occur
on an overloaded machine."""


class DeployedSuperLink:
    """Client of a deployment's SuperLink on this machine.

    Args:
        deployment: The deployment.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._client = FlowerClient(deployment.flower_home, deployment.database, commands_environment(deployment))
        self._last_announced: dict[int, bool] | None = None
        self._last_answer = time.monotonic()
        self._last_health_check = 0.0

    def require(self) -> None:
        """Check that the SuperLink runs and that its database is readable.

        Raises:
            RunFailedError: If not, with the remedy.
        """
        start = shlex.quote(str(self._deployment.server / "start.sh"))
        check = f"hyperfl deploy check {shlex.quote(str(self._deployment.folder))}"
        try:
            self._health()
        except (httpx.HTTPError, OSError) as error:
            if is_refused(error):
                raise RunFailedError(
                    f"the SuperLink is not running: nothing listens at {self._address}; start it: {start}"
                ) from None
            raise RunFailedError(
                f"the SuperLink does not answer at {self._address} ({error}); `{check}` finds the cause"
            ) from None
        if not os.access(self._deployment.database, os.R_OK):
            raise RunFailedError(
                f"the SuperLink's database {self._deployment.database} is not readable; run this command as the user "
                f"who starts {start}, on the SuperLink's machine"
            )

    def nodes(self) -> dict[int, bool]:
        """Return for each node of the deployment whether it is online; False for a node that is not registered."""
        registered = registered_nodes(self._deployment)
        online = {number for number, node in registered.items() if node.online}
        return {number: number in online for number in range(self._deployment.num_nodes)}

    def new_notes(self) -> Iterable[str]:
        """Return notes about nodes that went online or offline since the last call; at first, about all nodes.

        While the nodes cannot be read there are no notes: a run goes on without them.
        """
        try:
            before, now = self._last_announced, self.nodes()
        except StateError:
            return
        self._last_announced = now
        if before is None:
            missing = [number for number, online in now.items() if not online]
            there = [number for number, online in now.items() if online]
            yield f"online: {_named(there)}" + (f"; offline: {_named(missing)}" if missing else "")
            return
        for number, online in now.items():
            if online != before.get(number, False):
                yield f"node {number} is {'online' if online else 'offline'}"

    def require_free(self, announce: Callable[[str], None] = lambda _: None) -> None:
        """Check that no other run is active; stop a run that was abandoned when the SuperLink was killed.

        Args:
            announce: Receives a note about each run that is stopped.

        Raises:
            RunFailedError: If another run is active, with the command that stops it, or if one could not be stopped.
            StateError: If the SuperLink's database cannot be read.
        """
        with readable(self._deployment.database):
            unfinished = self._client.unfinished()
        for run_id, run in unfinished.items():
            folder = str(run.settings.get("resume") or run.settings.get("output") or "")
            if folder and _is_abandoned(Path(folder), run.submitted):
                self.stop(run_id)
                announce(f"stopped run {run_id} in {folder}: no process writes there any more")
            else:
                raise RunFailedError(
                    f"another run is active on the SuperLink: {run_id}{f' in {folder}' if folder else ''}; wait for it "
                    f"or stop it: {self.stop_command(run_id)}"
                )

    def submit(self, app: Path, run_config: Path) -> int:
        """Start a run; returns its id.

        Args:
            app: The folder of the Flower app.
            run_config: A TOML file with the settings to override.

        Raises:
            RunFailedError: If Flower did not accept the run.
        """
        return self._client.submit(app, run_config)

    def status(self, run_id: int) -> RunStatus:
        """Return the status of a run.

        Raises:
            RunFailedError: If the SuperLink ended, or does not know the run.
        """
        status = self._client.status(run_id)
        if not status.finished and not self._answers():
            start = shlex.quote(str(self._deployment.server / "start.sh"))
            raise RunFailedError(f"The SuperLink ended during the run; start it again: {start}")
        return status

    def read_log(self, run_id: int, position: int = 0) -> tuple[str, int]:
        """Return the run's output after `position`, and the position for the next call."""
        return self._client.read_log(run_id, position)

    def log_tail(self, run_id: int, lines: int = 20) -> str:
        """Return the last lines of the run's output, for an error message."""
        return self._client.log_tail(run_id, lines)

    def stop(self, run_id: int) -> None:
        """Stop a run; the SuperLink and the nodes keep running.

        Raises:
            RunFailedError: If Flower did not stop it.
        """
        self._client.stop(run_id)

    def stop_command(self, run_id: int) -> str:
        """Return the command with which the user stops a run."""
        return f"FLWR_HOME={shlex.quote(str(self._deployment.flower_home))} flwr stop {run_id}"

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self._deployment.port}"

    def _health(self) -> None:
        """Send a health request to the SuperLink; raises as `ask_health` does."""
        certificates = self._deployment.server / "ca.crt"
        ask_health("127.0.0.1", self._deployment.port, certificates, direct=True, seconds=HEALTH_TIMEOUT_SECONDS)

    def _answers(self) -> bool:
        """Return whether the SuperLink still runs; sends a health request at most every `HEALTH_SECONDS`."""
        now = time.monotonic()
        if now - self._last_health_check >= HEALTH_SECONDS:
            self._last_health_check = now
            try:
                self._health()
            except (httpx.HTTPError, OSError) as error:
                # A closed port is final; a timeout may only mean that the machine is overloaded.
                return not is_refused(error) and now - self._last_answer < SILENT_SECONDS
            self._last_answer = now
        return True


def _is_abandoned(folder: Path, submitted: datetime) -> bool:
    """Return whether a run that was submitted at a time has begun in its folder, and its process died there."""
    if not _lacks_end(folder, submitted):
        return False
    try:
        lock_folder(folder).close()  # the server app holds this lock as long as it runs
    except (RunDirectoryError, OSError):
        return False
    return _lacks_end(folder, submitted)  # it may have ended meanwhile, and is about to be reported to the SuperLink


def _lacks_end(folder: Path, submitted: datetime) -> bool:
    """Return whether a folder's manifest has the begin of a run that was submitted at a time, but no end of its own.

    Until the server app of a resumed run has found its nodes, the manifest is that of an earlier start. A run that died
    before that is not recognised here: Flower ends it a minute after the last heartbeat of its process.
    """
    if not (folder / "manifest.json").is_file():
        return False
    from hyperfl_flwr.runs.run_directory import read_manifest  # deferred: imports Flower

    try:
        manifest = read_manifest(folder)
        begun = datetime.fromisoformat([manifest, *manifest.get("resumed", ())][-1]["start"])
    except (HyperFLError, OSError, KeyError, TypeError, ValueError):
        return False
    return begun > submitted and manifest.get("status") not in ("completed", "failed")


def _named(numbers: list[int]) -> str:
    if not numbers:
        return "no node"
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
