"""The folder of a result that is no run, such as an audit."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.runs.run_directory import refuse_used_directory


@contextlib.contextmanager
def result_directory(given: Path | None, default: Path) -> Iterator[Path]:
    """Yield the folder of a result: a given one, or a new one, which is removed at the end if it is still empty.

    Args:
        given: The folder that the user has chosen; None for a new one.
        default: The new one, or its `PATH-2`, `PATH-3` and so on: the first that is not there yet. It is made at once,
            so that no other process takes it.

    Raises:
        RunDirectoryError: If the new one cannot be created.
    """
    if given is not None:
        yield given.absolute()
        return
    for number in itertools.count(1):
        path = default if number == 1 else default.with_name(f"{default.name}-{number}")
        if path.exists():
            continue
        refuse_used_directory(path)  # its error is better than that of the system
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            if not os.path.lexists(path):  # else another process was faster
                text = f"cannot create the output folder {path}: {path.parent} is a link to nothing; choose another one"
                raise RunDirectoryError(text) from None
    try:
        yield path.absolute()
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
