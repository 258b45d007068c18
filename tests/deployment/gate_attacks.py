"""Idle, slow and numerous connections to nginx, for tests of its limits per address."""

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator

from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from gates import OUTSIDE
from programs import LocalDeployment

from hyperfl_flwr.deploy.gate import sent_key

NUMBER = 600
"""Connections of an attack, more than nginx allows by default."""

UNREAD = "/v1/fleet/pull-messages"
"""A path of the nodes' service."""


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


def begun_body(path: str, *lines: str, node: int | None = None) -> Callable[[LocalDeployment, str], socket.socket]:
    return lambda made, source: said(request(path, *lines, node=node, made=made))(made, source)


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
    connection.setblocking(False)  # what can be read may be a ticket of the TLS session and no data
    try:
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(4096):
                return True
    except ssl.SSLWantReadError:
        return False
    except OSError:
        return True
    return False
