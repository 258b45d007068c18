"""Limits per address in nginx: hundreds of idle or slow connections do not keep a node out."""

import contextlib
import resource
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from gates import INSIDE, OUTSIDE, needs_nginx, running_gate
from programs import LocalDeployment, eventually, finished

from hyperfl_flwr.deploy.gate import sent_key
from hyperfl_flwr.runs.run_directory import read_metrics

ELSEWHERE = "127.0.0.3"
"""An address other than the nodes' 127.0.0.1."""

NUMBER = 600
"""Connections of an attack, more than nginx allows by default."""

CLOSED_AFTER = 35.0
"""Seconds until nginx has closed idle and slow connections; docs/how-to/deploy-security.md has the limits."""

UNREAD = "/v1/fleet/pull-messages"

pytestmark = needs_nginx()


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """Return a deployment with two nodes that are online through nginx."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 8000:
        pytest.skip("needs 8000 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8000), hard))
    try:
        with running_gate(tmp_path_factory.mktemp("operator")) as made:
            yield made
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def plain(made: LocalDeployment, source: str) -> socket.socket:
    return socket.create_connection((OUTSIDE, made.deployment.port), timeout=30, source_address=(source, 0))


def encrypted(made: LocalDeployment, source: str) -> socket.socket:
    context = ssl.create_default_context(cafile=made.deployment.server / "ca.crt")
    return context.wrap_socket(plain(made, source), server_hostname=OUTSIDE)


def request(path: str, *lines: str, node: int | None = None, made: LocalDeployment) -> bytes:
    """Return the head of a request, with a node's public key if `node` is given."""
    key = [] if node is None else [f"{FLEET_HTTP_PUBLIC_KEY_HEADER}: {sent_key(made.deployment, node)}"]
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *key, *lines, "", ""]).encode()


def said(first: bytes) -> Callable[[LocalDeployment, str], socket.socket]:
    def opened(made: LocalDeployment, source: str) -> socket.socket:
        connection = encrypted(made, source)
        connection.sendall(first)
        return connection

    return opened


def half_handshake(made: LocalDeployment, source: str) -> socket.socket:
    connection = plain(made, source)
    connection.sendall(b"\x16\x03\x01\x02\x00")
    return connection


def begun_body(path: str, line: str, node: int | None = None) -> Callable[[LocalDeployment, str], socket.socket]:
    return lambda made, source: said(request(path, line, node=node, made=made))(made, source)


ATTACKS: dict[str, Callable[[LocalDeployment, str], socket.socket]] = {
    "connected": plain,
    "half a handshake": half_handshake,
    "a handshake": encrypted,
    "half a header": said(b"POST /v1/fleet/x HTTP/1.1\r\nHost: x\r\nA: "),
    "a body": begun_body(UNREAD, "Content-Length: 5000000"),
    "a body in chunks": begun_body(UNREAD, "Transfer-Encoding: chunked"),
    "a body for the health": begun_body("/health", "Content-Length: 5000000"),
    "a body for what is refused": begun_body("/v1/control/list-runs", "Content-Length: 5000000"),
}
"""The part of a request that is sent; the connection stays open until nginx closes it."""


@contextlib.contextmanager
def attack(
    made: LocalDeployment, kind: Callable[[LocalDeployment, str], socket.socket], source: str, number: int = NUMBER
) -> Iterator[list[socket.socket]]:
    """Open connections, send one more byte per second on each that has begun to send, and yield them."""
    opened: list[socket.socket] = []
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(1.0):
            for connection in opened:
                if kind not in (plain, encrypted):
                    with contextlib.suppress(OSError):
                        connection.send(b"1")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        for _ in range(number):
            with contextlib.suppress(OSError):  # the connection was refused
                opened.append(kind(made, source))
        yield opened
    finally:
        ended.set()
        thread.join()
        for connection in opened:
            connection.close()


def status_of(made: LocalDeployment, source: str, head: bytes, body: Iterable[bytes] = ()) -> int:
    """Send a request and return the status of the answer."""
    with contextlib.closing(encrypted(made, source)) as connection:
        connection.sendall(head)
        for part in body:
            connection.sendall(part)
        return int(connection.recv(4096).split()[1])


def served(made: LocalDeployment, source: str, node: int = 0) -> int:
    """Return the status of a node's request: 400 is the SuperLink's answer to a meaningless message."""
    lines = (f"Content-Type: {PROTOBUF_MEDIA_TYPE}", "Content-Length: 3")
    return status_of(made, source, request(UNREAD, *lines, node=node, made=made), [b"\xff\xff\xff"])


def is_closed(connection: socket.socket) -> bool:
    """Return whether nginx has closed a connection, after reading what it sent before."""
    try:
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(4096):
                return True
    except ssl.SSLWantReadError:
        return False
    except OSError:
        return True
    return False


@pytest.mark.parametrize("source", [INSIDE, ELSEWHERE])
@pytest.mark.parametrize("kind", ATTACKS)
def test_no_address_keeps_nodes_out(gate: LocalDeployment, kind: str, source: str) -> None:
    """While one address holds as many of 600 connections as it can, nodes at it and at another are served at once."""
    with attack(gate, ATTACKS[kind], source):
        for address in (INSIDE, ELSEWHERE):
            began = time.monotonic()
            assert served(gate, address) == 400
            assert time.monotonic() - began < 15  # the time after which nginx closes idle connections


def test_what_says_too_little_is_closed(gate: LocalDeployment) -> None:
    """Connections are closed even if they send one more byte every second."""
    with contextlib.ExitStack() as stack:
        opened = [
            connection
            for kind in ATTACKS.values()
            for connection in stack.enter_context(attack(gate, kind, ELSEWHERE, 10))
        ]
        assert len(opened) == 10 * len(ATTACKS)
        time.sleep(CLOSED_AFTER)
        assert [connection for connection in opened if not is_closed(connection)] == []


def test_a_node_can_hold_no_more_than_its_own_connections(gate: LocalDeployment) -> None:
    """A registered node with 600 unfinished requests gets 503, and the other node is served."""
    with attack(gate, begun_body(UNREAD, "Content-Length: 5000000", node=1), INSIDE) as opened:
        assert served(gate, INSIDE, node=1) == 503
        assert served(gate, INSIDE, node=0) == 400
        kept = [connection for connection in opened if not is_closed(connection)]
        eventually(lambda: sum(not is_closed(connection) for connection in kept) <= 16, "refusals", 30)
    eventually(lambda: served(gate, INSIDE, node=1) == 400, "the node's answer", 30)


def test_strangers_reach_no_node_service(gate: LocalDeployment) -> None:
    """Without a key of this deployment the answer is 403, before the body; 415 is the SuperLink's answer to a node."""
    key = sent_key(gate.deployment, 0)
    for tried in ("", "x", key[:-4], f"{key}{key}"):
        for size in (5_000_000, 10**12):
            head = request(UNREAD, f"{FLEET_HTTP_PUBLIC_KEY_HEADER}: {tried}", f"Content-Length: {size}", made=gate)
            assert status_of(gate, INSIDE, head) == 403
    assert status_of(gate, INSIDE, request(UNREAD, "Content-Length: 5000000", node=0, made=gate)) == 415


def test_a_body_may_take_as_long_as_a_slow_link_needs(gate: LocalDeployment) -> None:
    """A body of 5 MiB may take 40 s, longer than nginx's limits on silence; one above 8 MB is refused at once."""
    size, steps = 5 << 20, 40
    lines = (f"Content-Type: {PROTOBUF_MEDIA_TYPE}", f"Content-Length: {size}")

    def pieces() -> Iterator[bytes]:
        for _ in range(steps):
            time.sleep(1.0)
            yield b"\xff" * (size // steps)

    began = time.monotonic()
    assert status_of(gate, INSIDE, request(UNREAD, *lines, node=0, made=gate), pieces()) == 400
    assert time.monotonic() - began >= steps
    large = request(UNREAD, "Content-Length: 9000000", node=0, made=gate)
    assert status_of(gate, INSIDE, large) == 413


def test_the_list_of_a_reply_may_not_be_long(gate: LocalDeployment) -> None:
    """A long list is refused (413) before it reaches the SuperLink, whose answer would be 415."""
    path = "/v1/fleet/push-messages"
    for size, status in ((200_000, 413), (100_000, 415)):
        assert status_of(gate, INSIDE, request(path, f"Content-Length: {size}", node=0, made=gate)) == status


def test_a_run_goes_on_during_an_attack(gate: LocalDeployment, tmp_path: Path) -> None:
    """All attacks run repeatedly from the nodes' address while a run with messages above 60 MB completes."""
    output, ended = tmp_path / "run", threading.Event()

    def attack_again() -> None:
        while not ended.is_set():
            with contextlib.ExitStack() as stack:
                for kind in ATTACKS.values():
                    stack.enter_context(attack(gate, kind, INSIDE, NUMBER // 4))
                ended.wait(15.0)

    thread = threading.Thread(target=attack_again)
    thread.start()
    try:
        sets = ("--set", "local-epochs=1", "--set", "hyperfl.hidden-width=800")
        code, _, err = finished(gate.hyperfl("run", "--num-rounds", 1, "--output", output, *sets))
    finally:
        ended.set()
        thread.join()
    assert code == 0, err
    assert max((output / "checkpoints").glob("round-*.npz")).stat().st_size > 60_000_000
    assert {row["client"] for row in read_metrics(output) if row["kind"] == "client"} == {0, 1}
