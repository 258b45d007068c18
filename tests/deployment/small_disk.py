"""A disk that can be full and have room again, while the programs that write to it run."""

import contextlib
import os
import resource
import subprocess

from programs import Program, processes_of

SIZE = 8_000_000
LEFT = 64_000
"""Bytes: room for some lines of a ledger, and for no larger file."""


class SmallDisk:
    """The disk of a node's state: a file system of its own where this user may mount one.

    Elsewhere the node's programs may not let a file grow, and the system refuses in the middle of a write, too.

    Args:
        node: The node; it has not started.
    """

    def __init__(self, node: Program) -> None:
        self.folder = node.folder / "state"
        self._node = node
        self._ballast = self.folder / "ballast"
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "tmpfs", str(self.folder)]
        self.mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        """Leave no room for a client's state."""
        if not self.mounted:
            largest = max((self._node.folder / "log").stat().st_size, (self.folder / "ledger.jsonl").stat().st_size)
            self._limit(largest + LEFT)
            return
        found = os.statvfs(self.folder)
        with self._ballast.open("wb") as file:
            file.write(bytes(found.f_bavail * found.f_frsize - LEFT))

    def make_room(self) -> None:
        """Take back what `fill` has done."""
        if self.mounted:
            self._ballast.unlink()
        else:
            self._limit(resource.RLIM_INFINITY)

    def unmount(self) -> None:
        """End the file system; the node has ended."""
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)

    def _limit(self, size: int) -> None:
        """Limit the files of the node's programs, which those that they start inherit."""
        for pid in processes_of(self._node.folder):
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
