"""`hyperfl deploy add-node`: add a node to a deployment whose SuperLink and nodes may be running.

The folders of the other nodes are not touched: a run names its number of nodes itself (`num-nodes`), so a run that has
begun keeps its nodes, and the next one has the new node, too.
"""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hyperfl_flwr.core.errors import ConfigError, StateError
from hyperfl_flwr.core.files.atomic_files import write_atomically, write_for_owner
from hyperfl_flwr.deploy.gate import GATE, header_value, sent_key
from hyperfl_flwr.deploy.keys import PRIVATE, public_line, read_certificate, read_node_key, read_public_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import PLACE, NodeAddress
from hyperfl_flwr.deploy.peers import deployment_peers
from hyperfl_flwr.deploy.provision import private_files, write_node, write_place
from hyperfl_flwr.protocol.secure_sums.peers import PEERS_FILE, peers_text

_LINE = re.compile(r'^[ \t]*"(?P<key>[A-Za-z0-9+/=]+)"[ \t]+(?P<number>\d+);[ \t]*(#.*)?\n', re.MULTILINE)
"""A line of `nginx.conf` with the key of a node, and nothing else but a comment after it."""


@dataclass(frozen=True, kw_only=True)
class _Gate:
    """`nginx.conf`, which the operator may have changed, and the place in it for another node's key.

    Attributes:
        text: The file's content.
        keys: The present nodes' keys, as Flower sends them.
        position: Index in `text` at which the line of another key belongs.
        owner: Status of the file that was read, should it be a link to one that is not everybody's to read.
    """

    text: str
    keys: frozenset[str]
    position: int
    owner: os.stat_result

    def with_key(self, key: str, number: int) -> str:
        """Return the file's content with a node's key, as Flower sends it, in place of any that it had before."""
        lines = list(_LINE.finditer(self.text))
        if any(line["key"] == key for line in lines):
            return self.text
        # The key of an interrupted call, which its owner has replaced since.
        old = [line.span() for line in lines if int(line["number"]) == number and line["key"] not in self.keys]
        start, end = old[-1] if old else (self.position, self.position)
        return f'{self.text[:start]}        "{key}" {number};\n{self.text[end:]}'


def add_node(folder: Path, number: int | None = None) -> tuple[Deployment, list[Path]]:
    """Add the next node to a deployment; if this is interrupted, the same call completes it.

    Args:
        folder: The deployment's folder.
        number: Number of the new node, so that a repeated call does not add another one; None for the next number.

    Returns:
        The deployment with the new node, which has the largest number; and the files and folders that were written, the
        node's folder first.

    Raises:
        ConfigError: If the folder is not a deployment's, `number` is not the next one, the deployment cannot have more
            nodes, the new node's place is in use, or `nginx.conf` has no line with the key of a node.
        StateError: If the authority's certificate or a node's public key is missing or damaged.
    """
    with Deployment.locked(folder) as present:
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
            write_for_owner(home / PEERS_FILE, everyone)
        files = [home, deployment.public_key(new)]
        write_for_owner(deployment.public_key(new), public_line(key, f"node-{new}"))
        if gate is not None:
            text = gate.with_key(header_value(key), new)
            write_atomically(present.server / GATE, text.encode(), mode=PRIVATE, owner=gate.owner)
            files.append(present.server / GATE)
        write_for_owner(deployment.peers, everyone)
        deployment.write()  # last: until here a repeated call completes all of it
    return deployment, [*files, deployment.peers, deployment.folder / "deployment.toml"]


def next_steps(deployment: Deployment) -> Iterator[str]:
    """Yield what the operator does after a node was added, a line for each step.

    Args:
        deployment: The deployment with the new node, which has the largest number.
    """
    folder, number = deployment.folder, deployment.num_nodes - 1
    yield f"with nginx: nginx -p {shlex.quote(str(deployment.server))} -c {GATE} -s reload"
    yield f"while the SuperLink runs: hyperfl deploy register {shlex.quote(str(folder))}"
    home = deployment.node(number)
    is_roots = home.exists() and home.stat().st_uid != folder.stat().st_uid
    root = " (it is root's)" if is_roots else ""
    yield f"give {home}{root} to the owner of node {number}, and delete it here"
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
    if unfinished.is_symlink() or (unfinished.exists() and not unfinished.is_dir()):
        raise ConfigError(f"{unfinished} is in use, and not by `hyperfl deploy add-node`; move it elsewhere and repeat")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a call that was interrupted
    write_node(deployment, number, unfinished)
    unfinished.rename(home)


def _open_gate(deployment: Deployment) -> _Gate | None:
    """Return the gate with the place after the last node's key; None if the file was deleted, as nginx is not used.

    Raises:
        ConfigError: If the file has the key of no node on a line of its own.
    """
    file = deployment.server / GATE
    if not file.is_file():
        return None
    with file.open() as opened:
        text, status = opened.read(), os.fstat(opened.fileno())
    keys = frozenset(sent_key(deployment, number) for number in range(deployment.num_nodes))
    ends = [line.end() for line in _LINE.finditer(text) if line["key"] in keys]
    if not ends:
        raise ConfigError(
            f"{file} has the key of no node on a line of its own, so it was changed by hand; add the line of a node to "
            f"its map of $http_flwr_public_key again, or delete the file if nginx is not used, and repeat"
        )
    return _Gate(text=text, keys=keys, position=max(ends), owner=status)
