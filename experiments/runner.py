"""Runs the cells of a study: finished ones are skipped, broken ones resumed, several run side by side."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.study import Cell, Study
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RESUMABLE_CHANGES, default_settings
from hyperfl_flwr.core.errors import RunDirectoryError, RunFailedError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.storage import write_atomically
from hyperfl_flwr.launch.app_bundle import worker_environment
from hyperfl_flwr.runs.run_directory import read_manifest, trained_settings

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
    return {key: value for key, value in sorted(changes.items()) if key not in machines or key.startswith("novel.")}


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
    """Return how the settings of a run differ from those that a cell has; the machine's do not count.

    A setting that the run did not know yet counts as its default.
    """
    asked, wanted = _of_the_study(cell.settings), _of_the_study(resolved(cell.config).flat() | cell.attack)
    got = _of_the_study({**default_settings(), **trained_settings(manifest)})
    wrong = [key for key in sorted({*wanted, *got}) if got.get(key) not in (asked.get(key), wanted.get(key))]
    return [f"{key} {got.get(key)!r} instead of {wanted.get(key)!r}" for key in wrong]


def run_cells(
    study: Study,
    cells: Sequence[Cell],
    folder: Path,
    jobs: int,
    on_finished: Callable[[Cell, str], None],
    *,
    quick: bool = False,
    on_note: Callable[[Cell, str], None] = lambda cell, note: None,
) -> None:
    """Run those cells that are not finished.

    Args:
        study: Gives the number of nodes.
        cells: In the order in which to begin them.
        folder: The study's.
        jobs: How many run at the same time.
        on_finished: Receives each cell as it ends, and why it failed, or an empty text.
        quick: Whether a process runs several cells, which saves seconds but makes memory figures meaningless.
        on_note: Receives a cell and what it waits for.

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
    workers = _Workers(jobs, worker_environment(), several_cells=quick)
    with ThreadPoolExecutor(jobs) as pool:
        futures: dict[Future[str], Cell] = {
            pool.submit(workers.run, _task(cell, folder, study.num_nodes), partial(on_note, cell)): cell
            for cell in waiting
        }
        try:
            for future in as_completed(futures):
                cell, problem = futures[future], future.result()
                if problem:
                    failed.append(f"{cell}: {problem}")
                on_finished(cell, problem)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            workers.end()
    workers.close()
    if failed:
        raise RunFailedError(
            "\n".join([f"{len(failed)} of {len(cells)} cells failed; the same command tries them again:", *failed])
        )


def _task(cell: Cell, folder: Path, num_nodes: int) -> str:
    """Return what `experiments.worker` reads."""
    path = cell.folder(folder)
    resumes = (path / "manifest.json").is_file() and not cell.attack
    settings = cell.config.flat() | ({"resume": str(path)} if resumes else {"output": str(path)})
    return json.dumps({"settings": settings, "attack": cell.attack, "num_nodes": num_nodes}) + "\n"


class _Worker:
    """A process of `experiments.worker`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        # Without -P, a folder `experiments` in the working directory would be run in the place of this project's.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "experiments.worker"], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def run(self, task: str, on_note: Callable[[str], None]) -> str:
        """Do a task; returns the problem, that the process died among them."""
        reader, writer = self.process.stdout, self.process.stdin
        if reader is None or writer is None:
            raise RuntimeError("the process has no pipes")
        try:
            writer.write(task)
            writer.flush()
            while "note" in (answer := json.loads(reader.readline() or "{}")):
                on_note(answer["note"])
        except BrokenPipeError:
            answer = {}
        if answer:
            return " | ".join(str(answer["problem"]).splitlines())
        self.process.wait()
        self._log.seek(0)
        said = " | ".join(self._log.read().strip().splitlines()[-LAST_LINES:])
        return f"its process died with exit status {self.process.returncode}: {said}"

    def end(self) -> None:
        """End the process; who waits for it hears that it died."""
        self.process.terminate()
        self.process.wait()

    def close(self) -> None:
        """Close its pipes, when nobody uses them any more."""
        for stream in (self.process.stdin, self.process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class _Workers:
    """Processes that run cells, each on one of the GPUs that are visible; a dead one is replaced."""

    def __init__(self, number: int, environment: Mapping[str, str], *, several_cells: bool) -> None:
        self._several_cells = several_cells
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[tuple[Mapping[str, str], _Worker | None]] = queue.SimpleQueue()
        self._all: list[_Worker] = []
        self._ended = False
        gpus = _visible_gpus()
        for place in range(number):
            gpu = {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {}
            self._idle.put(({**environment, **gpu}, None))

    def run(self, task: str, on_note: Callable[[str], None]) -> str:
        """Do a task on an idle process; returns the problem."""
        environment, worker = self._idle.get()
        try:
            with self._lock:
                if self._ended:
                    return "stopped"
                if worker is None or worker.process.poll() is not None:
                    worker = _Worker(environment)
                    self._all.append(worker)
            return worker.run(task, on_note)
        finally:
            if worker is not None and not self._several_cells:
                worker.end()
                worker.close()
                with self._lock:
                    self._all.remove(worker)
                worker = None
            self._idle.put((environment, worker))

    def end(self) -> None:
        """End all processes; what they were doing ends too."""
        with self._lock:
            self._ended = True
            running = list(self._all)
        for worker in running:
            worker.end()

    def close(self) -> None:
        """Close their pipes."""
        for worker in self._all:
            worker.close()


def _visible_gpus() -> list[str]:
    """Return the names by which CUDA_VISIBLE_DEVICES calls this machine's GPUs."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


def default_folder(study: str, *, quick: bool) -> Path:
    """Return where a study's runs go unless told otherwise."""
    return Path(os.getcwd()) / "runs" / "studies" / (f"{study}-quick" if quick else study)  # noqa: PTH109
