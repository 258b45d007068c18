"""Runs the cells of a study: finished ones are skipped, broken ones resumed, several run side by side."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.flower import training_environment
from experiments.run import commit
from experiments.studies import Cell, Study
from hyperfl_flwr.config import RESUMABLE_CHANGES, Scalar
from hyperfl_flwr.errors import RunDirectoryError, RunFailedError
from hyperfl_flwr.manifest import COMMIT_VARIABLE
from hyperfl_flwr.recording import read_manifest
from hyperfl_flwr.storage import write_atomically

DESCRIPTION = "study.json"
"""What a study's folder was begun with."""

LAST_LINES = 5
"""Lines of a failed cell's output that are shown."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What a study's folder was begun with; other cells of it may be added, other settings may not.

    Attributes:
        study: Name of the study.
        quick: Whether with its `quick` settings.
        changes: Settings that differ from the study's, without those of the machine.
    """

    study: str
    quick: bool
    changes: Mapping[str, Scalar]


def begin(folder: Path, begun: Begun) -> None:
    """Make a study's folder, or check that it was begun in the same way.

    Raises:
        RunDirectoryError: If it was not, or holds something else.
    """
    document = {"study": begun.study, "quick": begun.quick, "changes": _of_the_study(begun.changes)}
    if (folder / DESCRIPTION).is_file():
        if (before := json.loads((folder / DESCRIPTION).read_text())) != document:
            raise RunDirectoryError(f"{folder} was begun as {before}, not as {document}; choose another --output")
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise RunDirectoryError(f"{folder} holds something else than a study; choose another --output")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / DESCRIPTION, json.dumps(document, indent=2).encode())


def read_begun(folder: Path) -> Begun:
    """Return what a study's folder was begun with.

    Raises:
        RunDirectoryError: If it is no study's folder.
    """
    if not (folder / DESCRIPTION).is_file():
        raise RunDirectoryError(f"{folder} is no study's folder; run `hyperfl study` first, or give its --output")
    return Begun(**json.loads((folder / DESCRIPTION).read_text()))


def _of_the_study(changes: Mapping[str, Scalar]) -> dict[str, Scalar]:
    machines = RESUMABLE_CHANGES - {"num-rounds"}
    return {key: value for key, value in sorted(changes.items()) if key not in machines}


def seeds_in(folder: Path) -> int:
    """Return how many seeds, from 0, a study's folder has runs of."""
    numbers = [int(path.name.removeprefix("seed-")) for path in folder.glob("*/*/seed-[0-9]*")]
    return max(numbers, default=-1) + 1


def is_finished(cell: Cell, folder: Path) -> bool:
    """Say whether a cell was run to its end.

    Raises:
        RunDirectoryError: If it was run with other settings.
    """
    path = cell.folder(folder)
    if not (path / "manifest.json").is_file():
        return False
    manifest = read_manifest(path)
    if problems := differences(cell, manifest):
        raise RunDirectoryError(f"{path} was run with other settings ({'; '.join(problems)}); choose another --output")
    return bool(manifest["status"] == "completed" and (path / "summary.json").is_file())


def differences(cell: Cell, manifest: Mapping[str, Any]) -> list[str]:
    """Return how the settings of a run differ from those that a cell has; the machine's do not count."""
    wanted, got = _of_the_study(cell.config.flat()), _of_the_study(manifest["settings"])
    keys = sorted(set(wanted) | set(got))
    return [f"{key} {got.get(key)!r} instead of {wanted.get(key)!r}" for key in keys if got.get(key) != wanted.get(key)]


def run_cells(
    study: Study, cells: Sequence[Cell], folder: Path, jobs: int, on_finished: Callable[[Cell, str], None]
) -> None:
    """Run those cells that are not finished.

    Args:
        study: Gives the number of nodes.
        cells: In the order in which to begin them.
        folder: The study's.
        jobs: How many run at the same time.
        on_finished: Receives each cell as it ends, and why it failed, or an empty text.

    Raises:
        RunFailedError: If any failed; the others have been run.
        RunDirectoryError: If one was run before with other settings.
    """
    waiting = []
    for cell in cells:
        if is_finished(cell, folder):
            on_finished(cell, "")
        else:
            waiting.append(cell)
    failed: list[str] = []
    processes, environment = _Processes(), training_environment() | {COMMIT_VARIABLE: commit()}
    with ThreadPoolExecutor(jobs) as pool:
        futures: dict[Future[str], Cell] = {
            pool.submit(_run, cell, folder, study.num_nodes, processes, environment): cell for cell in waiting
        }
        try:
            for future in as_completed(futures):
                cell, problem = futures[future], future.result()
                if problem:
                    failed.append(f"{cell}: {problem}")
                on_finished(cell, problem)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.end()
            raise
    if failed:
        raise RunFailedError(
            "\n".join([f"{len(failed)} of {len(cells)} cells failed; the same command tries them again:", *failed])
        )


class _Processes:
    """The running cells, which end with this process's interest in them."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def run(self, command: Sequence[str], environment: Mapping[str, str], text: str) -> tuple[int, str]:
        """Run a command to its end; returns its exit status and output."""
        with self._lock:
            if self._ended:
                return 1, "stopped"
            process = subprocess.Popen(
                command, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self._running.add(process)
        output, _ = process.communicate(text)
        with self._lock:
            self._running.discard(process)
        return process.returncode, output

    def end(self) -> None:
        """End what runs, and let nothing begin."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.terminate()


def _run(cell: Cell, folder: Path, num_nodes: int, processes: _Processes, environment: Mapping[str, str]) -> str:
    """Run a cell; returns why it failed, or an empty text."""
    path = cell.folder(folder)
    began = (path / "manifest.json").is_file()
    settings = cell.config.flat() | ({"resume": str(path)} if began else {"output": str(path)})
    text = json.dumps({"settings": settings, "num_nodes": num_nodes})
    status, output = processes.run([sys.executable, "-m", "experiments.cell"], environment, text)
    if status == 0:
        return ""
    return " | ".join(output.strip().splitlines()[-LAST_LINES:]) or f"exit status {status}"


def default_folder(study: str, *, quick: bool) -> Path:
    """Return where a study's runs go unless told otherwise."""
    return Path(os.getcwd()) / "runs" / "studies" / (f"{study}-quick" if quick else study)  # noqa: PTH109
