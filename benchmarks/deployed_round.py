"""Measure where the seconds of a deployment's rounds go, from what real programs on this machine log.

The output of each node is read through a pipe, and each line gets the time of its arrival. With
`FLWR_LOG_LEVEL=DEBUG` Flower's programs log their steps, and the requests of a message's process to its SuperNode.
"""

import contextlib
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import proportional_memory
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.provision import init
from hyperfl_flwr.deploy.register import register
from hyperfl_flwr.deploy.superlink import DeployedSuperLink
from hyperfl_flwr.runs.run_directory import read_metrics

PATIENCE = 300.0
"""Seconds to wait for a program."""

IDLE_SECONDS = 3.0
"""Time after a run until its last process has ended."""

STEPS = {
    "taken": "Receiving: train message",
    "begun": "Start `flwr-clientapp` process",
    "loading": "Start `ClientApp` Loading",
    "answered": "POST /v1/runtime/push-messages",
    "sending": "Sending: train message",
    "sent": "Sent successfully",
}
"""Steps of a message on its node, in their order, and the lines with which Flower logs them."""

PARTS = {
    "waiting": "the server reduces, and the SuperNode asks for a message (every 3 s)",
    "begun": "the message comes to the SuperNode; its process starts and imports Flower (worker: the project)",
    "loading": "the message comes to the process",
    "imports": "the process imports torch and the project (worker: nothing), and loads the data",
    "clients": "the clients load their state, evaluate, train, evaluate and store",
    "sending": "the reply comes to the SuperNode",
    "sent": "the reply comes to the SuperLink",
}
"""Parts of a round, in their order, by the step at whose end they are."""


@dataclass(frozen=True, kw_only=True)
class DeployedWork:
    """A run of a deployment with two nodes of one client each.

    Attributes:
        name: Name in the table.
        settings: Settings of the run.
        model: Network of `hyperfl run --model`, in a file of this folder; empty for a built-in one.
    """

    name: str
    settings: Mapping[str, Scalar]
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the seconds of a round go.

    Attributes:
        round_seconds: Median wall time of a round at the server, without the first.
        parts: Median seconds of each of `PARTS` over the messages of these rounds.
        memory: Memory of a node's processes together after the run, in bytes, shared pages divided.
    """

    round_seconds: float
    parts: Mapping[str, float]
    memory: int


@dataclass(frozen=True, kw_only=True)
class DeployedRounds:
    """The rounds of a run with and without a worker on the nodes.

    Attributes:
        name: Name of the run.
        without_worker: The rounds with `worker = "off"`.
        with_worker: The rounds with `worker = "auto"`.
    """

    name: str
    without_worker: Profile
    with_worker: Profile


class Program:
    """A program of which each line of output gets the time of its arrival.

    Args:
        folder: Folder with its start.sh.
    """

    def __init__(self, folder: Path) -> None:
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            ["/bin/sh", str(folder / "start.sh")], env={**os.environ, "FLWR_LOG_LEVEL": "DEBUG"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def end(self) -> None:
        """End the program and all processes of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self._reader.join(30)

    def resident(self) -> int:
        """Return the memory of all processes of the program's session, shared pages divided, in bytes."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(entry.name)) == self.process.pid:
                    found.append(int(entry.name))
        return proportional_memory(found)


def measure_deployed(
    work: DeployedWork, num_rounds: int, data_root: str, note: Callable[[str], None]
) -> DeployedRounds:
    """Run a deployment of two nodes on loopback, with TLS and authentication, and divide its rounds into parts.

    Args:
        work: The run.
        num_rounds: Number of rounds, at least 2; the first is not counted.
        data_root: Folder of the named data sets; empty for the user's.
        note: Called with what is measured.
    """
    profiles = []
    for worker in (False, True):
        note(f"deployment: {work.name}, worker {'on' if worker else 'off'}")
        profiles.append(_profile(work, num_rounds, data_root, worker))
    return DeployedRounds(name=work.name, without_worker=profiles[0], with_worker=profiles[1])


def _profile(work: DeployedWork, num_rounds: int, data_root: str, worker: bool) -> Profile:
    with tempfile.TemporaryDirectory() as folder, deployed(Path(folder) / "fl", worker, data_root) as (fl, nodes):
        output = Path(folder) / "run"
        words = [f"--set={key}={value}" for key, value in {**work.settings, "num-rounds": num_rounds}.items()]
        words += ["--model", work.model] if work.model else []
        hyperfl = Path(sys.executable).with_name("hyperfl")
        command = [str(hyperfl), "run", "--deployment", str(fl.folder), "--output", str(output), "--quiet", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parent)
        time.sleep(IDLE_SECONDS)
        memory = nodes[0].resident()
        rows = [row for row in read_metrics(output) if row["kind"] == "train"][1:]
    messages = [parts for node in nodes for parts in divided(node.lines, [row["client_seconds"] / 2 for row in rows])]
    return Profile(
        round_seconds=statistics.median(row["seconds"] for row in rows),
        parts={name: statistics.median(parts[name] for parts in messages) for name in PARTS},
        memory=memory,
    )


@contextlib.contextmanager
def deployed(folder: Path, worker: bool, data_root: str) -> Iterator[tuple[Deployment, list[Program]]]:
    """Start a deployment of two nodes on this machine, and end it at the end of the `with` block."""
    deployment = Deployment(folder=folder, host="127.0.0.1", port=free_port(), num_nodes=2)
    init(deployment)
    for number in range(2):
        file = deployment.node(number) / "node.toml"
        changed = {"threads": "1", "worker": '"auto"' if worker else '"off"', "data-root": f'"{data_root}"'}
        text = file.read_text()
        for key, value in changed.items():
            text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        file.write_text(text)
        (deployment.node(number) / "environment").write_text(f"HYPERFL_BIN='{Path(sys.executable).parent}'\n")
    programs = [Program(deployment.server)]
    link = DeployedSuperLink(deployment)
    try:
        wait_until(lambda: _answers(link))
        list(register(deployment))
        programs += [Program(deployment.node(number)) for number in range(2)]
        wait_until(lambda: all(link.nodes().values()))
        yield deployment, programs[1:]
    finally:
        for program in reversed(programs):
            program.end()


def _answers(link: DeployedSuperLink) -> bool:
    try:
        link.require()
    except RunFailedError:
        return False
    return True


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds; raises TimeoutError after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("a program of the deployment does not answer")
        time.sleep(0.2)


def divided(lines: Sequence[tuple[float, str]], client_seconds: Sequence[float]) -> list[dict[str, float]]:
    """Divide the way of each training message into `PARTS`; the first message is left out.

    Args:
        lines: A node's output, each line with the time of its arrival in seconds.
        client_seconds: Seconds that the clients needed for each of these messages.

    Returns:
        Seconds by part, for each message.
    """
    messages: list[dict[str, float]] = []
    last: dict[str, float] = {}
    for moment, line in lines:
        if STEPS["taken"] in line:
            messages.append({"last": last.get("sent", moment)})
            last = messages[-1]
        step = next((name for name, text in STEPS.items() if text in line and name not in last), None)
        if step is not None and (step == "taken" or "taken" in last):
            last[step] = moment
    counted = [message for message in messages[1:] if "sent" in message]
    found: list[dict[str, float]] = []
    for message, clients in zip(counted, client_seconds, strict=True):
        order = list(STEPS)
        parts = {step: message[step] - message[before] for before, step in itertools.pairwise(order)}
        inside = parts.pop("answered")
        found.append(
            {**parts, "waiting": message["taken"] - message["last"], "clients": clients, "imports": inside - clients}
        )
    return found
