"""Call a function in a subprocess, so that this process stays small and the memory is freed afterwards.

A process that has imported torch keeps 600 MB until it ends. A notebook keeps the modules that it has imported, such as
a user's network; a subprocess imports their current source. The function takes and returns plain values and records,
which are pickled between this process and its own child.

This module is also the program of the subprocess (`main`); it imports nothing that takes time or memory.
"""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from typing import Any

from hyperfl_flwr.core.errors import HyperFLError, RunFailedError
from hyperfl_flwr.core.packages.quick_imports import quick_imports

END_SECONDS = 5.0
"""Seconds that an interrupted subprocess may take to remove its temporary files."""

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from hyperfl_flwr.launch.subprocess_call import main; main()"


def call_in_subprocess(name: str, *arguments: object) -> Any:  # noqa: ANN401 - the function's result
    """Call a function in a subprocess, which has this process's import path and nothing else of it.

    Args:
        name: The function, as `package.module:function`.
        *arguments: Its arguments.

    Returns:
        The function's result.

    Raises:
        HyperFLError: If the function raises it; RunFailedError if the subprocess dies or fails in another way, with
            the traceback on standard error.
        OSError: If the function raises it with a file name.
    """
    # -P and the same import path: the child imports nothing from a working directory that this process does not use.
    # A new session: Ctrl-C reaches only this process, which then ends the child in an orderly way.
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, *sys.path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with child:
        try:
            answer = _exchange(child, pickle.dumps((name, *arguments)))
            child.wait()  # before closing its standard input, which would end it in the middle of a traceback
        except BaseException:
            _end(child)
            raise
    if not answer:
        raise RunFailedError(f"the process that ran {name} ended without a result, with exit code {child.returncode}")
    returned, value = pickle.loads(answer)  # noqa: S301 - from this process's own child
    if not returned:
        raise value
    return value


def call_here(name: str, *arguments: object) -> Any:  # noqa: ANN401 - as the function
    """Call a function by its name."""
    module, _, function = name.partition(":")
    if module not in sys.modules:
        with quick_imports():
            importlib.import_module(module)
    return getattr(sys.modules[module], function)(*arguments)


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()


def _exchange(child: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    """Send a child its request and return its answer, which is empty if it dies."""
    if child.stdin is None or child.stdout is None:
        raise ValueError("the child has no pipes")
    try:
        child.stdin.write(request)
        child.stdin.flush()  # stays open: the child ends when it closes, also by kill -9 of this process
    except BrokenPipeError:
        return b""
    return child.stdout.read()


def main() -> None:
    """Run as the subprocess."""
    with os.fdopen(os.dup(1), "wb") as answers, os.fdopen(0, "rb", closefd=False) as requests:
        os.dup2(2, 1)  # the function's own output must not mix with the answer
        try:
            request = pickle.load(requests)  # noqa: S301 - from this process's own parent
        except EOFError:  # the parent was interrupted while it started this process
            return
        threading.Thread(target=_end_with_parent, daemon=True).start()
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            answer = (True, call_here(*request))
        except HyperFLError as error:
            answer = (False, error)
        except OSError as error:
            if error.filename is None:
                raise
            answer = (False, error)
        except KeyboardInterrupt:
            sys.exit(130)
        pickle.dump(answer, answers)
    sys.stdout.flush()  # of what the function has printed
    sys.stderr.flush()
    os._exit(0)  # skips Python's shutdown, which takes most of a second with torch


def _end_with_parent() -> None:
    """End this process when its parent has ended, which closes standard input."""
    while os.read(0, 1):
        pass
    os._exit(1)
