"""Let several processes, also on several machines, work on one study's folder: each cell is trained by one of them.

A process claims a cell by a file lock, which the kernel releases when the process ends, however it ends.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from hyperfl_flwr.core.errors import FolderInUseError
from hyperfl_flwr.core.files.folder_lock import lock_folder

CLAIMS = ".claims"
"""Folder of the locks, in a study's folder."""

WAIT_SECONDS = 60.0
"""Longest wait for another process that creates the study's folder, which takes some milliseconds."""

TAKEN = "another process is training it; skipped"
"""Note on a cell that another process has claimed."""


def is_foreign(folder: Path, description: str) -> bool:
    """Return whether a folder exists, is not empty, and is not a study's.

    Args:
        folder: The folder.
        description: Name of the file that describes a study's folder.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return bool(names) and not names & {description, CLAIMS}


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Create a study's folder if it is missing, and keep other processes waiting here within this context.

    Raises:
        RunDirectoryError: If another process stays here for a minute, or the file system has no locks.
    """
    path, end = folder / CLAIMS, time.monotonic() + WAIT_SECONDS
    path.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            lock = lock_folder(path)
            break
        except FolderInUseError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    with lock:
        yield


@contextlib.contextmanager
def claimed(folder: Path, cell: Path) -> Iterator[bool]:
    """Claim a cell within this context.

    Args:
        folder: The study's folder.
        cell: Folder of the cell's run, in the study's.

    Yields:
        Whether the cell is claimed; False if another process has claimed it.

    Raises:
        RunDirectoryError: If the file system has no locks.
    """
    path = folder / CLAIMS / cell.relative_to(folder)  # nested, since names have hyphens
    path.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(path)
    except FolderInUseError:
        yield False
        return
    with lock:
        yield True
