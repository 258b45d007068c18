"""Start the process of each message of a node in milliseconds: by a fork of a process that has imported torch.

Without a worker, Flower's `flower-superexec` starts an interpreter for each message, which imports Flower and torch
again. The worker takes its place (`flower-supernode --isolation process`). It takes the tokens of messages, and no
message: the forked process gets its message from the SuperNode, runs the app of the run's bundle and ends, as the
process of `flwr-clientapp` does. The worker itself never runs code of an app, and never uses a GPU.
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.packages.package_guard import ALL
from hyperfl_flwr.core.packages.quick_imports import quick_imports
from hyperfl_flwr.deploy.worker_secret import read_secret

if TYPE_CHECKING:
    from hyperfl_flwr.flower.node_tasks import NodeTasks, Task

PRELOADED = ("hyperfl_flwr.app.client", "hyperfl_flwr.app.node")
"""Modules that handle messages: what they import from other projects is imported once."""

_PR_SET_PDEATHSIG = 1
"""Number of prctl(2)'s request for a signal when the parent ends."""

_LISTENING = "0A"
"""State of a socket that accepts connections, as in proc(5)'s /proc/net/tcp."""

PATIENCE = 60.0
"""Time in seconds that a SuperNode has to end after Ctrl-C."""

SHORTEST_POLL, LONGEST_POLL = 0.1, 1.0
"""Shortest and longest pause between two requests for a message, in seconds."""


def is_possible() -> bool:
    """Return whether this system can have a worker: one that can fork with torch loaded, and wait for processes."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def serve(folder: Path, port: int, supernode: int) -> None:
    """Start a process for each message of a SuperNode until the SuperNode ends.

    Args:
        folder: The node's folder.
        port: Port of the SuperNode's runtime API on the loopback interface.
        supernode: Process id of the SuperNode.

    Raises:
        StateError: If the secret cannot be read, or the SuperNode refuses it.
    """
    secret = read_secret(folder)
    signal.signal(signal.SIGTERM, _stop)
    # A shell's background process otherwise ignores it, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.ExitStack() as at_end:
        try:
            ended = os.pidfd_open(supernode)  # another process that gets the id later is not taken for the SuperNode
        except ProcessLookupError:
            return
        except OSError as error:
            raise StateError(f"the SuperNode, process {supernode}, cannot be watched ({error.strerror})") from None
        at_end.callback(os.close, ended)
        try:
            _serve(port, secret, ended)
        except KeyboardInterrupt:  # Ctrl-C in a terminal reaches the SuperNode, too, which needs some seconds to end
            if not select.select([ended], [], [], PATIENCE)[0]:
                raise SystemExit(1) from None


def _serve(port: int, secret: bytes, ended: int) -> None:
    """Import what messages need, and start a process for each until the descriptor `ended` is readable."""
    packages, since, running = installed(), time.monotonic(), list[BaseProcess]()
    preload()
    # Not at the top: Flower is one of the packages that `preload` imports.
    from hyperfl_flwr.flower.node_tasks import NodeTasks, installed_app, run_client_app, run_client_app_anew

    with contextlib.ExitStack() as at_end:
        tasks = at_end.enter_context(NodeTasks(f"127.0.0.1:{port}", secret))
        at_end.callback(end, running)

        def handle(task: "Task", *, is_outdated: bool) -> NoReturn:
            tasks.close()
            if is_outdated:
                run_client_app_anew(tasks.address, task.token, partial(_be_killed_after, os.getpid()))
            import_app(installed_app(task.fab_hash))
            run_client_app(tasks.address, task.token)

        while not _ready(ended, pause(time.monotonic() - since, is_busy=bool(running)), running):
            if reap(running):
                since = time.monotonic()
            is_outdated = installed() != packages  # a message must not run with what was replaced
            if is_outdated and not running:
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the same command
            if is_own_listener(port) and (task := _taken(tasks)) is not None:
                since = time.monotonic()
                try:
                    running.append(start(partial(handle, task, is_outdated=is_outdated)))
                except OSError as error:  # the SuperNode offers the task again after half a minute
                    sys.stderr.write(f"warning: no process for a message can be started ({error.strerror})\n")


def pause(idle: float, *, is_busy: bool) -> float:
    """Return the time until the next request for a message: a twentieth of the idle time, within its limits.

    Args:
        idle: Time since the last message or its end, in seconds.
        is_busy: Whether a message is being handled: the next one comes after its reply, and its end ends the pause.

    Returns:
        Seconds. A node that waits for days polls each second.
    """
    return LONGEST_POLL if is_busy else min(max(SHORTEST_POLL, idle / 20), LONGEST_POLL)


def preload() -> None:
    """Import what handles messages; each message imports this project's own modules again, from its app's bundle."""
    with quick_imports():
        for name in PRELOADED:
            importlib.import_module(name)
    gc.freeze()  # the collector of a forked process would otherwise write to, and so copy, all of these objects


def start(handle: Callable[[], NoReturn]) -> BaseProcess:
    """Start a forked process that handles a message.

    Args:
        handle: What the process does; its `SystemExit` is the process's exit code.

    Raises:
        StateError: If this process has other threads, of which a fork would copy the locks but not the threads.
    """
    if threading.active_count() > 1:
        raise StateError(
            f"a process with threads cannot be forked: {[thread.name for thread in threading.enumerate()]}"
        )
    process = multiprocessing.get_context("fork").Process(target=_handle, args=(handle, os.getpid()))
    process.start()
    return process


def reap(running: list[BaseProcess]) -> bool:
    """Remove the processes that have ended; returns whether there are any."""
    done = [process for process in running if not process.is_alive()]
    for process in done:
        running.remove(process)
        process.close()
    return bool(done)


def end(running: Sequence[BaseProcess]) -> None:
    """Kill the processes that still run.

    Not by SIGTERM: Flower's program would then report that its task has failed, and its SuperNode would wait for a
    reply without end. A killed process is missed after a minute, and the server sends the message again.
    """
    for process in running:
        process.kill()
        process.join()


def _handle(handle: Callable[[], NoReturn], worker: int) -> None:
    """Become a process like one that `flwr-clientapp` has just started, and handle a message."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _be_killed_after(worker)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("flwr-clientapp")  # the name that `ps` shows
    forget_project()
    # Global generators would otherwise be the same in all processes; Python's own is seeded by its module.
    importlib.import_module("numpy").random.seed()
    importlib.import_module("torch").default_generator.seed()
    handle()


def _be_killed_after(parent: int) -> None:
    """Let the system kill this process when its parent ends; for the reason, see `end`."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # the system cannot, or the parent has already ended


def forget_project() -> None:
    """Remove the modules of this project, so that they are imported from the bundle of the app that is loaded next.

    The main module is replaced by an empty one, since processes that the app starts with multiprocessing's `spawn`
    would otherwise run the worker's program again.
    """
    own = {"hyperfl_flwr", *ALL}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")


def import_app(folder: Path | None) -> None:
    """Import this project's modules from the folder of an app's bundle, while the rest of a message arrives.

    Flower's program then finds them imported. It asks for parts that have not arrived only after a second, so asking
    later saves time. Without such a folder, or if an import fails, it imports them itself and reports the error.

    Args:
        folder: The folder into which an earlier message has installed the bundle; None if it is not installed.
    """
    if folder is None or not all((folder / f"{name.replace('.', '/')}.py").is_file() for name in PRELOADED):
        return  # an app of another project, or the first message of this app
    sys.path.insert(0, str(folder))
    try:
        for name in PRELOADED:
            if not Path(str(importlib.import_module(name).__file__)).is_relative_to(folder):
                raise ImportError(name)
    except Exception:  # noqa: BLE001 - whatever the app raises; Flower's program raises it again
        sys.path.remove(str(folder))
        forget_project()


def installed() -> dict[str, int]:
    """Return when each folder of installed packages was last changed by an installation or removal, in nanoseconds."""
    found = {}
    for folder in {Path(entry).resolve() for entry in sys.path if entry}:
        with contextlib.suppress(OSError):  # there is no such folder, or no longer
            if folder.is_dir():
                found[str(folder)] = folder.stat().st_mtime_ns
    return found


def is_own_listener(port: int) -> bool:
    """Return whether the program that listens on a loopback port is this user's.

    Another account's program that took the port before the SuperNode could name an app to run.
    """
    address = int.from_bytes(socket.inet_aton("127.0.0.1"), sys.byteorder)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    owners = {int(row[7]) for row in rows if (row[1], row[3]) == (f"{address:08X}:{port:04X}", _LISTENING)}
    return owners == {os.getuid()}


def _ready(ended: int, timeout: float, running: Sequence[BaseProcess]) -> bool:
    """Wait until a process ends or the time is over; returns whether it is that with the descriptor `ended`."""
    readable, _, _ = select.select([ended, *(process.sentinel for process in running)], [], [], timeout)
    return ended in readable


def _taken(tasks: "NodeTasks") -> "Task | None":
    try:
        return tasks.take()
    except PermissionError as error:
        raise StateError(f"{error}; start the node again") from None


def _stop(*_: object) -> NoReturn:
    raise SystemExit(1)
