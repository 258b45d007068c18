"""The end of a run on the server: what is recorded, and what is seen if it cannot be."""

import errno
import logging
from pathlib import Path

import pytest

from hyperfl_flwr.app import server
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.log import FLOWER_LOGGER
from hyperfl_flwr.runs.run_directory import RunDirectory, read_manifest

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the manifest be written once, when the run begins."""
    write, written = RunDirectory.write_json, set[str]()

    def refuse(directory: RunDirectory, name: str, document: object) -> None:
        if name in written:
            raise FULL
        written.add(name)
        write(directory, name, document)

    monkeypatch.setattr(RunDirectory, "write_json", refuse)


@pytest.mark.usefixtures("full_disk")
def test_a_failure_is_seen_also_if_it_cannot_be_recorded(
    federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is closed: a later run of this process does not write to it."""

    def fail(*others: object) -> None:
        raise RunFailedError("all clients failed")

    monkeypatch.setattr(server, "_train", fail)
    before = list(FLOWER_LOGGER.handlers)
    run = tmp_path / "run"
    with pytest.raises(RunFailedError, match=r"^all clients failed\n"):
        federate("fedavg", output=str(run))
    assert FLOWER_LOGGER.handlers == before
    FLOWER_LOGGER.log(logging.ERROR, "of a later run")
    log = (run / "server.log").read_text()
    assert "the run's end is not in manifest.json: [Errno 28] No space left on device" in log
    assert "of a later run" not in log
    assert read_manifest(run)["status"] == "running"


@pytest.mark.usefixtures("full_disk")
def test_without_another_failure_the_full_disk_is_one(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_train", lambda *others: None)
    before = list(FLOWER_LOGGER.handlers)
    with pytest.raises(OSError, match="No space left on device"):
        federate("fedavg")
    assert FLOWER_LOGGER.handlers == before
