"""The memory of a process that follows a run."""

import re
from pathlib import Path

MOST_MEGABYTES = 120
"""Limit on the resident memory of a process that follows a run, which uses about 65 MB."""


def assert_small(pid: int) -> None:
    """Check that a process has not loaded torch and uses little memory; does nothing on systems without /proc."""
    folder = Path("/proc") / str(pid)
    if folder.exists():
        assert "libtorch" not in (folder / "maps").read_text()
        (resident,) = re.findall(r"^VmRSS:\s+(\d+) kB$", (folder / "status").read_text(), re.MULTILINE)
        assert int(resident) < 1024 * MOST_MEGABYTES
