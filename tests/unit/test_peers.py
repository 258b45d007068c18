"""Files of peers: what is written is read, all owners get one fingerprint, and wrong files are refused."""

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from hyperfl_flwr.core.errors import ConfigError, for_others
from hyperfl_flwr.protocol.secure_sums.peers import (
    fingerprint,
    openssh,
    parse_public_key,
    peers_text,
    read_identity,
    read_peers,
)

Peers = dict[int, ec.EllipticCurvePublicKey]

PUBLIC = "its owner must repair peers-file in the node config; the node's log says more"


def make(*numbers: int) -> Peers:
    """Return a list of peers with the same keys on each call: the private key of node i is i + 1."""
    return {number: ec.derive_private_key(number + 1, ec.SECP384R1()).public_key() for number in numbers}


def line_of(key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def private_bytes(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


def test_what_is_written_is_read_by_ascending_number(tmp_path: Path) -> None:
    peers = make(11, 0, 2)
    (tmp_path / "peers.toml").write_text(peers_text(peers))
    read = read_peers(tmp_path / "peers.toml")
    assert list(read) == [0, 2, 11]
    assert read == peers


def test_the_file_has_openssh_lines() -> None:
    table = tomllib.loads(peers_text(make(0, 1)))["peers"]
    assert list(table) == ["0", "1"]
    assert all(re.fullmatch(rf"ecdsa-sha2-nistp384 \S+ node-{number}", line) for number, line in table.items())


def test_all_owners_get_one_fingerprint(tmp_path: Path) -> None:
    """Order, comments and spaces have no effect; it is the SHA-256 that `sha256sum` prints for the plain lines."""
    peers = make(0, 1, 10)
    lines = {number: line_of(key) for number, key in peers.items()}
    other = "\n".join(f"{number} = '{lines[number]}  ann@home'" for number in (10, 0, 1))
    (tmp_path / "p").write_text(f"[peers]\n{other}\n")
    assert fingerprint(read_peers(tmp_path / "p")) == fingerprint(peers)
    canonical = f"0 {lines[0]}\n1 {lines[1]}\n10 {lines[10]}\n"
    assert fingerprint(peers).replace(" ", "") == hashlib.sha256(canonical.encode()).hexdigest()
    assert re.fullmatch("([0-9a-f]{4} ){15}[0-9a-f]{4}", fingerprint(peers))


def test_another_list_has_another_fingerprint() -> None:
    """One key replaced, two swapped, one more, another number."""
    peers = make(0, 1)
    lists = [
        peers, {0: peers[0], 1: make(2)[2]}, {0: peers[1], 1: peers[0]}, make(0, 1, 2), {0: peers[0], 2: peers[1]},
    ]  # fmt: skip
    assert len({fingerprint(each) for each in lists}) == len(lists)


def test_a_comment_is_no_part_of_a_key() -> None:
    key = make(0)[0]
    assert parse_public_key(f"{line_of(key)} ann's key\n") == key
    assert openssh(key) == line_of(key)


P384 = line_of(make(0)[0])
P256 = line_of(ec.derive_private_key(1, ec.SECP256R1()).public_key())
ED25519 = line_of(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key())


def certificate() -> str:
    """Return an OpenSSH certificate for a key on P-384; it contains a key of a peer, but is none."""
    signer = ec.derive_private_key(7, ec.SECP384R1())
    builder = serialization.SSHCertificateBuilder().public_key(make(0)[0]).type(serialization.SSHCertificateType.HOST)
    built = builder.key_id(b"x").valid_for_all_principals().valid_after(0).valid_before(2**32).sign(signer)
    return built.public_bytes().decode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"must have one table \[peers\] with at least one key, and nothing else"),
        ("[peers]\n", r"must have one table \[peers\]"),
        ("peers = 3", r"must have one table \[peers\]"),
        (f'[peers]\n0 = "{P384}"\n[more]\n', r"must have one table \[peers\]"),
        ("[peers", "Expected"),
        ("[peers]\n0 = 1", "the key of node 0 is not an OpenSSH line"),
        ('[peers]\n0 = ""', "the key of node 0 is not an OpenSSH line"),
        ('[peers]\n3 = "ecdsa-sha2-nistp384 AAAA node-3"', "the key of node 3 is not an OpenSSH line"),
        (f'[peers]\n0 = "{P256}"', "the key of node 0 must be on the curve P-384"),
        (f'[peers]\n0 = "{ED25519}"', "the key of node 0 must be on the curve P-384"),
        (f'[peers]\n0 = "{certificate()}"', "the key of node 0 is not"),
        (f'[peers]\n0 = "{P384}"\n1 = "{P384} b"', "the nodes 0 and 1 have the same key, but each must have another"),
        (f'[peers]\n-1 = "{P384}"', "a node's number must be a whole number from 0; got '-1'"),
        (f'[peers]\n00 = "{P384}"', "got '00'"),
        (f'[peers]\n"٣" = "{P384}"', "got '٣'"),
        (f'[peers]\nnode-0 = "{P384}"', "got 'node-0'"),
    ],
    ids=range(16),
)
def test_a_file_that_is_no_list_of_peers_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """The owner reads what is wrong and what to do; the server reads only that the owner must act."""
    (tmp_path / "peers.toml").write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_peers(tmp_path / "peers.toml")
    assert str(caught.value).startswith(f"peers-file: {tmp_path}/peers.toml is not a list of peers: ")
    assert "ask the operator for peers.toml again" in str(caught.value)
    assert for_others(caught.value) == PUBLIC


def test_a_missing_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_peers(tmp_path / "none")
    assert for_others(caught.value) == PUBLIC
    (tmp_path / "binary").write_bytes(b"[peers]\n0 = '\xff'")
    with pytest.raises(ConfigError, match="is not a list of peers: 'utf-8' codec"):
        read_peers(tmp_path / "binary")


def test_an_identity_is_read(tmp_path: Path) -> None:
    key = ec.derive_private_key(1, ec.SECP384R1())
    (tmp_path / "node.key").write_bytes(private_bytes(key))
    assert read_identity(tmp_path / "node.key").public_key() == make(0)[0]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        (b"nonsense", "is not an OpenSSH private key without a password"),
        (private_bytes(ec.derive_private_key(1, ec.SECP256R1())), "must be a key on the curve P-384"),
        (private_bytes(ed25519.Ed25519PrivateKey.generate()), "must be a key on the curve P-384"),
    ],
)
def test_what_is_no_identity_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "node.key").write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        read_identity(tmp_path / "node.key")
    assert str(caught.value).startswith(f"identity-key-file: {tmp_path}/node.key ")
    assert for_others(caught.value) == PUBLIC.replace("peers-file", "identity-key-file")


def test_an_identity_with_a_password_is_refused(tmp_path: Path) -> None:
    """A node starts without its owner, who could type the password."""
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", str(tmp_path / "node.key")]
    subprocess.run(command, check=True)
    with pytest.raises(ConfigError, match="without a password"):
        read_identity(tmp_path / "node.key")


def test_peers_are_read_without_torch_and_flower() -> None:
    code = "import sys, hyperfl_flwr.protocol.secure_sums.peers; print('torch' in sys.modules, 'flwr' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
