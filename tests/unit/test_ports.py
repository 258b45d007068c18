"""Ports for programs: outside the range of connections, free, and an error if there are none."""

import socket

import pytest

from hyperfl_flwr.core import ports
from hyperfl_flwr.core.ports import PORTS, free_port


def test_a_port_can_be_listened_on_and_is_no_connections() -> None:
    found = {free_port() for _ in range(20)}
    assert len(found) > 1
    assert found <= set(PORTS)
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used, socket.create_server(("127.0.0.1", 0)) as freed:
        taken, free = (server.getsockname()[1] for server in (used, freed))
        freed.close()
        monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda *_: [taken, free])
        assert free_port() == free
        monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda *_: [taken])
        with pytest.raises(OSError, match="are in use; end some programs"):
            free_port()
