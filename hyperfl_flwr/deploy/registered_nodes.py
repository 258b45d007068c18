"""Read the registered nodes of a deployment from the SuperLink's database; the SuperLink need not run."""

from dataclasses import dataclass

from cryptography.hazmat.primitives import serialization

from hyperfl_flwr.deploy.keys import read_public_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.flower.superlink import database


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
    return {
        numbers[node.public_key]: RegisteredNode(flower_id=node.flower_id, online=node.online)
        for node in database.registered_nodes(deployment.database)
        if node.public_key in numbers
    }
