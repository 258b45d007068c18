"""Start a private Flower SuperLink for each simulation, and end all of its processes however the run ends.

By default, Flower starts one SuperLink per user. It never ends, keeps the environment and working directory of the
first run, and is reachable at its port by every user of the machine. Here each run gets a private FLWR_HOME, a free
port in a private network where the system supports it (`hyperfl_flwr.launch.network_namespace`), an empty working
directory, and a supervisor (`hyperfl_flwr.launch.processes`). The supervisor ends the whole process tree when the run
is stopped, when an exception or Ctrl-C leaves the `with` block, and also when this process is killed.
"""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.launch import network_namespace, processes
from hyperfl_flwr.launch.flower.client import FlowerClient, RunStatus, write_connection
from hyperfl_flwr.launch.flower.env import (
    can_use_database_file,
    flower_command,
    flower_environment,
    plain_text,
)

STOP_SECONDS = 15.0
"""Seconds that the supervisor may take to end the process tree; it needs 1 to 5."""


class LocalSuperLink:
    """Run a SuperLink with the simulation engine for the duration of a `with` block.

    Example::

        with LocalSuperLink() as superlink:
            run_id = superlink.submit(app, run_config, federation_config(4, 2))
            while not superlink.status(run_id).finished:
                time.sleep(1)

    Args:
        home: Its FLWR_HOME, which is kept with its logs; None for a temporary folder that is removed.
        start_timeout: Seconds to wait for the SuperLink to answer.
        private: Whether it gets a private network; None for yes if the system supports it.
        ray_address: HOST:PORT of the Ray cluster on which its runs train; empty to start Ray for each run. A process
            in a private network cannot join a cluster.
        folder: Existing folder for the temporary FLWR_HOME; None for the system's.
    """

    def __init__(
        self,
        home: Path | None = None,
        *,
        start_timeout: float = 180.0,
        private: bool | None = None,
        ray_address: str = "",
        folder: Path | None = None,
    ) -> None:
        self._wanted_home = home
        self._ray_address, self._folder = ray_address, folder
        self._start_timeout = start_timeout
        self._wants_private, self._private = private, False
        self._temporary: list[Path] = []
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._client: FlowerClient | None = None
        self._seen: dict[int, processes.Process] = {}
        self._network: network_namespace.Network | None = None
        self._has_run = False
        self._given_up = threading.Event()
        self.home = Path()
        self._database = Path()
        self.port = 0

    @property
    def address(self) -> str:
        """The address on which it listens, as HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    @property
    def log_file(self) -> Path:
        """The SuperLink's log file; it does not contain a run's output, see `read_log`."""
        return self.home / "superlink.log"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def submit(self, app: Path, run_config: Path, federation: str) -> int:
        """Start a run.

        Args:
            app: The folder of the Flower app.
            run_config: A TOML file with the settings to override.
            federation: See `hyperfl_flwr.launch.flower.env.federation_config`.

        Returns:
            The run's id.

        Raises:
            RunFailedError: If Flower did not accept the run.
        """
        self._has_run = True
        return self._running().submit(app, run_config, federation)

    def status(self, run_id: int) -> RunStatus:
        """Return the status of a run; cheap enough to call several times a second.

        Raises:
            RunFailedError: If the SuperLink ended, or does not know the run.
        """
        client = self._running()
        alive = self._supervisor_lives()
        status = client.status(run_id) if alive or client.reads_database else RunStatus(status="lost")
        if not status.finished and not alive:
            raise RunFailedError(f"The SuperLink ended during the run.\n{self._superlink_log()}")
        if status.status == "running" and not self._simulation_lives():
            status = client.status(run_id, now=True)  # the run may have ended regularly in between
            if not status.finished:  # Flower itself notices only after a minute
                return RunStatus(status="finished:failed", details="The simulation's process was killed.")
        return status

    def new_notes(self) -> Iterable[str]:
        """Return no notes: a simulation's nodes start and end with the run."""
        return ()

    def read_log(self, run_id: int, position: int = 0) -> tuple[str, int]:
        """Return the run's output after `position`, and the position for the next call."""
        return self._running().read_log(run_id, position)

    def log_tail(self, run_id: int, lines: int = 20) -> str:
        """Return the last lines of the run's output, for an error message."""
        return self._running().log_tail(run_id, lines)

    def give_up(self) -> None:
        """Make `__enter__`, which another thread executes, fail soon instead of waiting for the SuperLink."""
        self._given_up.set()

    def stop(self) -> None:
        """End the SuperLink and its whole process tree; may be called at any time and more than once."""
        if self._client is not None:
            self._client.close()
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.terminate()  # first: from here on everything ends even if this process is interrupted
            if self._has_run:
                self._below()
            else:  # there is nothing that must end in order
                processes.kill_all(self._below)
            try:
                supervisor.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                processes.kill_all(self._below)
                supervisor.kill()
                supervisor.wait()
            processes.kill_all(self._leftovers)  # a supervisor that was killed leaves processes
        self._close_network()
        while self._temporary:
            shutil.rmtree(self._temporary.pop(), ignore_errors=True)

    def _start(self) -> None:
        if self._supervisor is not None:
            raise ValueError("this LocalSuperLink was entered before; create another one")
        wanted = self._wants_private
        self._private = not (self._ray_address or network_namespace.obstacle()) if wanted is None else wanted
        if self._wanted_home is None:
            prefix = "hyperfl-" if self._folder is None else ".hyperfl-"
            self._temporary.append(Path(tempfile.mkdtemp(prefix=prefix, dir=self._folder)))
        self.home = (self._wanted_home or self._temporary[0]).resolve()
        (self.home / "empty").mkdir(parents=True, exist_ok=True)
        # Ray's socket paths are limited to 107 bytes, so its folder must have a short path.
        short = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 - mkdtemp makes a private folder in it
        self._temporary.append(Path(tempfile.mkdtemp(prefix="hf-", dir=short)))
        # On a local disk: a file system that several machines share may lack the locks of a database.
        self._database = (self._temporary[-1] if self._folder else self.home) / "state.db"
        environment = flower_environment(self.home, self._temporary[-1], ray_address=self._ray_address)
        for _attempt in range(3):  # another program may take the free port before the SuperLink does
            self._launch(environment)
            self._running().prepare()
            if self._wait_until_ready():
                return
            if "address already in use" not in self._superlink_log():
                break
        raise RunFailedError(f"Flower's SuperLink ended while it started.\n{self._superlink_log()}")

    def _launch(self, environment: Mapping[str, str]) -> None:
        if self._client is not None:
            self._client.close()
        self._close_network()
        self.port = free_port()
        write_connection(self.home, self.address)
        command = [str(flower_command("flower-superlink")), "--insecure", "--simulation"]
        command += ["--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(self.port)]
        if can_use_database_file():
            command += ["--database", str(self._database)]
        self._supervisor = processes.start_supervised(
            command,
            environment=environment,
            folder=self.home / "empty",
            log=self.log_file,
            polite="flwr-simulation",
            remove=self._temporary,
            within=network_namespace.in_new_network if self._private else list,
        )
        self._client = FlowerClient(self.home, self._database, environment, within=self._within)
        if self._private:
            try:
                self._network = network_namespace.Network(self._supervisor.pid, self._supervisor_lives)
            except OSError as error:
                raise RunFailedError(
                    f"Flower's SuperLink could not get a private network: {error}\n{self._superlink_log()}\n"
                    f"If no other user has access to this machine, set {network_namespace.SHARED}=1."
                ) from error

    def _close_network(self) -> None:
        if self._network is not None:
            self._network.close()

    def _within(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in the SuperLink's network."""
        return list(command) if self._network is None else self._network.entered_by(command)

    def _wait_until_ready(self) -> bool:
        """Wait until the SuperLink answers; return False if it ended instead."""
        deadline = time.monotonic() + self._start_timeout
        check = subprocess.Popen(self._within(network_namespace.health_check(self.port)), stdin=subprocess.DEVNULL)
        while check.poll() is None and self._supervisor_lives() and time.monotonic() < deadline:
            if self._given_up.wait(0.02):
                break
        ready = check.poll() == 0
        check.kill()
        check.wait()
        if not self._supervisor_lives():
            return False
        if ready:
            return True
        if self._given_up.is_set():
            raise RunFailedError("The start of Flower's SuperLink was given up.")
        raise RunFailedError(
            f"Flower's SuperLink did not answer within {self._start_timeout:g} s.\n{self._superlink_log()}"
        )

    def _running(self) -> FlowerClient:
        if self._client is None:
            raise ValueError("this LocalSuperLink is not running; use it inside its `with` block")
        return self._client

    def _supervisor_lives(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def _below(self) -> list[processes.Process]:
        """Return the processes below the supervisor, and remember them in case the supervisor is killed."""
        roots = [] if self._supervisor is None else [self._supervisor.pid]
        below = processes.descendants(roots, processes.process_table())
        self._seen.update(below)
        return list(below.values())

    def _simulation_lives(self) -> bool:
        return any("flwr-simulation" in process.command for process in self._below())

    def _leftovers(self) -> Iterable[processes.Process]:
        """Return the remembered processes that still run, those in this network or at this port, and all below them."""
        table = processes.process_table()
        ours = [p for p in table.values() if self._was_seen(p) or self._uses_network(p)]
        return [*ours, *processes.descendants([p.pid for p in ours], table).values()]

    def _was_seen(self, process: processes.Process) -> bool:
        seen = self._seen.get(process.pid)
        return seen is not None and seen.started == process.started

    def _uses_network(self, process: processes.Process) -> bool:
        """Return whether a process is in the private network, or is this user's Flower process with this port."""
        if self._private:  # in another network, the same port number belongs to another run
            return self._network is not None and self._network.contains(process.pid)
        if not processes.is_ours(process):
            return False
        command = f"{process.command} "
        if "flower-superlink " in command:
            return f"--port {self.port} " in command
        return f"--runtime-api-address {self.address} " in command

    def _superlink_log(self, lines: int = 15) -> str:
        if not self.log_file.is_file():
            return "The SuperLink wrote no log."
        return "\n".join(plain_text(self.log_file.read_text(errors="replace")).splitlines()[-lines:])
