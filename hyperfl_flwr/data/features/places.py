"""Check and hold the places that `hyperfl features` writes to: the output, its report and the folder of its parts."""

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.files.folder_lock import lock_folder

_OF_REPORTS = {"inputs", "training_images", "users_left_out", "missing", "broken"}
"""Keys by which a file is known to be a report of this command."""


def report_of(output: Path) -> Path:
    """Return the place of the report of an output."""
    return output.with_name(f"{output.name}.json")


def check_places(output: Path) -> None:
    """Check that an output can be written without replacing anything but an earlier report.

    Raises:
        RunDirectoryError: If the output exists, or another file has the place of its report.
    """
    if output.exists():
        raise RunDirectoryError(f"{output} exists; choose another --output, or delete it")
    report = report_of(output)
    if os.path.lexists(report) and not _is_report(report):
        raise RunDirectoryError(
            f"{report} is the place of the report, but has other content; move it, or choose another --output"
        )


@contextlib.contextmanager
def hold_parts(output: Path) -> Iterator[Path]:
    """Make the folder `OUTPUT.parts` if it is missing, and hold its lock within this context.

    Raises:
        RunDirectoryError: As for `check_places`, or if the folder belongs to another user.
        FolderInUseError: If another process is writing to it.
    """
    parts = output.with_name(f"{output.name}.parts")
    if not os.path.lexists(parts):
        parts.mkdir(mode=0o700, exist_ok=True)
    try:
        found = parts.lstat(), parts.stat()  # neither a link nor its folder may be another user's
    except OSError as error:
        raise RunDirectoryError(f"{parts} cannot be used: {error.strerror}; delete it") from None
    if {status.st_uid for status in found} != {os.getuid()} or not stat.S_ISDIR(found[1].st_mode):
        raise RunDirectoryError(
            f"{parts} must be a folder of yours, but is none or belongs to another user; choose another --output"
        )
    with lock_folder(parts):
        check_places(output)  # another call may have finished since the caller looked
        yield parts
    with contextlib.suppress(OSError):
        parts.rmdir()  # network file systems keep a deleted lock file, and so the folder, until the lock is closed


def remove_parts(parts: Path) -> None:
    """Delete a folder of parts whose lock is held."""
    shutil.rmtree(parts, ignore_errors=True)


def _is_report(file: Path) -> bool:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys() >= _OF_REPORTS
