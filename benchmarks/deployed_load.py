"""Measure how many rounds a minute a SuperLink serves with many SuperNodes on this machine, and its memory.

The SuperLink and the SuperNodes are Flower's programs, with TLS and authentication. The clients sleep instead of
training (`benchmarks/load_app`), and the process of each message is forked from one process, as a node's worker does:
the machine has to carry what in a deployment fifty machines carry.
"""

import contextlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.memory import cpu_seconds, proportional_memory
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import node_arguments
from hyperfl_flwr.deploy.provision import init
from hyperfl_flwr.deploy.register import register
from hyperfl_flwr.deploy.superlink import DeployedSuperLink
from hyperfl_flwr.deploy.worker_secret import read_secret, supernode_arguments
from hyperfl_flwr.flower.node_tasks import NodeTasks, run_client_app

APP = Path(__file__).with_name("load_app")

PROGRAMS = Path(sys.executable).parent
"""Folder of Flower's programs."""

FLOATS, SLEEP = 100_000, 1.0
"""Length of the array that each node receives and sends, and seconds that a client sleeps in between."""

LONGEST_SECONDS = 1500.0
"""Time after which the measurement is given up."""

MOST_PROCESSES, BATCH = 10, 4
"""Largest number of clients that sleep at the same time, and of SuperNodes that start at the same time."""

NODE_MEGABYTES, FREE_MEGABYTES = 100, 1000
"""Memory that a SuperNode needs at most, and that must stay free on the machine."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a SuperLink with many nodes did.

    Attributes:
        nodes: Number of SuperNodes.
        rounds: Number of rounds.
        payload: Bytes of the array that each node received and sent in each round.
        sleep: Seconds that each client slept.
        round_seconds: Median wall time of a round at the server, without the first.
        longest_round: Longest of these times.
        lost: Number of replies that were missing or wrong, over all rounds.
        memory_start: Memory of the SuperLink after the first round, in bytes, shared pages divided.
        memory_end: The same at the end of the last round.
        node_memory: Mean memory of a SuperNode, in bytes.
        busy: Mean share of the SuperLink's process in one core during the rounds.
    """

    nodes: int
    rounds: int
    payload: int
    sleep: float
    round_seconds: float
    longest_round: float
    lost: int
    memory_start: int
    memory_end: int
    node_memory: int
    busy: float


def measure_load(num_nodes: int, num_rounds: int, note: Callable[[str], None]) -> Load:
    """Run rounds of clients that sleep for a second and answer with 400 kB.

    Args:
        num_nodes: Number of SuperNodes.
        num_rounds: Number of rounds, at least 2.
        note: Called with what is done.

    Raises:
        MemoryError: If the machine has too little free memory.
        TimeoutError: If the rounds take longer than `LONGEST_SECONDS`.
    """
    needed = num_nodes * NODE_MEGABYTES + FREE_MEGABYTES
    if (free := _free_megabytes()) < needed:
        raise MemoryError(f"{num_nodes} SuperNodes need {needed} MB of free memory, found {free:.0f} MB")
    end = time.monotonic() + LONGEST_SECONDS
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        deployment = _new_deployment(folder / "fl", num_nodes)
        log = stack.enter_context((folder / "log").open("ab")).fileno()
        superlink = stack.enter_context(_program(["/bin/sh", str(deployment.server / "start.sh")], log))
        link = DeployedSuperLink(deployment)
        _wait(lambda: _listens(deployment.port), end)
        note(f"load: {num_nodes} nodes are registered and started")
        for _ in register(deployment):
            pass
        nodes = _start_nodes(deployment, link, stack, log, end)
        stack.enter_context(_served([(home, port) for home, port, _ in nodes], log))
        node_memory = statistics.mean(proportional_memory([process.pid]) for *_, process in nodes)
        note(f"load: {num_rounds} rounds")
        rows, (first, last), busy = _run_rounds(link, superlink.pid, num_rounds, folder, end)
    seconds = [row["seconds"] for row in rows[1:]]
    return Load(
        nodes=num_nodes, rounds=len(rows), payload=4 * FLOATS, sleep=SLEEP, round_seconds=statistics.median(seconds),
        longest_round=max(seconds), lost=num_nodes * num_rounds - sum(row["correct"] for row in rows),
        memory_start=first, memory_end=last, node_memory=int(node_memory), busy=busy,
    )  # fmt: skip


def _new_deployment(folder: Path, num_nodes: int) -> Deployment:
    """Make a deployment with Flower's programs of this environment, on a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    deployment = Deployment(folder=folder, host="127.0.0.1", port=port, num_nodes=num_nodes)
    init(deployment)
    (deployment.server / "environment").write_text(f"HYPERFL_BIN='{PROGRAMS}'\n")
    return deployment


def _start_nodes(
    deployment: Deployment, link: DeployedSuperLink, stack: contextlib.ExitStack, log: int, end: float
) -> list[tuple[Path, int, subprocess.Popen[bytes]]]:
    """Start the SuperNodes in batches, each after the one before is online; returns folder, port and process of each.

    Args:
        deployment: The deployment.
        link: Its SuperLink.
        stack: Ends the SuperNodes.
        log: File descriptor of their log.
        end: Time at which the measurement is given up.
    """
    nodes: list[tuple[Path, int, subprocess.Popen[bytes]]] = []
    for number in range(deployment.num_nodes):
        home = deployment.node(number)
        words = shlex.split(f"{supernode_arguments(home)} {node_arguments(home)}")
        command = [
            str(PROGRAMS / "flower-supernode"), "--root-certificates", str(home / "ca.crt"),
            "--auth-supernode-private-key", str(home / "node.key"), *words,
        ]  # fmt: skip
        process = stack.enter_context(_program(command, log, home))
        nodes.append((home, int(words[words.index("--port") + 1]), process))
        if len(nodes) % BATCH == 0 or len(nodes) == deployment.num_nodes:
            _wait(lambda: sum(link.nodes().values()) == len(nodes), end)
    return nodes


def _run_rounds(
    link: DeployedSuperLink, superlink: int, num_rounds: int, folder: Path, end: float
) -> tuple[list[dict[str, Any]], tuple[int, int], float]:
    """Run the rounds, and measure the SuperLink from the end of the first to the end of the last.

    Args:
        link: The SuperLink.
        superlink: Id of its process.
        num_rounds: Number of rounds.
        folder: Folder for the app's settings and its report.
        end: Time at which the measurement is given up.

    Returns:
        The app's row about each round, the SuperLink's memory at both times, and its mean share in one core.

    Raises:
        RuntimeError: If the app ends without a report.
    """
    report, settings = folder / "report.json", folder / "settings.toml"
    settings.write_text(f'rounds = {num_rounds}\nfloats = {FLOATS}\nsleep = {SLEEP}\nreport = "{report}"\n')
    run = link.submit(APP, settings)
    _wait(lambda: report.exists() or link.status(run).finished, end)
    if not report.exists():
        raise RuntimeError(f"the app ended before the first round: {link.status(run).details}")
    first, cpu, began = proportional_memory([superlink]), cpu_seconds([superlink]), time.monotonic()
    last = first

    def is_finished() -> bool:
        nonlocal last
        last = proportional_memory([superlink]) or last
        return link.status(run).finished

    _wait(is_finished, end, pause=1.0)
    busy = (cpu_seconds([superlink]) - cpu) / (time.monotonic() - began)
    return json.loads(report.read_text()), (first, last), busy


@contextlib.contextmanager
def _program(command: list[str], log: int, home: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    if home is not None:
        environment["FLWR_HOME"] = str(home / "flwr")
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


@contextlib.contextmanager
def _served(nodes: list[tuple[Path, int]], log: int) -> Iterator[None]:
    """Start the processes of all nodes' messages, in a process of its own, for the `with` block."""
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(nodes, log))
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _serve(nodes: list[tuple[Path, int]], log: int) -> None:
    """Fork a process for each message, at most `MOST_PROCESSES` at the same time, until SIGTERM."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    tasks = [(home, NodeTasks(f"127.0.0.1:{port}", read_secret(home))) for home, port in nodes]
    running: list[BaseProcess] = []
    while True:
        for home, node in tasks:
            running = [process for process in running if process.is_alive()]
            if len(running) < MOST_PROCESSES and (task := node.take()) is not None:
                process = multiprocessing.get_context("fork").Process(
                    target=_answer, args=(home, node.address, task.token), daemon=True
                )
                process.start()
                running.append(process)
        time.sleep(0.2)


def _answer(home: Path, address: str, token: str) -> None:
    os.environ["FLWR_HOME"] = str(home / "flwr")
    run_client_app(address, token)


def _wait(holds: Callable[[], object], end: float, pause: float = 0.5) -> None:
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"the load was not carried within {LONGEST_SECONDS:g} s")
        time.sleep(pause)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_megabytes() -> float:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) / 1e3
