"""`hyperfl deploy init` and `renew`: write a deployment's files, see `hyperfl_flwr.deploy.layout` for their places."""

import contextlib
import ipaddress
import os
import pwd
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.atomic_files import write_for_owner
from hyperfl_flwr.core.packages.versions import shared_versions
from hyperfl_flwr.deploy.gate import GATE, gate
from hyperfl_flwr.deploy.keys import read_certificate, write_authority, write_node_key, write_server_certificate
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import FILE, PLACE, NodeAddress
from hyperfl_flwr.deploy.peers import write_peers
from hyperfl_flwr.deploy.render import render

NODE_HOME = "/srv/hyperfl/node-{}"
"""Path at which a node's systemd unit expects the node's folder."""

_UNFIT = '?"%$\\'
"""Characters with a special meaning in a path for systemd, TOML or Flower's database URL."""

VERSIONS = "versions.toml"


def init(deployment: Deployment) -> None:
    """Write all files of a new deployment, readable by their owner only because they contain keys.

    Raises:
        ConfigError: If the folder is in use, or its path has characters that systemd, TOML or Flower cannot take.
    """
    folder = deployment.folder
    if os.geteuid() == 0 and folder.exists() and (user := folder.stat().st_uid):
        raise ConfigError(f"{folder} belongs to uid {user}; run the command as that user, or choose a new folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} must be a new or an empty folder, but is in use; choose another one")
    if unfit := sorted({character for character in str(folder) if character in _UNFIT or not character.isprintable()}):
        raise ConfigError(f"{folder} must have no {' '.join(map(repr, unfit))} in its path; choose another folder")
    with private_files():
        try:
            write_all(deployment)
        except BaseException:  # an interrupted `init` leaves nothing that looks like a deployment
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Create files and folders for their owner only within this context, not only after a chmod."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)


def write_all(deployment: Deployment) -> None:
    """Write a deployment's files; `deployment.toml`, which marks the folder as complete, is written last."""
    for folder in (deployment.authority, deployment.flower_home, deployment.public_key(0).parent):
        folder.mkdir(parents=True)
    deployment.folder.chmod(0o700)
    write_authority(deployment.authority)
    _write_server(deployment)
    for number in range(deployment.num_nodes):
        write_for_owner(deployment.public_key(number), write_node(deployment, number, deployment.node(number)))
    write_peers(deployment)
    _write(deployment.server / GATE, gate(deployment))
    deployment.write()


def renew(deployment: Deployment) -> None:
    """Write a new server certificate, signed by the same authority, so that the nodes need no new files.

    Raises:
        StateError: If the authority's files are missing or damaged.
    """
    write_server_certificate(deployment.authority, deployment.server, deployment.host)


def write_connection(deployment: Deployment) -> Path:
    """Write the connection to the SuperLink for Flower's commands; each time, because the folder may have moved.

    Returns:
        The file.
    """
    file = deployment.flower_home / "config.toml"
    text = render("flower_config.toml.jinja", port=deployment.port, certificate=deployment.server / "ca.crt")
    write_for_owner(file, text.encode(), mode=0o600)
    return file


def write_start(deployment: Deployment) -> Path:
    """Write the SuperLink's start script, which has its port; return its path."""
    bind = "127.0.0.1" if is_local(deployment.host) else "0.0.0.0"  # noqa: S104 - the nodes are on other machines
    file = deployment.server / "start.sh"
    _write(file, render("superlink_start.sh.jinja", bind=bind, port=deployment.port), mode=0o700)
    return file


def is_local(host: str) -> bool:
    """Return whether a host is a loopback address, which other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _write_server(deployment: Deployment) -> None:
    server = deployment.server
    certificate = read_certificate(deployment.authority / "ca.crt")
    write_for_owner(server / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))
    write_server_certificate(deployment.authority, server, deployment.host)
    write_connection(deployment)
    start = write_start(deployment)
    programs = Path(sys.executable).parent
    _write(server / "environment", render("environment.sh.jinja", program="flower-superlink", programs=programs))
    unit = render("hyperfl-superlink.service.jinja", start=start, user=_user())
    _write(server / "hyperfl-superlink.service", unit)


def write_node(deployment: Deployment, number: int, folder: Path) -> bytes:
    """Write the files of a node, with a new key, but without the list of all nodes' keys.

    Args:
        deployment: The deployment.
        number: The node's number.
        folder: Folder to create, which is to become the node's.

    Returns:
        The node's public key as a commented OpenSSH line.
    """
    (folder / "flwr").mkdir(parents=True)
    (folder / "state").mkdir()
    certificate = read_certificate(deployment.server / "ca.crt")
    write_for_owner(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))
    public = write_node_key(folder, f"node-{number}")
    write_place(deployment, number, folder)
    _write(folder / FILE, render("node.toml"))
    _write(folder / "README.txt", render("README.txt.jinja", number=number))
    _write(folder / "start.sh", render("supernode_start.sh.jinja", number=number), mode=0o700)
    _write(folder / "environment", render("environment.sh.jinja", program="flower-supernode", programs=None))
    home = Path(NODE_HOME.format(number))
    unit = render("hyperfl-node.service.jinja", folder=home, start=home / "start.sh", number=number)
    _write(folder / "hyperfl-node.service", unit)
    _write(folder / VERSIONS, "".join(f'{name} = "{version}"\n' for name, version in shared_versions().items()))
    return public


def write_place(deployment: Deployment, number: int, folder: Path) -> None:
    """Write `place.toml`, which has a node's number and the SuperLink's address, into its folder."""
    place = NodeAddress.model_validate(
        {"number": number, "nodes": deployment.num_nodes, "host": deployment.host, "port": deployment.port}
    )
    write_for_owner(folder / PLACE, place.text())


def _user() -> str:
    """Return the name of this process's user for a systemd unit; the number of one without an account."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _write(file: Path, text: str, mode: int = 0o600) -> None:
    write_for_owner(file, text.encode(), mode=mode)
