"""Run programs in a private network namespace, where no other user of the machine can reach their ports.

Flower's SuperLink for simulations and Ray listen on loopback ports. The SuperLink requires no login, so any user who
can connect to its port can run programs as the user who has started it. A Linux network namespace has a separate
loopback interface: ports opened in it exist in that namespace only, and only root and the same user can enter it. An
unprivileged user can create a network namespace only together with a user namespace, in which no other account exists.

This file is also the program that creates or enters a namespace (`main`); it imports the standard library only.
"""

import argparse
import ctypes
import fcntl
import functools
import http.client
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

SHARED = "HYPERFL_SHARE_NETWORK"
"""Environment variable; if it is 1, simulations use the machine's network, and other users can reach their ports."""

POLL_SECONDS = 0.02

ENTER_SECONDS = 30.0
"""Seconds that a process may take to enter its namespace; it needs some hundredths."""

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


def obstacle(environment: Mapping[str, str] = os.environ) -> str:
    """Return why simulations cannot have a private network namespace; empty if they can."""
    if environment.get(SHARED) == "1":
        return f"{SHARED}=1"
    return _kernel_obstacle()


@functools.cache
def _kernel_obstacle() -> str:
    """Create a namespace and enter it from another process, as a simulation does; return the error, or empty."""
    if not sys.platform.startswith("linux"):
        return "only Linux has network namespaces"
    wait = in_new_network([sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"])
    with subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as holder:
        try:
            with Network(holder.pid, lambda: holder.poll() is None) as network:
                command = network.entered_by([sys.executable, "-I", "-S", "-c", ""])
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
                return "" if done.returncode == 0 else " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        except OSError as error:
            stderr = b"" if holder.stderr is None or holder.poll() is None else holder.stderr.read()
            return " ".join(stderr.decode(errors="replace").split()) or str(error)


def in_new_network(command: Sequence[str]) -> list[str]:
    """Return the command that creates a network namespace and runs `command` in it, under the same process id."""
    return [*_program(), "--new", "--", *command]


def health_check(port: int) -> list[str]:
    """Return a command that waits until `http://127.0.0.1:PORT/health` answers, and then exits with code 0."""
    return [*_program(), "--wait-for", str(port)]


class Network:
    """Handle of the network namespace of a process that was started with `in_new_network`.

    The namespace is held open, because the kernel reuses the number of a namespace that has ended, and the process id.

    Args:
        pid: Id of the process.
        is_alive: Returns whether the process still runs.

    Raises:
        OSError: If the process ended, is another user's, or has no private namespace after `ENTER_SECONDS`.
    """

    def __init__(self, pid: int, is_alive: Callable[[], bool] = lambda: True) -> None:
        # Root needs no user namespace, and must never enter another user's.
        self._names = ["net"] if os.geteuid() == 0 else ["user", "net"]
        deadline = time.monotonic() + ENTER_SECONDS
        while any(_identity(f"/proc/{pid}/ns/{name}") == _identity(f"/proc/self/ns/{name}") for name in self._names):
            if not is_alive() or time.monotonic() > deadline:
                raise ProcessLookupError(f"process {pid} has no private network namespace")
            time.sleep(POLL_SECONDS)
        self._files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in self._names]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the namespace; it ends with its last process."""
        while self._files:
            os.close(self._files.pop())

    def entered_by(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in the namespace; it must start while this process lives."""
        paths = [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]
        return [*_program(), *(word for path in paths for word in ("--enter", path)), "--", *command]

    def contains(self, pid: int) -> bool:
        """Return whether a process is in the namespace; False if it has ended or is another user's."""
        try:
            return bool(self._files) and _identity(f"/proc/{pid}/ns/net") == _identity(self._files[-1])
        except OSError:
            return False


def _program() -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve())]


def _enter_new() -> None:
    """Move this process into a new network namespace, and unless it is root's into a new user namespace.

    Raises:
        OSError: If the kernel does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _call("unshare", _CLONE_NEWNET)
    else:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")  # required before an unprivileged user maps a group
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as control:  # a new namespace's loopback interface is down
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _enter(paths: Sequence[str]) -> None:
    """Move this process into namespaces, in this order: the user namespace gives the right to enter the network's.

    Raises:
        OSError: If a file is another user's namespace, or not a namespace.
    """
    for path in paths:
        with Path(path).open() as file:
            _call("setns", file.fileno(), 0)


def _identity(file: int | str) -> tuple[int, int]:
    """Return device and inode, which identify a namespace among all existing ones."""
    found = os.stat(file)  # noqa: PTH116 - a path or a descriptor
    return found.st_dev, found.st_ino


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _wait_for(port: int) -> None:
    """Wait until a SuperLink answers on a port of this network's loopback interface."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status < 400:
                return
        except (OSError, http.client.HTTPException):
            time.sleep(POLL_SECONDS)
        finally:
            connection.close()


def main() -> int:
    """Enter a network namespace and execute a command there, or wait for a port; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run a command in a network namespace.")
    parser.add_argument("--new", action="store_true", help="create a namespace")
    parser.add_argument("--enter", action="append", default=[], metavar="FILE", help="enter this namespace")
    parser.add_argument("--wait-for", type=int, metavar="PORT", help="wait until a SuperLink answers on a port")
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args()
    try:
        if arguments.new:
            _enter_new()
        _enter(arguments.enter)
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}\n")
        return 1
    if arguments.wait_for is None:
        os.execvp(arguments.command[0], arguments.command)  # noqa: S606 - replaces this program
    _wait_for(arguments.wait_for)
    return 0


if __name__ == "__main__":
    sys.exit(main())
