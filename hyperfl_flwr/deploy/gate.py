"""Write the configuration of an nginx in front of a SuperLink, which limits access and each client's resources.

Flower checks a node's signature only after it has read the whole body of a request. nginx checks before this that the
request names a public key of this deployment, which only the nodes and the operator have, so that strangers cannot hold
a connection by a body that never ends. It counts the connections of a key and an address together, so that a node that
names another one's key takes none of that one's. nginx cannot count the connections of an address before it has read a
request's header; these connections are limited by time instead.
"""

import base64

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hyperfl_flwr.deploy.keys import read_public_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.render import render

GATE = "nginx.conf"
"""File of the gate in the server's folder."""


def gate(deployment: Deployment) -> str:
    """Return the text of `nginx.conf` for a deployment; the nodes' public keys must exist."""
    keys = [sent_key(deployment, number) for number in range(deployment.num_nodes)]
    return render("nginx.conf.jinja", host=deployment.host, port=deployment.port, keys=keys)


def sent_key(deployment: Deployment, number: int) -> str:
    """Return a node's public key as Flower sends it in the header of each request."""
    return header_value(read_public_key(deployment.public_key(number)))


def header_value(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key as Flower sends it in the header of each request."""
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(pem).decode()
