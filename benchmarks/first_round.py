"""Measure the first seconds of `hyperfl run`: when each of its programs starts, and what each of them costs.

The command runs with its default settings, on digits, with each engine until its first round is trained.
Processes are recognised by their command lines, which are read from Linux's /proc.
"""

import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import cpu_seconds
from hyperfl_flwr.launch.processes import descendants, process_table

SAMPLE_SECONDS = 0.02
"""Time between two samples of the processes."""

PATIENCE = 600.0
"""Seconds after which a run without a first round is a failure."""

FIRST_ROUND = "the first round is trained"

ENGINES = {
    "in-process": "One process, which is what `--engine auto` chooses for this run:",
    "ray": "Flower's simulation engine on Ray (`--engine ray`):",
}
"""The engines that are measured, with the text above the table of each."""

PROGRAMS = {
    r"launch\.in_process_app": "planning and training",
    r"import subprocess_call|from hyperfl_flwr\.launch\.subprocess_call": "the check of the settings",
    r"launch/network_namespace\.py|launch/processes\.py .*--owner": "the supervisor and its network",
    r"bin/flower-superlink": "flower-superlink",
    r"bin/flower-superexec": "flower-superexec",
    r"bin/flwr |name=\"flwr\"": "flwr run",
    r"ray::|/ray/_private/workers/": "the nodes (Ray's actors)",
    r"/ray/": "Ray's other programs",
    r"bin/flwr-simulation": "the server (flwr-simulation)",
    r"hyperfl_flwr run": "hyperfl run",
}
"""Pattern of a command line -> program; the first that is found in it."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The beginning of a run, until its first round is trained.

    Attributes:
        started: Program -> seconds from the start of the command to that of its first process; `FIRST_ROUND` is last.
        cpu: Program -> CPU seconds of all its processes until the first round is trained.
    """

    started: Mapping[str, float]
    cpu: Mapping[str, float]


def program_of(command: str) -> str:
    """Return the program of a command line, or `other`."""
    return next((name for pattern, name in PROGRAMS.items() if re.search(pattern, command)), "other")


def measure_beginning(engine: str) -> Beginning:
    """Run `hyperfl run` until its first round is trained, then end it.

    Args:
        engine: The engine of the run.

    Raises:
        RuntimeError: If the command ends before, or takes longer than `PATIENCE`.
    """
    started: dict[str, float] = {}
    cpu: dict[tuple[int, str], tuple[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "hyperfl_flwr", "run", "--output", f"{folder}/run", "--engine", engine]
        begin = time.monotonic()
        with subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder) as run:
            try:
                while FIRST_ROUND not in started:
                    seconds = time.monotonic() - begin
                    table = process_table()
                    for pid in {run.pid, *descendants([run.pid], table)} & table.keys():
                        key = pid, table[pid].started
                        # An ending process has no command line. Ray's change theirs; the last one tells what they do.
                        name = program_of(table[pid].command) if table[pid].command else cpu.get(key, ("other", 0.0))[0]
                        started.setdefault(name, seconds)
                        cpu[key] = name, max(cpu_seconds([pid]), cpu.get(key, ("", 0.0))[1])
                    if metrics.is_file() and '"kind": "train"' in metrics.read_text():
                        started[FIRST_ROUND] = time.monotonic() - begin
                    elif run.poll() is not None or seconds > PATIENCE:
                        log.seek(0)
                        raise RuntimeError(f"no round after {seconds:.0f} s:\n{log.read()[-2000:]}")
                    time.sleep(SAMPLE_SECONDS)
            finally:
                run.send_signal(signal.SIGINT)  # as Ctrl-C, so that it ends its processes
    totals: dict[str, float] = {}
    for name, used in cpu.values():
        totals[name] = totals.get(name, 0.0) + used
    return Beginning(started=started, cpu=totals)


def medians(beginnings: Sequence[Beginning]) -> list[tuple[str, str, str]]:
    """Return rows of the medians over some runs: program, start in seconds, CPU seconds; the last row is the round."""
    names = [name for name in dict.fromkeys(n for one in beginnings for n in one.started) if name != FIRST_ROUND]
    rows = []
    for name in sorted(names, key=lambda name: _median([one.started.get(name) for one in beginnings])):
        start = _median([one.started.get(name) for one in beginnings])
        rows.append((name, f"{start:.1f}", f"{_median([one.cpu.get(name, 0.0) for one in beginnings]):.1f}"))
    total = _median([sum(one.cpu.values()) for one in beginnings])
    return [*rows, (FIRST_ROUND, f"{_median([one.started[FIRST_ROUND] for one in beginnings]):.1f}", f"{total:.1f}")]


def _median(values: Sequence[float | None]) -> float:
    return statistics.median([value for value in values if value is not None])
