"""A start script waits while the SuperLink counts the node's last SuperNode as online, and fails if waiting is useless.

The SuperLink's answers are real in tests/deployment; here each test lists them.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import hyperfl_flwr.deploy.admission
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.deploy.admission import wait_for_admission
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.provision import init
from hyperfl_flwr.flower.superlink.fleet_api import Registration

Answers = Callable[..., list[str]]


@pytest.fixture
def wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Return a function that waits for a SuperLink with the given answers, each given once, and returns the notes."""
    deployment = Deployment(folder=tmp_path / "an owner's fl", host="127.0.0.1", port=free_port(), num_nodes=1)
    init(deployment)
    monkeypatch.setattr(hyperfl_flwr.deploy.admission, "POLL_SECONDS", 0.0)

    def run(*answers: Registration | Exception) -> list[str]:
        left, notes = list(answers), []

        def answer(*_: object, activate: bool) -> Registration:
            assert activate
            registration = left.pop(0)
            if isinstance(registration, Exception):
                raise registration
            return registration

        monkeypatch.setattr(hyperfl_flwr.deploy.admission, "ask_registration", answer)
        wait_for_admission(deployment.node(0), notes.append)
        assert not left
        return notes

    return run


def test_it_waits_until_the_last_one_is_missed(wait: Answers) -> None:
    (note,) = wait(Registration.IN_USE, Registration.IN_USE, Registration.KNOWN)
    assert note == "waiting until the SuperLink accepts this node; after a kill, up to 60 s"


@pytest.mark.parametrize("answer", [Registration.KNOWN, Registration.UNCLEAR])
def test_it_does_not_wait_for_what_the_supernode_waits_for(answer: Registration, wait: Answers) -> None:
    assert wait(answer) == []


def test_the_address_of_a_superlink_that_does_not_answer_is_shown(wait: Answers) -> None:
    (note,) = wait(httpx.ConnectError("nobody is there"))
    assert re.match(r"127\.0\.0\.1:\d+ refuses connections; check that the SuperLink is running", note)
    assert note.endswith("the node tries again until the SuperLink answers")


@pytest.mark.parametrize(
    ("answer", "text"),
    [(Registration.UNKNOWN, "ask the operator to run `hyperfl deploy register`"), (Registration.REFUSED, "clocks")],
)
def test_what_waiting_does_not_mend_is_told(answer: Registration, text: str, wait: Answers) -> None:
    with pytest.raises(StateError, match=text):
        wait(answer)


def test_the_command_that_compares_the_clocks_holds_any_path(wait: Answers, tmp_path: Path) -> None:
    with pytest.raises(StateError) as told:
        wait(Registration.REFUSED)
    (command,) = re.findall(r"`(.*)`", str(told.value))
    node = tmp_path / "an owner's fl" / "nodes" / "node-0"
    assert shlex.split(command) == ["hyperfl", "deploy", "check", str(node)]


def test_a_superlink_says_that_its_port_is_taken(tmp_path: Path) -> None:
    """start.sh ends with the reason, before Flower's program has logged anything."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        deployment = Deployment(folder=tmp_path / "fl", host="127.0.0.1", port=port, num_nodes=1)
        init(deployment)
        done = subprocess.run(
            ["sh", str(deployment.server / "start.sh")], capture_output=True, text=True, check=False,
            env=os.environ | {"HYPERFL_BIN": str(Path(sys.executable).parent)},
        )  # fmt: skip
    assert done.returncode == 2
    assert f"error: port {port} of this machine is in use" in done.stderr
    assert "Flower" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["127.0.0.1,localhost"] * 2),
        ({"NO_PROXY": "example.org"}, ["example.org,127.0.0.1,localhost"] * 2),
        ({"no_proxy": "example.org"}, ["example.org,127.0.0.1,localhost"] * 2),
        ({"NO_PROXY": "'*'"}, ["*", "*"]),
        ({"NO_PROXY": "a", "no_proxy": "b"}, ["a,127.0.0.1,localhost", "b,127.0.0.1,localhost"]),
    ],
)
@pytest.mark.parametrize("place", ["server", "nodes/node-0"])
def test_a_proxy_is_not_asked_for_this_machine(
    place: str, given: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    deployment = Deployment(folder=tmp_path / "fl", host="127.0.0.1", port=free_port(), num_nodes=1)
    init(deployment)
    folder, programs = deployment.folder / place, tmp_path / "programs"
    programs.mkdir()
    shown = '#!/bin/sh\nprintf "%s\\n" "$ALL_PROXY" "$NO_PROXY" "$no_proxy"\n'
    for name, text in {
        "hyperfl": '#!/bin/sh\nif [ "$2" = node-arguments ]; then echo --superlink localhost:1; fi\n',
        "flower-superlink": shown,
        "flower-supernode": shown,
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    lines = [f"export {name}={value}" for name, value in {"ALL_PROXY": "http://proxy:3128", **given}.items()]
    (folder / "environment").write_text("\n".join([f"HYPERFL_BIN='{programs}'", *lines, ""]))
    done = subprocess.run(
        ["sh", str(folder / "start.sh")], capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if name.lower() != "no_proxy"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["http://proxy:3128", *expected]
