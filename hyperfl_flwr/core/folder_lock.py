"""The lock of a run's folder, which one process at a time writes to; the kernel gives it back when its holder ends."""

import fcntl
import os
from pathlib import Path
from typing import IO

from hyperfl_flwr.core.errors import RunDirectoryError


def lock_folder(path: Path) -> IO[str]:
    """Lock an existing folder until the file that is returned is closed.

    Raises:
        RunDirectoryError: If another process is writing to it.
    """
    # Nobody else may open it: a lock can be taken by whoever can read the file.
    lock = os.fdopen(os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunDirectoryError(f"another process is writing to {path}; wait for it, or stop it") from None
    return lock
