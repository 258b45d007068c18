"""Measure the workloads of `benchmarks.workload` in processes of their own."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from benchmarks.private_steps import PrivateSteps
from benchmarks.secure_rounds import SecureRound
from benchmarks.secure_sums import SecureCost
from benchmarks.transport import Step
from benchmarks.workload import Workload
from hyperfl_flwr.launch.flower.env import training_environment

Note = Callable[[str], None]
"""Receives one line for the user."""


class Worker:
    """A process of `benchmarks.worker`.

    Args:
        specification: The process's task, see `benchmarks.worker`.
        keeps_memory: Whether glibc is configured to keep freed memory, as by `hyperfl run`.

    Raises:
        RuntimeError: If the process ends before it is ready.
    """

    def __init__(self, specification: Mapping[str, Any], *, keeps_memory: bool) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", json.dumps(specification)],
            env=training_environment(keeps_memory=keeps_memory), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True,
        )  # fmt: skip
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self._process.__exit__(kind, error, traceback)  # closes the pipes, which ends the worker, and waits
        self._log.close()

    def measure(self) -> dict[str, Any]:
        """Run one measurement and return its result.

        Raises:
            RuntimeError: If the process ends without a result.
        """
        if self._process.stdin is None:
            raise RuntimeError("the worker has no standard input")
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._read()))

    def _read(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"a worker ended with exit code {status}:\n{self._log.read()[-2000:]}")
        return line


def measure_transport(work: Workload) -> list[Step]:
    """Measure the transport of a method's arrays, in a process with the environment of training processes."""
    with Worker({"kind": "transport", "work": work.as_json()}, keeps_memory=True) as worker:
        return [Step(**step) for step in worker.measure()["steps"]]


def measure_secure(work: Workload, num_nodes: int, note: Note = print) -> SecureCost:
    """Measure secure sums of a method's arrays, in a process with the environment of training processes."""
    note(f"secure sums of {num_nodes} nodes: {work.method}")
    with Worker({"kind": "secure", "work": work.as_json(), "nodes": num_nodes}, keeps_memory=True) as worker:
        return SecureCost(**worker.measure())


def measure_secure_rounds(work: Workload, num_rounds: int, note: Note = print) -> SecureRound:
    """Measure rounds with and without secure sums, in a process with the environment of training processes."""
    note(f"rounds with secure sums: {work.method}, {work.clients} nodes")
    with Worker({"kind": "secure-rounds", "work": work.as_json(), "rounds": num_rounds}, keeps_memory=True) as worker:
        return SecureRound(**worker.measure())


def measure_private(work: Workload, target: str, repetitions: int, note: Note = print) -> PrivateSteps:
    """Measure noisy steps of a target network, in a process with the environment of training processes."""
    note(f"noisy steps: {target}")
    specification = {"kind": "private", "work": work.as_json(), "target": target, "repetitions": repetitions}
    with Worker(specification, keeps_memory=True) as worker:
        found = worker.measure()
    return PrivateSteps(**found | {"shape": tuple(found["shape"])})
