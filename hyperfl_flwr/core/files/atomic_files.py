"""Replace files atomically and durably, and explain why one could not be written; without numpy.

A command that only writes text need not wait until numpy is imported.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, owner: os.stat_result | None = None) -> None:
    """Replace the content of a file; readers see either the old or the new content in full, even after a crash."""
    with replacement(path, mode, owner=owner) as file:
        file.write(data)


def write_for_owner(file: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file; if root does, it belongs to the user of the one that it replaces, or of the folder.

    With `sudo`, the files of a deployment stay readable for the user who runs its services. What is written must be
    this user's to read: nothing that was read from a file of the folder as it is, which may be a link.
    """
    write_atomically(file, data, mode=mode, owner=owner_of(file))


@contextlib.contextmanager
def replacement(path: Path, mode: int, *, owner: os.stat_result | None = None) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` at the end of a `with` block, or is removed after an exception.

    Args:
        path: The file to replace or create, in an existing folder.
        mode: Its permissions.
        owner: Status of something whose owner it gets if root writes it, see `owner_of`. None: it is root's.

    Raises:
        OSError: If it cannot be written, with its name.
    """
    with _named(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            # The content must be on disk before the rename: after a power failure the new name could hold no data.
            file.flush()
            os.fsync(file.fileno())
            if owner is not None and os.geteuid() == 0:
                # File systems and containers may refuse it; the file is then root's, which is better than none.
                with contextlib.suppress(OSError):
                    os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
        with _named(path):
            temporary.chmod(mode)
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself is durable only after the folder is synced.
    sync_folder(path.parent)


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


def owner_of(path: Path) -> os.stat_result:
    """Return the status of a file or link or, if it does not exist, of its folder: whose what replaces it should be."""
    return path.lstat() if os.path.lexists(path) else path.parent.stat()


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
