"""`hyperfl deploy move`: change the address of a SuperLink, in the operator's files or in a node's folder.

The authority and all keys stay as they are, so that nothing secret has to travel: each owner only has to be given the
new host and port. A run that is stopped before the move continues after it with `--resume`.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.storage import write_atomically
from hyperfl_flwr.deploy.keys import PRIVATE
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import PLACE, NodeAddress
from hyperfl_flwr.deploy.provision import renew, write_connection, write_start


def move_deployment(deployment: Deployment, host: str | None, port: int | None) -> Iterator[Path]:
    """Change the address at which the nodes reach a SuperLink; safe to repeat after an interruption.

    Args:
        deployment: The deployment at its present address.
        host: The new host name or IPv4 address; None for the present one.
        port: The new port; None for the present one.

    Yields:
        The files that were written, among them those of the nodes' folders that are still here.

    Raises:
        ConfigError: If the address is not valid or the present one, or `nginx.conf` was changed by hand.
        StateError: If the authority's files are missing or damaged.
    """
    moved = replace(deployment, **_given(host, port))
    if moved == deployment:
        raise _unchanged(deployment.host, deployment.port)
    yield from _move_gate(deployment, moved)
    if moved.host != deployment.host:
        renew(moved)
        yield moved.server / "server.crt"
    yield write_start(moved)
    write_connection(moved)
    for number in range(moved.num_nodes):
        file = moved.node(number) / PLACE
        if file.is_file():
            _write_address(file, NodeAddress.read(file.parent), moved.host, moved.port)
            yield file
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
        ConfigError: If the folder is not a node's, or the address is not valid or the present one.
    """
    place = NodeAddress.read(folder)
    present = Deployment(folder=folder, host=place.host, port=place.port, num_nodes=place.nodes)
    moved = replace(present, **_given(host, port))
    if moved == present:
        raise _unchanged(place.host, place.port)
    _write_address(folder / PLACE, place, moved.host, moved.port)
    return folder / PLACE


def _given(host: str | None, port: int | None) -> dict[str, Any]:
    """Return the parts of an address that are given, as fields of `Deployment`, which checks them."""
    return {name: value for name, value in (("host", host), ("port", port)) if value is not None}


def _write_address(file: Path, place: NodeAddress, host: str, port: int) -> None:
    write_atomically(file, place.model_copy(update={"host": host, "port": port}).text(), mode=PRIVATE)


def _unchanged(host: str, port: int) -> ConfigError:
    return ConfigError(f"the address is already {host}:{port}; give another --host or --port")


def _move_gate(old: Deployment, new: Deployment) -> Iterator[Path]:
    """Change the address in nginx.conf, which the operator may have changed; without nginx it has no effect."""
    file = old.server / "nginx.conf"
    if not file.is_file():
        return
    text = file.read_text()
    changes = {
        f"listen {old.host}:{old.port}": f"listen {new.host}:{new.port}",
        f"https://127.0.0.1:{old.port}": f"https://127.0.0.1:{new.port}",
    }
    for before, after in changes.items():
        text, replaced = re.subn(rf"{re.escape(before)}\b", after, text)
        if not replaced and not re.search(rf"{re.escape(after)}\b", text):
            raise ConfigError(
                f"{file} has no `{before}`, so it was changed by hand; write `{after}` there, or delete the file if "
                f"nginx is not used, and repeat"
            )
    write_atomically(file, text.encode(), mode=PRIVATE)
    yield file
