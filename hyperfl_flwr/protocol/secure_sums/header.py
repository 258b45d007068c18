"""Header of a secure step: everything that the nodes of a training or evaluation must agree on.

All nodes receive the same bytes, the canonical JSON of `Header`. Their SHA-256, the transcript T, is part of every key
that a node derives. So masks cancel only among nodes that were sent the same model, settings and requests.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.setting_types import Scalar

VERSION = 2
"""Version of the protocol; nodes refuse others."""

MOST_EXAMPLES = 1_000_000
"""Largest number of training samples with the weight 1; with more, a small client's weight could be rounded to 0, and
the sum would be that of a large client alone."""

MOST_BYTES = 1 << 24
"""Longest header that a node parses, in bytes."""

Phase = Literal["train", "evaluate"]

_HEX = {length: re.compile(f"[0-9a-f]{{{length}}}") for length in (16, 32, 64)}
_SIGNATURE = re.compile("([0-9a-f]{2}){0,128}")
_METRIC = re.compile("[a-z][a-z0-9-]{0,99}")
_MOST_METRICS = 100
_LARGEST = 1 << 40


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """One node of a step.

    Attributes:
        partition: The node's number.
        key: Its public X25519 key of the session, 64 hexadecimal digits.
        signature: Signature of that key by the node's identity, hexadecimal; empty without an identity.
        clients: Clients that it trains or evaluates, ascending; at least one.
        versions: Version of each client's private state to start from.
    """

    partition: int
    key: str
    signature: str
    clients: tuple[int, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Header:
    """Terms of a step, the same for all of its nodes.

    Attributes:
        session: Identity of the server's process, 32 hexadecimal digits; nodes have one key per session.
        experiment: Identity of the run, 16 hexadecimal digits.
        round: The federated round, from 1.
        phase: `train` or `evaluate`.
        nodes: The nodes, by ascending number.
        threshold: Number t of nodes that must answer to open the sum.
        max_examples: Weight of a client with this many training samples or more is 1, where samples are weights.
        metrics: Names of the metrics that are summed, in the order of their sums.
        squares: Whether their squares are summed, too.
        settings: Digest of the run's settings, see `settings_digest`.
        arrays: Digest of the arrays that are sent, see `arrays_digest`.
    """

    session: str
    experiment: str
    round: int
    phase: Phase
    nodes: tuple[NodeRow, ...]
    threshold: int
    max_examples: int
    metrics: tuple[str, ...]
    squares: bool
    settings: str
    arrays: str

    @property
    def num_clients(self) -> int:
        """Number of clients of the step."""
        return sum(len(node.clients) for node in self.nodes)

    @property
    def step(self) -> int:
        """Position of the step in the session; later steps have larger numbers."""
        return 2 * self.round + (self.phase == "evaluate")

    def row(self, partition: int) -> NodeRow | None:
        """Return a node's row; None if it is not in the step."""
        return next((node for node in self.nodes if node.partition == partition), None)

    def to_bytes(self) -> bytes:
        """Return the canonical encoding."""
        return _canonical({"version": VERSION, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse an encoding (untrusted input).

        Raises:
            ValueError: If it is not the canonical encoding of a header of this version.
        """
        if len(data) > MOST_BYTES:
            raise ValueError(f"a header must have at most {MOST_BYTES} bytes, got {len(data)}")
        try:
            found = json.loads(data)
            if found.pop("version") != VERSION:
                raise ValueError("the server uses another version of the protocol")
            rows = tuple(NodeRow(**_tuples(row)) for row in found.pop("nodes"))
            header = cls(nodes=rows, **_tuples(found))
            header.check()
        except (KeyError, TypeError, AttributeError, RecursionError, UnicodeError, json.JSONDecodeError) as error:
            raise ValueError(f"it is not a header: {type(error).__name__}") from None
        if header.to_bytes() != data:
            raise ValueError("the header is not in its canonical form")
        return header

    def check(self) -> None:
        """Check types and ranges; what nodes are in it is for the receiver to judge.

        Raises:
            ValueError: Naming the field that is wrong.
        """
        _require(_is_hex(self.session, 32), "session")
        _require(_is_hex(self.experiment, 16), "experiment")
        _require(_is_count(self.round) and self.round > 0, "round")
        _require(self.phase in ("train", "evaluate"), "phase")
        _require(_is_count(self.threshold) and self.threshold > 0, "threshold")
        _require(_is_count(self.max_examples) and 0 < self.max_examples <= MOST_EXAMPLES, "max_examples")
        _require(_is_hex(self.settings, 64), "settings")
        _require(_is_hex(self.arrays, 64), "arrays")
        names = self.metrics
        _require(isinstance(names, tuple) and len(names) <= _MOST_METRICS, "metrics")
        _require(all(isinstance(name, str) and _METRIC.fullmatch(name) for name in names), "metrics")
        _require(len(set(names)) == len(names), "metrics")
        _require(isinstance(self.squares, bool), "squares")
        for row in self.nodes:
            _require(_is_count(row.partition), "partition")
            _require(_is_hex(row.key, 64), "key")
            _require(isinstance(row.signature, str) and bool(_SIGNATURE.fullmatch(row.signature)), "signature")
            _require(_are_ascending(row.clients) and len(row.clients) > 0, "clients")
            _require(len(row.versions) == len(row.clients) and all(map(_is_count, row.versions)), "versions")
        _require(_are_ascending([row.partition for row in self.nodes]), "nodes")
        _require(len({row.key for row in self.nodes}) == len(self.nodes), "key")
        every = [client for row in self.nodes for client in row.clients]
        _require(len(set(every)) == len(every), "clients")


def transcript_of(data: bytes) -> bytes:
    """Return the transcript T of a header's bytes [32]."""
    return hashlib.sha256(data).digest()


def settings_digest(settings: Mapping[str, Scalar]) -> str:
    """Return the digest of a run's settings by key, in hexadecimal digits."""
    values = {key: ["float", value.hex()] if isinstance(value, float) else value for key, value in settings.items()}
    return hashlib.sha256(_canonical(values)).hexdigest()


def arrays_digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the digest of arrays with their names, types and shapes, in hexadecimal digits."""
    names = sorted(arrays)
    digest = hashlib.sha256(_canonical([[name, arrays[name].dtype.str, list(arrays[name].shape)] for name in names]))
    for name in names:
        digest.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _canonical(document: Any) -> bytes:  # noqa: ANN401 - what JSON can hold
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _tuples(document: Any) -> dict[str, Any]:  # noqa: ANN401 - parsed JSON
    return {key: tuple(value) if isinstance(value, list) else value for key, value in document.items()}


def _require(condition: bool, name: str) -> None:
    if not condition:
        raise ValueError(f"the header's {name} is invalid")


def _is_hex(value: object, length: int) -> bool:
    return isinstance(value, str) and bool(_HEX[length].fullmatch(value))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST  # isinstance would accept bool


def _are_ascending(values: Any) -> bool:  # noqa: ANN401 - parsed JSON
    counts = list(values)
    return all(map(_is_count, counts)) and all(one < two for one, two in pairwise(counts))
