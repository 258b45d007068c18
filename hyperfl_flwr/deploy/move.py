"""`hyperfl deploy move`: change the address of a SuperLink, in the operator's files or in a node's folder.

The authority and all keys stay as they are, so that nothing secret has to travel: each owner only has to be given the
new host and port. A run that is stopped before the move continues after it with `--resume`.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.atomic_files import write_atomically, write_for_owner
from hyperfl_flwr.deploy.gate import GATE
from hyperfl_flwr.deploy.keys import PRIVATE
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import PLACE, NodeAddress
from hyperfl_flwr.deploy.provision import renew, write_connection, write_start


def move_deployment(deployment: Deployment, host: str | None, port: int | None) -> Iterator[Path]:
    """Change the address at which the nodes reach a SuperLink; if it is interrupted, the same call completes it.

    Args:
        deployment: The deployment at its present address.
        host: The new host name or IPv4 address; None for the present one.
        port: The new port; None for the present one.

    Yields:
        The files that were written, among them those of the nodes' folders that are still here.

    Raises:
        ConfigError: If no address is given, it is not valid, `nginx.conf` has neither the present nor the new port, or
            a node's `place.toml` is damaged.
        StateError: If the authority's files are missing or damaged.
    """
    moved = replace(deployment, **_given(host, port))
    # All that can be wrong is found before anything is written.
    gate, gate_owner = _moved_gate(deployment, moved)
    folders = [moved.node(number) for number in range(moved.num_nodes)]
    places = {folder: NodeAddress.read(folder) for folder in folders if (folder / PLACE).is_file()}
    if moved.host != deployment.host:
        renew(moved)
        yield from (moved.server / "server.crt", moved.server / "server.key")
    if gate is not None:
        write_atomically(moved.server / GATE, gate.encode(), mode=PRIVATE, owner=gate_owner)
        yield moved.server / GATE
    yield write_start(moved)
    yield write_connection(moved)
    for folder, place in places.items():
        yield _write_address(folder, place, moved.host, moved.port)
    moved.write()  # last: until here a repeated call does all of it again
    yield moved.folder / "deployment.toml"


def move_node(folder: Path, host: str | None, port: int | None) -> Path:
    """Change the SuperLink's address in a node's folder; the node still accepts only the SuperLink of its authority.

    Args:
        folder: Folder of the node, on its owner's machine.
        host: The new host name or IPv4 address; None for the present one.
        port: The new port; None for the present one.

    Returns:
        The file that was written.

    Raises:
        ConfigError: If the folder is not a node's, or no address is given, or it is not valid.
    """
    place = NodeAddress.read(folder)
    present = Deployment(folder=folder, host=place.host, port=place.port, num_nodes=place.nodes)
    moved = replace(present, **_given(host, port))
    return _write_address(folder, place, moved.host, moved.port)


def _given(host: str | None, port: int | None) -> dict[str, Any]:
    """Return the parts of an address that are given, as fields of `Deployment`, which checks them."""
    if host is None and port is None:
        raise ConfigError("the new address is missing; give --host, --port or both")
    return {name: value for name, value in (("host", host), ("port", port)) if value is not None}


def _write_address(folder: Path, place: NodeAddress, host: str, port: int) -> Path:
    # The mode is that of a new file, as from `hyperfl deploy init`: the file has no secret, and a service may run as
    # another user than the one who moves it.
    write_for_owner(folder / PLACE, place.model_copy(update={"host": host, "port": port}).text())
    return folder / PLACE


def _moved_gate(old: Deployment, new: Deployment) -> tuple[str | None, os.stat_result | None]:
    """Return nginx.conf, which the operator may have changed, with the new address, and the status of what was read.

    Both are None if there is no such file.

    An address after `listen` that is not the deployment's host is the operator's, that of a network interface behind a
    router for example, and stays.
    """
    file = old.server / GATE
    if not file.is_file():
        return None, None
    with file.open() as opened:
        text, status = opened.read(), os.fstat(opened.fileno())
    text = re.sub(rf"(?<=listen ){re.escape(old.host)}(?=:{old.port}\b)", new.host, text)
    for address in (r"listen \S+", r"https://127\.0\.0\.1"):
        text = re.sub(rf"({address}):{old.port}\b", rf"\g<1>:{new.port}", text)
        if not re.search(rf"{address}:{new.port}\b", text):
            raise ConfigError(
                f"{file} does not have port {old.port} as `hyperfl deploy init` writes it, so it was changed by hand; "
                f"write `listen {new.host}:{new.port} ssl;` and `https://127.0.0.1:{new.port}` there, or delete the "
                f"file if nginx is not used, and repeat"
            )
    return text, status
