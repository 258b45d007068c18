"""Run `flwr` commands one after the other in one process, which imports Flower once: this takes it two seconds."""

import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.launch.flower.env import plain_text

COMMAND_SECONDS = 120.0
"""Seconds that one of Flower's commands may take; it needs about one."""

_PIECE = 2**16
"""Bytes of output that are read at once."""

_PROGRAM = """
import json
import os
import sys
from importlib.metadata import distribution
requests = os.fdopen(os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
(command,) = distribution("flwr").entry_points.select(group="console_scripts", name="flwr")
run = command.load()
for line in requests:
    end, *words = json.loads(line)
    sys.argv = ["flwr", *words]
    try:
        run()
    except SystemExit:
        pass
    sys.stderr.flush()
    print(end, flush=True)
"""
"""Flower's command `flwr`. Once it has imported what it needs, it reads from standard input a line for each call: its
arguments, and the text that is to follow its output. The command itself has an empty standard input."""


class FlowerCommands:
    """The command `flwr`, in a process that starts at the first call, or before it; `close` or a `with` block ends it.

    After a fatal error Flower ends its process, within seconds: what follows such a command belongs into another one.

    Args:
        environment: The environment of the commands.
        home: Their working directory.
        within: Returns the command that runs a given command in the SuperLink's network.
    """

    def __init__(
        self, environment: Mapping[str, str], home: Path, within: Callable[[Sequence[str]], list[str]] = list
    ) -> None:
        self._environment, self._home, self._within = dict(environment), home, within
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self) -> None:
        """Start the process, which imports Flower while the caller does something else."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._within([sys.executable, "-P", "-c", _PROGRAM]), env=self._environment, cwd=self._home,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def run(self, *words: str) -> str:
        """Run a command and return what it prints, without colours; with `--format json` also where it fails.

        Args:
            *words: The command and its arguments, for example `"stop", "17"`.

        Raises:
            RunFailedError: If it does not end within `COMMAND_SECONDS`.
        """
        self.prepare()
        end = secrets.token_hex(16)
        try:
            printed = self._exchange(json.dumps([end, *words]), end)
        except BaseException:
            self.close()
            raise
        if printed is None:
            self.close()
            raise RunFailedError(
                f"`flwr {words[0]}` did not end within {COMMAND_SECONDS:g} s; if the machine is busy, repeat it"
            )
        return plain_text(printed)

    def _exchange(self, request: str, end: str) -> str | None:
        """Send a request, and return the output up to its end, or to the end of the process; None after the time."""
        process, printed, line = self._process, bytearray(), f"{end}\n".encode()
        if process is None or process.stdin is None or process.stdout is None:
            raise ValueError("the process has no pipes")
        try:
            process.stdin.write(f"{request}\n".encode())
            process.stdin.flush()
        except BrokenPipeError:  # it has ended, and what it has printed says why
            pass
        until = time.monotonic() + COMMAND_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (at := printed.find(line, max(0, len(printed) - _PIECE - len(line)))) < 0:
                if not selector.select(max(0.0, until - time.monotonic())):
                    return None
                if not (more := os.read(process.stdout.fileno(), _PIECE)):
                    self.close()
                    break
                printed += more
        return printed[: at if at >= 0 else None].decode(errors="replace")


def json_in(text: str) -> dict[str, Any]:
    """Return the JSON object in a command's output; a user's first call prints other text before it."""
    try:
        document = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
