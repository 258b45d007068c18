"""Keys of a deployment's nodes: `init` pins them, owners replace them, and the checks find lists that do not fit."""

import os
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from federations import Call
from little_servers import NODE_COLUMNS

from hyperfl_flwr.core.errors import ConfigError, StateError
from hyperfl_flwr.deploy.add_node import add_node
from hyperfl_flwr.deploy.checks.peers import listed_keys, pinned_keys
from hyperfl_flwr.deploy.gate import gate, sent_key
from hyperfl_flwr.deploy.keys import public_line, read_node_key, read_public_key, write_node_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.move import move_deployment
from hyperfl_flwr.deploy.node_settings import NodeAddress, read_node_config
from hyperfl_flwr.deploy.peers import accept_key, deployment_peers, describe, node_peers, own_key, write_peers
from hyperfl_flwr.deploy.provision import init, renew
from hyperfl_flwr.deploy.registered_nodes import foreign_nodes, is_unregistered, registered_nodes
from hyperfl_flwr.launch.findings import Finding, Level
from hyperfl_flwr.protocol.secure_sums.peers import fingerprint, peers_text, read_identity, read_peers

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may change a file's owner")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    folder = tmp_path_factory.mktemp("deployment") / "fl"
    deployment = Deployment(folder=folder, host="127.0.0.1", port=8000, num_nodes=3)
    init(deployment)
    return deployment


@pytest.fixture
def deployment(original: Deployment, tmp_path: Path) -> Deployment:
    shutil.copytree(original.folder, tmp_path / "fl")
    return Deployment.read(tmp_path / "fl")


@pytest.fixture
def received(deployment: Deployment, tmp_path: Path) -> Path:
    """Return the file of a new public key of node 0, made on its owner's machine."""
    shutil.copytree(deployment.node(0), tmp_path / "node-0")
    return own_key(tmp_path / "node-0")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_a_new_deployment_has_pinned_keys(original: Deployment) -> None:
    """Each node has the keys of all nodes, and names the list and its own key in its settings."""
    peers = deployment_peers(original)
    assert list(peers) == [0, 1, 2]
    assert read_peers(original.peers) == peers
    for number in range(3):
        node = read_node_config(original.node(number))
        assert read_peers(Path(node.peers_file)) == peers
        assert read_identity(Path(node.identity_key_file)).public_key() == peers[number]
        assert not node.secure_sum_only
        assert (node.min_cohort, node.max_colluding) == (3, "auto")
        assert [finding.level for finding in checked(original, number)] == [Level.OK, Level.OK]


def test_an_owner_makes_a_key_that_the_operator_does_not_have(deployment: Deployment) -> None:
    folder = deployment.node(0)
    before = contents(folder)
    public = own_key(folder)
    key = read_node_key(folder / "node.key")
    assert public == folder / "node.pub"
    assert read_public_key(public) == key.public_key()
    assert public.read_text().split()[2] == "node-0"
    after = contents(folder)
    assert after[folder / "node.key.old"] == before[folder / "node.key"] != after[folder / "node.key"]
    assert mode(folder / "node.key") == mode(folder / "node.key.old") == 0o600
    changed = {path.name for path in after if before.get(path) != after[path]}
    assert changed == {"node.key", "node.key.old", "node.pub"}


@needs_root
def test_keys_that_root_makes_stay_with_the_service_s_user(deployment: Deployment) -> None:
    """The commands with sudo: the keys belong to the users of the two services, as before."""
    for path in (deployment.node(0), *deployment.node(0).iterdir()):
        os.chown(path, 1234, 2345)
    for path in (deployment.server, *deployment.server.iterdir()):
        os.chown(path, 3456, 4567)
    accept_key(deployment, 0, own_key(deployment.node(0)))
    renew(deployment)
    list(move_deployment(deployment, None, 8443))
    add_node(deployment.folder)
    for folder, names, owner in (
        (deployment.node(0), ("node.key", "node.key.old", "node.pub", "peers.toml"), (1234, 2345)),
        (deployment.server, ("server.key", "nginx.conf", "start.sh"), (3456, 4567)),
    ):
        for name in names:
            status = (folder / name).stat()
            assert (status.st_uid, status.st_gid) == owner, name


@needs_root
def test_a_link_in_the_place_of_a_key_gives_away_nothing_of_root(deployment: Deployment, tmp_path: Path) -> None:
    folder, secret = deployment.node(0), tmp_path / "secret"
    secret.write_bytes(b"root's")
    (folder / "node.key").unlink()
    (folder / "node.key").symlink_to(secret)
    for path in (folder, *folder.iterdir()):
        os.chown(path, 1234, 2345, follow_symlinks=False)
    own_key(folder)
    assert (secret.read_bytes(), secret.stat().st_uid) == (b"root's", 0)
    copy = (folder / "node.key.old").stat()
    assert (copy.st_uid, mode(folder / "node.key.old")) == (0, 0o600)
    assert (folder / "node.key").lstat().st_uid == 1234


@needs_root
def test_a_link_in_the_place_of_nginx_conf_gives_away_nothing_of_root(deployment: Deployment, tmp_path: Path) -> None:
    """What was read through a link gets the owner of what it leads to."""
    file, secret = deployment.server / "nginx.conf", tmp_path / "secret"
    shutil.move(file, secret)
    file.symlink_to(secret)
    for path in (deployment.server, file):
        os.chown(path, 1234, 2345, follow_symlinks=False)
    list(move_deployment(deployment, None, 8443))
    add_node(deployment.folder)
    assert (file.lstat().st_uid, mode(file)) == (0, 0o600)
    assert "8443" not in secret.read_text()


@needs_root
def test_root_follows_no_links_of_others(deployment: Deployment, tmp_path: Path) -> None:
    """Links of root's own are followed."""
    place = deployment.authority
    shutil.move(place, tmp_path / "authority")
    place.symlink_to(tmp_path / "authority")
    list(move_deployment(deployment, None, 8442))
    os.chown(place, 1234, -1, follow_symlinks=False)
    with (
        pytest.raises(ConfigError, match=r"authority is a link of uid 1234, which root does not follow"),
        Deployment.locked(deployment.folder),
    ):
        pass


@needs_root
def test_root_makes_no_deployment_in_the_folder_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, -1)
    with pytest.raises(ConfigError, match="belongs to uid 1234; run the command as that user"):
        init(Deployment(folder=tmp_path, host="127.0.0.1", port=8000, num_nodes=1))


def test_a_key_is_not_replaced_twice_by_accident(deployment: Deployment) -> None:
    """A second call makes no key, but repairs node.pub, which an interrupted first call may not have written."""
    folder = deployment.node(0)
    stale = (folder / "node.pub").read_bytes()
    public = own_key(folder).read_bytes()
    (folder / "node.pub").write_bytes(stale)
    key = (folder / "node.key").read_bytes()
    with pytest.raises(ConfigError, match=r"was already replaced .*; send .*node\.pub to the operator"):
        own_key(folder)
    assert (folder / "node.key").read_bytes() == key
    assert (folder / "node.pub").read_bytes() == public
    (folder / "node.key.old").unlink()
    own_key(folder)
    assert (folder / "node.key.old").read_bytes() == key


def test_making_a_key_continues_after_an_interruption(deployment: Deployment) -> None:
    """The old key was kept, but not replaced yet."""
    folder = deployment.node(0)
    old = (folder / "node.key").read_bytes()
    (folder / "node.key.old").write_bytes(old)
    own_key(folder)
    assert (folder / "node.key").read_bytes() != old
    assert (folder / "node.key.old").read_bytes() == old


def test_a_folder_that_is_no_node_gets_no_key(deployment: Deployment) -> None:
    before = contents(deployment.folder)
    with pytest.raises(ConfigError, match=r"place\.toml cannot be read"):
        own_key(deployment.folder)
    assert contents(deployment.folder) == before


def test_the_operator_accepts_a_key(deployment: Deployment, received: Path) -> None:
    """Key, nginx.conf and all lists have the new key; what the operator changed in nginx.conf stays."""
    shutil.rmtree(deployment.node(2))  # handed over
    old = sent_key(deployment, 0)
    config = deployment.server / "nginx.conf"
    config.write_text(config.read_text() + "# mine\n")
    written = list(accept_key(deployment, 0, received))
    assert written == [str(config), str(deployment.public_key(0)), str(deployment.peers)]
    peers = deployment_peers(deployment)
    assert peers[0] == read_public_key(received)
    assert deployment.public_key(0).read_bytes() == received.read_bytes()
    for file in (deployment.peers, *(deployment.node(number) / "peers.toml" for number in (0, 1))):
        assert read_peers(file) == peers
    assert not deployment.node(2).exists()
    assert config.read_text() == gate(deployment) + "# mine\n"
    assert old not in config.read_text()
    before = contents(deployment.folder)
    assert list(accept_key(deployment, 0, received)) == written[1:]
    assert contents(deployment.folder) == before


def test_a_deployment_without_nginx_accepts_a_key(deployment: Deployment, received: Path) -> None:
    (deployment.server / "nginx.conf").unlink()
    assert list(accept_key(deployment, 0, received)) == [str(deployment.public_key(0)), str(deployment.peers)]


P256 = ec.derive_private_key(1, ec.SECP256R1()).public_key()


def _private(deployment: Deployment, file: Path) -> None:
    shutil.copy(deployment.node(0) / "node.key", file)


def _binary(_: Deployment, file: Path) -> None:
    file.write_bytes(b"\xff\xfe")


def _p256(_: Deployment, file: Path) -> None:
    file.write_bytes(public_line(P256, "node-0"))


def _another_nodes(deployment: Deployment, file: Path) -> None:
    shutil.copy(deployment.public_key(1), file)


def _gone(_: Deployment, file: Path) -> None:
    file.unlink()


def _unknown_to_nginx(deployment: Deployment, _: Path) -> None:
    config = deployment.server / "nginx.conf"
    config.write_text(config.read_text().replace(sent_key(deployment, 0), ""))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_private, r"the key in .*node\.pub is not an OpenSSH line .*; give the node\.pub that the owner sent"),
        (_binary, "is not an OpenSSH line"),
        (_p256, "must be on the curve P-384"),
        (_another_nodes, "has the key of node 1, not of node 0"),
        (_gone, "cannot be read"),
        (_unknown_to_nginx, r"nginx\.conf does not have the node's present key"),
    ],
)
def test_what_is_not_accepted_changes_nothing(
    deployment: Deployment, received: Path, fault: Callable[[Deployment, Path], None], told: str
) -> None:
    fault(deployment, received)
    before = contents(deployment.folder)
    with pytest.raises(ConfigError, match=told):
        list(accept_key(deployment, 0, received))
    assert contents(deployment.folder) == before


@pytest.mark.parametrize("number", [-1, 3])
def test_a_node_that_does_not_exist_gets_no_key(deployment: Deployment, received: Path, number: int) -> None:
    with pytest.raises(ConfigError, match=f"must be 0 to 2; got {number}"):
        list(accept_key(deployment, number, received))


def test_two_nodes_with_one_key_are_no_list(deployment: Deployment, received: Path) -> None:
    """A key that was replaced by hand; `accept_key` repairs it."""
    shutil.copy(deployment.public_key(1), deployment.public_key(0))
    with pytest.raises(StateError, match=r"in .*keys, the nodes 0 and 1 have the same key"):
        write_peers(deployment)
    (deployment.server / "nginx.conf").unlink()
    list(accept_key(deployment, 0, received))
    assert read_peers(deployment.peers)[0] == read_public_key(received)


def test_the_keys_fingerprints_are_those_of_openssh(deployment: Deployment) -> None:
    *keys, whole = describe(node_peers(deployment.node(1)))
    for number, line in enumerate(keys):
        command = ["ssh-keygen", "-l", "-f", str(deployment.public_key(number))]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert line == f"node {number}: {printed.split()[1]}"
    assert whole == f"fingerprint: {fingerprint(deployment_peers(deployment))}"


def test_the_commands_show_one_fingerprint_on_both_sides(deployment: Deployment, received: Path, call: Call) -> None:
    assert call("deploy", "own-key", deployment.node(1))[:2] == (0, f"{deployment.node(1) / 'node.pub'}\n")
    code, out, err = call("deploy", "accept-key", deployment.folder, "0", received)
    assert (code, out.splitlines()[-1]) == (0, str(deployment.peers))
    assert "hyperfl deploy register" in err
    operator, owner = (call("deploy", "peers", folder) for folder in (deployment.folder, deployment.node(2)))
    assert operator == owner
    assert operator[0] == 0
    assert operator[1].splitlines() == list(describe(deployment_peers(deployment)))
    code, _, err = call("deploy", "peers", received.parent.parent)
    assert code == 2
    assert "is neither a deployment" in err


def test_the_command_writes_a_list_that_is_missing(deployment: Deployment, call: Call) -> None:
    deployment.peers.unlink()
    assert call("deploy", "peers", deployment.folder)[0] == 0
    assert read_peers(deployment.peers) == deployment_peers(deployment)


def test_a_node_without_a_list_has_no_fingerprint(deployment: Deployment) -> None:
    (deployment.node(0) / "node.toml").write_text("")
    with pytest.raises(ConfigError, match=r'has no peers-file; add peers-file = "peers\.toml"'):
        node_peers(deployment.node(0))


def checked(deployment: Deployment, number: int = 0, settings: str = "") -> list[Finding]:
    """Return the findings of a node's check of its peers, with settings added to node.toml."""
    folder = deployment.node(number)
    if settings:
        (folder / "node.toml").write_text(f"{(folder / 'node.toml').read_text()}\n{settings}\n")
    return list(pinned_keys(folder, NodeAddress.read(folder), read_node_config(folder)))


def problem(findings: list[Finding]) -> Finding:
    (found,) = [finding for finding in findings if finding.level is not Level.OK]
    return found


def test_a_node_says_its_fingerprint_and_which_sums_are_possible(deployment: Deployment) -> None:
    peers, sums = checked(deployment)
    assert peers.text == f"3 nodes, fingerprint {fingerprint(deployment_peers(deployment))}"
    assert sums.text == "possible with min-cohort = 3, max-colluding = 0, if 3 of 3 nodes answer"
    assert checked(deployment, 1, "min-cohort = 2")[1].text.endswith("if 2 of 3 nodes answer")


def test_sums_that_are_impossible_are_an_error_only_where_nothing_else_is_allowed(deployment: Deployment) -> None:
    few = "3 nodes are too few for min-cohort = 3, max-colluding = 1, so this node refuses every secure sum"
    found = problem(checked(deployment, 0, "max-colluding = 1"))
    assert (found.level, found.text) == (Level.WARNING, few)
    found = problem(checked(deployment, 0, "secure-sum-only = true"))
    assert (found.level, found.text) == (Level.ERROR, f"{few}; with secure-sum-only it refuses every run")


def _unpinned(deployment: Deployment) -> None:
    (deployment.node(0) / "node.toml").write_text("")


def _without_identity(deployment: Deployment) -> None:
    (deployment.node(0) / "node.toml").write_text('peers-file = "peers.toml"')


def _own_key(deployment: Deployment) -> None:
    own_key(deployment.node(0))


def _wrong_number(deployment: Deployment) -> None:
    file = deployment.node(0) / "place.toml"
    file.write_text(file.read_text().replace("number = 0", "number = 2"))


def _fewer(deployment: Deployment) -> None:
    peers = deployment_peers(deployment)
    (deployment.node(0) / "peers.toml").write_text(peers_text({0: peers[0], 1: peers[1]}))


def _other_numbers(deployment: Deployment) -> None:
    peers = deployment_peers(deployment)
    (deployment.node(0) / "peers.toml").write_text(peers_text({0: peers[0], 1: peers[1], 3: peers[2]}))


def _open(deployment: Deployment) -> None:
    (deployment.node(0) / "peers.toml").chmod(0o664)


def _damaged(deployment: Deployment) -> None:
    (deployment.node(0) / "peers.toml").write_text("nonsense")


def _damaged_identity(deployment: Deployment) -> None:
    (deployment.node(0) / "node.key").write_text("nonsense")


def _open_identity(deployment: Deployment) -> None:
    folder = deployment.node(0)
    shutil.move(folder / "node.key", folder / "identity")
    (folder / "identity").chmod(0o640)
    (folder / "node.toml").write_text('peers-file = "peers.toml"\nidentity-key-file = "identity"\n')


@pytest.mark.parametrize(
    ("fault", "level", "text", "remedy"),
    [
        (_unpinned, Level.WARNING, "takes the others' keys from the server", 'set peers-file = "peers.toml" and'),
        (_without_identity, Level.ERROR, "identity-key-file is not set", 'set identity-key-file = "node.key"'),
        (_own_key, Level.ERROR, "another key for this node than", "send node.pub to the operator"),
        (_wrong_number, Level.ERROR, "place.toml says that this is node 2, but by", "set number = 0 in place.toml"),
        (_fewer, Level.ERROR, "has the nodes 0, 1, but the deployment has 3 nodes", "ask the operator"),
        (_other_numbers, Level.ERROR, "has the nodes 0, 1, 3, but the deployment has 3", "ask the operator"),
        (_open, Level.ERROR, "other users can change", "chmod go-w"),
        (_damaged, Level.ERROR, "is not a list of peers", "check peers-file and identity-key-file in node.toml"),
        (_damaged_identity, Level.ERROR, "is not an OpenSSH private key", "check peers-file and identity-key-file"),
        (_open_identity, Level.ERROR, "other users have access to", "chmod go="),
    ],
)
def test_a_node_s_keys_that_do_not_fit_are_found(
    deployment: Deployment, fault: Callable[[Deployment], None], level: Level, text: str, remedy: str
) -> None:
    fault(deployment)
    found = problem(checked(deployment))
    assert found.level is level
    assert text in found.text
    assert remedy in found.remedy


def test_the_operator_s_lists_are_those_of_the_keys(deployment: Deployment) -> None:
    (found,) = listed_keys(deployment)
    assert found.level is Level.OK
    assert found.text == f"3 nodes, fingerprint {fingerprint(deployment_peers(deployment))}"


def test_lists_that_are_old_or_missing_are_found(deployment: Deployment, received: Path) -> None:
    """A key that was replaced by hand, a damaged list, and one that is missing; folders handed over are skipped."""
    shutil.copy(received, deployment.public_key(0))
    shutil.rmtree(deployment.node(2))
    (deployment.node(0) / "peers.toml").unlink()
    (deployment.node(1) / "peers.toml").write_text("nonsense")
    (found,) = listed_keys(deployment)
    listed = "peers.toml, nodes/node-0/peers.toml, nodes/node-1/peers.toml do not have the keys of server/keys"
    assert (found.level, found.text) == (Level.ERROR, listed)
    assert found.remedy.startswith("hyperfl deploy peers ")
    write_peers(deployment)  # the remedy
    assert [finding.level for finding in listed_keys(deployment)] == [Level.OK]


def test_keys_that_are_no_list_are_found(deployment: Deployment) -> None:
    deployment.public_key(1).write_bytes(public_line(P256, "node-1"))
    (found,) = listed_keys(deployment)
    assert "the key of node 1 must be on the curve P-384" in found.text
    assert "hyperfl deploy accept-key" in found.remedy


def test_a_replaced_key_that_is_registered_is_found(deployment: Deployment, received: Path) -> None:
    """The nodes are read from a table with Flower's columns; tests/deployment reads a real one."""

    def pem(number: int) -> bytes:
        key = read_public_key(deployment.public_key(number))
        return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)

    assert foreign_nodes(deployment) == []
    assert not is_unregistered(deployment, 0)
    with closing(sqlite3.connect(deployment.database)) as connection, connection:
        connection.execute(f"CREATE TABLE node ({NODE_COLUMNS})")
        for number in range(3):
            connection.execute(
                "INSERT INTO node VALUES (?, 'online', 0, NULL, NULL, ?, NULL)", (10 + number, pem(number))
            )
    assert foreign_nodes(deployment) == []
    old = deployment.public_key(0).read_bytes()
    list(accept_key(deployment, 0, received))
    assert foreign_nodes(deployment) == [10]
    assert sorted(registered_nodes(deployment)) == [1, 2]
    assert not is_unregistered(deployment, 0)
    with closing(sqlite3.connect(deployment.database)) as connection, connection:
        connection.execute("UPDATE node SET unregistered_at = 'now' WHERE node_id = 10")
    assert foreign_nodes(deployment) == []
    deployment.public_key(0).write_bytes(old)
    assert is_unregistered(deployment, 0)


def test_a_missing_file_does_not_make_a_key_foreign(deployment: Deployment) -> None:
    """Else `register` would unregister a key for good because its file was lost."""
    deployment.public_key(1).unlink()
    with pytest.raises(StateError, match=r"node-1\.pub cannot be read"):
        foreign_nodes(deployment)


def test_a_key_of_a_node_that_is_no_longer_counted_is_not_foreign(deployment: Deployment, tmp_path: Path) -> None:
    write_node_key(tmp_path, "node-3")
    shutil.copy(tmp_path / "node.pub", deployment.public_key(3))
    key = read_public_key(deployment.public_key(3))
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    with closing(sqlite3.connect(deployment.database)) as connection, connection:
        connection.execute(f"CREATE TABLE node ({NODE_COLUMNS})")
        connection.execute("INSERT INTO node VALUES (13, 'online', 0, NULL, NULL, ?, NULL)", (pem,))
    assert foreign_nodes(deployment) == []
