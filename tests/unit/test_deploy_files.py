"""The files of `hyperfl deploy init`: their modes, certificates that OpenSSL accepts, scripts that shells parse."""

import os
import pwd
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from jinja2 import UndefinedError

from hyperfl_flwr.core.errors import ConfigError, StateError
from hyperfl_flwr.deploy.gate import gate
from hyperfl_flwr.deploy.keys import read_certificate, read_node_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.move import move_deployment, move_node
from hyperfl_flwr.deploy.node_settings import NodeAddress
from hyperfl_flwr.deploy.peers import accept_key, own_key
from hyperfl_flwr.deploy.provision import init, renew
from hyperfl_flwr.deploy.render import jinja_environment, render

ROOT = Path(__file__).resolve().parents[2]

needs_shellcheck = pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")


def make(folder: Path, host: str = "fl.example.org", nodes: int = 2) -> Deployment:
    deployment = Deployment(folder=folder, host=host, port=8123, num_nodes=nodes)
    init(deployment)
    return deployment


def run(*command: str | Path, folder: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return make(tmp_path_factory.mktemp("deployment") / "a folder")


def test_everything_lies_where_the_layout_says(deployment: Deployment) -> None:
    assert Deployment.read(deployment.folder) == deployment
    for number in (0, 1):
        files = {path.name for path in deployment.node(number).iterdir()}
        assert {"ca.crt", "node.key", "node.pub", "peers.toml", "node.toml", "start.sh", "state", "flwr"} <= files
        readme = (deployment.node(number) / "README.txt").read_text().splitlines()
        assert readme[0] == f"Node {number} of a federation"
        assert max(map(len, readme)) <= 120
        named = set(re.findall(r"[\w-]+\.(?:toml|key|sh|service)\b", " ".join(readme)))
        assert named <= files
        assert deployment.public_key(number).read_bytes() == (deployment.node(number) / "node.pub").read_bytes()
    files = {path.name for path in deployment.server.iterdir()}
    assert {"ca.crt", "server.crt", "server.key", "start.sh", "keys", "flwr"} <= files
    assert not (deployment.server / "ca.key").exists()


def test_only_the_owner_reads_keys_and_folders(deployment: Deployment) -> None:
    paths = [deployment.folder, *deployment.folder.rglob("*")]
    private = [path for path in paths if path.is_dir() or path.suffix == ".key"]
    assert len([path for path in private if path.suffix == ".key"]) == 4  # the authority's, the server's, two nodes'
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_openssl_accepts_the_server_under_its_names_only(deployment: Deployment) -> None:
    verify = ("openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", deployment.server / "ca.crt")
    for name in ("fl.example.org", "localhost"):
        run(*verify, "-verify_hostname", name, deployment.server / "server.crt")
    run(*verify, "-verify_ip", "127.0.0.1", deployment.server / "server.crt")
    command = [*verify, "-verify_hostname", "other.example.org", deployment.server / "server.crt"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "hostname mismatch" in done.stderr.lower()


def test_an_address_is_an_address_in_the_certificate(tmp_path: Path) -> None:
    deployment = make(tmp_path / "d", host="10.1.2.3")
    run(
        "openssl", "verify", "-CAfile", deployment.authority / "ca.crt", "-verify_ip", "10.1.2.3",
        deployment.server / "server.crt",
    )  # fmt: skip


def test_ssh_keygen_reads_the_nodes_keys_and_they_differ(deployment: Deployment) -> None:
    lines = {run("ssh-keygen", "-y", "-f", deployment.node(number) / "node.key").split()[1] for number in (0, 1)}
    assert lines == {deployment.public_key(number).read_text().split()[1] for number in (0, 1)}
    assert len(lines) == 2


def test_a_renewed_certificate_is_another_of_the_same_authority(tmp_path: Path) -> None:
    deployment = make(tmp_path / "d")
    before = read_certificate(deployment.server / "server.crt")
    renew(deployment)
    after = read_certificate(deployment.server / "server.crt")
    assert after.serial_number != before.serial_number
    assert after.public_key() != before.public_key()
    authority = read_certificate(deployment.node(0) / "ca.crt")
    after.verify_directly_issued_by(authority)
    key = serialization.load_pem_private_key((deployment.server / "server.key").read_bytes(), None)
    assert key.public_key() == after.public_key()
    names = after.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]


def test_a_lost_or_foreign_authority_cannot_renew(tmp_path: Path) -> None:
    one, other = make(tmp_path / "one"), make(tmp_path / "other")
    shutil.copy(other.authority / "ca.key", one.authority / "ca.key")
    with pytest.raises(StateError, match=r"must be the key of .*ca\.crt"):
        renew(one)
    (one.authority / "ca.key").unlink()
    with pytest.raises(StateError, match="cannot be read"):
        renew(one)
    (one.node(0) / "node.key").write_bytes(b"nonsense")
    with pytest.raises(StateError, match="is damaged"):
        read_node_key(one.node(0) / "node.key")


def test_a_moved_deployment_is_one_made_at_the_new_address(tmp_path: Path) -> None:
    """Every text with the address equals that of a deployment that was made there; keys and authority stay."""
    one, there = make(tmp_path / "one"), make(tmp_path / "there", host="10.1.2.3")
    kept = [one.authority / "ca.crt", one.authority / "ca.key", one.peers, *one.folder.rglob("node.*")]
    before = {file: file.read_bytes() for file in kept}
    shutil.rmtree(one.node(1))  # was handed over
    written = list(move_deployment(one, "10.1.2.3", None))
    moved = Deployment.read(one.folder)
    assert (moved.host, moved.port) == ("10.1.2.3", 8123)
    assert {file: file.read_bytes() for file in kept if file.exists()} == {
        file: text for file, text in before.items() if one.node(1) not in file.parents
    }
    for name in ("server/start.sh", "deployment.toml", "nodes/node-0/place.toml"):
        assert (one.folder / name).read_bytes() == (there.folder / name).read_bytes()
        assert (one.folder / name).stat().st_mode == (there.folder / name).stat().st_mode
        assert one.folder / name in written
    assert {one.server / "server.crt", one.server / "server.key", one.flower_home / "config.toml"} < set(written)
    assert gate(moved) == (one.server / "nginx.conf").read_text()
    names = ("openssl", "verify", "-CAfile", one.authority / "ca.crt", "-verify_ip", "10.1.2.3")
    run(*names, one.server / "server.crt")
    connection = tomllib.loads((one.flower_home / "config.toml").read_text())["superlink"]["hyperfl"]
    certificate = (one.server / "server.crt").read_bytes()
    list(move_deployment(moved, None, 9443))
    moved = Deployment.read(one.folder)
    assert NodeAddress.read(one.node(0)) == NodeAddress(number=0, nodes=2, host="10.1.2.3", port=9443)
    assert (one.server / "server.crt").read_bytes() == certificate  # it names no port
    assert gate(moved) == (one.server / "nginx.conf").read_text()
    assert "--port 9443" in (one.server / "start.sh").read_text()
    moved_connection = tomllib.loads((one.flower_home / "config.toml").read_text())["superlink"]["hyperfl"]
    assert moved_connection == {**connection, "address": "127.0.0.1:9443"}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_move_keeps_what_was_changed_in_nginx_and_names_what_it_cannot_change(tmp_path: Path) -> None:
    one = make(tmp_path / "one")
    file = one.server / "nginx.conf"
    own_key(one.node(1))
    list(accept_key(one, 1, one.node(1) / "node.pub"))
    file.write_text("# mine: https://127.0.0.1:81234\n" + file.read_text())
    list(move_deployment(one, None, 9443))
    assert file.read_text() == "# mine: https://127.0.0.1:81234\n" + gate(Deployment.read(one.folder))
    file.write_text(file.read_text().replace("listen fl.example.org:9443", "listen 10.0.0.1:9443"))
    list(move_deployment(Deployment.read(one.folder), "a", 9444))
    assert "listen 10.0.0.1:9444 ssl;" in file.read_text()
    file.write_text(file.read_text().replace(":9444", ":1"))
    before = contents(one.folder)
    with pytest.raises(ConfigError, match=r"does not have port 9444 .* write `listen a:9445 ssl;` and"):
        list(move_deployment(Deployment.read(one.folder), None, 9445))
    assert contents(one.folder) == before


def test_a_move_that_cannot_be_finished_changes_nothing(tmp_path: Path) -> None:
    """Neither without the authority's key nor with a node's damaged address; afterwards it goes on."""
    one = make(tmp_path / "one")
    for file in (one.authority / "ca.key", one.node(1) / "place.toml"):
        good = file.read_bytes()
        file.write_bytes(b"nonsense")
        before = contents(one.folder)
        with pytest.raises((ConfigError, StateError), match=file.name):
            list(move_deployment(one, "10.1.2.3", 9443))
        assert contents(one.folder) == before
        file.write_bytes(good)
    list(move_deployment(one, "10.1.2.3", 9443))
    assert Deployment.read(one.folder).port == 9443


def test_an_interrupted_move_is_repeated_and_then_taken_back(tmp_path: Path) -> None:
    one = make(tmp_path / "one")
    before = (one.server / "nginx.conf").read_text()
    moving = move_deployment(one, "10.1.2.3", 9443)
    while next(moving).name != "start.sh":
        pass
    moving.close()
    assert Deployment.read(one.folder) == one
    list(move_deployment(one, "10.1.2.3", 9443))
    moved = Deployment.read(one.folder)
    assert gate(moved) == (one.server / "nginx.conf").read_text()
    list(move_deployment(moved, one.host, one.port))
    assert Deployment.read(one.folder) == one
    assert (one.server / "nginx.conf").read_text() == before


def test_an_owner_moves_a_node_and_nothing_else(tmp_path: Path) -> None:
    node = shutil.copytree(make(tmp_path / "one").node(1), tmp_path / "node-1")
    mode, before = (node / "place.toml").stat().st_mode, contents(node)
    assert move_node(node, "10.1.2.3", 9443) == node / "place.toml"
    assert NodeAddress.read(node) == NodeAddress(number=1, nodes=2, host="10.1.2.3", port=9443)
    assert (node / "place.toml").stat().st_mode == mode
    assert {path.name for path, text in before.items() if path.read_bytes() != text} == {"place.toml"}
    for host, port, problem in (
        (None, None, "the new address is missing; give --host, --port or both"),
        (None, 0, "port must be 1 to 65535; got 0"),
        ("", None, "host must be a host name or an IPv4 address; got ''"),
        ("a b", 1, "host must be a host name"),
    ):
        with pytest.raises(ConfigError, match=re.escape(problem)):
            move_node(node, host, port)
        with pytest.raises(ConfigError, match=re.escape(problem)):
            list(move_deployment(Deployment(folder=tmp_path, host="10.1.2.3", port=8123, num_nodes=1), host, port))


def test_a_folder_in_use_and_an_unfit_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "letter").touch()
    unfit = [(tmp_path / f"a{character}b", f"must have no {character!r} in") for character in '?"%$\\']
    for folder, told in ((tmp_path, "is in use"), (tmp_path / "letter", "is in use"), *unfit):
        with pytest.raises(ConfigError, match=re.escape(told)):
            make(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_a_path_may_look_like_a_place_for_a_value(tmp_path: Path) -> None:
    """A folder's name is written as it is, with an `@` (a home in a domain) or in the form of a placeholder."""
    place = tmp_path / "somebody@example.org" / "{{ port }}'s and spaces"
    place.parent.mkdir()
    one = make(place)
    told = tomllib.loads((one.flower_home / "config.toml").read_text())["superlink"]["hyperfl"]
    assert told["root-certificates"] == str(place / "server" / "ca.crt")
    assert f'ExecStart=/bin/sh "{place}/server/start.sh"' in (one.server / "hyperfl-superlink.service").read_text()


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'port' is undefined"):
        render("flower_config.toml.jinja", certificate="/x/ca.crt")


def test_a_value_that_a_template_does_not_quote_is_an_error() -> None:
    template = jinja_environment().from_string("{{ number }} {{ name | shell }}")
    assert template.render(number=1, name="a b") == "1 'a b'"
    with pytest.raises(ValueError, match="must be a number or pass one of bare, nginx"):
        jinja_environment().from_string("{{ name }}").render(name="ab")


@pytest.mark.parametrize("value", ["a;b", "a b", "$HOME", "a\n", ""])
def test_a_value_that_needs_quotes_is_not_written_without(value: str) -> None:
    with pytest.raises(ValueError, match="letters, digits and"):
        render("environment.sh.jinja", program=value, programs=None)


def test_a_line_break_in_a_value_is_an_error() -> None:
    for template, values in (
        ("hyperfl-node.service.jinja", {"folder": "/a", "start": "/a\nreboot", "number": 0}),
        ("hyperfl-superlink.service.jinja", {"start": "/a/start.sh", "user": "me\nExecStartPre=/bin/reboot"}),
        ("nginx.conf.jinja", {"host": "h", "port": 1, "keys": ["a\nb"]}),
    ):
        with pytest.raises(ValueError, match="only printable characters"):
            render(template, **values)


def test_a_shell_reads_the_folder_of_the_programs_as_it_was_given() -> None:
    """Its name may contain quotes, commands, and characters that are not printable, such as a line break."""
    folder = '/it\'s "a" $HOME `reboot` \\ %h; # a\u00a0b \U0001f468\u200d\U0001f469\nreboot'
    text = render("environment.sh.jinja", program="hyperfl", programs=folder)
    assert run("sh", "-c", f'{text}printf %s "$HYPERFL_BIN"') == folder


def test_the_unit_names_the_user_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOGNAME may name another one, and a container's user may have no account."""
    monkeypatch.setenv("LOGNAME", "somebody")
    account = pwd.getpwuid(os.getuid()).pw_name
    unit = make(tmp_path / "with").server / "hyperfl-superlink.service"
    assert f"\nUser={account}\n" in unit.read_text()
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    unit = make(tmp_path / "without").server / "hyperfl-superlink.service"
    assert f"\nUser={2**31 - 7}\n" in unit.read_text()


def test_systemd_replaces_nothing_in_a_path() -> None:
    start = """/a "b" %h $HOME \\/start.sh"""
    unit = render("hyperfl-node.service.jinja", folder="/srv/node-0", start=start, number=0)
    assert r'''ExecStart=/bin/sh "/a \"b\" %%h $$HOME \\/start.sh"''' in unit


def test_only_nodes_have_a_tmp_of_their_own(deployment: Deployment) -> None:
    """The SuperLink writes runs to the operator's folders, also below /tmp; a node to the folders that are named."""
    superlink, node = (
        (folder / name).read_text().splitlines()
        for folder, name in (
            (deployment.server, "hyperfl-superlink.service"),
            (deployment.node(0), "hyperfl-node.service"),
        )
    )
    assert not [line for line in superlink if line.startswith("PrivateTmp=")]
    assert {"PrivateTmp=yes", "ProtectSystem=strict", "NoNewPrivileges=yes"} <= set(node)
    assert {"ProtectSystem=full", "NoNewPrivileges=yes"} <= set(superlink)
    comment = " ".join(line for line in node if line.startswith("#"))
    assert all(word in comment for word in ("state-dir", "novel-output", "data-root", "lpm-weights", "XDG_CACHE_HOME"))


@needs_shellcheck
def test_shellcheck_finds_nothing_in_what_is_written(deployment: Deployment) -> None:
    scripts = list(deployment.folder.rglob("start.sh"))
    assert len(scripts) == 3
    for script in scripts:
        # -x makes shellcheck follow `environment`, which it looks up in the working directory.
        run("shellcheck", "-x", "-S", "style", "start.sh", folder=script.parent)


@needs_shellcheck
def test_shellcheck_finds_nothing_in_the_project_s_scripts() -> None:
    run("shellcheck", "-S", "style", ROOT / ".ci" / "run")


def test_shells_read_what_is_written(deployment: Deployment) -> None:
    for script in deployment.folder.rglob("start.sh"):
        run("sh", "-n", script)
    run("sh", "-c", f". '{deployment.server / 'environment'}'; test -x \"$HYPERFL_BIN/python\"")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_what_is_written(deployment: Deployment) -> None:
    units = list(deployment.folder.rglob("*.service"))
    assert len(units) == 3
    for unit in units:
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # systemd-analyze ignores what it does not understand, with a message and exit code 0.
        assert str(unit) not in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_nginx_reads_what_is_written(tmp_path: Path) -> None:
    run("nginx", "-t", "-p", make(tmp_path / "a folder", host="127.0.0.2").server, "-c", "nginx.conf")


def test_only_a_server_for_others_listens_to_others(deployment: Deployment, tmp_path: Path) -> None:
    assert 'bind="${HYPERFL_BIND:-0.0.0.0}"' in (deployment.server / "start.sh").read_text()
    for number, host in enumerate(("localhost", "127.0.0.1")):
        local = make(tmp_path / str(number), host=host, nodes=1)
        assert 'bind="${HYPERFL_BIND:-127.0.0.1}"' in (local.server / "start.sh").read_text()
        assert NodeAddress.read(local.node(0)) == NodeAddress(number=0, nodes=1, host=host, port=8123)


def test_flowers_commands_find_the_superlink(deployment: Deployment) -> None:
    connection = tomllib.loads((deployment.flower_home / "config.toml").read_text())["superlink"]["hyperfl"]
    assert connection == {"address": "127.0.0.1:8123", "root-certificates": str(deployment.server / "ca.crt")}
