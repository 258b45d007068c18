"""Measure the memory of this process and what is free, and name the process in reports."""

import os
import re
import resource
import secrets
import sys
from pathlib import Path


def peak_memory() -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    # ru_maxrss is in bytes on macOS and in kilobytes on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory(group: Path = Path("/sys/fs/cgroup"), table: Path = Path("/proc/meminfo")) -> int:
    """Return the memory in bytes that programs can still take; all of the machine's where the system does not say.

    Args:
        group: The cgroup folder with a container's limits (Linux, cgroup v2).
        table: Linux's table of total and free memory.
    """
    rows = dict(re.findall(r"^(\w+): +(\d+) kB$", table.read_text(), flags=re.M)) if table.is_file() else {}
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = int(rows["MemAvailable"]) * 1024 if "MemAvailable" in rows else total
    limit, used = (_content(group / name) for name in ("memory.max", "memory.current"))
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def _content(file: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


_NAMES: dict[int, str] = {}


def process_name() -> str:
    """Return a unique name of this process; it is random, so that it reveals nothing about the machine."""
    return _NAMES.setdefault(os.getpid(), secrets.token_hex(8))
