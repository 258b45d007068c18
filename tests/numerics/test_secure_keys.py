"""Keys of secure sums: the published values of the primitives, and derivations that differ in every argument."""

import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hyperfl_flwr.protocol.secure_sums.field import PRIME
from hyperfl_flwr.protocol.secure_sums.keys import (
    agree,
    box_key,
    is_signed,
    numbers_key,
    pair_secret,
    public_of,
    sign_key,
    vector_key,
)

SHARED, T, UPLOAD = bytes(range(32)), bytes(range(32, 64)), bytes(range(16))
SESSION = "0123456789abcdef" * 2


def private(digits):
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(digits))


@pytest.mark.parametrize(
    ("scalar", "point", "product"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_agreement_is_x25519(scalar, point, product):
    """RFC 7748, section 5.2."""
    assert agree(private(scalar), point).hex() == product


def test_both_sides_agree():
    """RFC 7748, section 6.1."""
    alice = private("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = private("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    assert public_of(alice) == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert public_of(bob) == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    secret = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert agree(alice, public_of(bob)).hex() == agree(bob, public_of(alice)).hex() == secret


@pytest.mark.parametrize(
    "public",
    [
        "00" * 32,
        "01" + "00" * 31,
        "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
        (PRIME - 1).to_bytes(32, "little").hex(),
        PRIME.to_bytes(32, "little").hex(),
        (PRIME + 1).to_bytes(32, "little").hex(),
    ],
)
def test_points_of_low_order_are_refused(public):
    """The seven of https://cr.yp.to/ecdh.html: with them, the secret would be 0 for every private key."""
    with pytest.raises(ValueError, match="shared key"):
        agree(X25519PrivateKey.generate(), public)


def test_other_texts_are_no_public_keys():
    for public in ("", "ab", "00" * 33, "x" * 64):
        with pytest.raises(ValueError):
            agree(X25519PrivateKey.generate(), public)


def hkdf(secret, salt, info, length):
    """HKDF-SHA256 from RFC 5869, section 2, written out."""
    key = hmac.digest(salt or bytes(32), secret, "sha256")
    found, block = b"", b""
    while len(found) < length:
        block = hmac.digest(key, block + info + bytes([len(found) // 32 + 1]), "sha256")
        found += block
    return found[:length]


def test_hkdf_is_the_published_one():
    """RFC 5869, appendix A.1."""
    secret, salt, info = b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    assert HKDF(SHA256(), 42, salt, info).derive(secret).hex() == hkdf(secret, salt, info, 42).hex() == expected


def test_boxes_are_the_published_cipher():
    """RFC 8439, section 2.8.2."""
    text = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    key, nonce, data = bytes(range(0x80, 0xA0)), "070000004041424344454647", "50515253c0c1c2c3c4c5c6c7"
    found = ChaCha20Poly1305(key).encrypt(bytes.fromhex(nonce), text + b"sunscreen would be it.", bytes.fromhex(data))
    assert found.hex() == (
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b"
        "1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
        "3ff4def08e4b7a9de576d26586cec64b6116" + "1ae10b594f09e26a7e902ecbd0600691"
    )


def test_derivations_are_hkdf_with_a_text_of_their_own():
    """Each equals the written-out HKDF with the protocol's name and all that the key is for in its text."""
    pair = int.from_bytes(hkdf(SHARED, T, b"hyperfl-secagg-1|pair|3|20", 48), "little") % PRIME
    assert pair_secret(SHARED, T, 20, 3) == pair_secret(SHARED, T, 3, 20) == pair
    box = b"hyperfl-secagg-1|box|20|3|000102030405060708090a0b0c0d0e0f"
    assert box_key(SHARED, T, 20, 3, UPLOAD) == hkdf(SHARED, T, box, 32)
    assert vector_key(258) == hkdf(b"\x02\x01" + bytes(30), b"", b"hyperfl-secagg-1|vector", 32)
    assert numbers_key(258) == hkdf(b"\x02\x01" + bytes(30), b"", b"hyperfl-secagg-1|numbers", 32)


def test_every_argument_matters():
    """Other secrets, steps, nodes, directions and uploads have other keys."""
    other = bytes(32)
    keys = [
        box_key(SHARED, T, 1, 2, UPLOAD), box_key(SHARED, T, 2, 1, UPLOAD), box_key(SHARED, T, 1, 3, UPLOAD),
        box_key(SHARED, T, 12, 3, UPLOAD), box_key(SHARED, T, 1, 23, UPLOAD), box_key(SHARED, T, 1, 2, bytes(16)),
        box_key(SHARED, other, 1, 2, UPLOAD), box_key(other, T, 1, 2, UPLOAD), vector_key(1), vector_key(2),
        numbers_key(1), numbers_key(2),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    pairs = [pair_secret(*arguments) for arguments in ((SHARED, T, 1, 2), (SHARED, T, 1, 12), (SHARED, T, 2, 12),
             (SHARED, other, 1, 2), (other, T, 1, 2))]  # fmt: skip
    assert len(set(pairs)) == len(pairs)


def test_a_signature_is_for_one_key_of_one_node_in_one_session():
    identity, public = ec.generate_private_key(ec.SECP384R1()), "ab" * 32
    signature, known = sign_key(identity, SESSION, 3, public), identity.public_key()
    assert is_signed(known, signature, SESSION, 3, public)
    assert not is_signed(known, signature, SESSION[::-1], 3, public)
    assert not is_signed(known, signature, SESSION, 30, public)
    assert not is_signed(known, signature, SESSION, 3, "ac" * 32)
    assert not is_signed(ec.generate_private_key(ec.SECP384R1()).public_key(), signature, SESSION, 3, public)
    for wrong in ("", "00", signature[:-2], "x" * len(signature), f"{int(signature, 16) ^ 1:x}"):
        assert not is_signed(known, wrong, SESSION, 3, public)


def test_a_signature_is_of_the_stated_text():
    """ECDSA with SHA-384; Flower signs with SHA-256, so neither signature is valid for the other."""
    identity = ec.generate_private_key(ec.SECP384R1())
    text = f"hyperfl-secagg-1|key|{SESSION}|3|{'ab' * 32}".encode()
    signature = bytes.fromhex(sign_key(identity, SESSION, 3, "ab" * 32))
    prehashed = ec.ECDSA(Prehashed(SHA384()))
    identity.public_key().verify(signature, hashlib.sha384(text).digest(), prehashed)
