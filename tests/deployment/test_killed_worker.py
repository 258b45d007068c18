"""A deployment of a node with a worker and one without: the worker is killed while it handles a message."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from programs import (
    SMALL,
    LocalDeployment,
    Program,
    eventually,
    finished,
    local_deployment,
    processes_of,
    rows_of,
    sets,
)

from hyperfl_flwr.node.ledger import LEDGER, read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def workers(node: Program) -> list[int]:
    """Return the worker of a node, not counting the processes of messages, which are forked from it."""
    found = []
    for pid in set(processes_of(node.folder)) - set(node.client_apps()):
        with contextlib.suppress(OSError):
            if b"\0deploy\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def trained(node: Program) -> list[str]:
    """Return the directions of a node's messages for training."""
    state = node.folder / "state"
    entries = read_ledger(state)[0] if (state / LEDGER).is_file() else []
    return [entry.direction for entry in entries if entry.kind == "train"]


def start_waiting(made: LocalDeployment, may_train: Path) -> None:
    """Start node 0 with a worker and node 1 without; their training waits."""
    may_train.write_text("0")
    altered = Path(__file__).with_name("altered")
    for node in made.nodes:
        with (node.folder / "environment").open("a") as environment:
            environment.write(f"export PYTHONPATH='{altered}':\"${{PYTHONPATH:-}}\"\nexport MAY_TRAIN='{may_train}'\n")
    settings = made.nodes[1].folder / "node.toml"
    settings.write_text(settings.read_text().replace('worker = "auto"', 'worker = "off"'))
    made.start()


def test_a_killed_worker_costs_a_message_and_flowers_program_takes_its_place(tmp_path: Path) -> None:
    may_train = tmp_path / "may_train"
    with local_deployment(tmp_path / "fl", 2) as made:
        start_waiting(made, may_train)
        first, second = made.nodes
        eventually(lambda: workers(first), "a worker of node 0")
        assert workers(second) == []
        run = made.hyperfl("run", "--num-rounds", 2, "--output", tmp_path / "run", *sets(SMALL))
        eventually(lambda: trained(first) == trained(second) == ["in"], "a message on each node")
        (forked,), (worker,) = first.client_apps(), workers(first)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: forked not in first.client_apps(), "the end of the message's process")
        eventually(lambda: trained(first) == ["in", "in"], "the message again")
        assert workers(first) == []
        may_train.write_text("2")
        code, _, errors = finished(run)
        assert code == 0, errors
        assert first.log.count("the worker has ended; each message now starts a new interpreter") == 1
        assert [row["failed"] for row in rows_of(tmp_path / "run", "train")] == [[], []]
        assert trained(first)[-1] == "out"
