"""Small servers on the loopback interface for tests of connection checks: with TLS, without it, and silent ones."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NODE_COLUMNS = "node_id, status, online_until, last_activated_at, last_deactivated_at, public_key, unregistered_at"
"""Columns of a SuperLink's table of nodes that are read, for tests without Flower's own code."""


@contextlib.contextmanager
def https_server(
    folder: Path | None, *, status: int = 200, body: bytes = b"", date: datetime | None = None, port: int = 0
) -> Iterator[int]:
    """Serve one answer to every request.

    Args:
        folder: Folder with `server.crt` and `server.key`; None for a server without TLS.
        status: HTTP status of the answer.
        body: Body of the answer.
        date: Time in its Date header; None for the current time.
        port: Port to listen on; 0 for a free one.

    Yields:
        The port.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(status)
            self.send_header("Date", format_datetime(date or datetime.now(UTC), usegmt=True))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that does not trust the certificate breaks off the handshake

    server = Server(("127.0.0.1", port), Handler)
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """Accept connections and never answer; yield the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]
