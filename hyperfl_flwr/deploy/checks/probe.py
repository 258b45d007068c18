"""Probe a SuperLink from a node or the operator's machine: connection, certificate and clock, as findings."""

import shlex
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from hyperfl_flwr.launch.findings import Finding, error, ok, warning

SECONDS = 10.0
"""Seconds that a SuperLink may take to answer."""

CERTIFICATE = "certificate"
"""Subject of findings about a certificate."""

AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 305.0
"""Largest differences of a node's clock from the SuperLink's; beyond them Flower refuses the node's signature."""

_EXPIRED, _NOT_YET, _WRONG_NAMES = 10, 9, (62, 64)
"""OpenSSL's error numbers for a certificate that is expired, not yet valid, or issued for another name."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of a SuperLink to a health request.

    Attributes:
        certificate: The SuperLink's certificate, DER.
        ahead: Seconds that this machine's clock is ahead of the SuperLink's; None if the answer has no date.
    """

    certificate: bytes
    ahead: float | None


def probe(host: str, port: int, root_certificates: Path, *, direct: bool = False) -> tuple[Answer | None, Finding]:
    """Connect to a SuperLink as Flower does, through the environment's proxies, and explain a failure.

    Args:
        host: Name or IPv4 address of the SuperLink.
        port: Port of the SuperLink.
        root_certificates: PEM file of the deployment's authority.
        direct: Whether to ignore the environment's proxies.

    Returns:
        The answer, None if there was none, and the finding.
    """
    subject, place = "connection", f"{host}:{port}"
    try:
        answer = ask_health(host, port, root_certificates, direct=direct, seconds=SECONDS)
    except OSError:
        return None, error(subject, f"{root_certificates.name} cannot be read", "restore it from the operator's copy")
    except httpx.HTTPStatusError as failure:
        text = f"the server at {place} is not a SuperLink (HTTP status {failure.response.status_code})"
        return None, error(subject, text, "find out which program it is, or ask the operator for the port")
    except httpx.HTTPError as failure:
        return None, _failed(failure, host, place)
    text = f"the SuperLink at {place} answers with a certificate of this deployment's authority"
    return answer, ok(subject, text)


def ask_health(host: str, port: int, root_certificates: Path, *, direct: bool, seconds: float) -> Answer:
    """Send `GET /health` to a SuperLink.

    Args:
        host: Name or IPv4 address of the SuperLink.
        port: Port of the SuperLink.
        root_certificates: PEM file of the deployment's authority.
        direct: Whether to ignore the environment's proxies, which Flower uses.
        seconds: Longest wait for a connection, and for an answer.

    Raises:
        OSError: If the certificates cannot be read.
        httpx.HTTPError: If there is no answer, the certificate is not trusted, or the answer is an HTTP error.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the same settings as Flower's
    context.load_verify_locations(cafile=root_certificates)
    with (
        httpx.Client(verify=context, timeout=seconds, trust_env=not direct) as client,
        client.stream("GET", f"https://{host}:{port}/health") as response,
    ):
        response.raise_for_status()
        peer = response.extensions["network_stream"].get_extra_info("ssl_object")
        return Answer(certificate=peer.getpeercert(True) or b"", ahead=_ahead(response.headers.get("date")))


def is_refused(failure: BaseException) -> bool:
    """Return whether a connection failed because no program listens at the port."""
    return any(isinstance(cause, ConnectionRefusedError) for cause in _causes(failure))


def clock(answer: Answer) -> Finding:
    """Check that this machine's clock agrees with the SuperLink's, as far as Flower requires."""
    subject, ahead = "clock", answer.ahead
    if ahead is None:
        return warning(subject, "the SuperLink's answer has no date", "compare the clocks by hand")
    text = f"this machine's is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the SuperLink's"
    limits = f"Flower refuses a node that is {AHEAD_SECONDS:.0f} s ahead or {BEHIND_SECONDS:.0f} s behind"
    remedy = f"synchronise both machines' clocks with a time server; {limits}"
    if ahead >= AHEAD_SECONDS or ahead <= -BEHIND_SECONDS:
        return error(subject, text, remedy)
    if ahead > AHEAD_SECONDS / 2 or ahead < -BEHIND_SECONDS / 10:
        return warning(subject, text, remedy)
    return ok(subject, "agrees with the SuperLink's")


def _ahead(date: str | None) -> float | None:
    """Return the seconds that this machine's clock is ahead of a `Date` header, or None if it cannot be parsed."""
    if date is None:
        return None
    try:
        then = parsedate_to_datetime(date)
    except ValueError:
        return None
    # The header has whole seconds, so it is half a second old on average.
    return (datetime.now(UTC) - then).total_seconds() - 0.5


def _causes(failure: BaseException | None) -> Iterator[BaseException]:
    while failure is not None:
        yield failure
        failure = failure.__cause__ or failure.__context__


def _failed(failure: Exception, host: str, place: str) -> Finding:
    """Explain why there is no answer, with the remedy for each cause."""
    causes = list(_causes(failure))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _distrusted(cause, host, place)
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        text = "does not use TLS"
        remedy = "another program uses this port, or the SuperLink was started with --insecure; ask the operator"
    elif any(isinstance(cause, socket.gaierror) for cause in causes):
        text = "has a name that this machine cannot resolve"
        remedy = "correct DNS or /etc/hosts, or ask the operator for an address"
    elif is_refused(failure):
        text = "refuses connections"
        remedy = "check that the SuperLink is running, and that no firewall blocks the port"
    elif any(isinstance(cause, (TimeoutError, httpx.TimeoutException)) for cause in causes):
        text = f"does not answer within {SECONDS:.0f} s"
        remedy = (
            "check that no firewall blocks the port, that the machine is on, and that no other program uses the port"
        )
    elif any(isinstance(cause, httpx.RemoteProtocolError | httpx.ReadError) for cause in causes):
        text = "closes the connection"
        remedy = "check that no other program uses this port, and that no proxy or firewall closes the connection"
    else:
        text = f"cannot be reached ({type(failure).__name__}: {failure})"
        remedy = "check the network, and the proxy in HTTPS_PROXY"
    return error("connection", f"{place} {text}", remedy)


def _distrusted(cause: ssl.SSLCertVerificationError, host: str, place: str) -> Finding:
    """Explain why the SuperLink's certificate is not trusted."""
    subject = CERTIFICATE
    if cause.verify_code == _EXPIRED:
        remedy = "the operator runs `hyperfl deploy renew` and restarts the SuperLink; or this machine's clock is wrong"
        return error(subject, f"the certificate of {place} has expired", remedy)
    if cause.verify_code == _NOT_YET:
        return error(subject, f"the certificate of {place} is not valid yet", "set this machine's clock")
    if cause.verify_code in _WRONG_NAMES:
        remedy = (
            f"if this is the SuperLink's host, the operator runs `hyperfl deploy move DIR --host {shlex.quote(host)}`, "
            f"or `hyperfl deploy renew DIR` if it is the deployment's host already, and restarts the SuperLink; "
            f"otherwise run `hyperfl deploy move NODE --host HOST` with its host in place of HOST on this machine"
        )
        return error(subject, f"the certificate of {place} is not valid for {host}", remedy)
    remedy = "it is the SuperLink of another deployment, or the connection is intercepted; ask the operator for ca.crt"
    return error(
        subject, f"the certificate of {place} was issued by another authority ({cause.verify_message})", remedy
    )
