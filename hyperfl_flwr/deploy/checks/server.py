"""`hyperfl deploy check` on the operator's machine: check files, certificates, the SuperLink and the nodes."""

import errno
import os
import shlex
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.packages.versions import shared_versions
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.deploy.checks import files as machine
from hyperfl_flwr.deploy.checks.peers import listed_keys
from hyperfl_flwr.deploy.checks.probe import CERTIFICATE, Answer, probe
from hyperfl_flwr.deploy.gate import GATE
from hyperfl_flwr.deploy.keys import read_certificate, read_private_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.peers import is_deployment
from hyperfl_flwr.deploy.provision import is_local
from hyperfl_flwr.deploy.registered_nodes import foreign_nodes, registered_nodes
from hyperfl_flwr.launch import other_accounts
from hyperfl_flwr.launch.findings import Finding, error, ok, warning
from hyperfl_flwr.launch.flower.env import can_use_database_file

FILES = ("ca.crt", "server.crt", "server.key", "start.sh", "flwr/config.toml")
LOOPBACK = "127.0.0.1"
NEW_CERTIFICATE = "run `hyperfl deploy renew`, and restart the SuperLink, and nginx if you use it"


def check(folder: Path, announced: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Check a deployment's folder or a node's folder, depending on which it is.

    Args:
        folder: The folder.
        announced: On a node, the run's settings of the data, as the operator has announced them.

    Raises:
        ConfigError: If the folder is neither, or a setting is wrong.
    """
    if is_deployment(folder):
        return check_server(Deployment.read(folder))
    # Imports torch, for two seconds, which the operator's side does not need.
    from hyperfl_flwr.deploy.checks.node import check_node

    return check_node(folder.absolute(), announced)


def check_server(deployment: Deployment) -> Iterator[Finding]:
    """Check the operator's side of a deployment; nothing is changed."""
    server = deployment.server
    keys = [str(deployment.public_key(number).relative_to(server)) for number in range(deployment.num_nodes)]
    folders = [deployment.folder, server, deployment.authority]
    yield from machine.owners("owners", folders)
    if not os.access(server, os.R_OK | os.X_OK):
        yield error("files", f"{server} cannot be read by this user", "run the command as the folder's user")
        return
    yield from machine.files(server, [*FILES, *keys])
    yield from machine.owners("owners", [server, *(server / name for name in (*FILES, GATE, "flwr"))])
    secrets = [deployment.folder, server, server / "server.key", deployment.authority / "ca.key"]
    yield from machine.private("modes", [*secrets, deployment.database])
    yield from machine.authority(server)
    yield from _certificate(deployment)
    yield from _handed_over(deployment)
    yield from listed_keys(deployment)
    yield from machine.writable("database", server)
    yield from other_accounts.deployments()
    if not can_use_database_file():
        remedy = "install it in a folder without spaces, commas and percent signs"
        yield error("database", "Flower cannot create a database file with the path of its installation", remedy)
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in shared_versions().items()))
    yield from _name(deployment)
    # By loopback and without proxies: the host's name and the network have their own checks.
    answer, found = probe(LOOPBACK, deployment.port, deployment.server / "ca.crt", direct=True)
    if answer is None:
        yield _no_answer(deployment, found)
    else:
        yield from _running(deployment, answer)
    yield from _nodes(deployment, is_running=answer is not None)


def _certificate(deployment: Deployment) -> Iterator[Finding]:
    """Check that the server's certificate is valid, issued by the authority, and matches the key and the host."""
    try:
        certificate = read_certificate(deployment.server / "server.crt")
        issuer = read_certificate(deployment.server / "ca.crt")
        key = read_private_key(deployment.server / "server.key")
    except StateError as failure:
        yield error(CERTIFICATE, str(failure), NEW_CERTIFICATE)
        return
    subject = CERTIFICATE
    yield from machine.validity(subject, certificate, NEW_CERTIFICATE)
    if not machine.is_issued_by(certificate, issuer):
        yield error(subject, "server.crt was issued by another authority than ca.crt", NEW_CERTIFICATE)
    if _public(certificate.public_key()) != _public(key.public_key()):
        yield error(subject, "server.key is not the key of server.crt", NEW_CERTIFICATE)
    if deployment.host not in _names(certificate):
        text = f"server.crt is valid for {', '.join(_names(certificate))}, but not for {deployment.host}"
        yield error(subject, text, NEW_CERTIFICATE)


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _public(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return b""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _handed_over(deployment: Deployment) -> Iterator[Finding]:
    """Warn if the nodes' private keys are still here, although only their owners should have them."""
    numbers = [number for number in range(deployment.num_nodes) if (deployment.node(number) / "node.key").exists()]
    if numbers and not is_local(deployment.host):
        text = f"the private keys of the nodes {', '.join(map(str, numbers))} are still here"
        yield warning("handing over", text, f"delete the folder in {deployment.folder / 'nodes'} once its owner has it")


def _name(deployment: Deployment) -> Iterator[Finding]:
    try:
        socket.getaddrinfo(deployment.host, deployment.port, socket.AF_INET)
    except OSError as failure:
        remedy = "make sure that the nodes can resolve it; correct DNS, or /etc/hosts on this machine"
        yield warning("host", f"this machine cannot resolve {deployment.host} ({failure.strerror})", remedy)
    else:
        yield ok("host", f"{deployment.host}, port {deployment.port}")


def _running(deployment: Deployment, answer: Answer) -> Iterator[Finding]:
    yield ok("superlink", f"running, answers on port {deployment.port}")
    try:
        current = read_certificate(deployment.server / "server.crt").public_bytes(serialization.Encoding.DER)
    except StateError:  # reported by _certificate
        return
    if current != answer.certificate:
        yield warning("superlink", "running with an older certificate than server.crt", "restart it")
    if (deployment.server / GATE).is_file() and not is_local(deployment.host):
        seen, found = probe(deployment.host, deployment.port, deployment.server / "ca.crt", direct=True)
        if seen is None and found.subject == CERTIFICATE:
            yield warning("nginx", found.text, "restart nginx")
        elif seen is not None and seen.certificate not in (current, answer.certificate):  # else it is the SuperLink's
            yield warning("nginx", f"{deployment.host} shows an older certificate than server.crt", "restart nginx")


def _no_answer(deployment: Deployment, found: Finding) -> Finding:
    """Return whether the SuperLink does not run, or another program uses its port."""
    if not is_in_use(LOOPBACK, deployment.port):
        start = shlex.quote(str(deployment.server / "start.sh"))
        return warning("superlink", "not running", f"start it: sh {start}")
    if found.subject == CERTIFICATE:
        return found
    move = f"hyperfl deploy move {shlex.quote(str(deployment.folder))} --port PORT"
    remedy = f"end that program, or choose another port: {move}, and the same in each node's folder"
    return error("port", f"{deployment.port} is in use by another program: {found.text}", remedy)


def is_in_use(host: str, port: int) -> bool:
    """Return whether a program on this machine listens on a port, so that another one could not.

    Args:
        host: Address, or name, on which the other one would listen; with nginx in front, that of the SuperLink only.
        port: The port.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probing:
            probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probing.bind(address)  # never listens
    except OSError as failure:  # the SuperLink itself reports the others, such as an address of another machine
        return failure.errno == errno.EADDRINUSE
    return False


def _nodes(deployment: Deployment, *, is_running: bool) -> Iterator[Finding]:
    """Check which nodes are registered, and which are connected."""
    try:
        nodes, foreign = registered_nodes(deployment), foreign_nodes(deployment)
    except StateError as failure:
        yield error("nodes", str(failure), "restore server/keys from a copy; the node's owner has node.pub as well")
        return
    everyone = range(deployment.num_nodes)
    register = f"hyperfl deploy register {shlex.quote(str(deployment.folder))} while the SuperLink runs"
    if foreign:
        yield error("nodes", f"replaced keys that can still connect: {len(foreign)}", register)
    if unknown := [number for number in everyone if number not in nodes]:
        text = f"{_list(unknown)} not registered"
        yield warning("nodes", text, register)
    if is_running and nodes:
        online = [number for number in everyone if number in nodes and nodes[number].online]
        away = [number for number in everyone if number in nodes and not nodes[number].online]
        if away:
            remedy = "their owners start them again: sh start.sh in the node's folder, or its service"
            yield warning("nodes", f"{_list(away)} away, {_list(online)} connected", remedy)
        else:
            yield ok("nodes", f"{_list(online)} connected")
    elif nodes and not unknown:
        yield ok("nodes", f"all {deployment.num_nodes} are registered")


def _list(numbers: list[int]) -> str:
    return f"{len(numbers)} ({', '.join(map(str, numbers))})" if numbers else "none"
