"""Arrays on disk: they are written whole or not at all, damage is detected, and nothing is unpickled."""

import errno
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import unwritable, write_atomically, write_for_owner
from hyperfl_flwr.core.files.storage import read_arrays, stored_bytes, write_arrays
from hyperfl_flwr.launch import in_process_app

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may change a file's owner")

ARRAYS = {"group/a": np.arange(6, dtype=np.float32).reshape(2, 3), "group/b": np.array([-1], np.int64)}
META = {"round": 3, "name": "ä"}


def same(found: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    arrays, meta = found
    return meta == META and {k: (v.dtype, v.shape, v.tobytes()) for k, v in arrays.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in ARRAYS.items()
    }


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "arrays.npz"
    write_arrays(path, ARRAYS, META)
    return path


def test_arrays_and_meta_come_back_unchanged(stored: Path) -> None:
    assert same(read_arrays(stored))


def test_sizes_are_those_of_the_arrays(stored: Path, tmp_path: Path) -> None:
    """Sizes do not include NumPy's and zip's headers; a damaged file is an error."""
    assert stored_bytes(stored) == {"group/a": 24, "group/b": 8}
    write_arrays(tmp_path / "x.npz", {"none": np.zeros((0, 3)), "one": np.float16(1)}, {})
    assert stored_bytes(tmp_path / "x.npz") == {"none": 0, "one": 2}
    (tmp_path / "x.npz").write_bytes(stored.read_bytes()[:-30])
    with pytest.raises(StateError, match="is damaged"):
        stored_bytes(tmp_path / "x.npz")


def test_an_array_without_dimensions_keeps_none(tmp_path: Path) -> None:
    """The counter of a batch normalisation has the shape (), which a client's state must keep."""
    write_arrays(tmp_path / "x.npz", {"norm/num_batches_tracked": np.array(7, np.int64)}, {})
    back = read_arrays(tmp_path / "x.npz")[0]["norm/num_batches_tracked"]
    assert (back.shape, back.dtype, int(back.reshape(()))) == ((), np.int64, 7)


def test_the_file_is_an_ordinary_npz(stored: Path) -> None:
    """Numpy itself reads the same arrays."""
    with np.load(stored, allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["group/a"], ARRAYS["group/a"])


def test_arrays_that_are_not_contiguous(tmp_path: Path) -> None:
    """A transposed view and a strided one are read back with equal values."""
    base = np.arange(12.0).reshape(3, 4)
    views = {"t": base.T, "s": base[::2, ::-1]}
    write_arrays(tmp_path / "x.npz", views, {})
    for key, value in read_arrays(tmp_path / "x.npz")[0].items():
        np.testing.assert_array_equal(value, views[key])


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_modes_do_not_depend_on_the_umask_or_on_the_old_file(tmp_path: Path, mode: int) -> None:
    old = os.umask(0)
    try:
        for name, write in (("a", lambda p: write_atomically(p, b"x", mode=mode)),
                            ("b", lambda p: write_arrays(p, {}, {}, mode=mode))):  # fmt: skip
            path = tmp_path / name
            path.touch(mode=0o666)
            write(path)
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(old)


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    """Neither where the folder is missing, nor where the file is a folder; nothing is left."""
    (folder := tmp_path / "folder").mkdir()
    for path in (tmp_path / "gone" / "x", folder):
        with pytest.raises(OSError, match=rf"^\[Errno \d+\] [\w ]+: '{path}'$") as caught:
            write_atomically(path, b"x")
        assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [folder]


@needs_root
def test_root_keeps_a_file_s_owner_where_that_is_wanted(tmp_path: Path) -> None:
    """A new file goes to the folder's owner, and a link is replaced as it is; nothing else changes its owner."""
    os.chown(tmp_path, 1234, 2345)
    (tmp_path / "other").write_bytes(b"root's")
    (tmp_path / "link").symlink_to("other")
    os.chown(tmp_path / "link", 3456, 4567, follow_symlinks=False)
    (tmp_path / "old").touch()
    os.chown(tmp_path / "old", 5678, 6789)
    for name in ("old", "new", "link"):
        write_for_owner(tmp_path / name, b"x", mode=0o600)
    write_atomically(tmp_path / "plain", b"x", mode=0o600)
    found = {path.name: path.lstat() for path in tmp_path.iterdir()}
    assert {name: (status.st_uid, status.st_gid) for name, status in found.items()} == {
        "old": (5678, 6789), "new": (1234, 2345), "link": (3456, 4567), "other": (0, 0), "plain": (0, 0),
    }  # fmt: skip
    assert all(stat.S_IMODE(found[name].st_mode) == 0o600 for name in ("old", "new", "link", "plain"))
    assert (tmp_path / "other").read_bytes() == b"root's"


@needs_root
def test_a_folder_s_owner_turns_no_write_of_root_on_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the folder can put links in the place of the temporary file, and of the folder itself."""
    (folder := tmp_path / "folder").mkdir()
    os.chown(folder, 1234, 2345)
    (roots := tmp_path / "roots").mkdir()
    secret = roots / "file"
    secret.write_bytes(b"root's")
    secret.chmod(0o600)
    sync = os.fsync

    def attacked(handle: int) -> None:
        for temporary in folder.glob(".file.*"):
            temporary.unlink()
            temporary.symlink_to(secret)
        if not folder.is_symlink():
            folder.rename(tmp_path / "away")
            folder.symlink_to(roots)
        sync(handle)

    monkeypatch.setattr(os, "fsync", attacked)
    write_for_owner(folder / "file", b"new", mode=0o644)
    assert (secret.read_bytes(), stat.S_IMODE(secret.stat().st_mode), secret.stat().st_uid) == (b"root's", 0o600, 0)


def test_only_root_gives_files_away_and_a_refusal_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def refused(_: int, uid: int, __: int) -> None:
        given.append(uid)
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "fchown", refused)
    for user in (1000, 0):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        write_for_owner(tmp_path / "key", str(user).encode())
        assert (tmp_path / "key").read_text() == str(user)
    assert given == [tmp_path.stat().st_uid]


@pytest.mark.parametrize("moment", ["replace", "fsync", "fchmod"])
def test_a_crash_leaves_the_old_file_and_nothing_else(
    stored: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Writing fails at its last steps: the old content is read back and no temporary file remains."""

    def crash(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, crash)
        with pytest.raises(OSError, match="disk full"):
            write_arrays(stored, {"other": np.zeros(2)}, {})
        with pytest.raises(OSError, match="disk full"):
            write_atomically(stored, b"other")
    assert same(read_arrays(stored))
    assert list(stored.parent.iterdir()) == [stored]


def test_a_run_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file could not be written; another error of the system is shown as it is."""
    settings = default_settings() | {"output": str(tmp_path / "run")}
    for number, text in ((errno.ENOSPC, f"the disk of {tmp_path / 'run'} is full ("), (errno.EIO, "OSError: [Errno")):

        def full(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("hyperfl_flwr.app.server.run", full)
        problem = in_process_app.answer("run", settings, 1)
        assert str(problem).startswith(text)
    assert unwritable(tmp_path, OSError(errno.ENOSPC, "full"), 5).endswith("free at least 5 bytes")


def test_everything_is_on_disk_before_the_new_name_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is flushed before the rename and the folder after it: the only order that survives a power cut."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(*names: str, **folders: int) -> None:
        events.append("rename")
        replace(*names, **folders)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    write_arrays(tmp_path / "a", ARRAYS, META)
    write_atomically(tmp_path / "b", b"x")
    assert events == ["file", "rename", "folder"] * 2


@pytest.mark.parametrize("mask", [0xFF, 0x01, 0x20, 0x80])
def test_a_flipped_byte_anywhere_is_seen_or_harmless(stored: Path, mask: int) -> None:
    """Wherever a byte changes, reading ends with a StateError or gives what was written (e.g. for a time stamp).

    A change within the arrays or the metadata must always be detected.
    """
    data = stored.read_bytes()
    with zipfile.ZipFile(stored) as archive:
        members = [(info.header_offset, archive.read(info)) for info in archive.infolist()]
    protected = {
        position
        for offset, content in members
        for position in range(data.index(content, offset), data.index(content, offset) + len(content))
    }
    assert len(protected) > 300
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= mask
        stored.write_bytes(damaged)
        try:
            found = read_arrays(stored)
        except StateError:
            continue
        assert position not in protected, position
        assert same(found), position


def test_a_truncated_file_is_refused(stored: Path) -> None:
    data = stored.read_bytes()
    for length in range(0, len(data), 7):
        stored.write_bytes(data[:length])
        with pytest.raises(StateError, match="is damaged"):
            read_arrays(stored)


def test_a_missing_file_and_a_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is missing"):
        read_arrays(tmp_path / "none.npz")
    with pytest.raises(StateError, match="is damaged"):
        read_arrays(tmp_path)


def test_an_archive_without_meta(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(2))
    with pytest.raises(StateError, match="is damaged"):
        read_arrays(tmp_path / "x.npz")


class Evil:
    """An object that leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("unpickled",)


def test_nothing_is_pickled_or_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of objects can neither be written nor read."""
    monkeypatch.chdir(tmp_path)
    objects = np.array([Evil()], dtype=object)
    with pytest.raises(ValueError, match="allow_pickle"):
        write_arrays(tmp_path / "x.npz", {"a": objects}, {})
    assert list(tmp_path.iterdir()) == []
    np.savez(tmp_path / "y.npz", a=objects)
    with zipfile.ZipFile(tmp_path / "y.npz", "a") as archive:
        archive.writestr("meta.json", "{}")
    with pytest.raises(StateError, match="is damaged"):
        read_arrays(tmp_path / "y.npz")
    assert not (tmp_path / "unpickled").exists()
