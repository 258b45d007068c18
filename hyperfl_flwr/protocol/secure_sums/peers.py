"""Peers of a node: the public identity keys of all nodes of a federation, which a node's owner has checked.

A file of peers is TOML, with one OpenSSH line per node number:

    [peers]
    "0" = "ecdsa-sha2-nistp384 AAAA... node-0"
    "1" = "ecdsa-sha2-nistp384 AAAA... node-1"

A node takes part only in secure sums of nodes whose keys of the session are signed by these identities. The file keeps
a malicious server from inventing nodes only if its owner knows that the keys are the other owners'. For that the owners
compare one fingerprint of the whole list.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hyperfl_flwr.core.errors import ConfigError

PEERS_FILE = "peers.toml"
"""Name of the file of peers in a node's folder."""

_TABLE = "peers"
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_HEAD = "# Public keys of all nodes. `hyperfl deploy peers` prints their fingerprint, for the owners to compare.\n"
_REMEDY = "ask the operator for peers.toml again, and compare its fingerprint with the other owners"


def read_peers(path: Path) -> dict[int, ec.EllipticCurvePublicKey]:
    """Read the public identity keys of all nodes from a file of peers.

    Args:
        path: The file.

    Returns:
        The nodes' keys on the curve P-384, by ascending node number; at least one, all different.

    Raises:
        ConfigError: If the file cannot be read, or is not such a list.
    """
    try:
        return parse_peers(path.read_bytes().decode())
    except OSError as error:
        raise _refused("peers-file", f"{path} cannot be read ({error.strerror}); {_REMEDY}") from None
    except ValueError as error:
        raise _refused("peers-file", f"{path} is not a list of peers: {error}; {_REMEDY}") from None


def parse_peers(text: str) -> dict[int, ec.EllipticCurvePublicKey]:
    """Parse the content of a file of peers.

    Args:
        text: The content, see the module.

    Returns:
        As `read_peers`.

    Raises:
        ValueError: Naming what is wrong.
    """
    document = tomllib.loads(text)
    table = document.get(_TABLE)
    if list(document) != [_TABLE] or not isinstance(table, dict) or not table:
        raise ValueError(f"it must have one table [{_TABLE}] with at least one key, and nothing else")
    peers: dict[int, ec.EllipticCurvePublicKey] = {}
    owners: dict[str, str] = {}
    for number, line in table.items():
        if not _NUMBER.fullmatch(number):
            raise ValueError(f"a node's number must be a whole number from 0; got {number!r}")
        try:
            key = parse_public_key(line)
        except ValueError as error:
            raise ValueError(f"the key of node {number} {error}") from None
        if (owner := owners.setdefault(openssh(key), number)) != number:
            raise ValueError(f"the nodes {owner} and {number} have the same key, but each must have another one")
        peers[int(number)] = key
    return dict(sorted(peers.items()))


def peers_text(peers: Mapping[int, ec.EllipticCurvePublicKey]) -> str:
    """Return the content of a file of peers.

    Args:
        peers: The nodes' public keys by number.
    """
    lines = [f'"{number}" = "{openssh(key)} node-{number}"\n' for number, key in sorted(peers.items())]
    return "".join([_HEAD, f"[{_TABLE}]\n", *lines])


def fingerprint(peers: Mapping[int, ec.EllipticCurvePublicKey]) -> str:
    """Return the fingerprint of a list of peers, which is the same for all owners with the same list.

    It is the SHA-256 of the lines `NUMBER KEY`, by ascending number, without comments. All of it must be compared:
    whoever makes several of the keys can search for two lists with a common part of their fingerprints.

    Args:
        peers: The nodes' public keys by number.

    Returns:
        64 hexadecimal digits in 16 groups of four.
    """
    lines = "".join(f"{number} {openssh(key)}\n" for number, key in sorted(peers.items()))
    digits = hashlib.sha256(lines.encode()).hexdigest()
    return " ".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def openssh(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key as an OpenSSH line without a comment."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def parse_public_key(line: object) -> ec.EllipticCurvePublicKey:
    """Return the public key of an OpenSSH line (untrusted input); its comment is ignored.

    Raises:
        ValueError: If it is not one key on the curve P-384; the text continues "the key of node 0 ...".
    """
    words = line.split(maxsplit=2) if isinstance(line, str) else []
    try:
        key = serialization.load_ssh_public_key(" ".join(words[:2]).encode())
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("is not an OpenSSH line (ecdsa-sha2-nistp384 AAAA... node-0)") from None
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
        raise ValueError("must be on the curve P-384 (ecdsa-sha2-nistp384)")
    if openssh(key).split() != words[:2]:  # a certificate also contains a key
        raise ValueError("is not a plain public key")
    return key


def read_identity(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node's private identity key in OpenSSH's format.

    Args:
        path: The file, `identity-key-file` of the node.

    Raises:
        ConfigError: If it cannot be read, or is not an unencrypted key on the curve P-384.
    """
    remedy = "set it to node.key of the node's folder, or make a key with `hyperfl deploy own-key`"
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise _refused("identity-key-file", f"{path} cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        text = f"{path} is not an OpenSSH private key without a password; {remedy}"
        raise _refused("identity-key-file", text) from None
    if not (isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1)):
        raise _refused("identity-key-file", f"{path} must be a key on the curve P-384; {remedy}")
    return key


def _refused(setting: str, text: str) -> ConfigError:
    public = f"its owner must repair {setting} in the node config; the node's log says more"
    return ConfigError(f"{setting}: {text}", public=public)
