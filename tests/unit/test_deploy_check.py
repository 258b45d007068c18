"""`hyperfl deploy check`: each fault is caused on purpose, and reported under its subject with a remedy."""

import errno
import os
import re
import shlex
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from little_servers import NODE_COLUMNS, https_server
from PIL import Image

from hyperfl_flwr.core.errors import ConfigError, StateError
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.deploy.checks import node as check_node
from hyperfl_flwr.deploy.checks import server as check_server
from hyperfl_flwr.deploy.checks.probe import Answer, probe
from hyperfl_flwr.deploy.checks.server import check
from hyperfl_flwr.deploy.keys import (
    read_certificate,
    read_node_key,
    read_public_key,
    write_authority,
    write_node_key,
    write_server_certificate,
)
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.provision import init, renew
from hyperfl_flwr.deploy.register import _remedy
from hyperfl_flwr.launch import other_accounts
from hyperfl_flwr.launch.findings import Finding, Level, ok
from hyperfl_flwr.launch.machine_checks import gpus
from hyperfl_flwr.privacy.budget import FILE as PRIVACY_RECORD
from hyperfl_flwr.privacy.budget import PrivacyBudget
from hyperfl_flwr.privacy.release import Release

Found = dict[str, list[Finding]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    port = free_port()
    deployment = Deployment(folder=tmp_path_factory.mktemp("o") / "d", host="127.0.0.1", port=port, num_nodes=2)
    init(deployment)
    return deployment


@pytest.fixture
def deployment(original: Deployment, tmp_path: Path) -> Deployment:
    shutil.copytree(original.folder, tmp_path / "moved")
    return Deployment.read(tmp_path / "moved")


@pytest.fixture(autouse=True)
def no_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the other accounts that use this machine."""
    monkeypatch.setattr(other_accounts, "other_accounts", list)


def look(folder: Path, **told: Scalar) -> Found:
    found: Found = {}
    for finding in check(folder, {f"data.{key.replace('_', '-')}": value for key, value in told.items()}):
        found.setdefault(finding.subject, []).append(finding)
    return found


def errors(found: Found) -> dict[str, str]:
    return {
        subject: finding.text
        for subject, findings in found.items()
        for finding in findings
        if finding.level is Level.ERROR
    }


def warnings(found: Found) -> dict[str, str]:
    return {
        subject: finding.text
        for subject, findings in found.items()
        for finding in findings
        if finding.level is Level.WARNING
    }


@pytest.fixture
def running(deployment: Deployment) -> Iterator[Deployment]:
    with https_server(deployment.server, port=deployment.port):
        yield deployment


def test_a_new_deployment_only_lacks_its_superlink(deployment: Deployment) -> None:
    found = look(deployment.folder)
    assert errors(found) == {}
    assert warnings(found) == {"superlink": "not running", "nodes": "2 (0, 1) not registered"}
    assert found["peers"] == look(deployment.node(1))["peers"]  # the same fingerprint on both sides


def test_another_program_has_the_port(deployment: Deployment) -> None:
    with https_server(None, port=deployment.port):
        (port,) = errors(look(deployment.folder)).items()
        told = f"{deployment.port} is in use by another program: 127.0.0.1:{deployment.port} does not use TLS"
        assert port == ("port", told)
    with https_server(deployment.server, port=deployment.port, status=404):
        assert "is not a SuperLink" in errors(look(deployment.folder))["port"]


def test_nginx_on_the_public_address_does_not_have_the_port(deployment: Deployment) -> None:
    with socket.socket() as nginx:
        try:
            nginx.bind(("127.0.0.2", deployment.port))
        except OSError:
            pytest.skip("NEEDS THE ADDRESS 127.0.0.2")
        nginx.listen()
        found = look(deployment.folder)
    assert errors(found) == {}
    assert warnings(found)["superlink"] == "not running"


def test_another_deployments_superlink_has_the_port(deployment: Deployment, tmp_path: Path) -> None:
    write_authority(tmp_path)
    write_server_certificate(tmp_path, tmp_path, "127.0.0.1")
    with https_server(tmp_path, port=deployment.port):
        assert "was issued by another authority" in errors(look(deployment.folder))["certificate"]


def test_a_certificate_that_was_renewed_while_the_superlink_runs(running: Deployment) -> None:
    assert "superlink" not in warnings(look(running.folder))
    renew(running)
    assert warnings(look(running.folder))["superlink"] == "running with an older certificate than server.crt"


def _expire(deployment: Deployment) -> None:
    write_server_certificate(deployment.authority, deployment.server, deployment.host, days=-0.01)


def _expire_soon(deployment: Deployment) -> None:
    write_server_certificate(deployment.authority, deployment.server, deployment.host, days=20)


def _move(deployment: Deployment) -> None:
    Deployment(folder=deployment.folder, host="localhost.localdomain", port=deployment.port, num_nodes=2).write()


def _sign_by_another(deployment: Deployment) -> None:
    write_authority(deployment.authority)
    renew(deployment)


def _mix_keys(deployment: Deployment) -> None:
    key = (deployment.server / "server.key").read_bytes()
    renew(deployment)
    (deployment.server / "server.key").write_bytes(key)


def _damage(deployment: Deployment) -> None:
    (deployment.server / "server.crt").write_text("nonsense")


@pytest.mark.parametrize(
    ("fault", "level", "text"),
    [
        (_expire, Level.ERROR, "the certificate expired"),
        (_expire_soon, Level.WARNING, "the certificate expires on"),
        (_move, Level.ERROR, "but not for localhost.localdomain"),
        (_sign_by_another, Level.ERROR, "by another authority than ca.crt"),
        (_mix_keys, Level.ERROR, "is not the key of server.crt"),
        (_damage, Level.ERROR, "is damaged"),
    ],
)
def test_a_certificate_that_is_wrong(
    deployment: Deployment, fault: Callable[[Deployment], None], level: Level, text: str
) -> None:
    fault(deployment)
    told = [finding for finding in look(deployment.folder)["certificate"] if finding.level is level]
    assert len(told) == 1
    assert text in told[0].text
    assert "hyperfl deploy renew" in told[0].remedy


def test_what_others_could_read_or_is_missing(deployment: Deployment) -> None:
    (deployment.server / "server.key").chmod(0o640)
    (deployment.server / "start.sh").unlink()
    found = errors(look(deployment.folder))
    assert "server.key (mode 640)" in found["modes"]
    assert "start.sh missing" in found["files"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may change a file's owner")
def test_keys_of_another_user_than_their_folder_are_named(deployment: Deployment) -> None:
    for folder in (deployment.server, deployment.node(0)):
        os.chown(folder, 1234, -1)
    (found,) = [one for one in look(deployment.node(0))["modes"] if one.level is Level.ERROR]
    assert found.text.endswith("node.key belongs to uid 0, its folder to uid 1234")
    assert found.remedy == f"sudo chown -h 1234 {deployment.node(0) / 'node.key'}"
    texts = [one.text for one in look(deployment.folder)["modes"] if one.level is Level.ERROR]
    assert any("server.key belongs to uid 0" in text for text in texts)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may change a file's owner")
def test_programs_of_another_user_than_their_folder_are_named(deployment: Deployment) -> None:
    """The service of the folder's user cannot read a start.sh of root's."""
    os.chown(deployment.server, 1234, -1)
    found = [one for one in look(deployment.folder)["owners"] if one.level is Level.ERROR]
    names = {one.text.split(" belongs to uid 0")[0].rpartition("/")[2] for one in found}
    assert names >= {"start.sh", "nginx.conf", "server.crt"}
    assert {one.remedy.partition(" /")[0] for one in found} == {"sudo chown -h 0", "sudo chown -h 1234"}


def test_nginx_that_still_shows_the_old_certificate_is_named(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the file when it starts. Replaced is only the way to the host's name, of which no address is here."""
    host = "fl.example.org"
    replace(deployment, host=host).write()
    shown = [certificate_of(deployment)]

    def probed(to: str, port: int, root_certificates: Path, *, direct: bool) -> tuple[Answer | None, Finding]:
        if to != host:
            return probe(to, port, root_certificates, direct=direct)
        return Answer(certificate=shown[0], ahead=None), ok("connection", "nginx answers")

    monkeypatch.setattr(check_server, "probe", probed)
    renew(deployment)
    with https_server(deployment.server, port=deployment.port):
        assert warnings(look(deployment.folder))["nginx"] == f"{host} shows an older certificate than server.crt"
        shown[0] = certificate_of(deployment)
        assert "nginx" not in warnings(look(deployment.folder))
        shown[0] = b"of another program"
        (deployment.server / "nginx.conf").unlink()
        assert "nginx" not in warnings(look(deployment.folder))


def certificate_of(deployment: Deployment) -> bytes:
    return read_certificate(deployment.server / "server.crt").public_bytes(serialization.Encoding.DER)


def test_a_key_that_this_user_may_not_read_need_not_be_restored(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(StateError, match=r"node\.key cannot be read \(Permission denied\); make it readable for this"):
        read_node_key(deployment.node(0) / "node.key")


def test_commands_hold_paths_that_a_shell_would_split(tmp_path: Path) -> None:
    deployment = Deployment(folder=tmp_path / "o'brien's node", host="127.0.0.1", port=free_port(), num_nodes=1)
    init(deployment)
    opened = [deployment.server / "server.key", deployment.node(0) / "peers.toml"]
    opened[0].chmod(0o644)
    opened[1].chmod(0o666)
    deployment.peers.unlink()
    found, folder = look(deployment.folder), str(deployment.folder)
    with https_server(None, port=deployment.port):
        taken = look(deployment.folder)["port"][0].remedy
    words = [
        (found["modes"][0].remedy, ["chmod", "go=", str(opened[0])]),
        (look(deployment.node(0))["peers"][0].remedy, ["chmod", "go-w", str(opened[1])]),
        (found["peers"][0].remedy.partition(", and")[0], ["hyperfl", "deploy", "peers", folder]),
        (found["superlink"][0].remedy.removeprefix("start it: "), ["sh", str(deployment.server / "start.sh")]),
        (found["nodes"][0].remedy.partition(" while")[0], ["hyperfl", "deploy", "register", folder]),
        (re.findall(r"port: (.*), and", taken)[0], ["hyperfl", "deploy", "move", folder, "--port", "PORT"]),
        (re.findall(r"`(.*)`", _remedy(deployment))[0], ["hyperfl", "deploy", "check", folder]),
    ]
    assert [shlex.split(command) for command, _ in words] == [expected for _, expected in words]


def test_public_keys_that_are_missing_and_a_number_of_nodes_that_was_changed(deployment: Deployment) -> None:
    """Both problems are found even before the SuperLink has a database."""
    Deployment(folder=deployment.folder, host=deployment.host, port=deployment.port, num_nodes=3).write()
    found = errors(look(deployment.folder))
    assert "keys/node-2.pub missing" in found["files"]
    assert "node-2.pub cannot be read" in found["nodes"]


def test_the_nodes_keys_do_not_stay_with_the_operator_of_a_real_host(deployment: Deployment) -> None:
    assert "handing over" not in look(deployment.folder)
    Deployment(folder=deployment.folder, host="fl.invalid", port=deployment.port, num_nodes=2).write()
    shutil.rmtree(deployment.node(1))
    found = warnings(look(deployment.folder))
    assert found["handing over"] == "the private keys of the nodes 0 are still here"
    assert "cannot resolve fl.invalid" in found["host"]


def test_other_users_of_the_machine_are_a_warning_on_both_sides(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_accounts, "other_accounts", lambda: ["ann"])
    for folder in (deployment.folder, deployment.node(0)):
        assert "(ann) can reach the loopback ports" in warnings(look(folder))["other users"]


def test_which_nodes_are_there_is_read_from_the_database(running: Deployment) -> None:
    """The nodes' states are read from a table with Flower's columns; tests/deployment reads a real one."""
    with sqlite3.connect(running.database) as connection:
        connection.execute(f"CREATE TABLE node ({NODE_COLUMNS})")
        for number, status, until in ((0, "online", time.time() + 60), (1, "online", time.time() - 1)):
            key = read_public_key(running.public_key(number))
            pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            connection.execute(
                "INSERT INTO node VALUES (?, ?, ?, NULL, NULL, ?, NULL)", (-number - 1, status, until, pem)
            )
    connection.close()
    assert [finding.text for finding in look(running.folder)["nodes"]] == ["1 (1) away, 1 (0) connected"]


def test_a_replaced_key_that_is_still_registered_is_an_error(deployment: Deployment, tmp_path: Path) -> None:
    write_node_key(tmp_path, "node-0")
    key = read_public_key(tmp_path / "node.pub")
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    with sqlite3.connect(deployment.database) as connection:
        connection.execute(f"CREATE TABLE node ({NODE_COLUMNS})")
        connection.execute("INSERT INTO node VALUES (1, 'online', 0, NULL, NULL, ?, NULL)", (pem,))
    connection.close()
    assert errors(look(deployment.folder))["nodes"] == "replaced keys that can still connect: 1"


def test_a_node_whose_superlink_is_away(deployment: Deployment) -> None:
    found = look(deployment.node(0))
    assert list(errors(found)) == ["connection"]
    assert warnings(found) == {
        "data": "not set in node.toml; the node uses the data set of the run",
        "secure sums": "2 nodes are too few for min-cohort = 3, max-colluding = 0, so this node "
        "refuses every secure sum",
    }


def _settings(deployment: Deployment, text: str) -> Path:
    folder = deployment.node(1)
    (folder / "node.toml").write_text(text)
    return folder


def test_data_that_can_be_read_are_described(deployment: Deployment) -> None:
    images = np.random.default_rng(0).integers(0, 255, (30, 8, 8), dtype=np.uint8)
    np.savez(deployment.node(1) / "mine.npz", images=images, labels=np.arange(30) % 3)
    found = look(_settings(deployment, 'data = "npz:mine.npz"'))
    (data,) = found["data"]
    assert data.level is Level.OK
    assert "1 x 8 x 8, 3 classes" in data.text
    limits = 'data = "npz:mine.npz"\nmin-samples = 100\nmin-test-samples = 6'  # it has 24 to train on, and 6
    found, *others = [each for each in look(_settings(deployment, limits))["data"] if each.level is Level.ERROR]
    assert found.text == "24 samples are fewer than min-samples = 100, so that no round is answered"
    assert (found.remedy, others) == ("lower min-samples in node.toml", [])
    few = 'data = "npz:mine.npz"\nmin-test-samples = 7'  # a node with a privacy budget sends no accuracies
    for more, levels in (("", {Level.OK, Level.ERROR}), ("\nmax-epsilon = 4.0", {Level.OK})):
        assert {each.level for each in look(_settings(deployment, few + more))["data"]} == levels


def test_a_folder_of_images_is_described_and_a_damaged_image_named(deployment: Deployment) -> None:
    for name in ("cat", "dog"):
        (deployment.node(1) / "mine" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (8, 8), number).save(deployment.node(1) / "mine" / name / f"{number}.png")
    (data,) = look(_settings(deployment, 'data = "folder:mine"'))["data"]
    assert data.level is Level.OK
    assert "1 x 8 x 8, 2 classes" in data.text
    (deployment.node(1) / "mine" / "dog" / "3.png").write_bytes(b"nonsense")
    assert "3.png" in errors(look(deployment.node(1)))["data"]


@pytest.mark.parametrize(
    ("text", "subject", "told"),
    [
        ('data = "npz:missing.npz"', "data", "missing.npz"),
        ('data = "nosuchset"', "settings", "nosuchset"),
        ('device = "cuda:77"', "device", "cuda:77"),
        ('mixing-key-file = "missing"', "mixing-key-file", "cannot be read"),
        ('novel-data = "missing"\nnovel-output = "o"', "novel-data", "is missing"),
        ('join-data = "npz:missing.npz"\nnovel-output = "o"', "join-data", "is missing"),
        ('novel-data = "node.toml"', "novel-output", "needs a folder"),
        ('dvice = "cpu"', "settings", "did you mean device"),
    ],
)
def test_settings_that_cannot_work(deployment: Deployment, text: str, subject: str, told: str) -> None:
    assert told in errors(look(_settings(deployment, text)))[subject]


def test_a_node_with_other_versions(deployment: Deployment) -> None:
    file = deployment.node(0) / "versions.toml"
    text = file.read_text()
    name = text.splitlines()
    file.write_text("\n".join('flwr = "1.40.0"' if line.startswith("flwr") else line for line in name))
    assert "the operator had 1.40.0 when this folder was created" in errors(look(deployment.node(0)))["versions"]
    file.write_text("\n".join('torch = "1.0"' if line.startswith("torch") else line for line in name))
    assert "the operator had 1.0" in warnings(look(deployment.node(0)))["versions"]
    file.write_text(text.replace('"\n', '+cu129"\n'))
    assert "versions" not in errors(look(deployment.node(0)))  # another build of the same version


def test_a_damaged_key_and_an_open_one(running: Deployment) -> None:
    key = running.node(0) / "node.key"
    key.write_text("nonsense")
    key.chmod(0o644)
    found = errors(look(running.node(0)))
    assert "is damaged" in found["key"]
    assert "node.key (mode 644)" in found["modes"]


def test_a_state_folder_that_cannot_be_written(deployment: Deployment) -> None:
    folder = _settings(deployment, 'state-dir = "/proc/state"')  # not even root can create a file there
    assert "is not writable" in errors(look(folder))["state"]


def test_the_privacy_budget_of_a_node(deployment: Deployment) -> None:
    """Without a budget the record is counted; with one, what was spent is compared with it."""
    assert "privacy" not in look(deployment.node(1))
    release = Release(unit="client", mechanism="gaussian", noise_multiplier=1.0)
    record = deployment.node(1) / "state" / PRIVACY_RECORD
    for number in range(10):
        PrivacyBudget(path=record, experiment="a", client=0).spend(number, release)
    (found,) = look(deployment.node(1))["privacy"]
    assert found.text == "10 uploads recorded; max-epsilon is not set in node.toml, so none is refused"
    (found,) = look(_settings(deployment, "max-epsilon = 20"))["privacy"]
    assert (found.level, found.text) == (
        Level.OK, "max-epsilon = 20 at delta 1e-05; 10 uploads have spent 17.86",
    )  # fmt: skip
    folder = _settings(deployment, "max-epsilon = 10")
    assert "10 uploads have spent 17.86" in warnings(look(folder))["privacy"]
    PrivacyBudget(path=record, experiment="b", client=0).spend(1, None)
    assert "11 uploads have spent inf" in warnings(look(folder))["privacy"]
    with record.open("a") as file:
        file.write("x\n")
    assert "line 12 of the privacy record" in errors(look(folder))["privacy"]


def test_a_state_folder_that_others_can_use(deployment: Deployment, tmp_path: Path) -> None:
    """The state folder that node.toml names is checked, wherever it is."""
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    folder = _settings(deployment, f'state-dir = "{tmp_path / "elsewhere"}"')
    assert f"other users have access to {tmp_path / 'elsewhere'} (mode 755)" in errors(look(folder))["state"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a usable GPU")
def test_a_gpu_that_torch_cannot_use_is_told(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's version in /proc without a GPU that torch finds is a warning, unless the device is the CPU."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n")
    monkeypatch.setattr(check_node, "gpus", lambda: gpus(tmp_path / "version"))
    assert "driver 535.104.05" in warnings(look(_settings(deployment, 'device = "auto"')))["GPU"]
    assert "GPU" not in look(_settings(deployment, 'device = "cpu"'))


def test_a_folder_is_read_as_the_run_will(deployment: Deployment) -> None:
    """Images of two sizes are refused unless the run's settings give a shape; the run's classes must fit, too."""
    for part in ("train", "test"):
        for name, size in (("cat", 9), ("dog", 12)):
            (deployment.node(1) / "images" / part / name).mkdir(parents=True)
            for number in range(4):
                Image.new("L", (size, size), 40 * number).save(
                    deployment.node(1) / "images" / part / name / f"{number}.png"
                )
    folder = _settings(deployment, 'data = "folder:images"')
    assert "data" in errors(look(folder))
    (found,) = look(folder, input_shape="1x8x8", classes="bird,cat,dog")["data"]
    assert found.text == f"folder:{folder}/images: 1 x 8 x 8, 3 classes, 8 samples for training, 8 for testing"
    assert list((folder / "state").glob("decoded/*"))  # where the run will find them
    assert "dog" in errors(look(folder, input_shape="1x8x8", classes="bird,cat"))["data"]


def test_a_folder_of_neither_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a deployment"):
        check(tmp_path, {})
