"""Run simulations without Flower's engine and Ray: the nodes take turns in one process, which opens no port.

`InProcessEngine` has the same interface for `hyperfl_flwr.launch.follow` as
`hyperfl_flwr.launch.flower.local_superlink.LocalSuperLink`.
"""

import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch import processes
from hyperfl_flwr.launch.app_bundle import worker_environment
from hyperfl_flwr.launch.flower.client import RunStatus
from hyperfl_flwr.launch.flower.env import plain_text

POLL_SECONDS = 0.02
"""Seconds between two looks for a request or an answer."""

_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from hyperfl_flwr.launch.in_process_app import main; main()"


def request_file(folder: Path, number: int) -> Path:
    """Return the file of a request to the process."""
    return folder / f"request-{number}.pickle"


def answer_file(folder: Path, number: int) -> Path:
    """Return the file of the answer to a request."""
    return folder / f"answer-{number}.pickle"


class InProcessEngine:
    """A process that plans runs and trains them, one after the other, for the duration of a `with` block.

    Planning and training share what takes time and memory: torch and the data set are loaded once. The process starts
    with the block and is replaced if it ended: `end` frees its memory while nothing is to be done.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None
        self._requests = 0
        self._log_starts: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - the function's result
        """Call a function in the process; what it prints goes to standard error.

        Args:
            name: The function, as `package.module:function`.
            *arguments: Its arguments.

        Raises:
            HyperFLError: If the function raises it; RunFailedError if the process dies or fails in another way, with
                the traceback on standard error.
            OSError: If the function raises it with a file name.
        """
        number, position = self._request("call", name, *arguments), 0
        while True:
            is_running = self._poll() is None  # before the answer, which is written before the process ends
            text, position = self.read_log(number, position)
            sys.stderr.write(text)
            if (file := answer_file(self._folder, number)).is_file():
                returned, value = pickle.loads(file.read_bytes())  # noqa: S301 - from this process's own child
                if not returned:
                    raise value
                return value
            if not is_running:
                raise RunFailedError(f"the process that ran {name} ended without a result, exit code {self._poll()}")
            time.sleep(POLL_SECONDS)

    def submit(self, settings: Mapping[str, Scalar], num_nodes: int) -> int:
        """Start a run.

        Args:
            settings: The run's settings by dotted key.
            num_nodes: Number of nodes P.

        Returns:
            The id of the run.
        """
        return self._request("run", dict(settings), num_nodes)

    def end(self) -> None:
        """End the process; a further request starts another one."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._printed is not None:
            self._printed.close()
            self._printed = None

    def status(self, run_id: int) -> RunStatus:
        """Return the status of a run."""
        code = self._poll()
        if (file := answer_file(self._folder, run_id)).is_file():
            problem = pickle.loads(file.read_bytes())  # noqa: S301 - from this process's own child
            return RunStatus(status="finished:failed" if problem else "finished:completed", details=problem)
        if code is None:
            return RunStatus(status="running")
        return RunStatus(status="finished:failed", details=f"the run's process ended with exit code {code}")

    def new_notes(self) -> Iterable[str]:
        """Return no notes: the nodes start and end with the run."""
        return ()

    def read_log(self, run_id: int, position: int = 0) -> tuple[str, int]:
        """Return a run's output after `position`, and the position for the next call, in bytes."""
        if self._printed is None:
            return "", position
        self._printed.seek(self._log_starts[run_id] + position)
        printed = self._printed.read()
        return plain_text(printed.decode(errors="replace")), position + len(printed)

    def log_tail(self, run_id: int, lines: int = 20) -> str:
        """Return the last lines of a run's output."""
        return "\n".join(self.read_log(run_id)[0].splitlines()[-lines:])

    def _poll(self) -> int | None:
        """Return the exit code of the process; None while it is running."""
        return None if self._process is None else self._process.poll()

    def _begin(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hyperfl-"))
        log = self._folder / "run.log"
        # -P and the same import path: the process imports nothing from a working directory that this one does not use.
        self._process = processes.start_supervised(
            [sys.executable, "-P", "-c", _PROGRAM, str(self._folder), *sys.path],
            environment=worker_environment(),
            folder=Path.cwd(),
            log=log,
            remove=[self._folder],
        )
        self._printed = log.open("rb")  # opened now, because the supervisor removes the folder when the process ends

    def _request(self, *request: object) -> int:
        """Send a request, to a new process if there is none, and return its number."""
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._begin()
        number, self._requests = self._requests, self._requests + 1
        self._log_starts[number] = (self._folder / "run.log").stat().st_size
        write_atomically(request_file(self._folder, number), pickle.dumps((number, *request)))
        return number
