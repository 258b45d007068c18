"""Detect other users of this machine, who can reach the loopback ports of programs that run here.

Simulations are protected by a network namespace where the system supports it
(`hyperfl_flwr.launch.network_namespace`), and by Ray's token. A SuperLink or SuperNode of a deployment is not: it must
reach other machines, and Flower's local ports require no login.
"""

import contextlib
import os
import pwd
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hyperfl_flwr.launch import network_namespace
from hyperfl_flwr.launch.findings import Finding, ok, warning

FIRST_USER_ID = 500 if sys.platform == "darwin" else 1000
"""Accounts with smaller ids belong to the system."""

NOBODY = 65534
"""Id of a system account above `FIRST_USER_ID`; on macOS its id is beyond 2^31."""

UNSEEN = "unknown, because this system hides the processes of other users"


def other_accounts(running: Iterable[int] | None = None) -> list[str]:
    """Return the names of the other users who have running processes on this machine.

    Args:
        running: User ids of the running processes; None to look them up.

    Returns:
        Sorted account names, without the current user's and the system's; `UNSEEN` alone if the system hides the
        processes of other users.
    """
    if running is None and Path("/proc/self").exists() and not Path("/proc/1").exists():  # mounted with hidepid
        return [UNSEEN]
    found = set()
    for user in set(_running_users() if running is None else running) - {os.getuid(), NOBODY}:
        with contextlib.suppress(KeyError):  # a user of a container has no account here
            if FIRST_USER_ID <= user < 2**31:
                found.add(pwd.getpwuid(user).pw_name)
    return sorted(found)


def _running_users() -> Iterator[int]:
    """Yield the user id of each running process."""
    if Path("/proc/self").exists():
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    yield folder.stat().st_uid
                except OSError:  # it ended in between
                    continue
        return
    listed = subprocess.run(["ps", "-A", "-o", "uid="], capture_output=True, text=True, check=False).stdout
    yield from (int(word) for word in listed.split())


def simulation_warning() -> str:
    """Return the warning to show before a simulation opens ports; empty if no other user can reach them."""
    obstacle = network_namespace.obstacle()
    names = other_accounts() if obstacle else []
    if not names:
        return ""
    return (
        f"other users of this machine ({_listed(names)}) can reach the ports of this simulation's SuperLink and run "
        f"programs as you, because it has no private network namespace ({obstacle}); use --engine in-process, or a "
        f"container"
    )


def deployment_warning() -> str:
    """Return the warning to show before a SuperLink or SuperNode opens ports; empty if there are no other users."""
    names = other_accounts()
    if not names:
        return ""
    return (
        f"other users of this machine ({_listed(names)}) can reach the loopback ports over which Flower's programs "
        f"communicate, and act in your name; run these programs in a container or on a separate machine"
    )


def simulations() -> Iterator[Finding]:
    """Check whether other users can reach a simulation's ports."""
    obstacle = network_namespace.obstacle()
    if not obstacle:
        yield ok("isolation", "simulations have a private network namespace, which other users cannot enter")
    elif not (problem := simulation_warning()):
        yield ok("isolation", f"no network namespace for simulations ({obstacle}); no other user has processes here")
    else:
        text, _, remedy = problem.partition("; ")
        yield warning("isolation", text, remedy)


def deployments() -> Iterator[Finding]:
    """Check whether other users can reach the loopback ports of a SuperLink or SuperNode."""
    if problem := deployment_warning():
        text, _, remedy = problem.partition("; ")
        yield warning("other users", text, remedy)
    else:
        yield ok(
            "other users",
            "no other user has processes here that could reach the loopback ports of Flower's programs",
        )


def _listed(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
