"""Whether a SuperLink takes a node with a key: asked as the node itself.

Flower has no such question. A SuperNode activates itself for a heartbeat interval; an interval of 0 is refused for its
length if the key is known, and as any other activation if it is not. A known key is refused, too, while a SuperNode
that has it counts as online: for a minute if it was killed.

Wraps `flwr.supernode.fleet_http_client`, the client by which a SuperNode speaks to a SuperLink, and what its requests
and answers consist of. Flower's only public user of that API is the command `flower-supernode`, which stays.
"""

from enum import Enum, auto
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor


class Registration(Enum):
    """What the SuperLink says of a key."""

    KNOWN = auto()
    TAKEN = auto()
    """It is known, and a SuperNode that has it counts as online."""
    UNKNOWN = auto()
    REFUSED = auto()
    """The signature of the time is not accepted: the clocks differ, or something on the way has changed it."""
    UNCLEAR = auto()
    """It answers in another way: it is no SuperLink, or one of another version."""


def ask_registration(address: str, root_certificates: Path, key: ec.EllipticCurvePrivateKey) -> Registration:
    """Ask a SuperLink whether it knows a node's key.

    Args:
        address: HOST:PORT.
        root_certificates: PEM file of the authority that has signed the SuperLink's certificate.
        key: The node's private key; it stays here.

    Raises:
        httpx.TransportError: If there is no connection, or no trust in it.
    """
    with _client(address, root_certificates, key) as client:
        return _activate(client, key, 0)


def ask_admission(address: str, root_certificates: Path, key: ec.EllipticCurvePrivateKey) -> Registration:
    """Ask a SuperLink whether it takes a node now, by being active for a moment.

    Args:
        address: HOST:PORT.
        root_certificates: PEM file of the authority that has signed the SuperLink's certificate.
        key: The node's private key; it stays here.

    Raises:
        httpx.TransportError: If there is no connection, or no trust in it.
    """
    with _client(address, root_certificates, key) as client:
        said = _activate(client, key, 0)
        if said is not Registration.KNOWN:
            return said
        said = _activate(client, key, HEARTBEAT_MIN_INTERVAL)
        return Registration.TAKEN if said is Registration.UNKNOWN else said


def _client(address: str, root_certificates: Path, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
    signer = NodeAuthHttpInterceptor(key, key.public_key())
    return FleetHttpClient.from_server_address(address, False, root_certificates.read_bytes(), [signer])


def _activate(client: FleetHttpClient, key: ec.EllipticCurvePrivateKey, interval: float) -> Registration:
    """Activate a node, and deactivate it if that is granted."""
    request = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=interval)
    try:
        node = client.ActivateNode(request).node_id
        if not interval:
            return Registration.UNCLEAR
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))
    except httpx.HTTPStatusError as error:
        return _meaning(error.response)
    except ValueError:  # an answer that is none of Flower's
        return Registration.UNCLEAR
    return Registration.KNOWN


def _meaning(response: httpx.Response) -> Registration:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return Registration.REFUSED
    error = FlowerError.from_json(response.text)
    answers = {
        int(ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL): Registration.KNOWN,
        int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED): Registration.UNKNOWN,
    }
    return Registration.UNCLEAR if error is None else answers.get(error.code, Registration.UNCLEAR)
