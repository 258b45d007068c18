"""A SuperLink that starts while settings are checked: it is there when it is needed, and gone when it is not."""

import time

import pytest

from hyperfl_flwr.core.errors import InstallationError
from hyperfl_flwr.launch import processes
from hyperfl_flwr.launch.flower import local_superlink
from hyperfl_flwr.launch.flower.early_superlink import EarlySuperLink
from hyperfl_flwr.launch.flower.local_superlink import LocalSuperLink

pytestmark = pytest.mark.slow


def parts(superlink: LocalSuperLink) -> list[int]:
    """Return the ids of a SuperLink's processes, with that of the Flower command that waits for its arguments."""
    client = superlink._client
    assert client is not None
    assert client._commands._process is not None
    return [client._commands._process.pid, *(process.pid for process in superlink._below())]


def test_it_ends_at_once_without_a_run_and_another_one_starts_after_it() -> None:
    with EarlySuperLink() as early:
        first = early.get()
        assert early.get() is first
        pids, home = parts(first), first.home
        assert len(pids) >= 3  # the command, the SuperLink and its SuperExec
        early.discard()
        assert not set(pids) & set(processes.process_table())
        assert not home.exists()
        second = early.get()
        assert second is not first
        pids = parts(second)
        assert set(pids) <= set(processes.process_table())
    assert not set(pids) & set(processes.process_table())


def test_leaving_while_it_starts_does_not_wait_for_it() -> None:
    """The settings were wrong: the SuperLink, which would answer only after a second, is ended before."""
    with EarlySuperLink() as early:
        superlink = early._superlink
        assert superlink is not None
        while superlink._supervisor is None:
            time.sleep(0.01)
    assert superlink._supervisor.poll() is not None
    assert not superlink.home.exists()


def test_none_is_started_that_is_not_wanted() -> None:
    with EarlySuperLink(wanted=False) as early:
        assert early._superlink is None


def test_what_keeps_it_from_starting_is_raised_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise InstallationError(f"{name} is not installed")

    monkeypatch.setattr(local_superlink, "flower_command", missing)
    with EarlySuperLink() as early, pytest.raises(InstallationError, match="flower-superlink is not installed"):
        early.get()
