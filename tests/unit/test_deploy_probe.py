"""Findings about a connection to a SuperLink; each case is caused with a real small server."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from little_servers import https_server, silent_server

import hyperfl_flwr.deploy.checks.probe
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.deploy.checks.probe import Answer, clock, probe
from hyperfl_flwr.deploy.keys import write_authority, write_server_certificate
from hyperfl_flwr.flower.superlink.fleet_api import Registration, ask_registration
from hyperfl_flwr.launch.findings import Level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    write_authority(folder)
    write_server_certificate(folder, folder, "127.0.0.1")
    return folder


def test_a_server_with_the_authoritys_certificate_is_in_order(folder: Path) -> None:
    with https_server(folder) as port:
        answer, found = probe("127.0.0.1", port, folder / "ca.crt")
        assert found.level is Level.OK
        assert answer is not None
        assert answer.ahead is not None
        assert abs(answer.ahead) < 2.5
        assert probe("localhost", port, folder / "ca.crt")[1].level is Level.OK


def told(host: str, port: int, root: Path) -> tuple[str, str]:
    answer, found = probe(host, port, root)
    assert answer is None
    assert found.level is Level.ERROR
    return found.subject, found.text


def test_an_expired_certificate_is_told(folder: Path, tmp_path: Path) -> None:
    write_server_certificate(folder, tmp_path, "127.0.0.1", days=-0.01)
    with https_server(tmp_path) as port:
        assert told("127.0.0.1", port, folder / "ca.crt") == (
            "certificate",
            f"the certificate of 127.0.0.1:{port} has expired",
        )


def test_a_certificate_by_another_authority(folder: Path, tmp_path: Path) -> None:
    write_authority(tmp_path)
    with https_server(folder) as port:
        subject, text = told("127.0.0.1", port, tmp_path / "ca.crt")
    assert subject == "certificate"
    assert "was issued by another authority" in text


def test_a_certificate_for_another_host(folder: Path) -> None:
    with https_server(folder) as port:
        subject, text = told("127.0.0.2", free_port(), folder / "ca.crt")
        assert (subject, "refuses connections" in text) == ("connection", True)  # nothing listens there
    with https_server(folder) as port:
        subject, text = told("127.1", port, folder / "ca.crt")  # another way to write 127.0.0.1: the same server
        remedy = probe("127.1", port, folder / "ca.crt")[1].remedy
    assert subject == "certificate"
    assert "is not valid for 127.1" in text
    assert "`hyperfl deploy move DIR --host 127.1`" in remedy


def test_a_server_without_tls(folder: Path) -> None:
    with https_server(None) as port:
        assert told("127.0.0.1", port, folder / "ca.crt") == ("connection", f"127.0.0.1:{port} does not use TLS")


def test_a_port_that_nobody_has(folder: Path) -> None:
    assert "refuses connections" in told("127.0.0.1", free_port(), folder / "ca.crt")[1]


def test_a_name_that_nobody_has(folder: Path) -> None:
    assert "cannot resolve" in told("nowhere.invalid", 8000, folder / "ca.crt")[1]


def test_a_program_that_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperfl_flwr.deploy.checks.probe, "SECONDS", 0.5)
    with silent_server() as port:
        assert "does not answer within" in told("127.0.0.1", port, folder / "ca.crt")[1]


def test_a_web_server_that_is_no_superlink(folder: Path) -> None:
    with https_server(folder, status=404) as port:
        assert "is not a SuperLink (HTTP status 404)" in told("127.0.0.1", port, folder / "ca.crt")[1]


def test_an_authority_that_cannot_be_read(tmp_path: Path) -> None:
    assert "ca.crt cannot be read" in told("127.0.0.1", 1, tmp_path / "ca.crt")[1]
    (tmp_path / "ca.crt").write_text("nonsense")
    assert "ca.crt cannot be read" in told("127.0.0.1", 1, tmp_path / "ca.crt")[1]


@pytest.mark.parametrize(
    ("ahead", "level"),
    [(0, Level.OK), (8, Level.ERROR), (-20, Level.OK), (-60, Level.WARNING), (-320, Level.ERROR), (9e4, Level.ERROR)],
)
def test_clocks_that_differ_too_much_are_told(folder: Path, ahead: float, level: Level) -> None:
    """Flower accepts signatures from less than 5 s in the future and less than 305 s in the past."""
    with https_server(folder, date=datetime.now(UTC) - timedelta(seconds=ahead)) as port:
        answer, _ = probe("127.0.0.1", port, folder / "ca.crt")
    assert answer is not None
    assert clock(answer).level is level


def test_a_server_that_tells_no_time() -> None:
    assert clock(Answer(certificate=b"", ahead=None)).level is Level.WARNING


@pytest.mark.parametrize(
    ("status", "body", "registration"),
    [
        (401, b'{"detail": "Invalid SuperNode authentication"}', Registration.REFUSED),
        (404, b"<html>", Registration.UNCLEAR),
        (200, b"<html>", Registration.UNCLEAR),
        (500, b'{"code": 1007, "detail": "Invalid"}', Registration.UNCLEAR),
    ],
)
def test_answers_of_others_than_a_superlink(folder: Path, status: int, body: bytes, registration: Registration) -> None:
    """Only Flower's 401 counts as a refusal; tests/deployment has a SuperLink's answers to known and unknown keys."""
    key = ec.generate_private_key(ec.SECP384R1())
    with https_server(folder, status=status, body=body) as port:
        for activate in (False, True):
            answer = ask_registration(f"127.0.0.1:{port}", folder / "ca.crt", key, activate=activate)
            assert answer is registration
