"""A Ray cluster of two hosts on one machine, made of network, mount, process and host-name namespaces (root only).

The hosts share all files of the machine but the folder of Ray's sockets. They see neither each other's processes nor
each other's loopback interface, so that everything between them passes a network.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from waiting import eventually

ATTEMPTS = 3
"""Attempts to start Ray on a host: it gives up after 30 seconds, which can be too few on a busy machine."""

PORT = 6380
"""Port of the head; Ray's processes take 10002 to 19999."""

RAY_SETTINGS = {
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_period_ms": "500",  # the head notices within seconds that a host has died
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""Variables of the hosts' Ray."""


def obstacle() -> str:
    """Return why this system cannot have such hosts; empty if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    probe = "ip link set lo up && ip link add hfa type veth peer name hfb && mount -t tmpfs none /mnt"
    words = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", probe]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip()


class Host:
    """A host. All of its processes end with the `with` block, and with the process that started it.

    Args:
        name: Its host name.
        address: Its IP address.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._holder: subprocess.Popen[bytes] | None = None
        self._network: IO[str] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self.pid = 0

    def __enter__(self) -> Self:
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--uts", "--pid", "--fork"]
        self._holder = subprocess.Popen([*words, "--kill-child", "--mount-proc", "sleep", "infinity"])
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        eventually(lambda: children.read_text().strip() != "", "a child", every=0.05)
        self.pid = int(children.read_text())
        eventually(lambda: "sleep" in Path(f"/proc/{self.pid}/comm").read_text(), "sleep", every=0.05)
        # Held, so that the other host keeps its interface when this one dies.
        self._network = Path(f"/proc/{self.pid}/ns/net").open()
        self.run("hostname", self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.die()
        if self._network is not None:
            self._network.close()

    def die(self) -> None:
        """End all processes of the host at once, as a power failure does; its network stays, without an answer."""
        if self._holder is not None:
            self._holder.kill()  # the kernel kills `sleep`, and with it all processes of its namespace
            self._holder.wait()
        while self._started:
            self._started.pop().wait()

    def command(self, *words: str | Path) -> list[str]:
        """Return the command that runs another one on this host."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-p", "--", *map(str, words)]

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command on this host; a failure is an error."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    @contextlib.contextmanager
    def instead(self, shown: Path, place: Path) -> Iterator[None]:
        """Let this host see a file or folder in place of another one, within the context."""
        self.run("mount", "--bind", shown, place)
        try:
            yield
        finally:
            self.run("umount", place)

    def start_ray(self, folder: Path, *options: str) -> None:
        """Start Ray with one CPU on this host, and wait until it runs."""
        ray = Path(sys.executable).with_name("ray")
        words = [ray, "start", f"--node-ip-address={self.address}", "--num-cpus=1", "--disable-usage-stats", "--block"]
        environment = {**os.environ, **RAY_SETTINGS}
        environment.pop("RAY_ADDRESS", None)
        for attempt in range(ATTEMPTS):
            file = folder / f"{self.name}-{attempt}.log"
            with file.open("w") as log:
                process = subprocess.Popen(self.command(*words, *options), env=environment, stdout=log, stderr=log)
            self._started.append(process)
            eventually(lambda: self._started[-1].poll() is not None or "Ray runtime started" in file.read_text(), "Ray")  # noqa: B023
            if process.poll() is None:
                return
            self.run(ray, "stop", "--force")  # ends processes of this host only
        raise AssertionError(file.read_text())


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Start two hosts and a Ray cluster on them; the first is its head.

    Args:
        folder: Folder for logs.
    """
    # Short: a socket's path has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp", ignore_cleanup_errors=True) as sockets,
        Host("one", "10.77.0.1") as one,
        Host("two", "10.77.0.2") as two,
    ):
        ends = ("hfa", "netns", str(one.pid), "type", "veth", "peer", "name", "hfb", "netns", str(two.pid))
        subprocess.run(["ip", "link", "add", *ends], check=True)
        for host, device in ((one, "hfa"), (two, "hfb")):
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", device)
            host.run("ip", "link", "set", device, "up")
        two.run("mount", "-t", "tmpfs", "none", sockets)
        one.start_ray(folder, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={sockets}")
        two.start_ray(folder, f"--address={one.address}:{PORT}")
        yield one, two
