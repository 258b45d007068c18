"""A disk that can be full and have room again while programs write to it."""

import contextlib
import os
import resource
import subprocess

from programs import Program, processes_of

SIZE = 8_000_000
LEFT = 64_000
"""Bytes that are left: room for some lines of a ledger, but not for larger files."""


class SmallDisk:
    """The disk of a node's state: a separate file system, if this user may mount one.

    Otherwise a limit on file sizes stops the node's programs, which can also happen in the middle of a write.

    Args:
        node: The node, which must not have started.
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
        """Undo what `fill` has done."""
        if self.mounted:
            self._ballast.unlink()
        else:
            self._limit(resource.RLIM_INFINITY)

    def unmount(self) -> None:
        """Unmount the file system, after the node has ended."""
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)

    def _limit(self, size: int) -> None:
        """Limit the file size of the node's programs, which their child processes inherit."""
        for pid in processes_of(self._node.folder):
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
