"""One run with all that can befall its three nodes: real processes, TLS and authentication.

Node 2 is late and later lies, node 1 is killed, node 0 loses a client's process and has a full disk. What happens is
caused by what the nodes' ledgers and the server's log say, so that a busy machine changes nothing.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from programs import LocalDeployment, eventually, finished, local_deployment
from small_disk import SmallDisk

from hyperfl_flwr.ledger import LEDGER, Entry, read_ledger
from hyperfl_flwr.recording import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = 8
SETTINGS = {
    "min-nodes": 2,
    "failure-budget": 0.9,
    "checkpoint-every": 1,
    "learning-rate": 1e-7,  # so large an embedding must not leap
    "local-epochs": 20,  # seconds, so that there is a midst of training
    "hyperfl.hidden-width": 8,
    "hyperfl.embedding-dim": 50_000,  # the private state, of 200 kB, is larger than logs and ledgers
}
SETS = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={json.dumps(value)}")]
LIES = ["norm", "nan", "shape"]
WAITS = "waiting until the SuperLink has missed this node's last SuperNode"


@dataclass(kw_only=True)
class Story:
    """What was done to the nodes and what came of it.

    Attributes:
        made: SuperLink and nodes.
        output: The run's folder.
        disturbed: The round in which processes were killed.
        killed: When node 1 was killed.
        full: The round in which the disk was full.
        states: By node the newest version of private state, its file and content: of node 1 when it was killed, of
            node 0 when its disk was full.
        seconds: How long what took.
    """

    made: LocalDeployment
    output: Path
    disturbed: int = 0
    full: int = 0
    killed: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    states: dict[int, tuple[Path, bytes]] = field(default_factory=dict)

    @property
    def log(self) -> str:
        """What the server's side has logged."""
        file = self.output / "server.log"
        return file.read_text() if file.is_file() else ""

    def wait_for_log(self, pattern: str) -> None:
        eventually(lambda: re.search(pattern, self.log), f"{pattern!r} in\n{self.log}")

    def round_is_over(self, number: int) -> None:
        self.wait_for_log(rf"round {number}/{ROUNDS}: ")

    def messages(self, node: int) -> list[Entry]:
        """Return the TRAIN messages and replies in a node's ledger."""
        state = self.made.nodes[node].folder / "state"
        entries = read_ledger(state)[0] if (state / LEDGER).is_file() else []
        return [entry for entry in entries if entry.kind == "train"]

    def trains(self, node: int, number: int) -> bool:
        """Say whether a node has got its message of a round and not answered yet."""
        return [entry.direction for entry in self.messages(node) if entry.round == number] == ["in"]

    def keep_state(self, node: int) -> None:
        newest = max((self.made.nodes[node].folder / "state").rglob("round-*.npz"))
        self.states[node] = newest, newest.read_bytes()

    def rows(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return the rows of metrics.jsonl of one kind, by round."""
        return {row["round"]: row for row in read_metrics(self.output) if row["kind"] == kind}


def disturb(story: Story) -> None:
    """In the late node's first round end, in the midst of their work, all that the nodes consist of."""
    nodes = story.made.nodes
    eventually(lambda: story.messages(2), "a message to node 2")
    story.disturbed = number = story.messages(2)[0].round
    story.keep_state(1)
    deeds = {0: nodes[0].kill9_client_apps, 1: lambda: kill_and_start_too_early(story), 2: nodes[2].interrupt}

    def all_are_done() -> bool:
        for node in [node for node in deeds if story.trains(node, number)]:
            deeds.pop(node)()
        return not deeds

    eventually(all_are_done, "training on all nodes")
    nodes[2].stop()  # as an operator does who restarts it
    nodes[2].start()
    eventually(lambda: WAITS in nodes[1].log, "a word of the node that is started too early")
    nodes[1].kill9()
    eventually(lambda: not story.made.superlink.nodes()[1], "node 1 offline")
    story.seconds["from the kill of node 1 until it counts as away"] = time.monotonic() - story.killed
    story.round_is_over(number)
    story.seconds["from the kill of node 1 until the round is over"] = time.monotonic() - story.killed


def kill_and_start_too_early(story: Story) -> None:
    story.made.nodes[1].kill9()
    story.killed = time.monotonic()
    story.made.nodes[1].start()


def fill_disk_and_lie(story: Story, disk: SmallDisk, lies: Path) -> None:
    """Begin right after a round, seconds before the next round's processes have begun; node 1 comes back meanwhile."""
    story.keep_state(0)
    disk.fill()
    story.full = story.disturbed + 1
    began = time.monotonic()
    story.made.nodes[1].start()
    story.round_is_over(story.full)
    assert story.states[0][0].read_bytes() == story.states[0][1]
    disk.make_room()
    lies.write_text("\n".join(LIES))
    story.wait_for_log("node 1 is back")
    story.seconds["from the start of node 1 until it takes part"] = time.monotonic() - began


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("survives")
    lies = folder / "lies"
    with local_deployment(folder / "fl", 3) as made:
        altered = Path(__file__).with_name("altered")
        with (made.nodes[2].folder / "environment").open("a") as environment:
            environment.write(f"export PYTHONPATH='{altered}':\"${{PYTHONPATH:-}}\" LIES='{lies}'\n")
        disk = SmallDisk(made.nodes[0])
        try:
            story = Story(made=made, output=folder / "run")
            live(story, disk, lies)
            yield story
        finally:
            made.stop()
            disk.unmount()


def begin(story: Story) -> subprocess.Popen[str]:
    """Start a run without the late node, which is waited for; on a machine too busy for the others, for longer."""
    has_begun = (story.output / "manifest.json").is_file
    for seconds in (30, 60, 120):
        words = ("--num-rounds", ROUNDS, "--output", story.output, *SETS, "--set", f"node-timeout={seconds}")
        run = story.made.hyperfl("run", *words)
        eventually(lambda run=run: has_begun() or run.poll() is not None, "a run that begins")
        if has_begun():
            return run
    pytest.fail(finished(run)[2])


def live(story: Story, disk: SmallDisk, lies: Path) -> None:
    """Start nodes 0 and 1 and a run, and go through everything."""
    made = story.made
    made.start(0, 1)
    run = begin(story)
    made.nodes[2].start()
    disturb(story)
    fill_disk_and_lie(story, disk, lies)
    code, _, err = finished(run)
    assert code == 0, err
    print("\n".join(f"{seconds:6.1f} s {what}" for what, seconds in story.seconds.items()))  # noqa: T201
    print(story.log)  # noqa: T201


def test_a_node_that_comes_late_takes_part(story: Story) -> None:
    assert story.rows("train")[1]["away"] == [2]
    manifest = json.loads((story.output / "manifest.json").read_text())
    assert (manifest["present_at_start"], manifest["joined"]) == ([0, 1], [2])
    assert "node 2 joins (clients 2)" in story.log
    assert 2 not in story.rows("train")[story.disturbed]["away"]


def test_a_killed_node_is_left_out_and_goes_on_with_its_state(story: Story) -> None:
    """Its last version is that of the round before, as the server has not heard of what came after."""
    assert story.rows("train")[story.disturbed]["away"] == [1]
    assert "node 1 is away (clients 1)" in story.log
    log = story.made.nodes[1].log
    assert log.count(WAITS) == 1  # it was started once while it counted as online
    assert "[code: 2004]" not in log
    returned = [entry for entry in story.messages(1) if entry.round > story.disturbed]
    first = returned[0]
    assert (first.direction, versions(first)) == ("in", [story.disturbed - 1])
    assert story.states[1][0].name == f"round-{story.disturbed - 1:06d}.npz"
    assert [entry.direction for entry in returned[:2]] == ["in", "out"]
    assert returned[1].error == ""
    later = [row for number, row in story.rows("train").items() if number >= first.round]
    assert later
    assert not any(1 in row["away"] or 1 in row["failed"] for row in later)


def versions(entry: Entry) -> list[int]:
    """Return the versions of private state that a message asks its clients to start from."""
    (found,) = [record.values["versions"] for record in entry.records if record.values and "versions" in record.values]
    return list(found)


def test_a_killed_process_of_a_client_and_a_restarted_node_get_the_message_again(story: Story) -> None:
    """Both take part in the round all the same, and start from the same version both times."""
    row = story.rows("train")[story.disturbed]
    assert (row["clients"], row["failed"], row["away"]) == (2, [], [1])
    for node in (0, 2):
        said = [entry for entry in story.messages(node) if entry.round == story.disturbed]
        came = [entry for entry in said if entry.direction == "in"]
        assert (len(came), said[-1].direction) == (2, "out"), node
        assert versions(came[0]) == versions(came[1])


def test_a_full_disk_hurts_one_round_of_one_node(story: Story) -> None:
    rows = story.rows("train")
    assert rows[story.full]["clients"] >= 1
    assert rows[story.full]["failed"] == [0]
    assert not any(0 in row["failed"] + row["away"] for number, row in rows.items() if number != story.full)
    log = story.made.nodes[0].log
    said = re.search(rf"StateError: the state of client 0 after round {story.full} is not stored: (.*)", log)
    assert said is not None, log
    assert re.fullmatch(
        rf"the disk of .* is full .*; make room for \d+ bytes; the state of round {story.disturbed} is kept", said[1]
    )
    assert f"round {story.full}: client 0 is left out: StateError, see the node's log" in story.log
    again = next(entry for entry in story.messages(0) if entry.round == story.full + 1)
    assert versions(again) == [story.disturbed]


def test_a_node_that_lies_is_left_out_by_name(story: Story) -> None:
    """Each lie costs the liar the round in which it is told; before and after, it takes part."""
    told = dict(re.findall(r"round (\d): client 2 is left out: node 2: (.*)", story.log))
    first = story.full + 1
    assert list(map(int, told)) == [first, first + 1, first + 2]
    assert "times as long as what it was sent, more than max-update-ratio = 10" in told[str(first)]
    assert "finite" in told[str(first + 1)]
    assert "shape" in told[str(first + 2)]
    rows = story.rows("train")
    assert [number for number, row in rows.items() if 2 in row["failed"]] == [first, first + 1, first + 2]


def test_the_run_comes_to_its_end_with_all_nodes(story: Story) -> None:
    rows = story.rows("train")
    assert list(rows) == list(range(1, ROUNDS + 1))
    last = rows[ROUNDS]
    assert (last["clients"], last["failed"], last["away"]) == (3, [], [])
    assert story.rows("aggregate")[ROUNDS]["clients"] == 3
