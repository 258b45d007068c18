"""Replace files atomically and durably, and explain why one could not be written; without numpy.

A command that only writes text need not wait until numpy is imported.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, owner: os.stat_result | None = None) -> None:
    """Replace the content of a file; readers see either the old or the new content in full, even after a crash."""
    with replacement(path, mode, owner=owner) as file:
        file.write(data)


def write_for_owner(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file; if root does, it belongs to the user of the one that it replaces, or of the folder.

    With `sudo`, the files of a deployment stay readable for the user who runs its services. What is written must be
    this user's to read: nothing that was read from a file of the folder as it is, which may be a link.
    """
    with replacement(path, mode, keeps_owner=True) as file:
        file.write(data)


@contextlib.contextmanager
def replacement(
    path: Path, mode: int, *, owner: os.stat_result | None = None, keeps_owner: bool = False
) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` at the end of a `with` block, or is removed after an exception.

    The folder is opened once, and the file is changed through its descriptor: another user who may write to the folder
    can put nothing of somebody else's in the place of either.

    Args:
        path: The file to replace or create, in an existing folder.
        mode: Its permissions.
        owner: Status of something whose owner it gets if root writes it. None: it is root's.
        keeps_owner: Whether, if root writes it, it gets the owner of what it replaces, or else of the folder.

    Raises:
        OSError: If it cannot be written, with its name.
    """
    with _named(path):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _named(path):
            temporary = f".{path.name}.{secrets.token_hex(4)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            handle = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fchmod(file.fileno(), mode)
                if keeps_owner:
                    owner = _owner_in(folder, path.name)
                if owner is not None and os.geteuid() == 0:
                    # File systems and containers may refuse it; the file is then root's, which is better than none.
                    with contextlib.suppress(OSError):
                        os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
                # The content must be on disk before the rename: after a power failure the new name could hold no data.
                os.fsync(file.fileno())
            with _named(path):
                os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)  # the rename itself is durable only after that
    finally:
        os.close(folder)


def _owner_in(folder: int, name: str) -> os.stat_result:
    """Return the status of a file or link in an opened folder or, if it does not exist, of the folder."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return os.fstat(folder)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error name the user's file, and not the temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # an error of the system, which shows its files
            error.filename = str(path)
            del error.filename2  # None would be shown
        raise


def sync_folder(folder: Path) -> None:
    """Make the names of a folder's files durable.

    Raises:
        OSError: If the folder cannot be opened or synced.
    """
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def leftovers(folder: Path, pattern: str) -> list[Path]:
    """Return the temporary files of writers that were killed or still run; `pattern` matches the final file names."""
    return sorted(folder.glob(f".{pattern}.*"))


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a disk, a quota or a file has no room."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def unwritable(folder: Path, error: OSError, num_bytes: int = 0) -> str:
    """Return a message for the user: why something could not be written to a folder, and what to do.

    Args:
        folder: The folder.
        error: The error.
        num_bytes: Size of the file; 0 if it is not known.
    """
    if is_full(error):
        room = f"at least {num_bytes} bytes" if num_bytes else "space on it"
        return f"the disk of {folder} is full ({error.strerror}); free {room}"
    return f"cannot write to {folder} ({error.strerror or error}); check its permissions and its disk"
