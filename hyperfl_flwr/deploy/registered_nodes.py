"""Read the registered nodes of a deployment from the SuperLink's database; the SuperLink need not run."""

import contextlib
import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography.hazmat.primitives import serialization

from hyperfl_flwr.deploy.keys import read_public_key
from hyperfl_flwr.deploy.layout import Deployment

_QUERY = "SELECT node_id, status, online_until, public_key FROM node WHERE unregistered_at IS NULL"


@dataclass(frozen=True, kw_only=True)
class RegisteredNode:
    """A node with a key that is registered with the SuperLink.

    Attributes:
        flower_id: Flower's permanent id of the node, 0 .. 2^64-1.
        online: Whether the node is connected; a killed node counts as online for up to a minute.
    """

    flower_id: int
    online: bool


def registered_nodes(deployment: Deployment) -> dict[int, RegisteredNode]:
    """Return the registered nodes of a deployment by their number.

    Raises:
        StateError: If the file of a node's public key is missing or damaged.
    """
    numbers = {}
    for number in range(deployment.num_nodes):
        key = read_public_key(deployment.public_key(number))
        pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        numbers[pem] = number
    if not deployment.database.is_file():
        return {}
    name = f"{deployment.database.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(name, uri=True, timeout=5)) as connection:
            rows = connection.execute(_QUERY).fetchall()
    except sqlite3.OperationalError:  # the SuperLink has not created its tables yet
        return {}
    # A killed node stays "online" in the table; the time until which its last heartbeat counts shows that it ended.
    now = datetime.now(UTC).timestamp()
    return {
        # SQLite stores the unsigned id as a signed integer.
        numbers[key]: RegisteredNode(flower_id=flower_id % 2**64, online=status == "online" and until > now)
        for flower_id, status, until, key in rows
        if key in numbers
    }
