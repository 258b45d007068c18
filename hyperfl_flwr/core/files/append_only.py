"""Append to a file of lines that several processes share; a line is on disk, in full, when it counts as written."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from hyperfl_flwr.core.files.atomic_files import sync_folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Yield a descriptor of a file that no other process appends to within this context; waits for another holder.

    A missing file is created in its folder, which is created, too, both with access for their owner only; its name is
    then on disk before anything is appended.

    Raises:
        OSError: If the file cannot be opened, or a new one cannot be made durable.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not os.fstat(file).st_size:  # new: after a power failure a synced file could have no name
            sync_folder(path.parent)
        yield file
    finally:
        os.close(file)


def append(file: int, line: bytes) -> None:
    """Append a line, which ends with a line break, to a file of `locked`; it is on disk when this returns.

    Raises:
        OSError: If the line cannot be written in full; the file is unchanged.
    """
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        line = b"\n" + line  # a crash left an incomplete last line; it stays, and the new one gets a separate line
    try:
        written = 0
        while written < len(line):
            written += os.write(file, line[written:])
        os.fsync(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)  # the caller does not go on without a complete line: no partial one may remain
        raise
