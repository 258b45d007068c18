"""Serve the state of a deployment as a page, on this machine only; a request changes nothing."""

import math
import re
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import ConfigError, HyperFLError
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.status import Status
from hyperfl_flwr.pages.figures import captioned
from hyperfl_flwr.pages.render import NOTHING, page
from hyperfl_flwr.runs.figures.plots import run_panels

LOOPBACK = "127.0.0.1"

REFRESH_SECONDS = 10
"""Seconds after which a browser loads the page again."""

KEPT_SECONDS = 2.0
"""Seconds for which a page answers all requests; a long run takes seconds to read."""

_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


def status_page(deployment: Deployment) -> str:
    """Return the page of a deployment's state, with the curves of its newest run.

    Args:
        deployment: The deployment.

    Raises:
        StateError: If the file of a node's public key is missing or damaged, or the database cannot be read.
    """
    found = Status.of(deployment)
    begun = bool(found.runs and found.runs[0].round)
    figures = captioned(run_panels(Path(found.runs[0].folder))) if begun else []
    rows = [(str(node.number), node.state, node.since or NOTHING) for node in found.nodes]
    return page("status.html", found=found, figures=figures, rows=rows)


class StatusServer(ThreadingHTTPServer):
    """HTTP server on the loopback address that answers `GET /` with the page of a deployment's state.

    Args:
        deployment: The deployment.
        port: Port to listen on; 0 for a free one.

    Raises:
        ConfigError: If the port is taken, or may not be used.
    """

    daemon_threads = True
    _body, _since = b"", -math.inf

    def __init__(self, deployment: Deployment, port: int) -> None:
        self._drawing = threading.Lock()  # matplotlib is not safe in several threads
        self._deployment = deployment
        try:
            super().__init__((LOOPBACK, port), _handler(self.content))
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used: {error.strerror}; choose another with --port") from None

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def content(self) -> bytes:
        """Return the page as it was at most `KEPT_SECONDS` ago."""
        with self._drawing:
            if time.monotonic() - self._since > KEPT_SECONDS:
                self._body = status_page(self._deployment).encode()
                self._since = time.monotonic()
            return self._body

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        """Print errors, but nothing of browsers that close the connection early or fall silent."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _handler(content: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers requests of browsers on this machine."""

        timeout = 10.0  # seconds that a silent connection is kept

        def do_GET(self) -> None:
            """Answer with the page; refuse other paths, and names by which another site could read it."""
            host = re.sub(r":[0-9]+\Z", "", self.headers.get("Host", ""))
            if host not in (LOOPBACK, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN, "open it as 127.0.0.1 or localhost")
            elif self.headers.get("Sec-Fetch-Site") == "cross-site":
                self.send_error(HTTPStatus.FORBIDDEN, "another site asks for it")
            elif self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                try:
                    body, code = content(), HTTPStatus.OK
                except HyperFLError as error:
                    body, code = str(error).encode(), HTTPStatus.INTERNAL_SERVER_ERROR
                self.send_response(code)
                for name, value in _HEADERS.items():
                    self.send_header(name, value if code == HTTPStatus.OK or "html" not in value else "text/plain")
                self.send_header("Refresh", str(REFRESH_SECONDS))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def version_string(self) -> str:
            """Name no program."""
            return "status"

        def log_message(self, *_: object) -> None:
            """Print no requests."""

    return Handler
