"""Run a simulation without Flower's engine and Ray: the nodes take turns in one process, which opens no port.

`InProcessRun` has the same interface for `hyperfl_flwr.launch.follow` as
`hyperfl_flwr.launch.local_superlink.LocalSuperLink`.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.toml_files import settings_text
from hyperfl_flwr.launch import processes
from hyperfl_flwr.launch.app_bundle import worker_environment
from hyperfl_flwr.launch.flower_client import RunStatus
from hyperfl_flwr.launch.flower_env import plain_text


def problem_file(settings: Path) -> Path:
    """Return the file with the reason of a failure, in the same folder as the run's settings."""
    return settings.with_name("problem.txt")


class InProcessRun:
    """Run the app in a subprocess for the duration of a `with` block.

    Args:
        settings: The run's settings by dotted key.
        num_nodes: Number of nodes P.
    """

    def __init__(self, settings: Mapping[str, Scalar], num_nodes: int) -> None:
        self._settings = settings
        self._num_nodes = num_nodes
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="hyperfl-"))
        settings = self._folder / "settings.toml"
        settings.write_text(settings_text(self._settings))
        # -P keeps the working directory off the import path: packages there may have the same names as this project's.
        command = [
            sys.executable,
            "-P",
            "-m",
            "hyperfl_flwr.launch.in_process_app",
            str(settings),
            str(self._num_nodes),
        ]
        self._process = processes.start_supervised(
            command,
            environment=worker_environment(),
            folder=Path.cwd(),
            log=self._log,
            remove=[self._folder],
        )
        self._printed = self._log.open("rb")  # opened now, because the supervisor removes the folder when the run ends
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        if self._printed is not None:
            self._printed.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def status(self, run_id: int) -> RunStatus:
        """Return the status of the run; there is only one, so the id is ignored."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return RunStatus(status="running")
        if code == 0:
            return RunStatus(status="finished:completed")
        problem = problem_file(self._folder / "settings.toml")
        details = problem.read_text() if problem.is_file() else f"the run's process ended with exit code {code}"
        return RunStatus(status="finished:failed", details=details)

    def new_notes(self) -> Iterable[str]:
        """Return no notes: the nodes start and end with the run."""
        return ()

    def read_log(self, run_id: int, position: int = 0) -> tuple[str, int]:
        """Return the run's output after `position`, and the position for the next call, in bytes."""
        if self._printed is None:
            return "", position
        self._printed.seek(position)
        printed = self._printed.read()
        return plain_text(printed.decode(errors="replace")), position + len(printed)

    def log_tail(self, run_id: int, lines: int = 20) -> str:
        """Return the last lines of the run's output."""
        return "\n".join(self.read_log(run_id)[0].splitlines()[-lines:])

    @property
    def _log(self) -> Path:
        return self._folder / "run.log"
