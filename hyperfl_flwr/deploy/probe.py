"""How a SuperLink is reached: the connection, the certificate, and its clock, each as a finding with its cause."""

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
"""How long a SuperLink may take to answer."""

CERTIFICATE = "certificate"
"""Subject of what is found about one."""

AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 305.0
"""How far a node's clock may be from the SuperLink's; Flower refuses the signature of one that is further off."""

_EXPIRED, _NOT_YET, _WRONG_NAMES = 10, 9, (62, 64)
"""OpenSSL's numbers of what is wrong with a certificate."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A SuperLink that answered.

    Attributes:
        certificate: Its certificate, DER.
        ahead: Seconds that this machine's clock is ahead of the SuperLink's; None if it tells no time.
    """

    certificate: bytes
    ahead: float | None


def probe(host: str, port: int, root_certificates: Path, *, direct: bool = False) -> tuple[Answer | None, Finding]:
    """Ask a SuperLink for its health, on the way that Flower takes: proxies of the environment count.

    Args:
        host: Name or IPv4 address.
        port: Its port.
        root_certificates: PEM file of the deployment's authority.
        direct: Whether proxies do not count.

    Returns:
        Its answer, None if there was none, and what was found.
    """
    subject, place = "connection", f"{host}:{port}"
    try:
        answer = ask_health(host, port, root_certificates, direct=direct, seconds=SECONDS)
    except OSError:
        return None, error(subject, f"{root_certificates.name} cannot be read", "restore it from the operator's copy")
    except httpx.HTTPStatusError as failure:
        told = f"what answers at {place} is no SuperLink (HTTP status {failure.response.status_code})"
        return None, error(subject, told, "find out which program it is, or ask the operator for the port")
    except httpx.HTTPError as failure:
        return None, _failed(failure, host, place)
    told = f"the SuperLink at {place} answers, with a certificate of this deployment's authority"
    return answer, ok(subject, told)


def ask_health(host: str, port: int, root_certificates: Path, *, direct: bool, seconds: float) -> Answer:
    """Send `GET /health` to a SuperLink.

    Args:
        host: Name or IPv4 address.
        port: Its port.
        root_certificates: PEM file of the deployment's authority.
        direct: Whether to ignore the proxies of the environment, which Flower uses.
        seconds: Longest wait for a connection, and for an answer.

    Raises:
        OSError: If the certificates cannot be read.
        httpx.HTTPError: If there is no answer, no trust in the server's certificate, or the answer is an HTTP error.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as Flower makes it
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
    """Return whether this machine's clock agrees with the SuperLink's."""
    subject, ahead = "clock", answer.ahead
    if ahead is None:
        return warning(subject, "the SuperLink tells no time", "compare the clocks by hand")
    told = f"this machine's is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the SuperLink's"
    limits = f"Flower refuses a node that is {AHEAD_SECONDS:.0f} s ahead or {BEHIND_SECONDS:.0f} s behind"
    remedy = f"let both machines take the time from a server of time; {limits}"
    if ahead >= AHEAD_SECONDS or ahead <= -BEHIND_SECONDS:
        return error(subject, told, remedy)
    if ahead > AHEAD_SECONDS / 2 or ahead < -BEHIND_SECONDS / 10:
        return warning(subject, told, remedy)
    return ok(subject, "agrees with the SuperLink's")


def _ahead(date: str | None) -> float | None:
    """Return how far this machine's clock is ahead; the header is cut to seconds, so it is half a second old."""
    if date is None:
        return None
    try:
        then = parsedate_to_datetime(date)
    except ValueError:
        return None
    return (datetime.now(UTC) - then).total_seconds() - 0.5


def _causes(failure: BaseException | None) -> Iterator[BaseException]:
    while failure is not None:
        yield failure
        failure = failure.__cause__ or failure.__context__


def _failed(failure: Exception, host: str, place: str) -> Finding:
    """Say in words why there is no answer."""
    causes = list(_causes(failure))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _distrusted(cause, host, place)
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        text, remedy = "speaks no TLS", "another program has this port, or the SuperLink was started with --insecure"
    elif any(isinstance(cause, socket.gaierror) for cause in causes):
        text = "has a name that this machine cannot find"
        remedy = "mend the name service or /etc/hosts, or ask the operator for an address"
    elif is_refused(failure):
        text, remedy = "refuses connections", "the SuperLink is not running, or a firewall is in the way"
    elif any(isinstance(cause, (TimeoutError, httpx.TimeoutException)) for cause in causes):
        text = f"does not answer within {SECONDS:.0f} s"
        remedy = "a firewall is in the way, the machine is off, or another program has this port"
    elif any(isinstance(cause, httpx.RemoteProtocolError | httpx.ReadError) for cause in causes):
        text, remedy = "ends the connection", "another program has this port, or something on the way breaks it"
    else:
        text = f"cannot be reached ({type(failure).__name__}: {failure})"
        remedy = "mend the network, or the proxy that HTTPS_PROXY names"
    return error("connection", f"{place} {text}", remedy)


def _distrusted(cause: ssl.SSLCertVerificationError, host: str, place: str) -> Finding:
    subject = CERTIFICATE
    if cause.verify_code == _EXPIRED:
        remedy = "the operator runs `hyperfl deploy renew` and restarts the SuperLink; or this machine's clock is wrong"
        return error(subject, f"that of {place} has expired", remedy)
    if cause.verify_code == _NOT_YET:
        return error(subject, f"that of {place} is not valid yet", "set this machine's clock")
    if cause.verify_code in _WRONG_NAMES:
        remedy = "the operator sets `host` in deployment.toml, runs `hyperfl deploy renew` and restarts the SuperLink"
        return error(subject, f"that of {place} is not for {host}", remedy)
    remedy = "it is the SuperLink of another deployment, or somebody is in between; ask the operator for ca.crt"
    return error(subject, f"that of {place} is by another authority ({cause.verify_message})", remedy)
