"""A deployment on this machine: real processes that are started by their start.sh and can be killed."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from waiting import PATIENCE, eventually

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.provision import init
from hyperfl_flwr.deploy.register import register
from hyperfl_flwr.deploy.superlink import DeployedSuperLink
from hyperfl_flwr.launch.flower.env import training_environment
from hyperfl_flwr.runs.run_directory import read_metrics

HYPERFL = Path(sys.executable).with_name("hyperfl")

SMALL: dict[str, Scalar] = {"local-epochs": 1, "hyperfl.hidden-width": 8, "hyperfl.embedding-dim": 4}
"""HyperFL settings with little training and small messages."""


ROOT = Path(__file__).resolve().parents[2]


def adding_commands() -> list[str]:
    """Return the commands of docs/how-to/deploy-operate.md that add a node, without that of nginx."""
    page = (ROOT / "docs" / "how-to" / "deploy-operate.md").read_text()
    section = page.partition("\n## Add a node\n")[2].partition("\n## ")[0]
    return re.findall(r"^\$ (hyperfl .*)$", section, flags=re.M)


def sets(settings: Mapping[str, Scalar]) -> list[str]:
    """Return settings as command-line words."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind in a run's metrics.jsonl."""
    return [row for row in read_metrics(run) if row["kind"] == kind]


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait until a command ends; return (exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def processes_of(folder: Path) -> list[int]:
    """Return all processes, of any parent, whose FLWR_HOME is below a folder."""
    wanted = f"FLWR_HOME={folder}/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if any(word.startswith(wanted) for word in (entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


class Program:
    """A SuperLink or SuperNode that is started by its start.sh.

    Args:
        folder: The folder with start.sh.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All output of the program, over all its starts."""
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.is_file() else ""

    @property
    def pid(self) -> int:
        """Process id of the SuperLink or SuperNode, which replaces start.sh."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Run start.sh in a new session."""
        environment = training_environment(keeps_memory=False)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", str(self.folder / "start.sh")], env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def client_apps(self) -> list[int]:
        """Return the client processes that handle a message at this moment."""
        found = []
        for pid in processes_of(self.folder):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "flwr-clientapp\n":  # started, or forked by a worker
                    found.append(pid)
        return found

    def client_app(self) -> int:
        """Return the only client process, once those of earlier messages have ended."""
        found: list[int] = []

        def alone() -> bool:
            found[:] = self.client_apps()
            return len(found) == 1

        eventually(alone, "a single client process")
        return found[0]

    def workers(self) -> list[int]:
        """Return the node's worker, without the processes of messages, which are forked from it."""
        found = []
        for pid in set(processes_of(self.folder)) - set(self.client_apps()):
            with contextlib.suppress(OSError):
                if b"\0deploy\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def kill9(self) -> None:
        """Kill the program and all its descendants, as a power failure does."""
        self._signal(signal.SIGKILL)
        for pid in processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill9_alone(self) -> None:
        """Kill the SuperLink or SuperNode itself only, not its descendants."""
        os.kill(self.pid, signal.SIGKILL)
        self._wait()

    def stop(self) -> None:
        """Stop the program as an operator does; may be called at any time."""
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
        folder: Folder of the deployment; it must not exist yet.
        num_nodes: Number of nodes.
        host: Address at which the nodes connect to the SuperLink.
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
            self._set_up(node)

    def _set_up(self, node: Program) -> None:
        (node.folder / "environment").write_text(f"HYPERFL_BIN='{HYPERFL.parent}'\n")
        settings = node.folder / "node.toml"
        settings.write_text(settings.read_text().replace('threads = "auto"', "threads = 1"))

    def start_server(self) -> None:
        """Start the SuperLink and wait until it answers."""
        self.server.start()
        eventually(self._answers, "the SuperLink's answer")

    def start(self, *numbers: int) -> None:
        """Start the SuperLink and some nodes (all without numbers), and wait until they are online."""
        self.start_server()
        self.start_nodes(*numbers)

    def start_nodes(self, *numbers: int) -> None:
        """Register the nodes, start some (all without numbers), and wait until they are online."""
        list(register(self.deployment))
        wanted = numbers or tuple(range(len(self.nodes)))
        for number in wanted:
            self.nodes[number].start()
        self.wait_until_online(*wanted)

    def wait_until_online(self, *numbers: int) -> None:
        """Wait until nodes stay online: their start scripts are online for a moment before."""

        def are_online() -> bool:
            return all(self.superlink.nodes()[number] for number in numbers)

        eventually(lambda: are_online() and not time.sleep(1.0) and are_online(), f"nodes {numbers} online")

    def move(self, port: int) -> None:
        """Stop the nodes and move the stopped SuperLink and the nodes to another port, as operator and owners do."""
        for node in self.nodes:
            node.stop()
        outside = self.folder.with_name("handed-over")
        self.nodes[-1].folder.rename(outside)
        for folder in (self.folder, outside):
            subprocess.run([HYPERFL, "deploy", "move", folder, "--port", str(port)], check=True, timeout=PATIENCE)
        outside.rename(self.nodes[-1].folder)
        self.deployment = Deployment.read(self.folder)
        self.superlink = DeployedSuperLink(self.deployment)

    def add_node(self) -> None:
        """Add a node while the SuperLink runs, with the page's commands, start it, and wait until it is online."""
        number = len(self.nodes)
        for command in adding_commands():
            words = [str(HYPERFL), *shlex.split(command)[1:]]
            subprocess.run(words, cwd=self.folder.parent, check=True, timeout=PATIENCE)
        self.deployment = Deployment.read(self.folder)
        self.superlink = DeployedSuperLink(self.deployment)
        self.nodes.append(Program(self.deployment.node(number)))
        self._set_up(self.nodes[-1])
        self.nodes[-1].start()
        self.wait_until_online(number)

    def hyperfl(self, command: str, *words: object, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start `hyperfl COMMAND ... --deployment DIR` in `cwd`, by default the deployment's folder."""
        self._commands.append(
            subprocess.Popen(
                [str(HYPERFL), command, *map(str, words), "--deployment", str(self.folder)],
                cwd=cwd or self.folder, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
        return self._commands[-1]

    def stop(self) -> None:
        """Stop everything, the nodes first."""
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
    """Yield a deployment that has not started; stop its processes afterwards."""
    made = LocalDeployment(folder, num_nodes, host)
    try:
        yield made
    finally:
        made.stop()
        assert processes_of(folder) == []
