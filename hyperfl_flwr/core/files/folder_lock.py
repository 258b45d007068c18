"""Lock a folder so that only one process writes to it; the kernel releases the lock when the process ends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hyperfl_flwr.core.errors import FolderInUseError, RunDirectoryError


def lock_folder(path: Path) -> IO[str]:
    """Lock an existing folder until the returned file is closed.

    Raises:
        FolderInUseError: If another process holds the lock.
        RunDirectoryError: If the file system has no locks.
    """
    # Mode 600: any user who can read the file could take the lock and block the run.
    lock = os.fdopen(os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise FolderInUseError(f"another process is writing to {path}; wait for it, or stop it") from None
    except OSError as error:
        lock.close()
        raise RunDirectoryError(
            f"the file system of {path} must have file locks, got: {error.strerror}; mount it with them (Lustre: "
            f"-o flock), or choose a folder on another one"
        ) from None
    return lock


@contextlib.contextmanager
def wait_for_folder(path: Path, *, is_required: bool = True) -> Iterator[None]:
    """Hold the lock of an existing folder within this context, for a short time; waits for another holder.

    Args:
        path: The folder.
        is_required: False to go on without the lock where the file system has none for folders, as NFS.

    Raises:
        OSError: If the folder cannot be read, or has no lock and `is_required`.
    """
    folder = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:
            if is_required:
                raise
        yield
    finally:
        os.close(folder)
