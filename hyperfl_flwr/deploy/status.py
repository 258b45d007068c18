"""The state of a deployment for its operator: SuperLink, nodes and runs; everything is read, nothing is changed."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import HyperFLError
from hyperfl_flwr.core.tasks import CLASSIFICATION, TASKS, task_of
from hyperfl_flwr.deploy.checks.probe import probe
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.registered_nodes import readable, registered_nodes
from hyperfl_flwr.flower.superlink import database
from hyperfl_flwr.protocol.messages import printable
from hyperfl_flwr.runs.failures import read_failures
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics

MOST_RUNS = 5
"""Number of the latest runs that are described."""

MOST_STARTS = 50
"""Number of the latest starts of runs that are read; a run that was resumed has several."""

MOST_PROBLEMS = 10
"""Number of the latest problems of each kind that are listed: refused nodes, clients left out, warnings and errors."""

_PROBLEM = re.compile(r"^\S+ \S+ (?:WARNING|ERROR) (.*)$")
"""A line of a run's log about a problem."""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """A node as the SuperLink sees it.

    Attributes:
        number: The node's number.
        state: `connected`, `away`, or `not registered`.
        since: Time since when it is connected or away, UTC, ISO 8601; empty if it is not known.
    """

    number: int
    state: str
    since: str = ""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run on the SuperLink.

    Attributes:
        run_id: Flower's id.
        status: `pending`, `starting`, `running`, or `finished:` with `completed`, `failed` or `stopped`.
        folder: Its folder; empty if its settings do not name one.
        method: Its method; empty until its folder has a manifest.
        start: Time of its start, UTC, ISO 8601; empty likewise.
        round: Last finished round.
        num_rounds: Number of rounds that it is to have; 0 until its folder has a manifest.
        num_nodes: Number of its nodes, those with the smallest numbers; 0 likewise.
        task: Name of what it predicts.
        personalized: Mean score of the last finished round after local training; None without one.
        aggregate: Mean score of the last global state that was evaluated; None without one.
        away: Clients that were away in the last finished round.
        problems: The latest problems: refused nodes, clients that were left out, warnings and errors of its log.
    """

    run_id: int
    status: str
    folder: str
    method: str = ""
    start: str = ""
    round: int = 0
    num_rounds: int = 0
    num_nodes: int = 0
    task: str = CLASSIFICATION.name
    personalized: float | None = None
    aggregate: float | None = None
    away: Sequence[int] = ()
    problems: Sequence[str] = ()

    @property
    def score_title(self) -> str:
        """Name of the score."""
        return TASKS[self.task].score_title

    def scores(self) -> dict[str, str]:
        """Return the mean scores as text, by kind of model."""
        known = {"personalized": self.personalized, "aggregate": self.aggregate}
        return {kind: "none" if value is None else TASKS[self.task].text(value) for kind, value in known.items()}

    def text(self) -> str:
        """Describe the run's progress in one line."""
        scores = ", ".join(f"{kind} {value}" for kind, value in self.scores().items())
        return f"{self.method}, round {self.round} of {self.num_rounds}, {self.score_title}: {scores}"


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a deployment.

    Attributes:
        folder: The deployment's folder.
        address: Address of its SuperLink.
        superlink: `running`, or why it does not answer.
        nodes: Its nodes, by number.
        runs: Its latest runs, the newest first.
    """

    folder: str
    address: str
    superlink: str
    nodes: Sequence[NodeState]
    runs: Sequence[RunState]

    @classmethod
    def of(cls, deployment: Deployment) -> "Status":
        """Read the state of a deployment on the SuperLink's machine.

        Raises:
            StateError: If the file of a node's public key is missing or damaged, or the database cannot be read.
        """
        answer, found = probe("127.0.0.1", deployment.port, deployment.server / "ca.crt", direct=True)
        registered = registered_nodes(deployment)
        nodes = [
            NodeState(
                number=number,
                state="connected" if registered[number].online else "away",
                since=registered[number].since,
            )
            if number in registered
            else NodeState(number=number, state="not registered")
            for number in range(deployment.num_nodes)
        ]
        return cls(
            folder=str(deployment.folder),
            address=f"{deployment.host}:{deployment.port}",
            superlink="running" if answer is not None else f"not running: {found.text}",
            nodes=nodes,
            runs=list(_runs(deployment.database)),
        )

    def entry(self) -> dict[str, Any]:
        """Return the state as plain values, for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the state as lines of text."""
        yield f"SuperLink at {self.address}: {self.superlink}"
        connected = [node for node in self.nodes if node.state == "connected"]
        yield f"nodes: {len(connected)} of {len(self.nodes)} connected"
        for node in self.nodes:
            if node.state != "connected":
                yield f"  node {node.number}: {node.state}" + (f" since {node.since}" if node.since else "")
        if not self.runs:
            yield "runs: none yet"
        for run in self.runs:
            yield f"run {run.folder or run.run_id}: {run.status.removeprefix('finished:')}"
            if run.num_rounds:
                yield f"  {run.text()}"
            if 0 < run.num_nodes < len(self.nodes):
                yield f"  {run.num_nodes} of {len(self.nodes)} nodes: the others take no part in this run"
            if run.away:
                yield f"  away in round {run.round}: clients {', '.join(map(str, run.away))}"
            for problem in run.problems:
                yield f"  {problem}"


def _runs(file: Path) -> Iterator[RunState]:
    """Yield the latest runs in a SuperLink's database, the newest first; of a resumed run only its last start."""
    if not file.is_file():
        return
    newest: dict[object, tuple[int, str]] = {}
    with readable(file):
        for run_id, settings in database.latest_runs(file, MOST_STARTS).items():
            folder = str(settings.get("resume") or settings.get("output") or "")
            newest.setdefault(folder or run_id, (run_id, folder))
        listed = list(newest.values())[:MOST_RUNS]
        states = [database.run_status(file, run_id) for run_id, _ in listed]
    for (run_id, folder), status in zip(listed, states, strict=True):
        state = RunState(run_id=run_id, status=status[0] if status else "pending", folder=folder)
        yield _described(state) if folder else state


def _described(state: RunState) -> RunState:
    """Return the state of a run with what its folder says; unchanged if it has none on this machine."""
    path = Path(state.folder)
    try:
        return _read(state, path) if path.is_dir() else state
    except (HyperFLError, OSError, KeyError, TypeError, ValueError) as error:  # half written, or damaged
        return replace(state, problems=(f"its folder cannot be read: {type(error).__name__}: {printable(str(error))}",))


def _read(state: RunState, path: Path) -> RunState:
    manifest = read_manifest(path)
    records = [record for record in read_metrics(path) if record["kind"] in ("train", "aggregate")]
    left_out = read_failures(path)
    rounds = [record for record in records if record["kind"] == "train"]
    received = [record for record in records if record["kind"] == "aggregate"]
    task = task_of(manifest["settings"])
    last: Mapping[str, Any] = rounds[-1] if rounds else {}
    nodes = [f"node {each['node']} was refused: {each['reason']}" for each in manifest.get("refused", ())]
    nodes += [f"node {each['node']} is excluded: {each['reason']}" for each in manifest.get("excluded", ())]
    failures = [f"round {each.round}, client {each.client}, {each.phase}: {each.reason}" for each in left_out]
    return RunState(
        run_id=state.run_id,
        status=state.status,
        folder=state.folder,
        method=str(manifest["settings"]["method"]),
        start=str(manifest["start"]),
        round=last.get("round", 0),
        num_rounds=int(manifest["settings"]["num-rounds"]),
        num_nodes=len(manifest["nodes"]),
        task=task.name,
        personalized=_finite(last.get(f"personalized_{task.score}")),
        aggregate=_finite(received[-1].get(f"aggregate_{task.score}")) if received else None,
        away=tuple(last.get("away", ())),
        problems=[*nodes[-MOST_PROBLEMS:], *failures[-MOST_PROBLEMS:], *_logged(path / "server.log")[-MOST_PROBLEMS:]],
    )


def _logged(file: Path) -> list[str]:
    """Return the warnings and errors in a run's log, each where it was said last."""
    if not file.is_file():
        return []
    with file.open(errors="replace") as lines:
        found = [match[1] for line in lines if (match := _PROBLEM.match(line))]
    return [printable(text) for text in reversed(dict.fromkeys(reversed(found)))]


def _finite(share: float | None) -> float | None:
    return share if share is not None and math.isfinite(share) else None
