"""Query whether a SuperLink accepts a node's key, with a request signed by the node's key.

Flower has no such query. A SuperNode activates itself with a heartbeat interval. With an interval of 0, the SuperLink
refuses a known key because of the interval, and an unknown key like any other activation. It also refuses a known key
while a SuperNode with this key counts as online, which lasts a minute after a kill.

Wraps `flwr.supernode.fleet_http_client`, the client of a SuperNode for its SuperLink, and the messages of its requests
and replies. Flower's only public user of that API is the command `flower-supernode`, which does not end.
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
    """State of a key at the SuperLink."""

    KNOWN = auto()
    IN_USE = auto()
    """The key is known, and a SuperNode with this key counts as online."""
    UNKNOWN = auto()
    REFUSED = auto()
    """The signed timestamp is refused: the clocks differ, or a proxy has changed the headers."""
    UNCLEAR = auto()
    """Another answer: the server is not a SuperLink, or has another version."""


def ask_registration(
    address: str, root_certificates: Path, key: ec.EllipticCurvePrivateKey, *, activate: bool = False
) -> Registration:
    """Ask a SuperLink whether a node's key is registered, and optionally whether it accepts the node now.

    Args:
        address: Address of the SuperLink, HOST:PORT.
        root_certificates: PEM file of the authority that has signed the SuperLink's certificate.
        key: The node's private key; it is not sent.
        activate: Whether to also activate the node for a moment, which the SuperLink refuses with `IN_USE` while
            another SuperNode with this key counts as online.

    Raises:
        httpx.TransportError: If the connection fails, or the certificate is not trusted.
    """
    with _client(address, root_certificates, key) as client:
        registration = _activate(client, key, 0)
        if not activate or registration is not Registration.KNOWN:
            return registration
        # The key is known, so a refusal of a valid interval means that another SuperNode is online with it.
        registration = _activate(client, key, HEARTBEAT_MIN_INTERVAL)
        return Registration.IN_USE if registration is Registration.UNKNOWN else registration


def _client(address: str, root_certificates: Path, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
    signer = NodeAuthHttpInterceptor(key, key.public_key())
    return FleetHttpClient.from_server_address(address, False, root_certificates.read_bytes(), [signer])


def _activate(client: FleetHttpClient, key: ec.EllipticCurvePrivateKey, interval: float) -> Registration:
    """Try to activate a node, deactivate it again on success, and return what the answer means for its key."""
    request = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=interval)
    try:
        node = client.ActivateNode(request).node_id
        if not interval:
            return Registration.UNCLEAR
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))
    except httpx.HTTPStatusError as error:
        return _meaning(error.response)
    except ValueError:  # not an answer of Flower's API
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
