"""`hyperfl deploy add-node`: add a node to a deployment whose SuperLink and nodes may be running.

The folders of the other nodes are not touched: a run names its number of nodes itself (`num-nodes`), so a run that has
begun keeps its nodes, and the next one has the new node, too.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hyperfl_flwr.core.errors import ConfigError, StateError
from hyperfl_flwr.core.folder_lock import wait_for_folder
from hyperfl_flwr.core.storage import write_atomically
from hyperfl_flwr.deploy.gate import GATE, header_value, sent_key
from hyperfl_flwr.deploy.keys import PRIVATE, public_line, read_certificate, read_node_key, read_public_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import PLACE, NodeAddress
from hyperfl_flwr.deploy.peers import deployment_peers
from hyperfl_flwr.deploy.provision import private_files, write_node, write_place
from hyperfl_flwr.protocol.secure_sums.peers import PEERS_FILE, peers_text


@dataclass(frozen=True, kw_only=True)
class _Gate:
    """`nginx.conf`, which the operator may have changed, and the place in it for another node's key.

    Attributes:
        text: The file's content.
        position: Index in `text` at which the line of the key belongs.
    """

    text: str
    position: int

    def with_key(self, key: str, number: int) -> str:
        """Return the file's content with a node's key, as Flower sends it."""
        if key in self.text:
            return self.text
        return f'{self.text[: self.position]}        "{key}" {number};\n{self.text[self.position :]}'


def add_node(folder: Path, number: int | None = None) -> Iterator[Path]:
    """Add the next node to a deployment; if this is interrupted, the same call completes it.

    Args:
        folder: The deployment's folder.
        number: Number of the new node, so that a repeated call does not add another one; None for the next number.

    Yields:
        The files and folders that were written, the new node's folder first.

    Raises:
        ConfigError: If the folder is not a deployment's, `number` is not the next one, the deployment cannot have more
            nodes, the new node's place is in use, or `nginx.conf` has no key of a node.
        StateError: If the authority's certificate or a node's public key is missing or damaged.
    """
    Deployment.read(folder)  # its error is better than the lock's
    with wait_for_folder(folder):
        present = Deployment.read(folder)
        new = present.num_nodes
        if number not in (None, new):
            raise ConfigError(_wrong_number(number, new))
        deployment = replace(present, num_nodes=new + 1)
        # All that can be wrong is found before anything is written.
        read_certificate(present.server / "ca.crt")
        peers = deployment_peers(present)
        gate = _open_gate(present)
        begun = _is_begun(deployment, new)
        home = deployment.node(new)
        with private_files():
            if not begun:
                _write_home(deployment, new)
            key = read_public_key(home / "node.pub")
            everyone = peers_text({**peers, new: key}).encode()
            write_place(deployment, new, home)  # again: address and keys may have changed since an interrupted call
            write_atomically(home / PEERS_FILE, everyone)
        yield home
        write_atomically(deployment.public_key(new), public_line(key, f"node-{new}"))
        yield deployment.public_key(new)
        if gate is not None:
            write_atomically(present.server / GATE, gate.with_key(header_value(key), new).encode(), mode=PRIVATE)
            yield present.server / GATE
        write_atomically(deployment.peers, everyone)
        yield deployment.peers
        deployment.write()  # last: until here a repeated call completes all of it
        yield deployment.folder / "deployment.toml"


def next_steps(deployment: Deployment) -> Iterator[str]:
    """Yield what the operator does after a node was added, a line for each step.

    Args:
        deployment: The deployment with the new node, which has the largest number.
    """
    folder, number = deployment.folder, deployment.num_nodes - 1
    yield f"with nginx: nginx -p '{deployment.server}' -c {GATE} -s reload"
    yield f"while the SuperLink runs: hyperfl deploy register '{folder}'"
    yield f"give {deployment.node(number)} to the owner of node {number}, and delete it here"
    yield (
        f"a run that has begun goes on without node {number}; the next one has {deployment.num_nodes} nodes, or "
        f"{number} with --set num-nodes={number}"
    )
    yield (
        f"only for secure sums: once no run with them is unfinished, send {deployment.peers} to all owners; until "
        f"then their nodes refuse secure sums of {deployment.num_nodes} nodes"
    )


def _wrong_number(number: int | None, new: int) -> str:
    if number is not None and 0 <= number < new:
        return f"the deployment already has node {number}; the next new node is node {new}"
    return f"the number of the new node must be {new}, since the nodes are numbered without gaps; got {number}"


def _is_begun(deployment: Deployment, number: int) -> bool:
    """Return whether an interrupted call has left a complete folder of the new node.

    Raises:
        ConfigError: If something else is in its place.
    """
    home, public = deployment.node(number), deployment.public_key(number)
    if not home.exists() and not home.is_symlink():
        if public.exists():
            raise ConfigError(
                f"{public} is the key of a node {number} of which {home} is missing; put the folder back, or delete "
                f"the key to make another one, and repeat"
            )
        return False
    try:
        if NodeAddress.read(home).number != number:
            raise ConfigError(f"{home / PLACE} is of another node")
        if read_node_key(home / "node.key").public_key() != read_public_key(home / "node.pub"):
            raise ConfigError(f"{home / 'node.pub'} is not the public part of node.key")
    except (ConfigError, StateError) as error:
        raise ConfigError(
            f"{home} is in use, and not by a node that `hyperfl deploy add-node` has begun to add: {error}. Move it "
            f"elsewhere and repeat"
        ) from None
    return True


def _write_home(deployment: Deployment, number: int) -> None:
    """Write the new node's folder under another name, and give it its name when it is complete."""
    home = deployment.node(number)
    unfinished = home.with_name(f".{home.name}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a call that was interrupted
    write_node(deployment, number, unfinished)
    unfinished.rename(home)


def _open_gate(deployment: Deployment) -> _Gate | None:
    """Return the gate with the place after the last node's key; None if the file was deleted, as nginx is not used.

    Raises:
        ConfigError: If the file has the key of no node.
    """
    file = deployment.server / GATE
    if not file.is_file():
        return None
    text = file.read_text()
    keys = [sent_key(deployment, number) for number in range(deployment.num_nodes)]
    ends = [text.find("\n", text.find(key)) + 1 for key in keys if key in text]
    if not any(ends):
        raise ConfigError(
            f"{file} has the key of no node, so it was changed by hand; add the line of a node to its map of "
            f"$http_flwr_public_key again, or delete the file if nginx is not used, and repeat"
        )
    return _Gate(text=text, position=max(ends))
