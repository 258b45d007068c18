"""The memory of a process that follows a run."""

import re
from pathlib import Path

MOST_MEGABYTES = 120
"""Resident memory of the process that follows a run; it has some 65."""


def assert_small(pid: int) -> None:
    """Check that a process has not loaded what trains, where the system tells."""
    folder = Path("/proc") / str(pid)
    if folder.exists():
        assert "libtorch" not in (folder / "maps").read_text()
        (resident,) = re.findall(r"^VmRSS:\s+(\d+) kB$", (folder / "status").read_text(), re.MULTILINE)
        assert int(resident) < 1024 * MOST_MEGABYTES
