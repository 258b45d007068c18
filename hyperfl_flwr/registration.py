"""Whether a SuperLink takes a node with a key: asked as the node itself, without becoming active.

Flower has no such question. A SuperNode activates itself for a heartbeat interval; an interval of 0 is refused for its
length if the key is known, and as any other activation if it is not. This is the only module that uses Flower's
private client of a SuperLink.
"""

from enum import Enum, auto
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor


class Registration(Enum):
    """What the SuperLink says of a key."""

    KNOWN = auto()
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
    public_key = key.public_key()
    request = ActivateNodeRequest(public_key=public_key_to_bytes(public_key), heartbeat_interval=0)
    signer = NodeAuthHttpInterceptor(key, public_key)
    with FleetHttpClient.from_server_address(address, False, root_certificates.read_bytes(), [signer]) as client:
        try:
            client.ActivateNode(request)
        except httpx.HTTPStatusError as error:
            return _meaning(error.response)
        except ValueError:  # an answer that is none of Flower's
            return Registration.UNCLEAR
    return Registration.UNCLEAR


def _meaning(response: httpx.Response) -> Registration:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return Registration.REFUSED
    error = FlowerError.from_json(response.text)
    answers = {
        int(ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL): Registration.KNOWN,
        int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED): Registration.UNKNOWN,
    }
    return Registration.UNCLEAR if error is None else answers.get(error.code, Registration.UNCLEAR)
