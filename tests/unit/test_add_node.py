"""The files of `hyperfl deploy add-node`: those of a deployment that had the node from the start, also after a kill."""

import contextlib
import errno
import fcntl
import http.client
import os
import re
import shlex
import shutil
import ssl
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from federations import Call

from hyperfl_flwr.cli import deploy as deploy_commands
from hyperfl_flwr.core.errors import ConfigError, StateError
from hyperfl_flwr.core.files import folder_lock
from hyperfl_flwr.core.files.folder_lock import wait_for_folder
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.deploy import layout
from hyperfl_flwr.deploy.add_node import add_node, next_steps
from hyperfl_flwr.deploy.checks.peers import listed_keys, pinned_keys
from hyperfl_flwr.deploy.gate import gate, sent_key
from hyperfl_flwr.deploy.keys import read_node_key, read_public_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.move import move_deployment
from hyperfl_flwr.deploy.node_settings import NodeAddress, read_node_config
from hyperfl_flwr.deploy.peers import accept_key, own_key, write_peers
from hyperfl_flwr.deploy.provision import init
from hyperfl_flwr.deploy.registered_nodes import foreign_nodes, registered_nodes
from hyperfl_flwr.launch.findings import Level
from hyperfl_flwr.protocol.secure_sums.peers import read_peers


def make(folder: Path, nodes: int = 2) -> Deployment:
    deployment = Deployment(folder=folder, host="fl.example.org", port=8123, num_nodes=nodes)
    init(deployment)
    return deployment


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("original") / "fl").folder


@pytest.fixture
def one(original: Path, tmp_path: Path) -> Deployment:
    """Return a deployment of two nodes."""
    return Deployment.read(shutil.copytree(original, tmp_path / "fl"))


def begin(one: Deployment, *, before: str = "public_line") -> None:
    """Interrupt `add_node` before it calls a function for the first time, by default when the new folder is there."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"hyperfl_flwr.deploy.add_node.{before}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            add_node(one.folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_complete(folder: Path) -> None:
    """Check that a deployment is one of three nodes in each of its files."""
    found = Deployment.read(folder)
    assert found.num_nodes == 3
    home = found.node(2)
    key = read_node_key(home / "node.key").public_key()
    assert NodeAddress.read(home) == NodeAddress(number=2, nodes=3, host=found.host, port=found.port)
    assert key == read_public_key(home / "node.pub") == read_public_key(found.public_key(2))
    assert found.public_key(2).read_bytes() == (home / "node.pub").read_bytes()
    assert gate(found) == (found.server / "nginx.conf").read_text()
    assert read_peers(found.peers) == read_peers(home / "peers.toml")
    assert list(read_peers(found.peers).values()) == [read_public_key(found.public_key(each)) for each in range(3)]
    assert sorted(path.name for path in home.parent.iterdir()) == ["node-0", "node-1", "node-2"]


def test_the_deployment_is_one_that_had_the_node_from_the_start(one: Deployment, tmp_path: Path) -> None:
    """It has the same files with the same modes, and the same texts where these have no key; the others' stay."""
    there = make(tmp_path / "there", nodes=3)
    before = contents(one.folder)
    written = add_node(one.folder)[1]
    assert_complete(one.folder)
    after, wanted = contents(one.folder), contents(there.folder)
    assert after.keys() == wanted.keys()
    changed = {name for name, text in before.items() if after[name] != text}
    assert changed == {"deployment.toml", "peers.toml", "server/nginx.conf"}
    for name in sorted(wanted):
        if name.startswith("nodes/node-2/") and not name.endswith(("node.key", "node.pub", "ca.crt", "peers.toml")):
            assert after[name] == wanted[name], name
    for path in (*there.node(2).rglob("*"), there.node(2), there.server / "nginx.conf", there.public_key(2)):
        mode = (one.folder / path.relative_to(there.folder)).stat().st_mode
        assert stat.S_IMODE(mode) == stat.S_IMODE(path.stat().st_mode), path
    assert written == [
        one.node(2),
        one.public_key(2),
        one.server / "nginx.conf",
        one.peers,
        one.folder / "deployment.toml",
    ]
    add_node(one.folder)
    assert Deployment.read(one.folder).num_nodes == 4


def test_it_is_interrupted_at_each_write_and_repeated(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its last write the deployment has two nodes, and every file of them is as before or complete."""
    replace, rename, left = os.replace, Path.rename, 0

    def interrupted(move: Callable[..., Any], when: str) -> Callable[..., Any]:
        def moved(*names: Any, **folders: int) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and when == "before":
                raise KeyboardInterrupt
            done = move(*names, **folders)
            if left == 0:
                raise KeyboardInterrupt
            return done

        return moved

    number, ended = 0, set()
    while ended != {"before", "after"}:
        number += 1
        for when in ("before", "after"):
            folder = tmp_path / f"{when}-{number}"
            one = Deployment.read(shutil.copytree(original, folder))
            others = contents(one.node(0)), contents(one.node(1))
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", interrupted(replace, when))
                patch.setattr(Path, "rename", interrupted(rename, when))
                left = number
                try:
                    add_node(folder, 2)
                    ended.add(when)
                except KeyboardInterrupt:
                    pass
            if Deployment.read(folder).num_nodes == 2:
                assert (registered_nodes(one), foreign_nodes(one)) == ({}, [])
                add_node(folder, 2)
            assert_complete(folder)
            assert (contents(one.node(0)), contents(one.node(1))) == others
            with pytest.raises(ConfigError, match="already has node 2; the next new node is node 3"):
                add_node(folder, 2)
    assert number > 12  # more than the files that init writes for a node


def test_what_has_changed_since_an_interrupted_call_is_taken(one: Deployment) -> None:
    """The new node keeps its key; the address and the key of node 0 are the present ones."""
    begin(one)
    key = (one.node(2) / "node.key").read_bytes()
    own_key(one.node(0))
    list(accept_key(one, 0, one.node(0) / "node.pub"))
    list(move_deployment(one, "10.1.2.3", 9443))
    add_node(one.folder)
    assert_complete(one.folder)
    assert (one.node(2) / "node.key").read_bytes() == key


def test_the_folders_may_have_been_handed_over_and_the_authority_put_away(one: Deployment) -> None:
    for folder in (one.node(0), one.node(1), one.authority):
        shutil.rmtree(folder)
    add_node(one.folder)
    assert sorted(path.name for path in one.node(2).parent.iterdir()) == ["node-2"]
    assert Deployment.read(one.folder).num_nodes == 3


def test_what_was_changed_in_nginx_is_kept_and_what_cannot_be_changed_is_named(one: Deployment) -> None:
    file = one.server / "nginx.conf"
    mine = f"# mine\n{file.read_text()}# the end"
    file.write_text(mine.replace("listen fl.example.org", "listen 10.0.0.1"))
    add_node(one.folder)
    three = Deployment.read(one.folder)
    assert file.read_text() == f"# mine\n{gate(three)}# the end".replace("listen fl.example.org", "listen 10.0.0.1")
    file.write_text("events {}\n")
    before = contents(one.folder)
    with pytest.raises(
        ConfigError, match=r"nginx\.conf has the key of no node on a line of its own, .*; add the line of a node"
    ):
        add_node(one.folder)
    assert contents(one.folder) == before
    file.unlink()
    assert file not in add_node(one.folder)[1]
    assert not file.exists()


def test_a_key_that_was_replaced_after_an_interrupted_call_leaves_nginx(one: Deployment) -> None:
    """The key of the first call is in nginx.conf already; its owner has made another one."""
    begin(one, before="Deployment.write")
    assert (one.server / "nginx.conf").read_text().count('" 2;') == 1
    own_key(one.node(2))
    (one.node(2) / "node.key.old").unlink()
    add_node(one.folder)
    assert_complete(one.folder)


def _one_line(text: str, one: Deployment) -> str:
    head, rest = text.split("map $http_flwr_public_key $node {")
    body, rest = rest.split("}", 1)
    return f"{head}map $http_flwr_public_key $node {{{' '.join(body.split())} }}{rest}"


def _revoked(text: str, one: Deployment) -> str:
    """Return the file without node 1's key, which is in comments after the map."""
    key = sent_key(one, 1)
    lines = text.replace(f'        "{key}" 1;\n', "").splitlines(keepends=True)
    return "".join([*lines, f'# "{key}" 1;\n', f"# revoked: {key}\n"])


def test_a_key_comes_only_after_the_line_of_another_one(one: Deployment) -> None:
    file = one.server / "nginx.conf"
    own = file.read_text()
    file.write_text(_one_line(own, one))
    before = contents(one.folder)
    with pytest.raises(ConfigError, match=r"has the key of no node on a line of its own"):
        add_node(one.folder)
    assert contents(one.folder) == before
    file.write_text(_revoked(own, one))
    three, _ = add_node(one.folder)
    line = f'        "{sent_key(three, 0)}" 0;\n'
    assert file.read_text() == _revoked(own, one).replace(line, f'{line}        "{sent_key(three, 2)}" 2;\n')


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_a_running_nginx_admits_the_node_when_it_has_read_its_configuration_again(tmp_path: Path) -> None:
    """403 is nginx's refusal of an unknown key; 502 says that it has passed a request on to no SuperLink."""
    one = Deployment(folder=tmp_path / "fl", host="127.0.0.2", port=free_port(), num_nodes=2)
    init(one)
    command = ["nginx", "-p", str(one.server), "-c", "nginx.conf"]

    def status(number: int) -> int:
        context = ssl.create_default_context(cafile=one.server / "ca.crt")
        connection = http.client.HTTPSConnection(one.host, one.port, context=context, timeout=10)
        with contextlib.closing(connection):
            key = sent_key(Deployment.read(one.folder), number)
            connection.request("POST", "/v1/fleet/x", headers={"flwr-public-key": key})
            return connection.getresponse().status

    def answers(number: int, wanted: int) -> bool:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if status(number) == wanted:
                    return True
            time.sleep(0.1)
        return False

    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert answers(1, 502)
        add_node(one.folder)
        assert status(2) == 403
        subprocess.run([*command, "-s", "reload"], check=True, timeout=30)
        assert answers(2, 502)
        assert status(1) == 502
    finally:
        running.terminate()
        running.wait(30)


def _damaged_key(one: Deployment) -> None:
    one.public_key(1).write_text("nonsense")


def _same_key(one: Deployment) -> None:
    shutil.copy(one.public_key(0), one.public_key(1))


def _no_certificate(one: Deployment) -> None:
    (one.server / "ca.crt").unlink()


def _other_folder(one: Deployment) -> None:
    one.node(2).mkdir()
    (one.node(2) / "letter").touch()


def _other_node(one: Deployment) -> None:
    shutil.copytree(one.node(1), one.node(2))


def _dangling(one: Deployment) -> None:
    one.node(2).symlink_to("/nowhere")


def _lost_folder(one: Deployment) -> None:
    shutil.copy(one.public_key(1), one.public_key(2))


def _file_in_the_way(one: Deployment) -> None:
    (one.folder / "nodes" / ".node-2").touch()


def _link_in_the_way(one: Deployment) -> None:
    (one.folder / "nodes" / ".node-2").symlink_to(one.folder.parent)


def _wrong_public_part(one: Deployment) -> None:
    begin(one)
    shutil.copy(one.node(1) / "node.pub", one.node(2) / "node.pub")


def _full(one: Deployment) -> None:
    (one.folder / "deployment.toml").write_text('host = "a"\nport = 1\nnodes = 10000\n')


def _damaged(one: Deployment) -> None:
    (one.folder / "deployment.toml").write_text("nodes = 2")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_damaged_key, r"node-1\.pub is damaged"),
        (_same_key, "the nodes 0 and 1 have the same key"),
        (_no_certificate, r"server/ca\.crt cannot be read"),
        (_other_folder, r"node-2 is in use, .*place\.toml cannot be read .* Move it elsewhere and repeat"),
        (_other_node, r"node-2 is in use, .*place\.toml is of another node"),
        (_dangling, r"node-2 is in use"),
        (_lost_folder, r"node-2\.pub is the key of a node 2 of which .*node-2 is missing; put the folder back"),
        (_file_in_the_way, r"\.node-2 is in use, and not by `hyperfl deploy add-node`; move it elsewhere"),
        (_link_in_the_way, r"\.node-2 is in use"),
        (_wrong_public_part, r"node\.pub is not the public part of node\.key"),
        (_full, "nodes must be 1 to 10000; got 10001"),
        (_damaged, r"deployment\.toml is damaged"),
    ],
)
def test_what_cannot_be_finished_changes_nothing(
    spoil: Callable[[Deployment], None], told: str, one: Deployment
) -> None:
    spoil(one)
    before = contents(one.folder)
    with pytest.raises((ConfigError, StateError), match=told):
        add_node(one.folder)
    assert contents(one.folder) == before


def test_checks_know_lists_from_before_a_node_was_added(one: Deployment) -> None:
    """The operator is warned until they are replaced; an owner may have the new list and an old place.toml."""
    add_node(one.folder)
    three = Deployment.read(one.folder)
    (found,) = listed_keys(three)
    assert (found.level, "node-0/peers.toml, nodes/node-1/peers.toml are from before" in found.text) == (
        Level.WARNING, True,
    )  # fmt: skip
    shutil.copy(three.peers, three.node(0))
    peers, _ = pinned_keys(three.node(0), NodeAddress.read(three.node(0)), read_node_config(three.node(0)))
    assert (peers.level, peers.text.startswith("3 nodes, fingerprint")) == (Level.OK, True)
    write_peers(three)
    assert [finding.level for finding in listed_keys(three)] == [Level.OK]


def test_the_command_says_what_was_written_and_what_comes_next(one: Deployment, call: Call) -> None:
    code, out, err = call("deploy", "add-node", one.folder, "--number", "2")
    assert (code, out.splitlines()[0], out.splitlines()[-1]) == (
        0,
        str(one.node(2)),
        str(one.folder / "deployment.toml"),
    )
    for text in (
        f"nginx -p {shlex.quote(str(one.server))} -c nginx.conf -s reload",
        f"hyperfl deploy register {shlex.quote(str(one.folder))}",
        f"give {one.node(2)} to the owner of node 2", "or 2 with --set num-nodes=2", f"send {one.peers} to all owners",
    ):  # fmt: skip
        assert text in err
    for folder, words, told in (
        (one.folder, ["--number", "2"], "already has node 2; the next new node is node 3"),
        (one.folder, ["--number", "4"], "must be 3, since the nodes are numbered without gaps; got 4"),
        (one.folder, ["--number=-1"], "must be 3, since"),
        (one.node(0), [], "is not a deployment"),
        (one.folder / "nowhere", [], "is not a deployment"),
    ):
        before = contents(one.folder)
        code, _, err = call("deploy", "add-node", folder, *words)
        assert (code, bool(re.search(told, err))) == (2, True), err
        assert contents(one.folder) == before


class _ClosedPipe:
    """A terminal that has gone, as that of `hyperfl deploy add-node fl | head -1`."""

    def print(self, *_: object, **__: object) -> None:
        raise BrokenPipeError


def test_a_reader_that_goes_away_leaves_nothing_half_done(
    one: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    received = shutil.copy(own_key(one.node(0)), tmp_path / "node.pub")
    with monkeypatch.context() as patch:
        patch.setattr(deploy_commands, "out", _ClosedPipe())
        with pytest.raises(BrokenPipeError):
            deploy_commands.run_add_node(one.folder)
        with pytest.raises(BrokenPipeError):
            deploy_commands.run_move(one.folder, host=None, port=9443)
        with pytest.raises(BrokenPipeError):
            deploy_commands.run_accept_key(one.folder, 0, received)
    assert_complete(one.folder)
    assert Deployment.read(one.folder).port == NodeAddress.read(one.node(0)).port == 9443
    assert read_public_key(one.public_key(0)) == read_public_key(received)


@pytest.mark.parametrize("command", ["accept-key", "peers", "move", "register", "renew"])
def test_other_commands_wait_and_then_know_the_new_node(
    command: str, one: Deployment, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are called while a node is being added; register is not carried out, as no SuperLink runs."""
    words: dict[str, list[object]] = {
        "accept-key": [0, shutil.copy(own_key(one.node(0)), tmp_path / "node.pub")], "move": ["--port", 9443],
    }  # fmt: skip
    seen: list[int] = []

    @contextlib.contextmanager
    def waits(folder: Path, **options: bool) -> Iterator[None]:
        monkeypatch.setattr(layout, "wait_for_folder", wait_for_folder)
        add_node(folder)
        with wait_for_folder(folder, **options):
            yield

    def registered(deployment: Deployment) -> Iterator[str]:
        seen.append(deployment.num_nodes)
        assert_locked(one.folder)
        yield "registered"

    monkeypatch.setattr(layout, "wait_for_folder", waits)
    monkeypatch.setattr("hyperfl_flwr.deploy.register.register", registered)
    assert call("deploy", command, one.folder, *words.get(command, []))[0] == 0
    assert seen == ([3] if command == "register" else [])
    assert_complete(one.folder)


def assert_locked(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(opened)


def test_a_file_system_without_locks_is_enough(one: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a folder has none."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(folder_lock.fcntl, "flock", no_locks)
    add_node(one.folder)
    assert_complete(one.folder)
    with pytest.raises(OSError, match="Bad file descriptor"), folder_lock.wait_for_folder(one.folder):
        pass


def test_a_shell_reads_the_next_steps_of_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "the owner's folder"
    steps = list(next_steps(Deployment(folder=folder, host="localhost", port=8443, num_nodes=3)))
    words = [shlex.split(step.partition(": ")[2]) for step in steps[:2]]
    assert words == [
        ["nginx", "-p", str(folder / "server"), "-c", "nginx.conf", "-s", "reload"],
        ["hyperfl", "deploy", "register", str(folder)],
    ]
