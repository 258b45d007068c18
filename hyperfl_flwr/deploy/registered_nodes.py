"""Read the registered nodes of a deployment from the SuperLink's database; the SuperLink need not run."""

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.deploy.keys import read_public_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.flower.superlink import database


@dataclass(frozen=True, kw_only=True)
class RegisteredNode:
    """A node with a key that is registered with the SuperLink.

    Attributes:
        flower_id: Flower's permanent id of the node, 0 .. 2^64-1.
        online: Whether the node is connected; a killed node counts as online for up to a minute.
        since: Time since when it is online or not, UTC, ISO 8601; empty if it was never online.
    """

    flower_id: int
    online: bool
    since: str = ""


def registered_nodes(deployment: Deployment) -> dict[int, RegisteredNode]:
    """Return the registered nodes of a deployment by their number.

    Raises:
        StateError: If the file of a node's public key is missing or damaged, or the database cannot be read.
    """
    numbers = {_pem(deployment.public_key(number)): number for number in range(deployment.num_nodes)}
    if not deployment.database.is_file():
        return {}
    return {
        numbers[node.public_key]: RegisteredNode(flower_id=node.flower_id, online=node.online, since=node.since)
        for node in _nodes(deployment)
        if node.public_key in numbers
    }


def foreign_nodes(deployment: Deployment) -> list[int]:
    """Return Flower's ids of the nodes that are registered with a key that is not in the deployment's folder of keys.

    These are the keys that `hyperfl deploy accept-key` has replaced.

    Raises:
        StateError: If the file of a node's public key is missing, or a public key is damaged, or the database cannot
            be read.
    """
    expected = {deployment.public_key(number) for number in range(deployment.num_nodes)}
    known = {_pem(file) for file in expected.union(deployment.public_key(0).parent.glob("*.pub"))}
    if not deployment.database.is_file():
        return []
    return [node.flower_id for node in _nodes(deployment) if node.public_key not in known]


def is_unregistered(deployment: Deployment, number: int) -> bool:
    """Return whether a node's key was registered and then unregistered, so that Flower never accepts it again.

    Raises:
        StateError: If the file of the node's public key is missing or damaged.
    """
    key = _pem(deployment.public_key(number))
    with readable(deployment.database):
        return deployment.database.is_file() and key in database.unregistered_keys(deployment.database)


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """Convert errors of the SuperLink's database to a `StateError`."""
    try:
        yield
    except sqlite3.Error as error:
        raise StateError(f"{file} cannot be read: {error}; try again") from error


def _nodes(deployment: Deployment) -> list[database.NodeRecord]:
    with readable(deployment.database):
        return database.registered_nodes(deployment.database)


def _pem(file: Path) -> bytes:
    """Return the public key in a file as the SuperLink stores it."""
    key = read_public_key(file)
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
