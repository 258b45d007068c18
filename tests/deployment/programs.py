"""A deployment on this machine, of real processes that are started by their start.sh and can be killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.provision import init
from hyperfl_flwr.deploy.register import register
from hyperfl_flwr.deploy.superlink import DeployedSuperLink
from hyperfl_flwr.launch.flower_env import training_environment
from hyperfl_flwr.runs.run_directory import read_metrics

PATIENCE = 400.0
"""Seconds within which whatever is waited for happens, on a machine that does much else."""

HYPERFL = Path(sys.executable).with_name("hyperfl")

SMALL: dict[str, Scalar] = {"local-epochs": 1, "hyperfl.hidden-width": 8, "hyperfl.embedding-dim": 4}
"""Settings of HyperFL with little to train and small messages."""


def sets(settings: Mapping[str, Scalar]) -> list[str]:
    """Return settings as words of a command."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind in a run's metrics.jsonl."""
    return [row for row in read_metrics(run) if row["kind"] == kind]


def eventually(holds: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait until something holds."""
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end, f"{what} must be within {patience:g} s"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a command: (exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def processes_of(folder: Path) -> list[int]:
    """Return the processes, of all descents, whose FLWR_HOME lies in a folder."""
    wanted = f"FLWR_HOME={folder}/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if any(word.startswith(wanted) for word in (entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


class Program:
    """What a start.sh starts: a SuperLink or a SuperNode.

    Args:
        folder: The folder with start.sh.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All that it has said, over all its starts."""
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.is_file() else ""

    @property
    def pid(self) -> int:
        """The SuperLink's or SuperNode's own process, which start.sh becomes."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Run start.sh in a process group of its own."""
        environment = training_environment(keeps_memory=False)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", str(self.folder / "start.sh")], env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill9_client_apps(self) -> None:
        """Kill the processes that answer a message at this moment."""
        for pid in processes_of(self.folder):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(Path(word.decode()).name == "flwr-clientapp" for word in words[:2]):
                    os.kill(pid, signal.SIGKILL)

    def kill9(self) -> None:
        """Kill it and all that came of it, as a machine without power does."""
        self._signal(signal.SIGKILL)
        for pid in processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill9_alone(self) -> None:
        """Kill the SuperLink or SuperNode itself only; what came of it finds out."""
        os.kill(self.pid, signal.SIGKILL)
        self._wait()

    def stop(self) -> None:
        """End it as an operator does; may be called at any time."""
        self._signal(signal.SIGTERM)
        end = time.monotonic() + 20.0
        while processes_of(self.folder) and time.monotonic() < end:
            time.sleep(0.1)
        self.kill9()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            self._wait()

    def _wait(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LocalDeployment:
    """A deployment with its SuperLink and SuperNodes on this machine.

    Args:
        folder: A new folder.
        num_nodes: Number of nodes.
        host: The address at which the nodes look for the SuperLink.
    """

    def __init__(self, folder: Path, num_nodes: int, host: str = "127.0.0.1") -> None:
        self.deployment = Deployment(folder=folder, host=host, port=free_port(), num_nodes=num_nodes)
        init(self.deployment)
        self.folder = folder
        self.server = Program(self.deployment.server)
        self.nodes = [Program(self.deployment.node(number)) for number in range(num_nodes)]
        self.superlink = DeployedSuperLink(self.deployment)
        self._commands: list[subprocess.Popen[str]] = []
        for node in self.nodes:
            (node.folder / "environment").write_text(f"HYPERFL_BIN='{HYPERFL.parent}'\n")
            settings = node.folder / "node.toml"
            settings.write_text(settings.read_text().replace('threads = "auto"', "threads = 1"))

    def start_server(self) -> None:
        """Start the SuperLink and wait until it answers."""
        self.server.start()
        eventually(self._answers, "the SuperLink's answer")

    def start(self, *numbers: int) -> None:
        """Start the SuperLink, register the nodes, start some (without numbers all), and wait until they are online."""
        self.start_server()
        self.start_nodes(*numbers)

    def start_nodes(self, *numbers: int) -> None:
        """Register the nodes, start some (without numbers all), and wait until they are online."""
        list(register(self.deployment))
        wanted = numbers or tuple(range(len(self.nodes)))
        for number in wanted:
            self.nodes[number].start()
        self.wait_until_online(*wanted)

    def wait_until_online(self, *numbers: int) -> None:
        """Wait until nodes are online, and stay so: their start scripts are for a moment before."""

        def are_online() -> bool:
            return all(self.superlink.nodes()[number] for number in numbers)

        eventually(lambda: are_online() and not time.sleep(1.0) and are_online(), f"nodes {numbers} online")

    def hyperfl(self, command: str, *words: object, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start `hyperfl COMMAND ... --deployment DIR` in a folder, without one in the deployment's."""
        self._commands.append(
            subprocess.Popen(
                [str(HYPERFL), command, *map(str, words), "--deployment", str(self.folder)],
                cwd=cwd or self.folder, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
        return self._commands[-1]

    def stop(self) -> None:
        """End everything; nodes first."""
        for command in self._commands:
            if command.poll() is None:
                command.kill()
            command.communicate()
        for program in (*self.nodes, self.server):
            program.stop()

    def _answers(self) -> bool:
        assert self.server.alive, self.server.log
        try:
            self.superlink.require()
        except RunFailedError:
            return False
        return True


@contextlib.contextmanager
def local_deployment(folder: Path, num_nodes: int, host: str = "127.0.0.1") -> Iterator[LocalDeployment]:
    """Give a deployment whose processes are ended afterwards; nothing has started yet."""
    made = LocalDeployment(folder, num_nodes, host)
    try:
        yield made
    finally:
        made.stop()
        assert processes_of(folder) == []
