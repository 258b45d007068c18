"""`hyperfl deploy own-key`, `accept-key` and `peers`: the nodes' identity keys for secure sums, and their list.

`hyperfl deploy init` makes all keys on the operator's machine, so an operator could have kept copies. An owner who does
not want to rely on the operator makes a new key, and the operator puts its public part into the list of all nodes.
"""

import base64
import os
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hyperfl_flwr.core.errors import ConfigError, StateError
from hyperfl_flwr.core.files.atomic_files import write_atomically, write_for_owner
from hyperfl_flwr.deploy.gate import GATE, header_value
from hyperfl_flwr.deploy.keys import (
    PRIVATE,
    public_line,
    read_node_key,
    read_public_key,
    write_node_key,
)
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import FILE, PLACE, NodeAddress, read_settings
from hyperfl_flwr.protocol.secure_sums.peers import (
    PEERS_FILE,
    fingerprint,
    parse_peers,
    parse_public_key,
    peers_text,
    read_peers,
)

Peers = dict[int, ec.EllipticCurvePublicKey]

OLD_KEY = "node.key.old"
"""Copy of the key before `hyperfl deploy own-key`; of no use once the operator has registered the new key."""


def is_deployment(folder: Path) -> bool:
    """Return whether a folder is a deployment's, and not a node's.

    Raises:
        ConfigError: If it is neither.
    """
    if (folder / "deployment.toml").is_file():
        return True
    if (folder / PLACE).is_file():
        return False
    raise ConfigError(
        f"{folder} is neither a deployment (it has no deployment.toml) nor a node's folder (it has no {PLACE}); "
        f"give the folder that `hyperfl deploy init` wrote, or the node's folder that the operator gave you"
    )


def own_key(folder: Path) -> Path:
    """Make a new key in a node's folder; the old one is kept as `OLD_KEY`.

    Args:
        folder: Folder of the node, on its owner's machine.

    Returns:
        The file of the new public key, for the operator.

    Raises:
        ConfigError: If the folder is not a node's, or its key was already replaced.
    """
    comment = f"node-{NodeAddress.read(folder).number}"
    key, old, public = folder / "node.key", folder / OLD_KEY, folder / "node.pub"
    if old.exists() and key.exists() and old.read_bytes() != key.read_bytes():
        write_for_owner(public, public_line(read_node_key(key).public_key(), comment))  # lost if this was interrupted
        raise ConfigError(
            f"this node's key was already replaced ({old} is the one before); send {public} to the operator. To make "
            f"yet another key, first delete {OLD_KEY}"
        )
    if key.exists():
        with key.open("rb") as file:  # if it is a link to a file of root, the copy is root's, too
            write_atomically(old, file.read(), mode=PRIVATE, owner=os.fstat(file.fileno()))
    write_node_key(folder, comment)
    return public


def accept_key(deployment: Deployment, number: int, file: Path) -> Iterator[str]:
    """Replace the public key of a node by the one that its owner has sent; safe to repeat.

    Args:
        deployment: The deployment.
        number: The node's number.
        file: The file that the owner has sent, an OpenSSH line.

    Yields:
        A line for each file that was written.

    Raises:
        ConfigError: If there is no such node, or the file has no key on the curve P-384 that no other node has.
        StateError: If a public key of the deployment cannot be read.
    """
    if not 0 <= number < deployment.num_nodes:
        raise ConfigError(f"the number of the node must be 0 to {deployment.num_nodes - 1}; got {number}")
    try:
        key = parse_public_key(file.read_bytes().decode(errors="replace"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give the node.pub that the owner sent") from None
    except ValueError as error:
        raise ConfigError(f"the key in {file} {error}; give the node.pub that the owner sent") from None
    for other in range(deployment.num_nodes):
        if other != number and read_public_key(deployment.public_key(other)) == key:
            raise ConfigError(f"{file} has the key of node {other}, not of node {number}; give each node its own")
    public = deployment.public_key(number)
    # nginx.conf first: afterwards the key that it replaces is no longer known.
    yield from _replace_in_gate(deployment, read_public_key(public), key)
    write_for_owner(public, public_line(key, f"node-{number}"))
    yield str(public)
    write_peers(deployment)
    yield str(deployment.peers)


def deployment_peers(deployment: Deployment) -> Peers:
    """Return the public keys of a deployment's nodes by number, from the server's folder.

    Raises:
        StateError: If a key is missing, damaged, on another curve, or the same as another node's.
    """
    keys = {number: read_public_key(deployment.public_key(number)) for number in range(deployment.num_nodes)}
    try:
        return parse_peers(peers_text(keys))
    except ValueError as error:
        folder = deployment.public_key(0).parent
        raise StateError(f"in {folder}, {error}; ask the node's owner for node.pub") from None


def write_peers(deployment: Deployment) -> Peers:
    """Write the list of all nodes' keys, also into the nodes' folders that are still here; return the list.

    Raises:
        StateError: As `deployment_peers` does.
    """
    peers = deployment_peers(deployment)
    text = peers_text(peers).encode()
    folders = [deployment.node(number) for number in range(deployment.num_nodes)]
    for file in (deployment.peers, *(folder / PEERS_FILE for folder in folders if folder.is_dir())):
        write_for_owner(file, text)
    return peers


def node_peers(folder: Path) -> Peers:
    """Return the list of all nodes' keys that a node uses.

    Raises:
        ConfigError: If `node.toml` is wrong or names no list, or the list is wrong.
    """
    file = read_settings(folder).peers_file
    if not file:
        raise ConfigError(f'{folder / FILE} has no peers-file; add peers-file = "{PEERS_FILE}"')
    return read_peers(Path(file))


def describe(peers: Peers) -> Iterator[str]:
    """Yield a line for each key, with the fingerprint that `ssh-keygen -l` prints, and one for the whole list."""
    for number, key in peers.items():
        digest = base64.b64encode(serialization.ssh_key_fingerprint(key, hashes.SHA256())).decode().rstrip("=")
        yield f"node {number}: SHA256:{digest}"
    yield f"fingerprint: {fingerprint(peers)}"


def _replace_in_gate(
    deployment: Deployment, old: ec.EllipticCurvePublicKey, new: ec.EllipticCurvePublicKey
) -> Iterator[str]:
    """Replace a node's key in nginx.conf, which the operator may have changed; without nginx it has no effect."""
    file = deployment.server / GATE
    if not file.is_file():
        return
    with file.open() as opened:
        text, status = opened.read(), os.fstat(opened.fileno())
    if header_value(new) in text:
        return
    if header_value(old) not in text:
        raise ConfigError(
            f"{file} does not have the node's present key, so it was changed by hand; write this key there instead of "
            f"the node's, or delete the file if nginx is not used, and repeat: {header_value(new)}"
        )
    text = text.replace(header_value(old), header_value(new))
    write_atomically(file, text.encode(), mode=PRIVATE, owner=status)
    yield str(file)
