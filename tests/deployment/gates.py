"""nginx in front of a SuperLink, for tests.

Both use the same port: nginx at 127.0.0.2, which stands for the public address, and the SuperLink at 127.0.0.1.
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
from programs import LocalDeployment, local_deployment
from waiting import eventually

from hyperfl_flwr.deploy.checks.probe import probe
from hyperfl_flwr.deploy.checks.server import is_in_use

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "deploy-security.md"
INSIDE, OUTSIDE = "127.0.0.1", "127.0.0.2"


def is_address_here(address: str) -> bool:
    """Return whether this machine has an address; some systems have no other loopback address than 127.0.0.1."""
    with socket.socket() as probing:
        try:
            probing.bind((address, 0))
        except OSError:
            return False
    return True


def needs_nginx() -> list[pytest.MarkDecorator]:
    """Return the pytest marks of tests with a gate."""
    return [
        pytest.mark.slow,
        pytest.mark.timeout(1800),
        pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx"),
        pytest.mark.skipif(not is_address_here(OUTSIDE), reason=f"needs the address {OUTSIDE}"),
    ]


def page_commands() -> list[str]:
    """Return the page's two commands for the gate: the SuperLink's setting and nginx."""
    block = re.search(r"^```console\n(\$ echo HYPERFL_BIND.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    assert block is not None
    found = [line.removeprefix("$ ") for line in block[1].splitlines()]
    assert [command.split()[0] for command in found] == ["echo", "nginx"]
    return found


@contextlib.contextmanager
def started(command: str, place: Path) -> Iterator[Path]:
    """Run a command in the foreground of its own session and yield its log; stop it afterwards."""
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
    """Yield a deployment with two nodes that are online through nginx, as docs/how-to/deploy-security.md describes.

    Args:
        operator: The folder in which the operator works.
    """
    bind, nginx = page_commands()
    with pytest.MonkeyPatch.context() as patch, local_deployment(operator / "fl", 2, host=OUTSIDE) as made:
        patch.setenv("NO_PROXY", f"localhost,{INSIDE},{OUTSIDE}")
        patch.setenv("HYPERFL_BIND", "0.0.0.0")  # the file `environment`, which the page writes, must take precedence
        subprocess.run(["sh", "-c", bind], cwd=operator, check=True, timeout=60)
        with started(nginx, operator) as log:
            eventually(lambda: is_in_use(OUTSIDE, made.deployment.port), "nginx")
            made.start_server()  # as after a restart; by hand, it may start first
            eventually(lambda: answers(made, OUTSIDE), "nginx's answer")
            made.start_nodes()
            yield made
            # Strangers cannot fill the log; it names only nodes with too large a body.
            assert [line for line in log.read_text().splitlines() if "too large body" not in line] == []
        assert answers(made, INSIDE)
        assert not answers(made, OUTSIDE)


def call(made: LocalDeployment, host: str, method: str, path: str) -> tuple[int, str, str]:
    """Send a request without content and with an unnormalised path; return (status, server program, body)."""
    context = ssl.create_default_context(cafile=made.deployment.server / "ca.crt")
    connection = http.client.HTTPSConnection(host, made.deployment.port, context=context, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, headers={"Content-Type": "text/plain"})
        answer = connection.getresponse()
        return answer.status, answer.headers["Server"].split("/")[0], answer.read().decode()
