"""Format of TRAIN and EVALUATE messages and their replies: record names and layouts, shared by server and nodes.

A TRAIN or EVALUATE message to a node holds

- `arrays`: the shared groups that all clients receive, keyed `group/name`;
- `per-client-arrays`: the arrays for one client each, keyed `client/group/name` (absent if no group is `PER_CLIENT`);
- `config`: a `Request`.

A node hosts several clients and sends one reply, with

- `arrays`: the summed groups, keyed `group/name` (TRAIN only): the unchanged parameters of a single trained client, or
  the SUMS of weight times parameters of several clients in float64, level 0 of
  `hyperfl_flwr.protocol.reproducible_sum`;
- `outlier-sums`: the other levels, keyed `level/group/name` (TRAIN only; absent in nearly all replies);
- `per-client-arrays`: the `PER_CLIENT` and `EACH` groups of each trained client, keyed `client/group/name` (TRAIN);
- `weights`: the two weights, and nothing else;
- `clients`: a `Report` with the per-client numbers.

`DOWN` groups are in no reply. `hyperfl_flwr.protocol.queries` has all other messages. No message holds private groups.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

ARRAYS = "arrays"
CLIENTS = "clients"
CONFIG = "config"
PROPERTIES = "properties"
WEIGHTS = "weights"

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

HELLO = "query.hello"
"""Message type of the handshake; `hyperfl_flwr.protocol.queries` has the types of later queries."""

DATA_VERSION = "data-sha256"
"""Name of the handshake property with the SHA-256 of custom data, in simulations only: it could tell whether a node has
known data."""

LABEL_COUNTS = "labels/counts"
"""Key of a client's numbers of training samples by class, floats [K], for methods that send them."""

PER_CLIENT_ARRAYS = "per-client-arrays"
OUTLIER_SUMS = "outlier-sums"
NUM_CLIENTS = "num-clients"
NUM_EXAMPLES = "num-examples"


class Reduction(Enum):
    """Rule by which the server reduces a shared group over the trained clients."""

    MEAN_BY_EXAMPLES = "mean_by_examples"
    """sum_i n_i x_i / sum_i n_i, with the numbers n_i of training samples."""
    MEAN = "mean"
    """sum_i x_i / number of clients."""
    SUM = "sum"
    """sum_i x_i; absent clients count as zero."""
    PER_CLIENT = "per_client"
    """Not reduced: each client receives separate arrays, and the method's strategy gets the arrays of each client."""
    EACH = "each"
    """Not reduced: all clients receive the same arrays, and the method's strategy gets the arrays of each client."""
    DOWN = "down"
    """All clients receive the same arrays, and send nothing back."""

    @property
    def is_summed(self) -> bool:
        """Whether a node adds up the arrays of its clients."""
        return self in (Reduction.MEAN_BY_EXAMPLES, Reduction.MEAN, Reduction.SUM)

    @property
    def is_alone(self) -> bool:
        """Whether the server gets the arrays of each client, so that no sum can hide them."""
        return self in (Reduction.PER_CLIENT, Reduction.EACH)

    def weight(self, num_examples: int) -> float:
        """Return the weight of one client in the node's sum."""
        return float(num_examples) if self is Reduction.MEAN_BY_EXAMPLES else 1.0

    def divisor(self, num_examples: int, num_clients: int) -> float:
        """Return the divisor of the sum over all nodes."""
        if self is Reduction.MEAN_BY_EXAMPLES:
            return float(num_examples)
        return float(num_clients) if self is Reduction.MEAN else 1.0


def group_of(key: str) -> str:
    """Return the group in a key `group/name`."""
    return key.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request of the server to train or evaluate clients of a node.

    Attributes:
        round: The federated round, from 1.
        experiment: Identity of the run, 16 hexadecimal digits.
        run_directory: The server's output folder; a simulated node keeps its clients' private state below it.
        clients: The sampled clients that this node hosts, ascending.
        versions: For each client the round that saved the private state to start from; 0 for the initial state.
        kept_versions: For each client the version of its state that the last durable checkpoint needs.
        num_clients: Number of clients in the round on all nodes, which affects the rounding of sums (TRAIN only).
        max_num_examples: Training samples of the largest client, which affects that rounding, too (TRAIN only).
    """

    round: int
    experiment: str
    run_directory: str
    clients: Sequence[int]
    versions: Sequence[int]
    kept_versions: Sequence[int]
    num_clients: int = 1
    max_num_examples: int = 1

    def to_record(self) -> ConfigRecord:
        """Pack into a record."""
        values = {name.replace("_", "-"): value for name, value in vars(self).items()}
        return ConfigRecord({key: list(value) if isinstance(value, tuple) else value for key, value in values.items()})

    @classmethod
    def of(cls, content: RecordDict) -> "Request":
        """Return the request in a message's content; raises as `record_of` and `from_record`."""
        return cls.from_record(record_of(content, CONFIG, ConfigRecord))

    @classmethod
    def from_record(cls, record: ConfigRecord) -> "Request":
        """Unpack from a record.

        Raises:
            ValueError: If the experiment does not have the format of `secrets.token_hex(8)`.
        """
        values: dict[str, Any] = dict(record)
        experiment = str(values["experiment"])
        if not re.fullmatch("[0-9a-f]{16}", experiment):
            # The experiment becomes part of a path on the node's disk; the server must not choose such paths.
            raise ValueError(f"the identity of an experiment must be 16 hexadecimal digits, got {experiment!r}")
        return cls(
            round=int(values["round"]),
            experiment=experiment,
            run_directory=str(values["run-directory"]),
            clients=list(values["clients"]),
            versions=list(values["versions"]),
            kept_versions=list(values["kept-versions"]),
            num_clients=int(values["num-clients"]),
            max_num_examples=int(values["max-num-examples"]),
        )


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """Numbers that a client reports after training or evaluation.

    Attributes:
        client: The client's id.
        num_examples: Number of its training samples (TRAIN) or test samples (EVALUATE).
        metrics: Metrics by name, for example `personalized-accuracy`.
    """

    client: int
    num_examples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Reason why a client did not take part in a round.

    Attributes:
        client: The client's id.
        reason: The reason, as one line.
        details: A traceback; empty if the node does not send one.
    """

    client: int
    reason: str
    details: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Per-client results and failures in one reply of a node.

    Attributes:
        results: Results of the clients that finished, in the order of their ids.
        failures: Reasons of the clients that did not finish.
        process: Id of the process that ran the clients.
        peak_memory: Peak resident memory of that process so far, in bytes.
        seconds: Wall time that the node spent on the message, in seconds.
    """

    results: Sequence[ClientResult] = ()
    failures: Sequence[Failure] = ()
    process: str = ""
    peak_memory: int = 0
    seconds: float = 0.0

    def to_record(self) -> ConfigRecord:
        """Pack into a record: one list per metric, with NaN for clients without the metric."""
        names = sorted({name for result in self.results for name in result.metrics})
        columns = {
            f"metric/{name}": [float(result.metrics.get(name, float("nan"))) for result in self.results]
            for name in names
        }
        values: dict[str, Any] = {
            "client": [result.client for result in self.results],
            "num-examples": [result.num_examples for result in self.results],
            "failed": [failure.client for failure in self.failures],
            "reason": [failure.reason for failure in self.failures],
            "details": [failure.details for failure in self.failures],
            "process": self.process,
            "peak-memory": self.peak_memory,
            "seconds": self.seconds,
            **columns,
        }
        # Flower cannot count the bytes of an empty list.
        return ConfigRecord({key: value for key, value in values.items() if value != []})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> "Report":
        """Unpack from a record (untrusted input).

        Raises:
            ValueError: If it does not have the format of `to_record`, with lists of equal length and positive counts.
        """
        try:
            return cls._unpack(dict(record))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"it is not a report: {type(error).__name__}: {error}") from None

    @classmethod
    def _unpack(cls, values: Mapping[str, Any]) -> "Report":
        clients, counts = values.get("client", []), values.get("num-examples", [])
        failed, reasons, details = (values.get(key, []) for key in ("failed", "reason", "details"))
        columns = {key.partition("/")[2]: value for key, value in values.items() if key.startswith("metric/")}
        if not all(type(number) is int for number in (*clients, *counts, *failed)):  # isinstance would accept bool
            raise ValueError("client ids and numbers of samples must be integers")
        if not all(count > 0 for count in counts):
            raise ValueError(f"numbers of samples must be positive, got {list(counts)}")
        if any(len(column) != len(clients) for column in columns.values()):
            raise ValueError(f"every metric must have one number for each of {len(clients)} clients")
        process, peak_memory, seconds = values["process"], values["peak-memory"], float(values["seconds"])
        if type(process) is not str or type(peak_memory) is not int or not 0 <= peak_memory < 2**50:
            raise ValueError("process must be a text, and peak-memory an integer from 0 to 2**50 - 1 (bytes)")
        if not 0 <= seconds < 1e9:
            raise ValueError(f"seconds must be at least 0 and below 1e9, got {seconds:g}")
        return cls(
            results=[
                ClientResult(client=client, num_examples=count, metrics=_row(columns, number))
                for number, (client, count) in enumerate(zip(clients, counts, strict=True))
            ],
            failures=[
                Failure(client=client, reason=printable(reason), details=detail[:MAX_DETAILS])
                for client, reason, detail in zip(failed, reasons, details, strict=True)
            ],
            process=printable(process),
            peak_memory=peak_memory,
            seconds=seconds,
        )


MAX_REASON = 2_000
MAX_DETAILS = 100_000
"""Maximum length of a failure's reason and details that the server keeps, in characters."""


def printable(text: str) -> str:
    """Return an untrusted text as one line that is safe to print and to log, at most `MAX_REASON` characters."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:MAX_REASON]


def _row(columns: Mapping[str, Any], number: int) -> dict[str, float]:
    """Return one client's metrics from the columns of a record, without those that are NaN."""
    row = {name: float(column[number]) for name, column in columns.items()}
    return {name: value for name, value in row.items() if not np.isnan(value)}


def weights_record(num_examples: int, num_clients: int) -> MetricRecord:
    """Pack the weights of a node's sums: its numbers of samples and of clients."""
    return MetricRecord({NUM_EXAMPLES: num_examples, NUM_CLIENTS: num_clients})


def record_of(content: RecordDict, name: str, kind: type[Record]) -> Record:
    """Return the record of a message's content with the given name and type.

    Flower's `content.array_records[name]` creates a reference cycle, which keeps the arrays in memory until the garbage
    collector runs.

    Raises:
        ValueError: If the content has no record of this name and type.
    """
    record = content.get(name)
    if not isinstance(record, kind):
        raise ValueError(f"the message holds no {kind.__name__} {name!r}")
    return record
