"""Find a port for a program that listens on this machine."""

import random
import socket
from contextlib import suppress

PORTS = range(20_000, 32_768)
"""Ports outside the ranges from which Linux, macOS and Windows take those of connections: a port of these ranges could
become a connection's before the program listens."""


def free_port() -> int:
    """Return a port of `PORTS` on which no program of this machine listens; different ones at each call.

    Raises:
        OSError: If a hundred of them are all in use.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"a hundred ports between {PORTS.start} and {PORTS.stop - 1} are in use; end some programs")
