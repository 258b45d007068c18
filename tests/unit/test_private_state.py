"""A client's private arrays on its node's disk."""

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.node.private_state import PrivateState, client_folders, largest_state
from hyperfl_flwr.node.saved_models import KeptModel

ARRAYS = {"embedding/v": np.arange(4, dtype=np.float32), "classifier/weight": np.ones((2, 3))}


@pytest.fixture
def state(tmp_path: Path) -> PrivateState:
    return PrivateState(tmp_path / "node" / "run", "ab12", 3)


def versions(state: PrivateState) -> list[str]:
    return sorted(path.name for path in state.directory.iterdir())


def test_a_version_comes_back_unchanged(state: PrivateState) -> None:
    state.save(7, ARRAYS)
    back = state.load(7)
    assert back.keys() == ARRAYS.keys()
    for key, value in ARRAYS.items():
        np.testing.assert_array_equal(back[key], value, strict=True)


def test_files_and_folders_are_their_owners_alone(state: PrivateState) -> None:
    """Folders have the mode 0700 and files 0600, whatever the umask."""
    old = os.umask(0)
    try:
        state.save(1, ARRAYS)
    finally:
        os.umask(old)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (state.directory.parent, state.directory, state.path(1))]
    assert modes == [0o700, 0o700, 0o600]


def test_versions_stand_side_by_side(state: PrivateState) -> None:
    """Version 2 is loaded although version 5 was stored later; storing 5 again replaces it."""
    state.save(2, {"a/x": np.array([2.0])})
    state.save(5, {"a/x": np.array([5.0])})
    state.save(5, {"a/x": np.array([5.5])})
    assert [float(state.load(version)["a/x"][0]) for version in (2, 5)] == [2.0, 5.5]
    assert versions(state) == ["round-000002.npz", "round-000005.npz"]


def test_older_versions_of_this_client_are_forgotten(state: PrivateState, tmp_path: Path) -> None:
    """Of the versions before 4 only 2 stays, 4 and 5 are newer, 0 and 9 do not exist; another client's files stay."""
    neighbour = PrivateState(tmp_path / "node" / "run", "ab12", 4)
    neighbour.save(1, ARRAYS)
    for version in (1, 2, 3, 4, 5):
        state.save(version, ARRAYS)
    state.forget_before(4, but={0, 2, 9})
    assert versions(state) == ["round-000002.npz", "round-000004.npz", "round-000005.npz"]
    assert versions(neighbour) == ["round-000001.npz"]


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
import numpy as np
from hyperfl_flwr.node.private_state import PrivateState

os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
PrivateState(Path(sys.argv[1]), "ab12", 3).save(int(sys.argv[2]), {"embedding/v": np.zeros(4)})
"""


def test_what_a_killed_process_left_is_deleted_with_its_version(state: PrivateState) -> None:
    for version in (5, 6):
        words = [sys.executable, "-c", KILLED_WHILE_WRITING, str(state.directory.parent), str(version)]
        assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    state.save(6, ARRAYS)
    assert [name[:17] for name in versions(state)] == [".round-000005.npz", ".round-000006.npz", "round-000006.npz"]
    state.forget_before(6, but=set())
    assert [name[:17] for name in versions(state)] == [".round-000006.npz", "round-000006.npz"]
    state.forget_before(7, but={6})
    assert versions(state) == ["round-000006.npz"]


def test_forgetting_before_the_first_save(state: PrivateState) -> None:
    state.forget_before(1, but=set())
    assert not state.directory.exists()


def test_a_missing_version_is_named(state: PrivateState) -> None:
    with pytest.raises(StateError, match=r"client-00003/round-000001\.npz is missing"):
        state.load(1)


@pytest.mark.parametrize(("experiment", "client", "version"), [("other", 3, 1), ("ab12", 4, 1), ("ab12", 3, 2)])
def test_a_file_of_another_run_client_or_round_is_refused(
    state: PrivateState, tmp_path: Path, experiment: str, client: int, version: int
) -> None:
    """A file names its experiment, client and version; here it is copied to the place of version 1 of client 3."""
    other = PrivateState(tmp_path / "other", experiment, client)
    other.save(version, ARRAYS)
    state.save(1, ARRAYS)
    state.path(1).write_bytes(other.path(version).read_bytes())
    with pytest.raises(StateError, match="must belong to"):
        state.load(1)


def test_the_largest_state_is_that_of_a_newest_version(state: PrivateState, tmp_path: Path) -> None:
    """By hand, for float64 arrays: an older, larger version does not count; without any state the result is None."""
    node = tmp_path / "node" / "run"
    assert largest_state(node) is None
    state.save(1, {"a/x": np.zeros(9)})
    state.save(2, {"a/x": np.zeros(3), "a/y": np.zeros(1)})
    PrivateState(node, "ab12", 1).save(5, {"a/x": np.zeros(2)})
    assert largest_state(node) == 32


def test_each_further_thousand_of_clients_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """At its edges; all folders are private; the largest state is found in each of them."""
    node = tmp_path / "node" / "run"
    for client, folder in (
        (999, "client-00999"),
        (1000, "clients-00001000/client-01000"),
        (12345, "clients-00012000/client-12345"),
    ):
        state = PrivateState(node, "ab12", client)
        state.save(1, {"a/x": np.zeros(client)})
        assert state.directory == node / folder
        assert {
            stat.S_IMODE(path.stat().st_mode) for path in (node, *state.directory.parents[:1], state.directory)
        } == {0o700}
        assert len(PrivateState(node, "ab12", client).load(1)["a/x"]) == client
        assert largest_state(node) == 8 * client


def test_a_folder_of_an_earlier_version_is_used_as_it_is(tmp_path: Path) -> None:
    """It has all clients side by side."""
    (tmp_path / "run" / "client-01000").mkdir(parents=True)
    state = PrivateState(tmp_path / "run", "ab12", 1000)
    state.save(2, ARRAYS)
    assert state.path(2) == tmp_path / "run" / "client-01000" / "round-000002.npz"
    assert client_folders(tmp_path / "run") == [state.directory]
    assert not list(tmp_path.rglob("clients-*"))


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of this process's files, so that the system refuses a write half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LARGE = {"classifier/weight": np.ones(50_000, np.float32)}
"""Arrays of 200,000 bytes."""


def test_a_write_that_breaks_off_leaves_the_old_version(state: PrivateState) -> None:
    state.save(3, ARRAYS)
    before = state.path(3).read_bytes()
    with files_of_at_most(100_000), pytest.raises(StateError) as caught:
        state.save(4, LARGE)
    text = str(caught.value)
    assert text.startswith(f"the state of client 3 after round 4 is not stored: the disk of {state.directory} is full")
    assert text.endswith("free at least 200000 bytes; the state after round 3 is kept")
    assert versions(state) == ["round-000003.npz"]
    assert state.path(3).read_bytes() == before
    state.save(4, LARGE)  # there is room again
    np.testing.assert_array_equal(state.load(4)["classifier/weight"], LARGE["classifier/weight"])


def test_a_model_that_finds_no_room_leaves_the_old_one(tmp_path: Path) -> None:
    recipe = TargetRecipe(target="cnn", input_shape=(1, 8, 8), mean=(0.5,), std=(0.5,), classes=("0", "1"))
    old = KeptModel(
        client=3, experiment="ab12", round=4, method="hyperfl", dataset="digits", score=0.5, test_examples=2,
        recipe=recipe, tensors=ARRAYS, trained_on=np.zeros(0, np.uint64),
    )  # fmt: skip
    folder = tmp_path / "run" / "client-00003"
    old.write(folder)
    with files_of_at_most(100_000), pytest.raises(StateError) as caught:
        replace(old, round=5, tensors=LARGE).write(folder)
    text = str(caught.value)
    assert text.startswith(f"the model of client 3 after round 5 is not saved: the disk of {folder} is full")
    assert text.endswith("free at least 200000 bytes, or set keep-model = false in node.toml")
    assert KeptModel.read(folder).round == 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a separate file system of 128 kB, which only the superuser may do, and yield its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_version(small_disk: Path) -> None:
    state = PrivateState(small_disk / "run", "ab12", 3)
    state.save(3, ARRAYS)
    with pytest.raises(StateError, match=r"is full.*free at least 200000 bytes; the state after round 3 is kept"):
        state.save(4, LARGE)
    assert versions(state) == ["round-000003.npz"]
    assert state.load(3).keys() == ARRAYS.keys()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in the place of the folder gives an error."""
    (tmp_path / "node").write_text("")
    with pytest.raises(StateError, match=r"after round 1 is not stored: cannot write to"):
        PrivateState(tmp_path / "node" / "run", "ab12", 3).save(1, ARRAYS)
