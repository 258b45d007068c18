"""`hyperfl run --deployment`: real SuperLink and SuperNodes on loopback, with TLS and authentication.

Expected values are those of the same run in one process: neither the network nor kills may change any bit. The target
network and the method are in a folder outside the project, from which they travel to the nodes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from programs import (
    HYPERFL,
    SMALL,
    LocalDeployment,
    finished,
    processes_of,
    rows_of,
    sets,
)  # fmt: skip
from resident import assert_small
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waiting import eventually

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.app_bundle import commit
from hyperfl_flwr.launch.tensorboard import FOLDER
from hyperfl_flwr.privacy.budget import FILE, read_record
from hyperfl_flwr.server.in_process_grid import InProcessGrid

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SETTINGS: dict[str, Scalar] = SMALL | {"checkpoint-every": 1}
SETS = sets(SETTINGS)

MODEL = "network_of_mine:build"
HOLD = "hold"
"""File in the folder of the networks' sources; while it exists, the network is not built."""

OWN_NETWORK = """
from pathlib import Path
from time import sleep

from torch import nn


def build(input_shape, num_classes):
    while Path("HOLD").exists():
        sleep(0.1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, num_classes))
"""


METHOD = "method_of_mine:METHOD"
OWN_METHOD = """
from dataclasses import replace
from typing import ClassVar

from clients.hyperfl import HyperFLClient
from hyperfl_flwr.core.settings import PositiveFloat, Section, setting
from hyperfl_flwr.methods.hyperfl import METHOD as HYPERFL


class MineConfig(Section):
    key: ClassVar[str] = "mine"

    bound: PositiveFloat = setting(1.0, "Largest norm of the gradient.")


class MineClient(HyperFLClient):
    @classmethod
    def local_steps(cls, config):
        return replace(super().local_steps(config), clip_norm=config.section(MineConfig).bound)


METHOD = replace(
    HYPERFL, name="mine", client="method_of_mine:MineClient", settings=(*HYPERFL.settings, MineConfig)
)
"""

OWN: dict[str, Scalar] = {"target": MODEL, "method": METHOD, "mine.bound": 0.5}
OWN_WORDS = sets(OWN)

WIDE_MODEL = "wide_network:build"
WIDE_NETWORK = """
from torch import nn


def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200_000), nn.ReLU(), nn.Linear(200_000, num_classes))
"""
"""A network of 60 MB, so that a message takes a while to arrive."""


RECEIVING, IGNORED = "Receiving: train message", "is not in `RUNNING` status. Ignoring message"
"""What a SuperNode logs when a message begins to arrive, and when its run has ended before it had arrived."""


def checkpoint(folder: Path, number: int) -> dict[str, np.ndarray]:
    return read_arrays(folder / "checkpoints" / f"round-{number:06d}.npz")[0]


def accuracies(folder: Path) -> list[tuple[int, float]]:
    """Return (round, mean personalized accuracy) of each line, in order."""
    return [(row["round"], row["personalized_accuracy"]) for row in rows_of(folder, "train")]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sources of networks and of a method."""
    folder = tmp_path_factory.mktemp("network")
    (folder / "method_of_mine.py").write_text(OWN_METHOD)
    (folder / "network_of_mine.py").write_text(OWN_NETWORK.replace("HOLD", str(folder / HOLD)))
    (folder / "wide_network.py").write_text(WIDE_NETWORK)
    return folder


@pytest.fixture(scope="module")
def straight(network: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three rounds in this process."""
    output = tmp_path_factory.mktemp("straight") / "run"
    changes: dict[str, Scalar] = {"num-clients": 2, "num-rounds": 3, "threads": 1, "output": str(output)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(network)
        settings = with_defaults(SETTINGS | changes | OWN)
        run(InProcessGrid(app, 2, settings, {"simulated": True}), RunConfig.from_flat(settings))
    return output


def assert_like(folder: Path, straight: Path, rounds: int) -> None:
    """Check that a run has each round of the straight one once, with the same bits."""
    assert accuracies(folder) == accuracies(straight)[:rounds]
    np.testing.assert_equal(checkpoint(folder, rounds), checkpoint(straight, rounds))


def test_without_a_superlink_and_without_nodes(prepared: LocalDeployment) -> None:
    """This test is the first, since the others start what is missing here."""
    assert not prepared.server.alive
    code, _, err = finished(prepared.hyperfl("run"))
    assert (code, f"start it: {prepared.server.folder}/start.sh" in err) == (1, True), err
    prepared.start_server()
    code, _, err = finished(prepared.hyperfl("run", "--set", "node-timeout=1"))
    assert (code, "no node of" in err) == (1, True), err
    assert "online: no node; offline: nodes 0, 1" in err


def test_a_run_and_its_continuation(two_nodes: LocalDeployment, network: Path, straight: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = (*OWN_WORDS, "--num-rounds", 2, "--output", output, "--tensorboard", *SETS)
    code, out, err = finished(two_nodes.hyperfl("run", *words, cwd=network))
    assert code == 0, err
    assert out.splitlines()[-1] == str(output)
    assert "online: nodes 0, 1" in err
    shown = EventAccumulator(str(output / FOLDER)).Reload().Scalars("accuracy/personalized")
    assert [event.step for event in shown] == [1, 2]
    assert [event.value for event in shown] == pytest.approx([own for _, own in accuracies(output)])
    assert [int(number) for number in re.findall(r"^round (\d)/2: personalized accuracy", err, flags=re.M)] == [1, 2]
    spent = (
        r"round 1 took \d+\.\d s, in which a client trained for at most \d+\.\d s; a client received (.*) MB and sent"
    )
    (size,) = re.findall(spent, " ".join(err.split()))
    assert float(size) == pytest.approx(1e-6 * rows_of(output, "train")[0]["bytes_down_per_client"], abs=0.05)
    assert "hyperfl-frozen, with a constant embedding, would send" in " ".join(err.split())
    assert_like(output, straight, 2)
    manifest = json.loads((output / "manifest.json").read_text())
    assert (manifest["status"], manifest["nodes"]) == ("completed", [[0], [1]])
    assert manifest["code"]["commit"] == (commit().removesuffix("-dirty") or None)
    assert "label_counts" not in manifest
    assert {manifest["model"]["factory"], manifest["method"]["name"]} == {MODEL, METHOD}
    assert (output / "method" / "method_of_mine.py").read_text() == OWN_METHOD
    summary = json.loads((output / "summary.json").read_text())
    assert summary["test_accuracy"] == pytest.approx(np.mean(summary["test_accuracy_per_client"]))
    assert {"server.log", "plots", "checkpoints", "metrics.jsonl"} <= {path.name for path in output.iterdir()}
    assert_private_state_stays(two_nodes, output)

    refused = subprocess.run(
        [HYPERFL, "run", "--resume", output, "--num-rounds", "3"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "is a run of a deployment" in refused.stderr
    again = ("--num-rounds", 3, "--resume", output, "--verbose")
    code, out, err = finished(two_nodes.hyperfl("run", *again, cwd=network))
    assert code == 0, err
    assert out.splitlines()[-1] == str(output)
    assert "INFO :      round 3/3: personalized accuracy" in err
    assert "Start `flwr-serverapp` process" in err  # Flower's own log line
    assert_like(output, straight, 3)


def assert_private_state_stays(made: LocalDeployment, output: Path) -> None:
    """Check that no file on the server's side contains the bytes of private arrays."""
    kept = [read_arrays(file)[0] for node in made.nodes for file in (node.folder / "state").rglob("round-000002.npz")]
    groups = client_of("hyperfl").private
    private = [value.tobytes() for arrays in kept for key, value in arrays.items() if key.partition("/")[0] in groups]
    files = [path for folder in (output, made.server.folder) for path in folder.rglob("*") if path.is_file()]
    contents = [path.read_bytes() for path in files]
    assert len(kept) == 2  # one client on each node
    assert len(private) >= 2 * len(groups)
    assert not any(data[:16] in content for data in private for content in contents)
    shared = next(iter(checkpoint(output, 2).values())).tobytes()  # shared arrays must be found by this search
    assert any(shared[:16] in content for content in contents)


@pytest.mark.extended
def test_ctrl_c_during_a_transfer_stops_the_run_and_nothing_else(
    two_nodes: LocalDeployment, network: Path, tmp_path: Path
) -> None:
    """The node takes part in the next run, although Flower's SuperNode then sends each reply one message too late."""
    output, node = tmp_path / "a run", two_nodes.nodes[0]
    words = ("--method", "fedavg", "--model", WIDE_MODEL, "--num-rounds", 1000, "--output", output, *SETS)
    process = two_nodes.hyperfl("run", *words, cwd=network)
    eventually((output / "manifest.json").is_file, "the run's folder")
    assert_small(process.pid)
    code, _, err = finished(two_nodes.hyperfl("run", "--num-rounds", 2, *SETS))
    assert (code, "another run is active" in err, str(output) in err) == (1, True, True), err
    received = node.log.count(RECEIVING)
    eventually(lambda: node.log.count(RECEIVING) > received, "the next message", every=0.01)
    os.kill(node.pid, signal.SIGSTOP)  # the message arrives when the run has ended
    process.send_signal(signal.SIGINT)
    code, out, err = finished(process)
    os.kill(node.pid, signal.SIGCONT)
    assert (code, out) == (130, "")
    assert f"resume with: hyperfl run --resume '{output}' --deployment {two_nodes.folder}" in err
    assert "the run may go on" not in err
    two_nodes.superlink.require_free()
    assert two_nodes.superlink.nodes() == {0: True, 1: True}
    eventually(lambda: IGNORED in node.log, "a SuperNode that is out of step")
    words = ("--model", MODEL, "--num-rounds", 1, "--output", tmp_path / "next", *SETS)
    code, _, err = finished(two_nodes.hyperfl("run", *words, cwd=network))
    assert code == 0, err


@pytest.mark.extended
def test_a_killed_superlink_loses_nothing_even_if_it_moves_and_a_node_is_added(
    two_nodes: LocalDeployment, network: Path, straight: Path, tmp_path: Path
) -> None:
    """The run goes on at another port (`hyperfl deploy move`), with the same keys and the nodes' private state.

    Before its last round node 2 is added to the deployment. It takes no part in this run, of which no bit differs.
    """
    output = tmp_path / "run"
    words = (*OWN_WORDS, "--num-rounds", 3, "--output", output, *SETS)
    process = two_nodes.hyperfl("run", *words, cwd=network)
    eventually((output / "checkpoints" / "round-000001.npz").is_file, "the first checkpoint")
    two_nodes.server.kill9_alone()
    code, out, err = finished(process)
    assert (code, out) == (1, "")
    assert "The SuperLink ended during the run; start it again" in err
    command = re.search(r"resume with: hyperfl run --resume (.*) --deployment (.*)", err)
    assert command is not None, err
    assert command.groups() == (str(output), str(two_nodes.folder))
    # The run's own process releases its folder some seconds later.
    eventually(lambda: not processes_of(two_nodes.server.folder), "the end of what the SuperLink had started")
    code, _, err = finished(two_nodes.hyperfl("run", "--resume", output))
    assert (code, "start it:" in err) == (1, True), err
    two_nodes.move(free_port())
    two_nodes.start()
    process = two_nodes.hyperfl("run", "--resume", output, "--quiet")
    eventually(lambda: (output / "server.log").read_text().count("node 1 takes part") == 2, "the run's second begin")
    (network / HOLD).touch()
    two_nodes.add_node()
    assert not (output / "checkpoints" / "round-000003.npz").exists()
    (network / HOLD).unlink()
    code, out, err = finished(process)
    assert (code, out.splitlines(), err) == (0, [str(output)], "")
    assert_like(output, straight, 3)
    manifest = json.loads((output / "manifest.json").read_text())
    assert (len(manifest["resumed"]), manifest["nodes"], manifest["refused"]) == (1, [[0], [1]], [])
    assert "node 2 takes no part in this run\n" in (output / "server.log").read_text()
    assert "node 2 takes no part in this run, which has 2 nodes (num-nodes)" in two_nodes.nodes[2].log


def test_a_simulation_is_not_resumed_by_nodes_that_do_not_have_its_state(
    two_nodes: LocalDeployment, straight: Path, tmp_path: Path
) -> None:
    shutil.copytree(straight, tmp_path / "run")
    code, _, err = finished(two_nodes.hyperfl("run", "--resume", tmp_path / "run", "--num-rounds", 4))
    assert (code, "is a run of a simulation" in err) == (2, True), err
    code, _, err = finished(two_nodes.hyperfl("run", "--num-nodes", 3))
    assert (code, "a deployment has its own nodes" in err) == (2, True), err


@pytest.fixture
def three_nodes(two_nodes: LocalDeployment) -> LocalDeployment:
    """Return the deployment with the node that was added, which is added now if no test has done it."""
    if len(two_nodes.nodes) == 2:
        two_nodes.add_node()
    return two_nodes


@pytest.mark.extended
def test_a_run_has_the_node_that_was_added_and_a_node_keeps_to_its_owners_budget(
    three_nodes: LocalDeployment, tmp_path: Path
) -> None:
    """Node 1's owner allows an epsilon of 3.5 of the run's 4: it takes part in one of two rounds, without metrics.

    Its state folder is a new one, since earlier runs without noise have spent all of any budget.
    """
    node = three_nodes.nodes[1]
    node.stop()
    settings = node.folder / "node.toml"
    text = settings.read_text().replace('state-dir = "state"', 'state-dir = "limited"')
    settings.write_text(text.replace("# max-epsilon = 4.0", "max-epsilon = 3.5"))
    node.start()
    three_nodes.wait_until_online(1)
    changes = sets({"dp.epsilon": 4.0, "target": "mlp", "local-epochs": 1})
    output = tmp_path / "run"
    code, _, err = finished(
        three_nodes.hyperfl("run", "--method", "fedavg", "--num-rounds", 2, "--output", output, *changes)
    )
    assert code == 0, err
    assert [(row["clients"], row["failed"]) for row in rows_of(output, "train")] == [(3, []), (2, [1])]
    assert json.loads((output / "manifest.json").read_text())["nodes"] == [[0], [1], [2]]
    log = (output / "server.log").read_text()
    assert "client 1 is left out: " in log
    assert "the privacy budget that this node's owner allows (max-epsilon) does not suffice for this upload" in log
    assert [entry.round for entry in read_record(node.folder / "limited" / FILE)] == [1]
    first = {row["client"]: row for row in rows_of(output, "client") if row["round"] == 1}
    assert "personalized_accuracy" in first[0]
    assert "personalized_accuracy" not in first[1]
