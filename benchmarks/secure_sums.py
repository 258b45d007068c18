"""Measure what secure sums cost a node and the server, without training and without the network."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import RecordDict
from numpy.typing import NDArray

from benchmarks.secure_rounds import SecureRound
from benchmarks.workload import Workload, initial_arrays
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import ARRAYS, Reduction, group_of
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.secure_sums.encoding import Encoding
from hyperfl_flwr.protocol.secure_sums.header import Header, NodeRow, arrays_digest, settings_digest, transcript_of
from hyperfl_flwr.protocol.secure_sums.keys import public_of
from hyperfl_flwr.protocol.secure_sums.masks import Opening, Step, mask, release
from hyperfl_flwr.protocol.secure_sums.messages import (
    SECURE,
    SecureReply,
    UnmaskRequest,
    header_record,
    release_content,
    release_of,
    step_in,
)
from hyperfl_flwr.protocol.secure_sums.numbers import SQUARES_FROM, NumbersEncoding, Tally
from hyperfl_flwr.protocol.secure_sums.thresholds import smallest_threshold, unknown_nodes, usual_colluding
from hyperfl_flwr.protocol.sizes import content_bytes

REPETITIONS = 5
"""Number of times that the server opens a sum."""

METRICS = ("train-loss", "personalized-accuracy", "personalized-loss")
EXAMPLES = 600

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class SecureCost:
    """Cost of a training step with secure sums, one client on each node.

    Attributes:
        nodes: Number of nodes.
        parameters: Number of parameters that each node sends.
        node: Median CPU seconds of a node: check what it received, encode, mask, and answer the question for shares.
        server: Median CPU seconds of the server to read all replies and answers and to open the sum.
        missing: Largest number of nodes that may be missing.
        server_missing: The server's seconds with so many nodes missing in training.
        up: Bytes that a node sends, relative to its parameters in a plain reply.
        question: Bytes of the question for shares to one node.
        answer: Bytes of the answer.
    """

    nodes: int
    parameters: int
    node: float
    server: float
    missing: int
    server_missing: float
    up: float
    question: int
    answer: int


@dataclass(frozen=True, kw_only=True)
class SecureSums:
    """What secure sums cost.

    Attributes:
        costs: Costs of a training step, by numbers of nodes and of parameters.
        rounds: Whole rounds; each node hosts one client.
    """

    costs: Sequence[SecureCost]
    rounds: Sequence[SecureRound]


class _Nodes:
    """Nodes that have received a model, and changed it in training."""

    def __init__(self, received: SharedArrays, num_nodes: int) -> None:
        rng = np.random.default_rng(0)
        self.received = received
        self.trained = {key: _changed(value, rng) for key, value in received.items()}
        self.keys = {number: X25519PrivateKey.generate() for number in range(num_nodes)}
        rows = [
            NodeRow(partition=number, key=public_of(key), signature="", clients=(number,), versions=(0,))
            for number, key in self.keys.items()
        ]
        colluding = usual_colluding(num_nodes)
        threshold = smallest_threshold(num_nodes, colluding)
        self.header = Header(
            session="0" * 32, experiment="0" * 16, round=1, phase="train", nodes=tuple(rows), threshold=threshold,
            max_examples=1000, metrics=METRICS,
            squares=unknown_nodes(num_nodes, threshold, colluding) >= SQUARES_FROM,
            settings=settings_digest({}), arrays=arrays_digest(received),
        )  # fmt: skip

    @property
    def encoding(self) -> Encoding:
        """Encoding of the parameters, which both sides make anew in each step."""
        reductions = {group_of(key): Reduction.MEAN_BY_EXAMPLES for key in self.received}
        return Encoding(
            received=self.received, reductions=reductions, num_clients=len(self.keys),
            max_examples=self.header.max_examples, range=10.0,
        )  # fmt: skip

    @property
    def numbers(self) -> NumbersEncoding:
        """Encoding of counts and metrics."""
        return NumbersEncoding(metrics=METRICS, num_clients=len(self.keys), squares=self.header.squares)

    def reply(self, partition: int, message: RecordDict) -> RecordDict:
        """Return a node's reply to TRAIN."""
        step, encoding = step_in(message), self.encoding
        if step.header.arrays != arrays_digest(self.received):
            raise RuntimeError("the arrays are not those of the header")
        total = encoding.new_sum()
        saturated = encoding.add(total, self.trained, EXAMPLES)
        numbers = self.numbers.encode([dict.fromkeys(METRICS, 0.5)], num_examples=EXAMPLES, saturated=saturated)
        upload = mask(total, numbers, step, partition, self.keys[partition])
        return SecureReply(transcript=step.transcript, finished=[partition], failed=[], upload=upload).to_content()

    def answer(self, partition: int, message: RecordDict) -> RecordDict:
        """Return a node's answer to the question for shares."""
        request, step = UnmaskRequest.of(message), step_in(message)
        found = release(step, partition, self.keys[partition], request.uploads, request.boxes)
        return release_content(found, request.digest)

    def open(self, replies: Mapping[int, RecordDict], answers: Mapping[int, RecordDict], digest: bytes) -> Tally:
        """Return the counts of the opened sum, as the server computes them with the parameters' mean."""
        opening, found = self.opening(replies), {}
        for number, answer in answers.items():
            found[number] = release_of(answer, digest)
            opening.check_release(found[number])
        vector, numbers = opening.open(found)
        tally = self.numbers.decode(numbers)
        self.encoding.decode(vector, tally.clients, tally.examples)
        return tally

    def opening(self, replies: Mapping[int, RecordDict]) -> Opening:
        """Return the server's sum of the uploads in some replies."""
        data = self.header.to_bytes()
        step = Step(header=self.header, transcript=transcript_of(data))
        opening = Opening(step=step, size=self.encoding.size, num_numbers=self.numbers.size)
        for number, reply in replies.items():
            upload = SecureReply.of(reply).upload
            if upload is not None:
                opening.add(number, upload)
        return opening

    def question(self, opening: Opening, partition: int) -> UnmaskRequest:
        """Return the question for shares to a node."""
        boxes = opening.boxes_for(partition)
        return UnmaskRequest(header=self.header.to_bytes(), uploads=opening.uploads, boxes=boxes)


def measure_secure_sums(work: Workload, num_nodes: int) -> SecureCost:
    """Measure a training step of some nodes with the shared parameters of a workload's method.

    Raises:
        RuntimeError: If the opened sum is wrong.
    """
    nodes = _Nodes(initial_arrays(work), num_nodes)
    threshold = nodes.header.threshold
    message = RecordDict({SECURE: header_record(nodes.header.to_bytes())})
    replies, replying = _timed_each(lambda number: nodes.reply(number, message), range(num_nodes))
    everyone = _measure_opening(nodes, replies)
    few = _measure_opening(nodes, dict(list(replies.items())[:threshold]))
    plain = content_bytes([RecordDict({ARRAYS: pack_arrays(nodes.received)})])
    return SecureCost(
        nodes=num_nodes,
        parameters=sum(value.size for value in nodes.received.values()),
        node=replying + everyone.answering,
        server=everyone.opening,
        missing=num_nodes - threshold,
        server_missing=few.opening,
        up=(content_bytes([replies[0]]) + everyone.answer) / plain,
        question=everyone.question,
        answer=everyone.answer,
    )


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """Median CPU seconds of a node's answer and of the server, and bytes of a question and an answer."""

    answering: float
    opening: float
    question: int
    answer: int


def _measure_opening(nodes: _Nodes, replies: Mapping[int, RecordDict]) -> _Opening:
    opening = nodes.opening(replies)
    asked = {number: nodes.question(opening, number) for number in replies}
    questions = {number: RecordDict({SECURE: question.to_record()}) for number, question in asked.items()}
    answers, answering = _timed_each(lambda number: nodes.answer(number, questions[number]), replies)
    digest = asked[0].digest
    tallies, seconds = _timed_each(lambda _: nodes.open(replies, answers, digest), range(REPETITIONS))
    if any((tally.nodes, tally.clients) != (len(replies), len(replies)) for tally in tallies.values()):
        raise RuntimeError(f"the opened sum is not that of {len(replies)} nodes with one client each")
    question, answer = content_bytes([questions[0]]), content_bytes([answers[0]])
    return _Opening(answering=answering, opening=seconds, question=question, answer=answer)


def _timed_each(action: Callable[[int], Result], numbers: Iterable[int]) -> tuple[dict[int, Result], float]:
    """Return an action's result for each number, and the median of the CPU seconds."""
    found, seconds = {}, []
    for number in numbers:
        began = time.process_time()
        found[number] = action(number)
        seconds.append(time.process_time() - began)
    return found, statistics.median(seconds)


def _changed(value: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    return value + rng.normal(0, 0.005, value.shape).astype(value.dtype)
