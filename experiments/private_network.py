"""Runs programs in a network namespace of their own, where no other user of the machine can reach their ports.

Flower's SuperLink for simulations and Ray listen on loopback ports. The SuperLink asks for no login, so whoever can
connect to its port can run programs as the user who has started it. Linux gives a group of processes a loopback
interface of its own: their ports exist in that namespace only, and only root and the same user can enter it. An
unprivileged user gets a network namespace together with a user namespace, in which no account but the user's exists.

This file is also the program that starts in a namespace or enters it (`main`); it imports the standard library only.
"""

import argparse
import contextlib
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
from collections.abc import Mapping, Sequence
from pathlib import Path

SHARED = "HYPERFL_SHARE_NETWORK"
"""Environment variable: with the value 1, simulations use the machine's network, and others can reach their ports."""

POLL_SECONDS = 0.05

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_NAMESPACES = {"user": _CLONE_NEWUSER, "net": _CLONE_NEWNET}


def obstacle(environment: Mapping[str, str] = os.environ) -> str:
    """Return why simulations cannot have a network namespace of their own; empty if they can."""
    if environment.get(SHARED) == "1":
        return f"{SHARED}=1"
    return _kernel_obstacle()


@functools.cache
def _kernel_obstacle() -> str:
    """Make a namespace and leave it; return the error."""
    if not sys.platform.startswith("linux"):
        return "only Linux has network namespaces"
    done = subprocess.run([*_program(), "--new", "--", sys.executable, "-I", "-S", "-c", ""],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # fmt: skip
    return "" if done.returncode == 0 else " ".join(done.stderr.split()) or f"exit code {done.returncode}"


def in_new_network(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in a new network namespace, in the same process."""
    return [*_program(), "--new", "--", *command]


def in_network_of(pid: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in the network namespace that a process was given by `in_new_network`."""
    return [*_program(), "--of", str(pid), "--", *command]


def health_check(port: int) -> list[str]:
    """Return a command that ends with exit code 0 as soon as `http://127.0.0.1:PORT/health` answers."""
    return [*_program(), "--wait-for", str(port)]


def network_of(pid: int | str = "self") -> str:
    """Return the name of a process's network namespace; empty if the process has ended or is another user's."""
    try:
        return _namespace(pid, "net")
    except OSError:
        return ""


def _program() -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve())]


def _enter_new() -> None:
    """Move this process into a new network namespace, with a user namespace unless it is root's.

    Raises:
        OSError: The kernel does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _call("unshare", _CLONE_NEWNET)
    else:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")  # required before an unprivileged user maps a group
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as control:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _enter(pid: int, patience: float = 30.0) -> None:
    """Move this process into the namespaces of another, as soon as that one is in its own.

    Raises:
        OSError: The process has ended, is another user's, or stays in the machine's network namespace.
    """
    deadline = time.monotonic() + patience
    while _namespace(pid, "net") == _namespace("self", "net"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} must have a network namespace of its own, but has the machine's")
        time.sleep(POLL_SECONDS)
    # The user namespace first: it gives the right to enter the network namespace that belongs to it.
    names = [name for name in _NAMESPACES if _namespace(pid, name) != _namespace("self", name)]
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(Path(f"/proc/{pid}/ns/{name}").open()) for name in names}
        for name, file in files.items():
            _call("setns", file.fileno(), _NAMESPACES[name])


def _namespace(pid: int | str, name: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{name}").readlink())


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
    """Enter a network namespace and become a command there, or wait for a port; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run a command in a network namespace.")
    parser.add_argument("--new", action="store_true", help="a new one")
    parser.add_argument("--of", type=int, metavar="PID", help="that of a process")
    parser.add_argument("--wait-for", type=int, metavar="PORT", help="wait until a SuperLink answers on a port")
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args()
    try:
        if arguments.new:
            _enter_new()
        elif arguments.of is not None:
            _enter(arguments.of)
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}\n")
        return 1
    if arguments.wait_for is None:
        os.execvp(arguments.command[0], arguments.command)  # noqa: S606 - in the place of this program
    _wait_for(arguments.wait_for)
    return 0


if __name__ == "__main__":
    sys.exit(main())
