"""The commands of docs/how-to/deploy.md and deploy-operate.md are run as printed; only host and port are replaced.

The operator and the owner of node 0 have a folder each, and Flower's own programs use TLS on the loopback interface.
The commands for nginx are in test_gate.py.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from waiting import PATIENCE, eventually

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.deploy.admission import wait_for_admission
from hyperfl_flwr.deploy.checks.probe import probe
from hyperfl_flwr.deploy.keys import write_node_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.registered_nodes import registered_nodes
from hyperfl_flwr.launch.flower.env import flower_command
from hyperfl_flwr.runs.run_directory import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "how-to" / name for name in ("deploy.md", "deploy-operate.md")]
OWNERS = ("tar -xzf", "sh node-0", "hyperfl deploy check node-0", "hyperfl export node-0", "hyperfl ledger node-0",
          "hyperfl report node-0")  # fmt: skip
"""First words of the commands that the owner of node 0 runs; the operator runs the others."""


def page_commands() -> list[str]:
    """Return the pages' commands in order, without those that add a node, which test_deployed_run.py runs."""
    before, _, after = "\n".join(page.read_text() for page in PAGES).partition("\n## Add a node\n")
    text = before + "\n## " + after.partition("\n## ")[2]
    return [line.removeprefix("$ ") for line in text.splitlines() if re.match(r"\$ (hyperfl|sh|tar) ", line)]


@dataclass
class Machines:
    """Two people's folders on one machine, and the programs they have started.

    Attributes:
        folder: Folder that contains `operator` and `owner`.
        port: The SuperLink's port.
        running: Running programs by command, each in its own process group.
        said: Output of each finished command, in order.
    """

    folder: Path
    port: int
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    @property
    def deployment(self) -> Deployment:
        return Deployment.read(self.folder / "operator" / "fl")

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(flower_command("flower-superlink").parent), os.environ.get("PATH", os.defpath)])
        return {**os.environ, "PATH": path, "HOME": str(self.folder)}

    def start(self, command: str, place: Path) -> "subprocess.Popen[bytes]":
        log = (self.folder / f"{len(self.running)}.log").open("wb")
        with log:
            started = subprocess.Popen(
                ["sh", "-c", f"exec {command}"], cwd=place, env=self.environment(), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.running[command] = started
        return started

    def finish(self, command: str, place: Path) -> tuple[int, str]:
        # A node's commands ask the host as its SuperNode does, through a proxy; the start scripts exempt this host.
        environment = self.environment() | dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1")
        done = subprocess.run(
            ["sh", "-c", command], cwd=place, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        self.said[command] = done.stdout
        return done.returncode, done.stdout

    def online(self) -> list[int]:
        return [number for number, node in registered_nodes(self.deployment).items() if node.online]

    def known(self) -> set[tuple[int, bytes]]:
        """Return (Flower's number, key) of all nodes in the SuperLink's database."""
        name = f"{self.deployment.database.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(name, uri=True, timeout=5)) as connection:
            return set(connection.execute("SELECT node_id, public_key FROM node"))

    def stay_online(self, numbers: list[int]) -> bool:
        """Return whether exactly these nodes are online, and not only while a start script checks the connection."""
        if self.online() != numbers:
            return False
        time.sleep(1.0)
        return self.online() == numbers

    def answers(self) -> bool:
        return probe("localhost", self.port, self.deployment.server / "ca.crt", direct=True)[0] is not None

    def stop(self) -> None:
        """Stop the nodes, then the SuperLink; kill what does not end."""
        for command in reversed(self.running):
            started = self.running[command]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def run_pages(machines: Machines, commands: list[str]) -> None:
    """Run the commands; after one that starts a program, wait until it is online."""
    for written in commands:
        command = written.replace("fl.example.org", "localhost").replace("8443", str(machines.port))
        if command.startswith("hyperfl run") and len(machines.online()) == 1:
            start_the_other_node(machines)
        owner = machines.folder / "owner"
        place = owner if command.startswith(OWNERS) else machines.folder / "operator"
        if command.endswith("start.sh"):
            machines.start(command, place)
            if "server" in command:
                eventually(machines.answers, "the SuperLink's answer")
            else:
                eventually(lambda: machines.stay_online([0]), "node 0 online")
            continue
        code, said = machines.finish(command, place)
        assert code == 0, f"{command}: {said}"
        if command.startswith("tar -C"):  # the operator gives it to the owner
            shutil.move(machines.folder / "operator" / "node-0.tar.gz", owner)


def start_the_other_node(machines: Machines) -> None:
    """Start node 1, as its owner would."""
    machines.start("sh fl/nodes/node-1/start.sh", machines.folder / "operator")
    eventually(lambda: machines.stay_online([0, 1]), "both nodes online")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("two machines")
    machines = Machines(folder=folder, port=free_port())
    (folder / "operator").mkdir()
    (folder / "owner").mkdir()
    try:
        run_pages(machines, page_commands())
        yield machines
    finally:
        machines.stop()


def test_the_pages_have_the_commands() -> None:
    commands = page_commands()
    for word in ("init", "register", "renew", "check", "status"):
        assert any(command.startswith(f"hyperfl deploy {word} ") for command in commands), word


def test_both_sides_are_in_order(machines: Machines) -> None:
    operator, owner = machines.said["hyperfl deploy check fl"], machines.said["hyperfl deploy check node-0"]
    assert "error" not in operator + owner
    assert "nodes: 1 (1) away, 1 (0) connected" in operator
    assert "older certificate" not in operator
    _, renewed = machines.finish("hyperfl deploy check fl", machines.folder / "operator")
    assert "running with an older certificate" in renewed  # the pages' last command has renewed it
    assert "key: it is registered with the SuperLink" in owner
    assert "error" not in machines.said["hyperfl deploy check node-0 --set data.input-shape=1x64x64"]
    assert machines.said["hyperfl deploy register fl"].splitlines() == ["node-0: registered", "node-1: registered"]


def test_a_run_leaves_its_results_on_both_sides(machines: Machines) -> None:
    """The run and its continuation complete; the owner has the model, and a ledger of what left the node."""
    run = machines.folder / "operator" / "first"
    assert json.loads((run / "manifest.json").read_text())["status"] == "completed"
    assert [row["round"] for row in read_metrics(run) if row["kind"] == "train"] == [1, 2, 3]
    exported = machines.folder / "owner" / "mine" / "model.safetensors"
    newest = [row for row in read_metrics(run) if row["kind"] == "client" and row["client"] == 0][-1]
    assert json.loads(exported.with_suffix(".json").read_text())["accuracy"] == newest["personalized_accuracy"]
    page = Path(machines.said["hyperfl report node-0"].strip())
    assert page.is_relative_to(machines.folder / "owner" / "node-0" / "state")
    assert f'<dd class="value">{100 * newest["personalized_accuracy"]:.2f} %</dd>' in page.read_text()
    status = machines.said["hyperfl deploy status fl"]
    assert "SuperLink at localhost:" in status
    assert "nodes: 2 of 2 connected" in status
    assert "hyperfl, round 3 of 3, accuracy: personalized" in status
    told = next(said for command, said in machines.said.items() if command.startswith("hyperfl ledger"))
    assert "These groups are private and stayed on the node: classifier, embedding" in told


def test_registering_again_changes_nothing(machines: Machines) -> None:
    before = registered_nodes(machines.deployment)
    code, said = machines.finish("hyperfl deploy register fl", machines.folder / "operator")
    assert (code, said.splitlines()) == (0, ["node-0: is already registered", "node-1: is already registered"])
    assert registered_nodes(machines.deployment) == before


def test_a_node_with_an_unregistered_key_is_refused(machines: Machines) -> None:
    place = machines.folder / "stranger"
    shutil.copytree(machines.deployment.node(1), place)
    write_node_key(place, "stranger")
    code, said = machines.finish("hyperfl deploy check .", place)
    assert code == 1
    assert "error   key: it is not registered with the SuperLink" in said
    code, said = machines.finish("sh start.sh", place)
    assert code == 2
    assert "error: this node's key is not registered with the SuperLink; ask the operator to run" in said
    said = refused_by_the_superlink(machines, "--root-certificates ca.crt --auth-supernode-private-key node.key", place)
    assert "[code: 2004] Failed to activate SuperNode." in said


def test_a_node_without_a_key_is_refused(machines: Machines) -> None:
    said = refused_by_the_superlink(machines, "--root-certificates ca.crt", machines.deployment.node(1))
    assert "SuperNode authentication is enabled" in said


def refused_by_the_superlink(machines: Machines, words: str, place: Path) -> str:
    """Start Flower's SuperNode without the checks of start.sh, check that it is refused, and return its output."""
    before = machines.known()
    address = f"--superlink localhost:{machines.port} --max-retries 1 --port {free_port()}"
    quiet = "FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1"
    code, said = machines.finish(f"{quiet} flower-supernode {address} {words}", place)
    assert code == 1, said
    assert "Failed to initialize the connection to the SuperLink." in said  # it got as far as connecting
    assert len(before) == 2
    assert machines.known() == before
    assert machines.online() == [0, 1]
    assert machines.answers()
    return said


def test_a_second_supernode_with_the_key_of_one_that_is_online_is_told(machines: Machines) -> None:
    notes: list[str] = []
    with pytest.raises(StateError, match="another SuperNode is online with this node's key"):
        wait_for_admission(machines.deployment.node(1), notes.append, patience=0.0)
    assert notes == []
    assert machines.online() == [0, 1]


def test_a_node_without_tls_is_refused(machines: Machines) -> None:
    """The SuperLink ends a connection that does not use TLS, in one of several ways.

    Without a SuperLink the connection would be refused, and a SuperLink without TLS would accept the node.
    """
    said = refused_by_the_superlink(machines, "--insecure", machines.folder)
    assert "Starting insecure channel" in said
    assert "Connection attempt failed, retrying" in said
    assert "Connection refused" not in said


def test_a_node_that_trusts_another_authority_is_told(machines: Machines) -> None:
    place = machines.folder / "misled"
    shutil.copytree(machines.deployment.node(1), place)
    code, _ = machines.finish("hyperfl deploy init other --nodes 1", machines.folder)
    assert code == 0
    shutil.copy(machines.folder / "other" / "server" / "ca.crt", place / "ca.crt")
    code, said = machines.finish("hyperfl deploy check .", place)
    assert code == 1
    assert "was issued by another authority" in said


def test_a_wrong_setting_keeps_the_node_from_starting(machines: Machines) -> None:
    place = machines.folder / "mistaken"
    shutil.copytree(machines.deployment.node(1), place)
    (place / "node.toml").write_text('thread = 1\ndevice = "gpu"\n')
    code, said = machines.finish("sh start.sh", place)
    assert code == 2
    assert "thread is unknown; did you mean threads?" in said
    assert "'gpu'" in said
