"""Wait until the SuperLink accepts a node, and explain a refusal, before the start script starts the SuperNode."""

import shlex
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.deploy.checks.probe import probe
from hyperfl_flwr.deploy.keys import read_node_key
from hyperfl_flwr.deploy.node_settings import NodeAddress
from hyperfl_flwr.flower.superlink.fleet_api import Registration, ask_registration

PATIENCE = 90.0
"""Seconds to wait until the SuperLink counts a killed SuperNode as offline; this takes at most 60."""

POLL_SECONDS = 2.0


def wait_for_admission(folder: Path, note: Callable[[str], None], patience: float = PATIENCE) -> None:
    """Wait until the SuperLink accepts the node in a folder.

    If the SuperLink does not answer, or its answer is not understood, this returns at once: the SuperNode retries by
    itself, but does not name the address.

    Args:
        folder: Folder of the node.
        note: Called once with the reason of the wait, or why a SuperLink does not answer, with its address.
        patience: Longest wait, in seconds.

    Raises:
        StateError: If the key cannot be read, is not registered or is in use by another SuperNode, or the clock is
            wrong.
    """
    place, key = NodeAddress.read(folder), read_node_key(folder / "node.key")
    end = time.monotonic() + patience
    noted = False
    while True:
        try:
            registration = ask_registration(f"{place.host}:{place.port}", folder / "ca.crt", key, activate=True)
        except (httpx.TransportError, OSError):
            answer, found = probe(place.host, place.port, folder / "ca.crt")
            if answer is None:
                note(f"{found.text}; {found.remedy}; the node tries again until the SuperLink answers")
            return
        if registration is Registration.UNKNOWN:
            raise StateError(
                "this node's key is not registered with the SuperLink; ask the operator to run "
                "`hyperfl deploy register`"
            )
        if registration is Registration.REFUSED:
            raise StateError(
                f"the SuperLink refuses this node's signature; `hyperfl deploy check {shlex.quote(str(folder))}` "
                f"compares the clocks"
            )
        if registration is not Registration.IN_USE:
            return
        if time.monotonic() > end:
            raise StateError(
                "another SuperNode is online with this node's key; end it, or ask the operator for another node's "
                "folder"
            )
        if not noted:
            note("waiting until the SuperLink accepts this node; after a kill, up to 60 s")
            noted = True
        time.sleep(POLL_SECONDS)
