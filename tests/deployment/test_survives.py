"""One run in which its three nodes fail in many ways: real processes, TLS and authentication.

Node 2 is late and later sends false replies, node 1 is killed, node 0 loses its worker, with it a client's process, and
has a full disk. The nodes' training waits for each disturbance, so that the speed of the machine does not matter.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from programs import LocalDeployment, Program, finished, local_deployment, rows_of, sets
from small_disk import SmallDisk
from waiting import eventually

from hyperfl_flwr.node.ledger import LEDGER, LedgerEntry, read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

ROUNDS = 8
DISTURBED = 2
"""Round in which processes are killed; the late node's first."""
FULL = 3
"""Round in which a disk is full."""
SETTINGS = {
    "min-nodes": 2,
    "failure-budget": 0.2,  # of at least 20 trainings: killed process and full disk are fewer; refusals do not count
    "exclusion-rounds": 0,
    "checkpoint-every": 1,
    "learning-rate": 1e-7,  # with so large an embedding, larger steps would diverge
    "hyperfl.hidden-width": 8,
    "hyperfl.embedding-dim": 50_000,  # the private state, of 200 kB, is larger than logs and ledgers
}
SETS = sets(SETTINGS)
FALSE_REPLIES = ["norm", "nan", "shape", "honest", "large"]
"""Changes that node 2 makes to its replies after the round with the full disk."""
WAITS = "waiting until the SuperLink accepts this node"


@dataclass(kw_only=True)
class Story:
    """The disturbances of the nodes and their consequences.

    Attributes:
        folder: An empty folder.
        made: The deployment with SuperLink and nodes.
        disk: Disk of node 0.
        killed: Time at which node 1 was killed.
        states: File and content of the newest private state by node: of node 1 when it was killed, of node 0 when its
            disk was full.
        workers: Number of workers of each node after the run.
        seconds: Durations in seconds, by description.
    """

    folder: Path
    made: LocalDeployment
    disk: SmallDisk
    killed: float = 0.0
    states: dict[int, tuple[Path, bytes]] = field(default_factory=dict)
    workers: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def log(self) -> str:
        """The server's log."""
        file = self.output / "server.log"
        return file.read_text() if file.is_file() else ""

    def alter_nodes(self) -> None:
        """Let the nodes' training wait for `may_train`, and node 2 send false replies when requested."""
        self.may_train(0)
        altered = Path(__file__).with_name("altered")
        for node in self.made.nodes:
            with (node.folder / "environment").open("a") as environment:
                environment.write(f"export PYTHONPATH='{altered}':\"${{PYTHONPATH:-}}\"\n")
                environment.write(f"export MAY_TRAIN='{self.folder / 'may_train'}'\n")
                if node is self.made.nodes[2]:
                    environment.write(f"export FALSE_REPLIES='{self.folder / 'false_replies'}'\n")

    def may_train(self, number: int) -> None:
        """Let all rounds up to this one complete; training in later rounds waits in its first batch."""
        written = self.folder / "may_train.new"
        written.write_text(str(number))
        written.replace(self.folder / "may_train")

    def wait_for_training(self, number: int, *nodes: int) -> None:
        """Wait until nodes have received their message of a round."""
        for node in nodes:
            eventually(lambda node=node: self.said(node, number), f"round {number} on node {node}")

    def round_is_over(self, number: int) -> None:
        pattern = rf"round {number}/{ROUNDS}: "
        eventually(lambda: re.search(pattern, self.log), f"{pattern!r} in\n{self.log}")

    def messages(self, node: int) -> list[LedgerEntry]:
        """Return the TRAIN messages and replies in a node's ledger."""
        state = self.made.nodes[node].folder / "state"
        entries = read_ledger(state)[0] if (state / LEDGER).is_file() else []
        return [entry for entry in entries if entry.kind == "train"]

    def said(self, node: int, number: int) -> list[str]:
        """Return the directions of a node's TRAIN messages of a round."""
        return [entry.direction for entry in self.messages(node) if entry.round == number]

    def keep_state(self, node: int) -> None:
        newest = max((self.made.nodes[node].folder / "state").rglob("round-*.npz"))
        self.states[node] = newest, newest.read_bytes()

    def rows(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return the rows of metrics.jsonl of one kind, by round."""
        return {row["round"]: row for row in rows_of(self.output, kind)}


def join_late(story: Story) -> None:
    """Bring node 2 online after the first round has begun."""
    story.wait_for_training(1, 0, 1)
    story.made.nodes[2].start()
    story.made.wait_until_online(2)
    story.may_train(1)


def disturb(story: Story) -> None:
    """Kill or stop all kinds of processes of the nodes during training."""
    nodes = story.made.nodes
    story.wait_for_training(DISTURBED, 0, 1, 2)
    story.keep_state(1)
    kill_worker(nodes[0])
    nodes[1].kill9()
    story.killed = time.monotonic()
    nodes[1].start()  # too early: the SuperLink still counts it as online
    nodes[2].stop()  # as in a restart by its owner
    nodes[2].start()
    eventually(lambda: WAITS in nodes[1].log, "a word of the node that is started too early")
    nodes[1].kill9()
    eventually(lambda: not story.made.superlink.nodes()[1], "node 1 offline")
    story.seconds["from the kill of node 1 until it counts as away"] = time.monotonic() - story.killed
    for node in (0, 2):
        eventually(lambda node=node: story.said(node, DISTURBED) == ["in", "in"], f"the message again on node {node}")
    story.may_train(DISTURBED)
    story.round_is_over(DISTURBED)


def kill_worker(node: Program) -> None:
    """Kill a node's worker, which ends the process of its message, too."""
    (worker,), forked = node.workers(), node.client_app()
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: forked not in node.client_apps(), "the end of the message's process")


def fill_disk(story: Story) -> None:
    """Complete a round while node 0 has no room for its state; node 1 comes back meanwhile."""
    story.wait_for_training(FULL, 0)
    story.keep_state(0)
    story.disk.fill()
    began = time.monotonic()
    story.made.nodes[1].start()
    story.made.wait_until_online(1)
    story.seconds["from the start of node 1 until it is online"] = time.monotonic() - began
    story.may_train(FULL)
    story.round_is_over(FULL)
    assert story.states[0][0].read_bytes() == story.states[0][1]
    story.disk.make_room()


def begin(story: Story) -> subprocess.Popen[str]:
    """Start a run without the late node; if a busy machine delays the others, retry with a longer timeout."""
    has_begun = (story.output / "manifest.json").is_file
    for seconds in (30, 60, 120):
        words = ("--num-rounds", ROUNDS, "--output", story.output, *SETS, "--set", f"node-timeout={seconds}")
        run = story.made.hyperfl("run", *words)
        eventually(lambda run=run: has_begun() or run.poll() is not None, "a run that begins")
        if has_begun():
            return run
    pytest.fail(finished(run)[2])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("survives")
    with local_deployment(folder / "fl", 3) as made:
        story = Story(folder=folder, made=made, disk=SmallDisk(made.nodes[0]))
        try:
            live(story)
            yield story
        finally:
            made.stop()
            story.disk.unmount()


def live(story: Story) -> None:
    """Start nodes 0 and 1 and a run, and go through all disturbances."""
    story.alter_nodes()
    story.made.start(0, 1)
    run = begin(story)
    join_late(story)
    disturb(story)
    fill_disk(story)
    (story.folder / "false_replies").write_text("\n".join(FALSE_REPLIES))
    story.may_train(ROUNDS)
    code, _, err = finished(run)
    assert code == 0, err
    story.workers = [len(node.workers()) for node in story.made.nodes]
    print("\n".join(f"{seconds:6.1f} s {what}" for what, seconds in story.seconds.items()))  # noqa: T201
    print(story.log)  # noqa: T201


def test_a_node_that_comes_late_takes_part(story: Story) -> None:
    assert story.rows("train")[1]["away"] == [2]
    manifest = json.loads((story.output / "manifest.json").read_text())
    assert (manifest["present_at_start"], manifest["joined"]) == ([0, 1], [2])
    assert "node 2 joins (clients 2)" in story.log
    assert 2 not in story.rows("train")[DISTURBED]["away"]


def test_a_killed_node_is_left_out_and_goes_on_with_its_state(story: Story) -> None:
    """It resumes from the version of the round before, as the server has received nothing later."""
    assert story.rows("train")[DISTURBED]["away"] == [1]
    assert "node 1 is away (clients 1)" in story.log
    log = story.made.nodes[1].log
    assert log.count(WAITS) == 1  # it was started once while it counted as online
    assert "[code: 2004]" not in log
    returned = [entry for entry in story.messages(1) if entry.round > DISTURBED]
    first = returned[0]
    assert (first.direction, versions(first)) == ("in", [DISTURBED - 1])
    assert story.states[1][0].name == f"round-{DISTURBED - 1:06d}.npz"
    assert [entry.direction for entry in returned[:2]] == ["in", "out"]
    assert returned[1].error == ""
    later = [row for number, row in story.rows("train").items() if number >= first.round]
    assert later
    assert not any(1 in row["away"] or 1 in row["failed"] for row in later)


def versions(entry: LedgerEntry) -> list[int]:
    """Return the versions of private state from which a message asks its clients to start."""
    (found,) = [record.values["versions"] for record in entry.records if record.values and "versions" in record.values]
    return list(found)


def test_flowers_program_takes_the_place_of_a_killed_worker(story: Story) -> None:
    assert story.workers == [0, 1, 1]
    assert story.made.nodes[0].log.count("the worker has ended; each message now starts a new interpreter") == 1


def test_a_killed_process_of_a_client_and_a_restarted_node_get_the_message_again(story: Story) -> None:
    """Both nodes complete the round, starting from the same version both times."""
    row = story.rows("train")[DISTURBED]
    assert (row["clients"], row["failed"], row["away"]) == (2, [], [1])
    for node in (0, 2):
        said = [entry for entry in story.messages(node) if entry.round == DISTURBED]
        came = [entry for entry in said if entry.direction == "in"]
        assert (len(came), said[-1].direction) == (2, "out"), node
        assert versions(came[0]) == versions(came[1])


def test_a_full_disk_hurts_one_round_of_one_node(story: Story) -> None:
    rows = story.rows("train")
    assert rows[FULL]["clients"] >= 1
    assert rows[FULL]["failed"] == [0]
    assert not any(0 in row["failed"] + row["away"] for number, row in rows.items() if number != FULL)
    log = story.made.nodes[0].log
    # The owner's checks keep the received model, which is the first file of a round that is larger than the room left.
    said = re.search(rf"StateError: the model that client 0 has received in round {FULL} is not stored: (.*)", log)
    assert said is not None, log
    assert re.fullmatch(r"the disk of .* is full .*; free at least \d+ bytes", said[1])
    assert f"round {FULL}: client 0 is left out: StateError, see the node's log" in story.log
    again = next(entry for entry in story.messages(0) if entry.round == FULL + 1)
    assert versions(again) == [DISTURBED]


def test_a_malicious_node_is_left_out_by_name(story: Story) -> None:
    """Each false reply costs node 2 its round only; too large a reply excludes it from the run."""
    told = dict(re.findall(r"round (\d): client 2 is left out: node 2: (.*)", story.log))
    first = FULL + 1
    assert list(map(int, told)) == [first, first + 1, first + 2, ROUNDS]
    assert "times the norm of the values that it received, more than max-update-ratio = 10" in told[str(first)]
    assert "finite" in told[str(first + 1)]
    assert "shape" in told[str(first + 2)]
    rows = story.rows("train")
    assert "its reply is larger than" in told[str(ROUNDS)]
    assert [number for number, row in rows.items() if 2 in row["failed"]] == list(map(int, told))
    (excluded,) = json.loads((story.output / "manifest.json").read_text())["excluded"]
    assert (excluded["node"], excluded["round"], excluded["until"]) == (2, ROUNDS, None)


def test_all_nodes_take_part_again_and_the_run_comes_to_its_end(story: Story) -> None:
    """The last round's evaluation does not include node 2."""
    rows = story.rows("train")
    assert list(rows) == list(range(1, ROUNDS + 1))
    before = rows[ROUNDS - 1]
    assert (before["clients"], before["failed"], before["away"]) == (3, [], [])
    assert story.rows("aggregate")[ROUNDS]["clients"] == 2
