"""A run with secure sums in which node 1 and later the server are killed: real processes, TLS and authentication.

The keys are pinned by `hyperfl deploy init`, and two of three nodes suffice to open a sum. The nodes wait before they
release their shares, so that each kill is between the uploads and the opening of their sum. Expected values are those
of runs in one process in which node 1 takes part in the same rounds.
"""

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message
from programs import LocalDeployment, finished, local_deployment, rows_of, sets
from waiting import eventually

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.folders import exact, last_checkpoint
from hyperfl_flwr.contract.grids import round_of
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.node.ledger import LEDGER, LedgerEntry, read_ledger
from hyperfl_flwr.node.secure_session import FOLDER
from hyperfl_flwr.protocol.messages import HELLO
from hyperfl_flwr.protocol.secure_sums.messages import KEY, UNMASK
from hyperfl_flwr.server.in_process_grid import InProcessGrid

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

KILLED, AWAY, ROUNDS = 1, 2, 3
"""Round after whose upload node 1 is killed; round that it misses; last round, in which the server is killed."""
CAREFUL = 2
"""Node of which only secure sums may leave. It has no worker, from which processes would have torch in memory."""
SETTINGS: Mapping[str, Scalar] = {"method": "fedrep", "local-epochs": 1, "num-rounds": ROUNDS}
SECURE: Mapping[str, Scalar] = SETTINGS | {
    "secagg.enabled": True,
    "secagg.min-cohort": 2,
    "secagg.max-examples": 1000,  # "auto" is the largest client's number of samples in a simulation, which knows it
    "min-nodes": 3,  # the round after the one without node 1 waits for it
    "node-timeout": 400,
    "failure-budget": 0.5,
}


@dataclass(kw_only=True)
class Story:
    """The run and its disturbances.

    Attributes:
        folder: An empty folder.
        made: The deployment with SuperLink and nodes.
        said: What `hyperfl run` wrote, by the part of the story.
        unmasking: Files in the memory of the careful node's process while it is asked for its shares.
        seconds: Seconds from the beginning to the end of each part.
    """

    folder: Path
    made: LocalDeployment
    said: dict[str, str] = field(default_factory=dict)
    unmasking: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def may_unmask(self, number: int) -> None:
        """Let all rounds up to this one be opened."""
        written = self.folder / "may_unmask.new"
        written.write_text(str(number))
        written.replace(self.folder / "may_unmask")

    def prepare_nodes(self) -> None:
        """Set what the owners decide, and let the nodes wait before they release shares."""
        self.may_unmask(0)
        altered = Path(__file__).with_name("slow_to_unmask")
        for number, node in enumerate(self.made.nodes):
            with (node.folder / "environment").open("a") as environment:
                environment.write(f"export PYTHONPATH='{altered}':\"${{PYTHONPATH:-}}\"\n")
                environment.write(f"export MAY_UNMASK='{self.folder / 'may_unmask'}'\n")
            with (node.folder / "node.toml").open("a") as settings:
                settings.write("min-cohort = 2\n" + ("secure-sum-only = true\n" if number == CAREFUL else ""))
        careful = self.made.nodes[CAREFUL].folder / "node.toml"
        careful.write_text(careful.read_text().replace('worker = "auto"', 'worker = "off"'))

    def messages(self, node: int, kind: str, number: int = 0) -> list[LedgerEntry]:
        """Return the messages of one kind and round in a node's ledger."""
        state = self.made.nodes[node].folder / "state"
        entries = read_ledger(state)[0] if (state / LEDGER).is_file() else []
        return [entry for entry in entries if (entry.kind, entry.round) == (kind, number)]

    def wait_for_question(self, number: int, *nodes: int) -> None:
        """Wait until nodes were asked for their shares of a round."""
        for node in nodes:
            eventually(
                lambda node=node: self.messages(node, UNMASK, number), f"UNMASK of round {number} on node {node}"
            )

    def logged(self, text: str) -> bool:
        file = self.output / "server.log"
        return file.is_file() and text in file.read_text()


def refuse_a_plain_run(story: Story) -> None:
    """Ask the careful node for a plain run; the other nodes come online meanwhile."""
    made = story.made
    made.start(CAREFUL)
    plain = made.hyperfl(
        "run", "--output", story.folder / "plain", *sets({**SETTINGS, "min-nodes": 3, "node-timeout": 400})
    )
    for number in set(range(3)) - {CAREFUL}:
        made.nodes[number].start()
    eventually(lambda: refusals(story), "the refusal of a plain run")
    plain.send_signal(signal.SIGINT)
    finished(plain)
    made.wait_until_online(0, 1, 2)


def handshake_key(entry: LedgerEntry) -> str:
    """Return the public key of a session in a node's handshake; empty without a session."""
    return next((str(record.values[KEY]) for record in entry.records if record.values and KEY in record.values), "")


def refusals(story: Story) -> list[LedgerEntry]:
    """Return the entries in the careful node's ledger in which it refuses to take part."""
    handshakes = story.messages(CAREFUL, HELLO)
    return [entry for entry in handshakes if any("problem" in (record.values or {}) for record in entry.records)]


def kill_a_node(story: Story) -> None:
    """Kill node 1 between its upload and the opening of the sum; bring it back when the server has noticed."""
    node = story.made.nodes[1]
    story.wait_for_question(KILLED, 0, 1, 2)
    memory = story.made.nodes[CAREFUL].folder / "flwr" / "memory-of-unmask"
    eventually(memory.is_file, "the files in the memory of the process that answers")
    story.unmasking = memory.read_text()
    node.kill9()
    story.may_unmask(KILLED)
    story.wait_for_question(AWAY, 0)  # the server does not wait for node 1 any more
    node.start()
    story.may_unmask(AWAY)


def kill_the_server(story: Story, secure: subprocess.Popen[str]) -> None:
    """Kill all processes of the server between the uploads and the opening of the sum."""
    story.wait_for_question(ROUNDS, 0, 1, 2)
    story.made.server.kill9()
    story.may_unmask(ROUNDS)
    story.said["killed"] = finished(secure)[2]


def live(story: Story) -> None:
    """Go through all disturbances."""
    began = time.monotonic()
    story.prepare_nodes()
    refuse_a_plain_run(story)
    story.seconds["plain"] = time.monotonic() - began
    secure = story.made.hyperfl("run", "--output", story.output, *sets(SECURE))
    kill_a_node(story)
    story.seconds["node killed"] = time.monotonic() - began
    kill_the_server(story, secure)
    story.seconds["server killed"] = time.monotonic() - began
    story.made.start_server()
    code, _, story.said["resumed"] = finished(story.made.hyperfl("run", "--resume", story.output))
    story.seconds["resumed"] = time.monotonic() - began
    print(story.seconds, (story.output / "server.log").read_text(), sep="\n")  # noqa: T201
    assert code == 0, story.said["resumed"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("secure")
    with local_deployment(folder / "fl", 3) as made:
        story = Story(folder=folder, made=made)
        live(story)
        yield story


def trained_here(folder: Path, settings: Mapping[str, Scalar]) -> Path:
    """Return the folder of a run in this process in which node 1 does not train in the round that it misses."""

    def without_node_1(message: Message, context: Context) -> Message:
        if (message.metadata.message_type, round_of(message), context.node_config["partition-id"]) == (
            "train",
            AWAY,
            1,
        ):
            raise ConnectionError("away")
        return app(message, context)

    here: Mapping[str, Scalar] = {"num-clients": 3, "threads": 1, "output": str(folder)}
    flat = default_settings() | settings | here
    grid = InProcessGrid(without_node_1, 3, flat, {"simulated": True, "min-cohort": 2})
    return run(grid, RunConfig.from_flat(flat))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_here(tmp_path_factory.mktemp("plain") / "run", SECURE | {"secagg.enabled": False})


def test_a_run_with_kills_has_the_sums_of_a_run_in_one_process(story: Story, tmp_path: Path) -> None:
    """A sum is of integers, so neither the nodes that drop out nor the masks change any bit."""
    arrays, progress = last_checkpoint(story.output)
    expected, its_progress = last_checkpoint(trained_here(tmp_path / "run", SECURE))
    assert exact(arrays) == exact(expected)
    assert (progress.round, progress.versions) == (ROUNDS, its_progress.versions)


def test_the_parameters_are_those_of_a_plain_run(story: Story, plain: Path) -> None:
    arrays, expected = last_checkpoint(story.output)[0], last_checkpoint(plain)[0]
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        assert np.linalg.norm(arrays[name] - value) <= 3e-6 * np.linalg.norm(value), name


def test_the_accuracies_are_those_of_a_plain_run(story: Story, plain: Path) -> None:
    """The clients round their metrics to multiples of 2^-12."""
    for kind, name in (("train", "personalized_accuracy"), ("aggregate", "aggregate_accuracy")):
        here, expected = ([(row["round"], row[name]) for row in rows_of(each, kind)] for each in (story.output, plain))
        assert [number for number, _ in here] == [number for number, _ in expected]
        assert [value for _, value in here] == pytest.approx([value for _, value in expected], abs=2e-4)
    assert rows_of(story.output, "client") == []


def test_the_upload_of_a_killed_node_is_in_the_sum(story: Story) -> None:
    """It was killed while it was asked for its shares, and the shares of two nodes suffice."""
    asked = story.messages(1, UNMASK, KILLED)
    assert [entry.direction for entry in asked] == ["in"]
    uploaded = story.messages(1, "train", KILLED)
    assert [entry.direction for entry in uploaded] == ["in", "out"]
    rows = {row["round"]: row for row in rows_of(story.output, "train")}
    assert (rows[KILLED]["clients"], rows[KILLED]["failed"], rows[KILLED]["away"]) == (3, [], [])


def test_torch_is_not_loaded_to_release_shares(story: Story) -> None:
    assert "numpy" in story.unmasking
    assert "libtorch" not in story.unmasking


def test_a_killed_node_is_left_out_and_comes_back_with_its_key(story: Story) -> None:
    rows = {row["round"]: row for row in rows_of(story.output, "train")}
    assert (rows[AWAY]["clients"], rows[AWAY]["failed"], rows[AWAY]["away"]) == (2, [], [1])
    assert (rows[ROUNDS]["clients"], rows[ROUNDS]["failed"], rows[ROUNDS]["away"]) == (3, [], [])
    assert story.logged("node 1 is away (clients 1)")
    assert story.logged("node 1 is back (clients 1)")
    keys = {handshake_key(entry) for entry in story.messages(1, HELLO) if entry.direction == "out"} - {""}
    assert len(keys) == 2  # one of each start of the server


def test_a_killed_server_goes_on_with_another_session(story: Story) -> None:
    """It repeats the round that it could not open, and asks each node for shares of that session once."""
    assert "The SuperLink ended during the run; start it again" in story.said["killed"]
    manifest = json.loads((story.output / "manifest.json").read_text())
    assert (manifest["status"], len(manifest["resumed"])) == ("completed", 1)
    for number in range(3):
        sessions = story.made.nodes[number].folder / "state" / FOLDER
        folders = [folder for folder in sessions.iterdir() if folder.is_dir()]
        assert len(folders) == 2
        assert all(json.loads((folder / "step.json").read_text())["question"] for folder in folders)
        train = [entry for entry in story.messages(number, "train", ROUNDS) if entry.direction == "out"]
        assert len(train) == 2


def test_a_careful_node_refuses_a_plain_run(story: Story) -> None:
    assert not (story.folder / "plain" / "manifest.json").exists()
    (problem,) = {record.values["problem"] for entry in refusals(story) for record in entry.records if record.values}
    assert problem == (
        "its owner allows only secure sums (secure-sum-only = true); start the run with secagg.enabled = true"
    )
