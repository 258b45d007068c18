"""Calls a function in a subprocess, so that this process stays small and the memory is given back at the end.

A process that has imported torch keeps 600 MB for as long as it lives. A notebook keeps the modules that it has
imported, a network of the user's among them; a subprocess imports them as they are now. The function gets and returns
plain values and records, which travel as pickles between this process and its own child.

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

END_SECONDS = 5.0
"""How long an interrupted subprocess may take to remove its temporary files."""

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from hyperfl_flwr.launch.subprocess_call import main; main()"


def call_in_subprocess(name: str, *arguments: object) -> Any:  # noqa: ANN401 - as the function
    """Call a function in a subprocess, which has this process's import path and nothing else of it.

    Args:
        name: `package.module:function`.
        *arguments: What it is called with.

    Returns:
        What it returns.

    Raises:
        HyperFLError: As the function raises it; RunFailedError if the subprocess dies or fails in another way, after
            the traceback on standard error.
        OSError: As the function raises it of a file.
    """
    # -P and the same import path: nothing is imported from a working directory in which this process would not look.
    # A session of its own: Ctrl-C comes to this process alone, which ends the other in an orderly way.
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, *sys.path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with child:
        try:
            answer = _exchange(child, pickle.dumps((name, *arguments)))
            child.wait()  # before its standard input is closed, which would cut a traceback short
        except BaseException:
            _end(child)
            raise
    if not answer:
        raise RunFailedError(f"the process that ran {name} ended without a result, with exit status {child.returncode}")
    returned, value = pickle.loads(answer)  # noqa: S301 - of our own child
    if not returned:
        raise value
    return value


def call_here(name: str, *arguments: object) -> Any:  # noqa: ANN401 - as the function
    """Call a function by its name."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(*arguments)


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
        child.stdin.flush()  # stays open: the child ends when it is closed, by kill -9 of this process, too
    except BrokenPipeError:
        return b""
    return child.stdout.read()


def main() -> None:
    """Run as the subprocess."""
    with os.fdopen(os.dup(1), "wb") as answers, os.fdopen(0, "rb", closefd=False) as requests:
        os.dup2(2, 1)  # whatever else is printed
        try:
            request = pickle.load(requests)  # noqa: S301 - of our own parent
        except EOFError:  # it was interrupted while it started this process
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
    sys.stderr.flush()
    os._exit(0)  # at once: with torch, Python takes most of a second to take itself down


def _end_with_parent() -> None:
    """End the process when its parent has gone."""
    while os.read(0, 1):
        pass
    os._exit(1)
