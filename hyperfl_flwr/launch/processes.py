"""List and end process trees, and run a command below a supervisor that ends its tree when the owner dies.

Flower starts its helpers in new sessions and Ray's processes change parents, so neither a process group nor a list of
children reaches all of them. On Linux the supervisor is the reaper of every orphan below it, so its descendants are
the whole tree; elsewhere it remembers the processes that it has seen.

This file is also the program that runs as the supervisor (`main`). It imports the standard library only.
"""

import argparse
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.2
"""Seconds between two checks of the supervisor that its owner still runs."""

SCAN_SECONDS = 2.0
"""Seconds between two scans for processes to end, where the system has no reaper of orphans."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Process:
    """A running process; `pid` and `started` together are unique, also when process ids are used again."""

    pid: int
    parent: int
    started: str
    command: str


def process_table() -> dict[int, Process]:
    """Return all running processes, without zombies, by process id."""
    rows = _rows_from_proc() if Path("/proc/self/stat").exists() else _rows_from_ps()
    return {row.pid: row for row in rows}


def _rows_from_proc() -> Iterator[Process]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # the process ended in between
            continue
        if fields[0] not in ("Z", "X"):
            yield Process(pid=int(folder.name), parent=int(fields[1]), started=fields[19], command=command)


def _rows_from_ps() -> Iterator[Process]:
    command = ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,lstart=,command="]
    environment = {**os.environ, "LC_ALL": "C"}
    for line in subprocess.run(command, capture_output=True, text=True, env=environment, check=False).stdout.split(
        "\n"
    ):
        fields = line.split(None, 8)  # the start time is five words
        if len(fields) == 9 and not fields[2].startswith("Z"):
            started = " ".join(fields[3:8])
            yield Process(pid=int(fields[0]), parent=int(fields[1]), started=started, command=fields[8])


def is_ours(process: Process) -> bool:
    """Return whether a process belongs to the current user; False if its owner cannot be determined."""
    try:
        return Path(f"/proc/{process.pid}").stat().st_uid == os.getuid()
    except OSError:
        listed = subprocess.run(["ps", "-o", "uid=", "-p", str(process.pid)], capture_output=True, check=False).stdout
        return listed.strip() == str(os.getuid()).encode()


def user_of(process: Process) -> str:
    """Return the name or number of the user that a process belongs to; empty if it cannot be determined."""
    try:
        number = Path(f"/proc/{process.pid}").stat().st_uid
    except OSError:
        command = ["ps", "-o", "user=", "-p", str(process.pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # a user of a container has no account here
        return str(number)


def descendants(roots: Iterable[int], table: Mapping[int, Process]) -> dict[int, Process]:
    """Return the children of `roots`, their children and so on, without the roots themselves."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child.pid not in found:
                found[child.pid] = child
                waiting.append(child.pid)
    return found


def send(signal_number: int, processes: Iterable[Process]) -> None:
    """Send a signal to those of `processes` that still run; a new process with a reused id is left alone."""
    table = process_table()
    for process in processes:
        now = table.get(process.pid)
        if now is not None and now.started == process.started and process.pid != os.getpid():
            try:
                os.kill(process.pid, signal_number)
            except (ProcessLookupError, PermissionError):  # it ended, or now belongs to another user
                continue


def kill_all(find: Callable[[], Iterable[Process]], *, timeout: float = 5.0) -> list[Process]:
    """Kill the processes that `find` returns until it returns none; a process may start others before it is killed.

    Args:
        find: Returns the processes to end.
        timeout: Seconds after which to give up.

    Returns:
        The processes that still run, normally none.
    """
    deadline = time.monotonic() + timeout
    while left := list(find()):
        send(signal.SIGKILL, left)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


class Supervisor:
    """Run a command, and end its whole tree on SIGTERM, when the command ends or when the owner dies.

    Args:
        command: The command to run.
        owner: Id of this process's parent; a changed parent means that the owner has died.
        polite: Text in the command lines of processes that get SIGTERM, and time to act on it, before all others.
    """

    def __init__(self, command: list[str], *, owner: int, polite: str = "") -> None:
        self._command = command
        self._owner = owner
        self._polite = polite
        self._stop = False
        self._child = 0
        self._exit_code: int | None = None
        self._known: dict[int, Process] = {}

    def run(self) -> int:
        """Run until there is a reason to stop; return the command's exit code, or 0 if the supervisor ended it."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stop", True))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        reaper = _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        child = subprocess.Popen(self._command, preexec_fn=_restore_signals_and_die_with_parent)
        self._child = child.pid
        next_scan = 0.0
        # An orphan gets another parent, so the parent's id shows whether the owner still runs.
        while not self._stop and self._exit_code is None and os.getppid() == self._owner:
            time.sleep(POLL_SECONDS)
            self._reap()
            if not reaper and time.monotonic() >= next_scan:
                self._running_tree()
                next_scan = time.monotonic() + SCAN_SECONDS
        ended_by_itself, code = self._exit_code is not None, self._exit_code
        self._end()
        child.returncode = 0  # reaped here, so Popen has nothing left to warn about
        return code if ended_by_itself and code is not None else 0

    def _reap(self) -> None:
        """Collect every child that ended; orphans count as children of the reaper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child:
                self._exit_code = os.waitstatus_to_exitcode(status)

    def _running_tree(self) -> list[Process]:
        """Return the running processes of the tree: those below the supervisor now, and those seen below it before."""
        table = process_table()
        below = descendants([os.getpid(), *self._known], table)
        seen = {pid: p for pid, p in self._known.items() if pid in table and table[pid].started == p.started}
        self._known = {**seen, **below}
        return list(self._known.values())

    def _end(self) -> None:
        """End the tree: SIGTERM to the polite processes, then to the command, and SIGKILL to all that are left."""
        polite = [p for p in self._running_tree() if self._polite and self._polite in p.command]
        self._terminate(polite, seconds=2.0)
        self._terminate([p for p in self._running_tree() if p.pid == self._child], seconds=2.0)
        kill_all(self._running_tree)
        self._reap()

    def _terminate(self, processes: list[Process], *, seconds: float) -> None:
        send(signal.SIGTERM, processes)
        deadline = time.monotonic() + seconds
        pids = {p.pid for p in processes}
        while time.monotonic() < deadline and any(p.pid in pids for p in self._running_tree()):
            time.sleep(0.05)
            self._reap()


def _prctl(option: int, argument: int) -> bool:
    """Set a property of this process; return False where the system does not support it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return int(ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def _restore_signals_and_die_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start_supervised(
    command: list[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    polite: str = "",
    remove: Iterable[Path] = (),
    within: Callable[[list[str]], list[str]] = list,
) -> "subprocess.Popen[bytes]":
    """Start `command` below a supervisor, which ends its process tree when this process ends in any way.

    Args:
        command: The command to run.
        environment: Its complete environment.
        folder: Its working directory.
        log: File to which its output is appended.
        polite: See `Supervisor`.
        remove: Folders that the supervisor removes after it was stopped or its owner died.
        within: Returns the command that runs the supervisor, and thus the whole tree, in a network namespace.

    Returns:
        The supervisor's process; terminate it to end the whole tree.
    """
    program = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), "--owner", str(os.getpid())]
    program += ["--polite", polite, *(word for path in remove for word in ("--remove", str(path))), "--", *command]
    with log.open("ab") as output:
        return subprocess.Popen(
            within(program),
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def main() -> int:
    """Run as the supervisor."""
    parser = argparse.ArgumentParser(description="Run a command; end its whole process tree when the owner dies.")
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--polite", default="")
    parser.add_argument("--remove", action="append", default=[])
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    code = Supervisor(arguments.command, owner=arguments.owner, polite=arguments.polite).run()
    if code == 0:  # after a failure of the command, the owner reads the log in these folders
        for folder in arguments.remove:
            shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
