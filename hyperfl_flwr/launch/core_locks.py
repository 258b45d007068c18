"""Share the machine's cores among the concurrent runs of one user, by file locks.

Each core has a lock file, and the process that holds the lock may use the core. The kernel releases a lock when its
holder ends, also by kill -9, and child processes do not inherit it.
"""

import fcntl
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from hyperfl_flwr.core.errors import ConfigError, DeviceError

POLL_SECONDS = 0.5
"""Seconds between two attempts of a waiting run to take a core."""

WAITING = "all cores are taken by other runs; waiting for one (HYPERFL_CORES=N counts N cores; Ctrl-C ends this run)"
"""Note for the user while a run waits."""


def usable_cores(environment: Mapping[str, str] = os.environ) -> list[int]:
    """Return the numbers of the cores that this process may use; `HYPERFL_CORES` overrides their count.

    Raises:
        ConfigError: If `HYPERFL_CORES` is not a positive integer.
    """
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    override = environment.get("HYPERFL_CORES", "")
    if not override:
        return cores
    if not override.isascii() or not override.isdigit() or int(override) < 1:
        raise ConfigError(f"HYPERFL_CORES must be a positive integer, got {override!r}.")
    numbers = range(max(cores) + 1, max(cores) + 1 + int(override))
    return [*cores, *numbers][: int(override)]


def slots_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the lock files, one per user and machine; it is created if missing.

    Raises:
        DeviceError: If none of the usual places is writable.
    """
    runtime = environment.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    cache = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME") or "/nonexistent") / ".cache")
    places = [
        Path(runtime) / "hyperfl" / "cores",
        Path(cache) / "hyperfl" / "cores" / socket.gethostname(),  # a home may be shared by several machines
        Path(tempfile.gettempdir()) / f"hyperfl-{os.getuid()}" / "cores",
    ]
    if not Path(runtime).is_dir():  # only the system may create it
        places.pop(0)
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(place, os.W_OK | os.X_OK) and place.stat().st_uid == os.getuid():
            return place
    raise DeviceError(
        f"No folder for the lock files of the cores is writable, tried {', '.join(map(str, places))}; "
        f"set XDG_CACHE_HOME to a writable folder."
    )


class CoreSlots:
    """Reserve cores for this process among the user's runs.

    Example::

        with CoreSlots() as slots:
            num_actors = slots.acquire(8)

    Args:
        folder: Folder of the lock files; by default `slots_folder()`.
        cores: Numbers of the cores to share; by default `usable_cores()`.
    """

    def __init__(self, folder: Path | None = None, cores: list[int] | None = None) -> None:
        self._folder = slots_folder() if folder is None else folder
        self._cores = usable_cores() if cores is None else cores
        self._held: dict[int, int] = {}

    @property
    def held(self) -> list[int]:
        """The numbers of the cores that are held."""
        return sorted(self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self, max_cores: int, on_wait: Callable[[], None] | None = None) -> int:
        """Take up to `max_cores` free cores; wait while none is free.

        Args:
            max_cores: Largest number of cores to take, at least 1.
            on_wait: Called once if no core is free at first.

        Returns:
            Number of cores taken, at least 1.

        Raises:
            ValueError: If `max_cores` is less than 1, or cores are held already.
            DeviceError: If the folder's file system has no file locks.
        """
        if max_cores < 1 or self._held:
            raise ValueError(f"max_cores must be 1 or more and no core may be held, got {max_cores} and {self.held}")
        announced = False
        while not self._take(max_cores):
            if not announced and on_wait is not None:
                on_wait()
            announced = True
            time.sleep(POLL_SECONDS)
        return len(self._held)

    def release(self) -> None:
        """Give all cores back."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _take(self, max_cores: int) -> bool:
        for core in self._cores:
            if len(self._held) == max_cores:
                break
            path = self._folder / f"core-{core:04d}.lock"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            except OSError as error:
                os.close(descriptor)
                raise DeviceError(
                    f"The file system of {self._folder} must support file locks, got: {error}. "
                    "Set XDG_RUNTIME_DIR to a folder on a local disk."
                ) from error
            else:
                self._held[core] = descriptor
        return bool(self._held)
