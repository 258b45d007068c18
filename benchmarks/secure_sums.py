"""Measure what secure sums cost: the cryptography alone, and whole rounds against plain ones."""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from benchmarks.workload import Workload, write_dataset
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.protocol.secure_sums.header import Header, NodeRow, transcript_of
from hyperfl_flwr.protocol.secure_sums.keys import public_of
from hyperfl_flwr.protocol.secure_sums.masks import Opening, Release, Step, Upload, mask, release
from hyperfl_flwr.protocol.secure_sums.messages import SecureReply, UnmaskRequest, release_content
from hyperfl_flwr.protocol.secure_sums.thresholds import smallest_threshold, usual_colluding
from hyperfl_flwr.protocol.sizes import content_bytes, record_bytes
from hyperfl_flwr.runs.run_directory import read_metrics
from hyperfl_flwr.server.in_process_grid import InProcessGrid

EXTRACTOR, HYPERNETWORK = 115_776, 14_942_208
"""Numbers of parameters of HyperFL's extractor for images of 28x28, and about those of its hypernetwork (60 MB)."""

SIZES = ((5, EXTRACTOR), (20, EXTRACTOR), (100, EXTRACTOR), (5, HYPERNETWORK))
"""(nodes, parameters) of the measured sums."""

FROZEN: dict[str, Scalar] = {"hyperfl.embedding": "common-frozen"}
"""The setting with which HyperFL's sums can be secure."""

ROUNDS = (
    (Workload(method="hyperfl-frozen", shape=(1, 28, 28), clients=20), 20, 1.05),
    (Workload(method="hyperfl", shape=(1, 28, 28), clients=5), 5, 1.25),
)
"""(workload, nodes, largest ratio of a secure round to a plain one)."""

NUM_NUMBERS = 9
"""Counts and metrics in a sum."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs of a secure sum to which all nodes contribute.

    Attributes:
        nodes: Number n of nodes.
        parameters: Number P of parameters.
        node: CPU seconds of a node: keys, shares, masks.
        server: CPU seconds of the opening.
        bytes_up: Size of an upload, relative to the float32 parameters.
        question: Bytes of UNMASK.
        answer: Bytes of the reply to it.
    """

    nodes: int
    parameters: int
    node: float
    server: float
    bytes_up: float
    question: int
    answer: int


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """A round with secure sums against a plain one, in one process.

    Attributes:
        work: The workload.
        nodes: Number of nodes.
        plain: Median wall seconds of a plain round.
        secure: Median wall seconds of a round with secure sums.
        target: Largest ratio.
    """

    work: Workload
    nodes: int
    plain: float
    secure: float
    target: float


def measure_sum(num_nodes: int, size: int, repetitions: int) -> Cost:
    """Measure the masks of one node, and the opening of a sum of all nodes; medians."""
    keys = [X25519PrivateKey.generate() for _ in range(num_nodes)]
    step = _step([public_of(key) for key in keys])
    rng = np.random.default_rng(0)
    vector = rng.integers(0, 2**32, size, np.uint32)
    seconds: list[float] = []
    opened: list[float] = []
    cost = (0, 0, 0)
    for _ in range(repetitions):
        opening = Opening(step=step, size=size, num_numbers=NUM_NUMBERS)
        for number, key in enumerate(keys):
            began = time.process_time()
            upload = mask(vector.copy(), _numbers(rng), step, number, key)
            seconds.append(time.process_time() - began)
            opening.add(number, upload)
        answers, cost = _answers(opening, step, keys, upload)
        began = time.process_time()
        opening.open(answers)
        opened.append(time.process_time() - began)
    up, question, answer = cost
    return Cost(
        nodes=num_nodes,
        parameters=size,
        node=statistics.median(seconds),
        server=statistics.median(opened),
        bytes_up=up / (4 * size),
        question=question,
        answer=answer,
    )


def _answers(
    opening: Opening, step: Step, keys: Sequence[X25519PrivateKey], upload: Upload
) -> tuple[dict[int, Release], tuple[int, int, int]]:
    """Return the answers that open a sum, and the bytes of an upload, of a question and of an answer."""
    header, sizes = step.header.to_bytes(), (0, 0)
    answers: dict[int, Release] = {}
    for number, key in list(enumerate(keys))[: step.header.threshold]:
        question = UnmaskRequest(header=header, uploads=opening.uploads, boxes=opening.boxes_for(number))
        answers[number] = release(step, number, key, question.uploads, question.boxes)
        sizes = (record_bytes(question.to_record()), content_bytes([release_content(answers[number], question.digest)]))
    reply = SecureReply(transcript=step.transcript, finished=[0], failed=[], upload=upload)
    return answers, (content_bytes([reply.to_content()]), *sizes)


def _step(publics: Sequence[str]) -> Step:
    rows = tuple(
        NodeRow(partition=number, key=public, signature="", clients=(number,), versions=(0,))
        for number, public in enumerate(publics)
    )
    header = Header(
        session="0" * 32, experiment="0" * 16, round=1, phase="train", nodes=rows,
        threshold=smallest_threshold(len(rows), usual_colluding(len(rows))), max_examples=1000,
        metrics=("personalized-accuracy",), settings="0" * 64, arrays="0" * 64,
    )  # fmt: skip
    return Step(header=header, transcript=transcript_of(header.to_bytes()))


def _numbers(rng: np.random.Generator) -> NDArray[np.uint64]:
    return rng.integers(0, 2**60, NUM_NUMBERS, np.uint64)


def measure_rounds(work: Workload, num_nodes: int, target: float, num_rounds: int) -> RoundCost:
    """Measure rounds with and without secure sums in two runs of each, taking turns; the first round is not counted."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "images.npz"
        write_dataset(work, dataset)
        for turn in range(4):
            is_secure = bool(turn % 2)
            settings = work.settings() | (FROZEN if work.method == "hyperfl" else {})
            settings |= {"num-rounds": num_rounds, "dataset": f"npz:{dataset}", "output": f"{folder}/{turn}"}
            settings |= {"secagg.enabled": is_secure, "checkpoint-every": 1}
            done = run(InProcessGrid(app, num_nodes, settings, {"simulated": True}), RunConfig.from_flat(settings))
            rows = [row for row in read_metrics(done) if row["kind"] == "train"]
            seconds[is_secure] += [row["seconds"] for row in rows[1:]]
    plain, secure = (statistics.median(seconds[is_secure]) for is_secure in (False, True))
    return RoundCost(work=work, nodes=num_nodes, plain=plain, secure=secure, target=target)


def section(repetitions: int, num_rounds: int, *, quick: bool = False) -> Iterator[Sequence[str]]:
    """Yield the rows of the page's table on secure sums: what, target, measured."""
    limits = {(20, EXTRACTOR): (0.025, 0.040, 1.04), (5, HYPERNETWORK): (0.8, 1.5, None)}
    for num_nodes, size in SIZES[:2] if quick else SIZES:
        cost = measure_sum(num_nodes, size, repetitions)
        node, server, up = limits.get((num_nodes, size), (None, None, None))
        title = f"{num_nodes} nodes, {size:,} parameters"
        yield f"a node's CPU time, {title}", _limit(node, "ms", 1e3), f"{1e3 * cost.node:.1f} ms"
        yield f"the server's CPU time, {title}", _limit(server, "ms", 1e3), f"{1e3 * cost.server:.1f} ms"
        yield f"bytes of an upload to those of the parameters, {title}", _limit(up, "", 1), f"{cost.bytes_up:.3f}"
        yield f"bytes of UNMASK and of its answer, {title}", "", f"{cost.question:,} and {cost.answer:,}"
    for work, num_nodes, target in ROUNDS:
        chosen = dataclasses.replace(work, train=50, test=20, epochs=1) if quick else work
        found = measure_rounds(chosen, num_nodes, target, num_rounds)
        title = f"{work.method} on {num_nodes} nodes of one client"
        measured = f"{found.secure / found.plain:.2f} ({found.secure:.2f} s to {found.plain:.2f} s)"
        yield f"a round to a plain one, {title}", f"at most {target}", measured


def _limit(value: float | None, unit: str, factor: float) -> str:
    return "" if value is None else f"at most {factor * value:g} {unit}".rstrip()
