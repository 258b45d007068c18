"""Read the memory and CPU time of other processes from Linux's /proc."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

_RANGE = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")
_SHARED = ("/dev/shm/", "/memfd:", "/tmp/plasma")  # noqa: S108 - Ray's object store, mapped by several processes


def private_memory(pid: int) -> int:
    """Return the memory of a process that it does not share, in bytes; 0 if the process or /proc is missing.

    Pages of Ray's object store are not counted: the kernel reports them as private while only one process has used
    them.
    """
    total, counts = 0, True
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if _RANGE.match(line):
            counts = not any(name in line for name in _SHARED)
        elif counts and line.startswith(("Private_Clean", "Private_Dirty")):
            total += int(line.split()[1]) * 1024
    return total


def proportional_memory(pids: Iterable[int]) -> int:
    """Return the memory of some processes in bytes, pages that processes share divided among them."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the total CPU time in seconds of those of some processes that are still running."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
