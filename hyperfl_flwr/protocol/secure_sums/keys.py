"""Keys of secure sums: a node's key of a session, its signature, and everything that is derived from a pair of keys.

Each derivation is HKDF-SHA256 (RFC 5869) with a text of its own, so that no two uses of a secret have the same key.
The transcript T of the step is the salt of all that two nodes share.
"""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hyperfl_flwr.protocol.secure_sums.field import PRIME, to_bytes

LABEL = "hyperfl-secagg-1"
"""Beginning of every derivation's and signature's text; changes with the protocol."""


def public_of(private: X25519PrivateKey) -> str:
    """Return the public key of a private one, 64 hexadecimal digits."""
    return private.public_key().public_bytes_raw().hex()


def simulated_key(session: str, partition: int) -> X25519PrivateKey:
    """Return the key of a simulated node, which keeps nothing on disk: derived from public values, it hides nothing."""
    return X25519PrivateKey.from_private_bytes(_derive(bytes.fromhex(session), f"simulated|{partition}", 32))


def agree(private: X25519PrivateKey, public: str) -> bytes:
    """Return the secret of two key pairs (RFC 7748, section 6.1) [32].

    Raises:
        ValueError: If the public key is not one, or is of low order, so that the secret would be known to all.
    """
    return private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))


def is_key(public: str) -> bool:
    """Return whether 64 hexadecimal digits are a public key that `agree` accepts; keys of low order are not."""
    try:
        agree(X25519PrivateKey.generate(), public)
    except ValueError:
        return False
    return True


def pair_secret(shared: bytes, transcript: bytes, one: int, two: int) -> int:
    """Return the secret u of two nodes in a step, an element of the field from which their common mask is generated.

    Args:
        shared: The secret of their keys, see `agree`.
        transcript: T of the step.
        one: Number of one node.
        two: Number of the other node; the order has no effect.
    """
    # 48 bytes modulo p are uniform up to 2^-128.
    text = f"pair|{min(one, two)}|{max(one, two)}"
    return int.from_bytes(_derive(shared, text, 48, salt=transcript), "little") % PRIME


def box_key(shared: bytes, transcript: bytes, sender: int, holder: int, upload: bytes) -> bytes:
    """Return the key of the box of shares that one node sends another with one upload [32]."""
    return _derive(shared, f"box|{sender}|{holder}|{upload.hex()}", 32, salt=transcript)


def vector_key(secret: int) -> bytes:
    """Return the key of the stream that a secret adds to the vector of parameters [32]."""
    return _derive(to_bytes(secret), "vector", 32)


def numbers_key(secret: int) -> bytes:
    """Return the key of the stream that a secret adds to the vector of counts and metrics [32]."""
    return _derive(to_bytes(secret), "numbers", 32)


def sign_key(identity: ec.EllipticCurvePrivateKey, session: str, partition: int, public: str) -> str:
    """Return the identity's signature of a node's key of a session, hexadecimal."""
    return identity.sign(_claim(session, partition, public), ec.ECDSA(hashes.SHA384())).hex()


def is_signed(identity: ec.EllipticCurvePublicKey, signature: str, session: str, partition: int, public: str) -> bool:
    """Return whether an identity has signed a node's key of a session."""
    try:
        identity.verify(bytes.fromhex(signature), _claim(session, partition, public), ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


def _claim(session: str, partition: int, public: str) -> bytes:
    return f"{LABEL}|key|{session}|{partition}|{public}".encode()


def _derive(secret: bytes, text: str, length: int, salt: bytes | None = None) -> bytes:
    return HKDF(hashes.SHA256(), length, salt, f"{LABEL}|{text}".encode()).derive(secret)
