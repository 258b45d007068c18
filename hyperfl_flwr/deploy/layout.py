"""Paths of a deployment: the operator's folder, with a folder for each node to hand over.

::

    DIR/
    |-- deployment.toml       host, port and number of nodes; no secret
    |-- peers.toml            public keys of all nodes, for the owners; no secret
    |-- authority/            the certificate authority; its key stays here
    |   |-- ca.crt
    |   `-- ca.key
    |-- server/               files for the SuperLink's machine
    |   |-- ca.crt, server.crt, server.key
    |   |-- keys/node-0.pub   public keys of the nodes, to be registered
    |   |-- flwr/             FLWR_HOME of the SuperLink and of Flower's commands
    |   |-- state.db          the SuperLink's database
    |   `-- start.sh, ...
    `-- nodes/node-0/         files for node 0's machine, and nothing of other nodes
        |-- ca.crt, node.key, node.pub, peers.toml
        |-- node.toml         settings of the node's owner: data, device, threads, ...
        |-- state/            private state of its clients; never leaves the machine
        |-- worker.secret     shared by the SuperNode and its worker; new at each start
        |-- flwr/             FLWR_HOME of the SuperNode
        `-- start.sh, ...

A node's folder works at any path.
"""

import contextlib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.atomic_files import write_for_owner
from hyperfl_flwr.core.files.folder_lock import wait_for_folder
from hyperfl_flwr.protocol.hosting import MOST_NODES
from hyperfl_flwr.protocol.secure_sums.peers import PEERS_FILE

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
"""One label of a host name, between two dots (RFC 1123)."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A SuperLink and the nodes that may connect to it.

    Attributes:
        folder: Absolute path of the operator's folder.
        host: Host name or IPv4 address at which the nodes reach the SuperLink.
        port: Port of the SuperLink, 1 .. 65535.
        num_nodes: Number of nodes, 1 .. 10,000; they are numbered from 0.

    Raises:
        ConfigError: If host, port or number of nodes is out of range.
    """

    folder: Path
    host: str
    port: int
    num_nodes: int

    def __post_init__(self) -> None:
        problems = []
        if not _is_host(self.host):
            problems.append(f"host must be a host name or an IPv4 address; got {self.host!r}")
        if not 1 <= self.port <= 65535:
            problems.append(f"port must be 1 to 65535; got {self.port}")
        if not 1 <= self.num_nodes <= MOST_NODES:
            problems.append(f"nodes must be 1 to {MOST_NODES}; got {self.num_nodes}")
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a deployment from `deployment.toml` in its folder.

        Raises:
            ConfigError: If the folder is not a deployment's, or `deployment.toml` is damaged.
        """
        file = folder / "deployment.toml"
        try:
            found = tomllib.loads(file.read_text())
            host, port, nodes = found["host"], found["port"], found["nodes"]
            if not (isinstance(host, str) and type(port) is int and type(nodes) is int):
                raise ValueError("host must be a text, port and nodes whole numbers")
        except OSError as error:
            raise ConfigError(
                f"{folder} is not a deployment: {file.name} cannot be read ({error.strerror}); create one with "
                f"`hyperfl deploy init`"
            ) from None
        except (KeyError, ValueError) as error:  # a TOML or Unicode error is a ValueError
            raise ConfigError(
                f"{file} is damaged ({error}); restore it from a copy, or create another deployment with "
                f"`hyperfl deploy init`"
            ) from None
        return cls(folder=folder.absolute(), host=host, port=port, num_nodes=nodes)

    @classmethod
    @contextlib.contextmanager
    def locked(cls, folder: Path) -> Iterator[Self]:
        """Read a deployment that no other command changes within this context; waits for a command that does.

        On a file system without locks, such as NFS, the operator must see to it.

        Raises:
            ConfigError: As `read` does.
        """
        cls.read(folder).refuse_links()  # its error is better than the lock's
        with wait_for_folder(folder, is_required=False):
            yield cls.read(folder)  # again: the other command may have changed it

    def refuse_links(self) -> None:
        """Refuse, as root, links of other users in the places of folders and of the authority: root would follow them.

        Raises:
            ConfigError: Naming one.
        """
        if os.geteuid():
            return
        nodes = [self.node(number) for number in range(self.num_nodes)]
        places = [self.authority, self.authority / "ca.key", self.authority / "ca.crt", self.server, self.flower_home]
        for place in (*places, self.public_key(0).parent, self.node(0).parent, *nodes):
            if place.is_symlink() and (user := place.lstat().st_uid):
                raise ConfigError(
                    f"{place} is a link of uid {user}, which root does not follow; put the folder or file itself in "
                    f"its place, or run the command as that user"
                )

    def write(self) -> None:
        """Write `deployment.toml`."""
        lines = f'host = "{self.host}"\nport = {self.port}\nnodes = {self.num_nodes}\n'
        write_for_owner(self.folder / "deployment.toml", lines.encode())

    @property
    def authority(self) -> Path:
        """The certificate authority's folder."""
        return self.folder / "authority"

    @property
    def server(self) -> Path:
        """The SuperLink's folder."""
        return self.folder / "server"

    @property
    def flower_home(self) -> Path:
        """FLWR_HOME of the SuperLink and of Flower's commands that connect to it."""
        return self.server / "flwr"

    @property
    def database(self) -> Path:
        """The SuperLink's database file."""
        return self.server / "state.db"

    @property
    def peers(self) -> Path:
        """The file of the public keys of all nodes, a copy of which every owner gets."""
        return self.folder / PEERS_FILE

    def public_key(self, number: int) -> Path:
        """Return the file of a node's public key on the server's side."""
        return self.server / "keys" / f"node-{number}.pub"

    def node(self, number: int) -> Path:
        """Return the folder that is handed over to a node's owner."""
        return self.folder / "nodes" / f"node-{number}"


def _is_host(text: str) -> bool:
    """Return whether a text is a host name or an IPv4 address; a name does not end with a number (RFC 3696)."""
    labels = text.split(".")
    if labels[-1].isdecimal():
        try:
            ipaddress.IPv4Address(text)
        except ValueError:
            return False
        return True
    return len(text) <= 253 and all(map(_LABEL.fullmatch, labels))
