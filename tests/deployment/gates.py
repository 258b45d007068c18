"""nginx in front of a SuperLink, for tests.

Both have the same port, nginx of 127.0.0.2, which stands for the address that others see, the SuperLink of 127.0.0.1.
"""

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import LocalDeployment, eventually, local_deployment

from hyperfl_flwr.deploy.probe import probe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "deploy-security.md"
INSIDE, OUTSIDE = "127.0.0.1", "127.0.0.2"


def is_address_here(address: str) -> bool:
    """Say whether this machine has an address; some systems have no other loopback address than 127.0.0.1."""
    with socket.socket() as probing:
        try:
            probing.bind((address, 0))
        except OSError:
            return False
    return True


def needs_nginx() -> list[pytest.MarkDecorator]:
    """Return the marks of tests with a gate."""
    return [
        pytest.mark.slow,
        pytest.mark.timeout(1800),
        pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx"),
        pytest.mark.skipif(not is_address_here(OUTSIDE), reason=f"needs the address {OUTSIDE}"),
    ]


def page_commands() -> list[str]:
    """Return the page's commands for the gate: the one for the SuperLink and nginx's."""
    block = re.search(r"^```console\n(\$ echo HYPERFL_BIND.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    assert block is not None
    found = [line.removeprefix("$ ") for line in block[1].splitlines()]
    assert [command.split()[0] for command in found] == ["echo", "nginx"]
    return found


@contextlib.contextmanager
def started(command: str, place: Path) -> Iterator[Path]:
    """Run a command that stays in the foreground; gives its log."""
    log = place / "gate.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", f"exec {command}"], cwd=place, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=20)


def answers(made: LocalDeployment, host: str) -> bool:
    return probe(host, made.deployment.port, made.deployment.server / "ca.crt", direct=True)[0] is not None


@contextlib.contextmanager
def running_gate(operator: Path) -> Iterator[LocalDeployment]:
    """Give a deployment with two nodes that have come online through nginx, as docs/how-to/deploy-security.md says.

    Args:
        operator: The folder in which the operator works.
    """
    bind, nginx = page_commands()
    with pytest.MonkeyPatch.context() as patch, local_deployment(operator / "fl", 2, host=OUTSIDE) as made:
        patch.setenv("NO_PROXY", f"localhost,{INSIDE},{OUTSIDE}")
        patch.setenv("HYPERFL_BIND", "0.0.0.0")  # `environment`, where the page writes, must win
        subprocess.run(["sh", "-c", bind], cwd=operator, check=True, timeout=60)
        made.start_server()
        assert not answers(made, OUTSIDE)
        with started(nginx, operator) as log:
            eventually(lambda: answers(made, OUTSIDE), "nginx's answer")
            made.start_nodes()
            yield made
            # Strangers cannot fill the log; a node whose body is too large is named in it.
            assert [line for line in log.read_text().splitlines() if "too large body" not in line] == []


def call(made: LocalDeployment, host: str, method: str, path: str) -> tuple[int, str, str]:
    """Send a request that has no content, its path as it is: (status, which program answers, what it says)."""
    context = ssl.create_default_context(cafile=made.deployment.server / "ca.crt")
    connection = http.client.HTTPSConnection(host, made.deployment.port, context=context, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, headers={"Content-Type": "text/plain"})
        answer = connection.getresponse()
        return answer.status, answer.headers["Server"].split("/")[0], answer.read().decode()
