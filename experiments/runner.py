"""Run the cells of a study in parallel processes: skip finished cells, and resume interrupted ones."""

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
from functools import partial
from pathlib import Path

import torch

from experiments.claims import TAKEN, claimed
from experiments.golden import outdated
from experiments.prepared_data import changed_data
from experiments.restored import remove_restored
from experiments.study import Cell, Study
from experiments.study_folder import is_finished
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.launch.app_bundle import worker_environment

LAST_LINES = 5
"""Number of lines of a dead process's output that are shown."""


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
    """Run the cells that are not finished, except for those that another process is training.

    Args:
        study: The study, with the number of nodes.
        cells: The cells, in the order in which they are started.
        folder: The study's folder.
        jobs: Number of cells that run at the same time.
        on_finished: Receives each cell when it ends, with the reason of a failure or an empty text.
        quick: Whether a process runs several cells, which saves seconds but makes memory figures meaningless.
        on_note: Receives a cell and a note on what it waits for, or why it may have other numbers by now.

    Raises:
        RunFailedError: If a cell failed; the other cells have been run.
        RunDirectoryError: If a cell was run before with other settings.
    """
    waiting = []
    for cell in cells:
        if is_finished(cell, folder):
            if reasons := [*outdated(cell, folder), *changed_data(cell, folder)]:
                on_note(cell, f"finished earlier: {'; '.join(reasons)}; remove its folder to run it again")
            on_finished(cell, "")
        else:
            waiting.append(cell)
    failed: dict[str, list[Cell]] = {}
    workers = _Workers(jobs, worker_environment(), several_cells=quick)
    with ThreadPoolExecutor(jobs) as pool:
        futures: dict[Future[str], Cell] = {
            pool.submit(_run_claimed, workers, cell, folder, study.num_nodes, partial(on_note, cell)): cell
            for cell in waiting
        }
        try:
            for future in as_completed(futures):
                cell, problem = futures[future], future.result()
                if problem:
                    failed.setdefault(problem, []).append(cell)
                on_finished(cell, problem)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            workers.end()
    workers.close()
    if failed:
        count = f"{sum(map(len, failed.values()))} of {len(cells)} cells failed; repeat the command to retry them:"
        reasons = [f"{', '.join(map(str, some))}: {problem}" for problem, some in failed.items()]
        raise RunFailedError("\n".join([count, *reasons]))


def _run_claimed(workers: "_Workers", cell: Cell, folder: Path, nodes: int, on_note: Callable[[str], None]) -> str:
    """Run a cell and return the problem; empty if there is none, or if another process trains or has trained it."""
    with claimed(folder, cell.folder(folder)) as is_ours:
        if not is_ours:
            on_note(TAKEN)
            return ""
        if is_finished(cell, folder):
            return ""
        remove_restored(cell.folder(folder))  # of a run that has failed: it cannot be resumed
        return workers.run(task_of(cell, folder, nodes), on_note)


def task_of(cell: Cell, folder: Path, num_nodes: int) -> str:
    """Return a cell's line of input for `experiments.worker`."""
    path = cell.folder(folder)
    resumes = (path / "manifest.json").is_file() and not cell.attack
    settings = cell.config.flat() | ({"resume": str(path)} if resumes else {"output": str(path)})
    return json.dumps({"settings": settings, "attack": cell.attack, "num_nodes": num_nodes}) + "\n"


class _Worker:
    """A process of `experiments.worker`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        # Without -P, a folder `experiments` in the working directory would be run instead of this project's.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "experiments.worker"], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def run(self, task: str, on_note: Callable[[str], None]) -> str:
        """Run a task and return the problem, which may be the death of the process; empty if there is none."""
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
        last_lines = " | ".join(self._log.read().strip().splitlines()[-LAST_LINES:])
        return f"its process died with exit code {self.process.returncode}: {last_lines}"

    def end(self) -> None:
        """Terminate the process; a pending `run` then reports its death."""
        self.process.terminate()
        self.process.wait()

    def close(self) -> None:
        """Close the pipes; the process must have ended, and no `run` may be pending."""
        for stream in (self.process.stdin, self.process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class _Workers:
    """A pool of processes that run cells, distributed over the visible GPUs; dead processes are replaced."""

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
        """Run a task on an idle process and return the problem; empty if there is none."""
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
        """Terminate all processes and their tasks."""
        with self._lock:
            self._ended = True
            running = list(self._all)
        for worker in running:
            worker.end()

    def close(self) -> None:
        """Close the pipes of all processes."""
        for worker in self._all:
            worker.close()


def _visible_gpus() -> list[str]:
    """Return the names of the visible GPUs, as used in CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]
