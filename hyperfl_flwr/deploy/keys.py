"""Write and read the certificates and keys of a deployment: authority, SuperLink's certificate, nodes' keys.

All keys are on the curve P-384, and private keys are readable by their owner only. A node authenticates by signing its
requests with its key, which Flower reads in OpenSSH's format; the SuperLink knows the public keys.
"""

import datetime
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import write_for_owner
from hyperfl_flwr.protocol.secure_sums.peers import openssh

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825
"""Validity of a server's certificate; the longest that some TLS libraries accept."""

PRIVATE = 0o600

Loaded = TypeVar("Loaded")

_BACKDATED = datetime.timedelta(hours=1)
"""Certificates are valid from this long before their creation, because a node's clock may be slow."""


def write_authority(folder: Path) -> None:
    """Create a certificate authority and write `ca.crt` and `ca.key` into a folder.

    Each deployment has a separate authority, so that a node trusts the SuperLink of its own deployment only.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "HyperFL deployment authority")])
    usage = _key_usage(digital_signature=False, key_cert_sign=True, crl_sign=True)
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)  # signs no other authorities
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_for_owner(folder / "ca.key", _pem(key), mode=PRIVATE)
    write_for_owner(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))


def write_server_certificate(authority: Path, folder: Path, host: str, *, days: float = SERVER_DAYS) -> None:
    """Write `server.key` and `server.crt`, valid for a host and for this machine itself, signed by the authority.

    Args:
        authority: The folder with `ca.crt` and `ca.key`.
        folder: Folder to write to.
        host: Host name or IPv4 address at which the nodes reach the server.
        days: Days of validity from now on; the certificate is valid from an hour before.

    Raises:
        StateError: If the authority's files are missing or damaged.
    """
    issuer, signer = _authority(authority)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "HyperFL SuperLink")])
    certificate = (
        _builder(subject, issuer.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True, key_cert_sign=False, crl_sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    write_for_owner(folder / "server.key", _pem(key), mode=PRIVATE)
    write_for_owner(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))


def write_node_key(folder: Path, comment: str) -> bytes:
    """Create a node's key and write `node.key` and `node.pub`; return the public key as a commented OpenSSH line."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = public_line(key.public_key(), comment)
    write_for_owner(folder / "node.key", private, mode=PRIVATE)
    write_for_owner(folder / "node.pub", public)
    return public


def public_line(key: ec.EllipticCurvePublicKey, comment: str) -> bytes:
    """Format a public key as an OpenSSH line with a comment."""
    return f"{openssh(key)} {comment}\n".encode()


def read_node_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node's private key.

    Raises:
        StateError: If it is missing, damaged or of another kind.
    """
    key = _read(file, lambda data: serialization.load_ssh_private_key(data, None))
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise StateError(f"{file} must hold a key on an elliptic curve; got {type(key).__name__}")
    return key


def read_public_key(file: Path) -> ec.EllipticCurvePublicKey:
    """Read a node's public key.

    Raises:
        StateError: If it is missing, damaged or of another kind.
    """
    key = _read(file, serialization.load_ssh_public_key)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise StateError(f"{file} must hold a key on an elliptic curve; got {type(key).__name__}")
    return key


def read_certificate(file: Path) -> x509.Certificate:
    """Read a certificate.

    Raises:
        StateError: If it is missing or damaged.
    """
    return _read(file, x509.load_pem_x509_certificate)


def read_private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read the authority's or the server's private key.

    Raises:
        StateError: If it is missing, damaged or of another kind.
    """
    key = _read(file, lambda data: serialization.load_pem_private_key(data, None))
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise StateError(f"{file} must hold a key on an elliptic curve; got {type(key).__name__}")
    return key


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Read the authority's certificate and key, and check that they belong together."""
    certificate = read_certificate(folder / "ca.crt")
    key = read_private_key(folder / "ca.key")
    if key.public_key() != certificate.public_key():
        raise StateError(f"{folder / 'ca.key'} must be the key of {folder / 'ca.crt'}; restore both from one copy")
    return certificate, key


def _read(file: Path, load: Callable[[bytes], Loaded]) -> Loaded:
    try:
        return load(file.read_bytes())
    except PermissionError as error:
        remedy = f"make it readable for this user (uid {os.getuid()}), or run the command as the user who may read it"
        raise StateError(f"{file} cannot be read ({error.strerror}); {remedy}") from None
    except OSError as error:
        raise StateError(f"{file} cannot be read ({error.strerror}); restore it from a copy") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StateError(f"{file} is damaged ({error}); restore it from a copy") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _names(host: str) -> list[x509.GeneralName]:
    """Return the names that a server's certificate is valid for."""
    # The operator's commands connect from the same machine, by loopback.
    names: list[x509.GeneralName] = []
    for name in dict.fromkeys([host, "localhost", "127.0.0.1"]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            names.append(x509.DNSName(name))
    return names


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _key_usage(*, digital_signature: bool, key_cert_sign: bool, crl_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
