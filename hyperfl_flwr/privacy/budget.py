"""Record what a node's uploads spend of its clients' privacy budgets, and refuse what its owner does not allow.

The record, `privacy.jsonl` in the node's state folder, has a line for each release, of all runs. A line is on disk
before the release is computed, so a message that is sent again, or a process that is killed, is counted, too. Lines are
never removed. Several processes may write to one record.

Composition is over all runs, for each client. The epsilon for one record composes the releases of both units: what
protects a whole client also bounds one of its records, with twice the sensitivity, since a record moves the client's
contribution within a ball of radius C, by at most 2 C. The epsilon for a whole client is infinite as soon as one
release protects only records. Randomised response bounds every change of a client's data by the same epsilon, which is
that of one number times how many numbers were randomised; it is added to the epsilon of the other releases.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from hyperfl_flwr.core.errors import RefusalError, StateError
from hyperfl_flwr.core.files.append_only import append, locked
from hyperfl_flwr.privacy.accounting import Mechanism, NoisyStep, composed_epsilon
from hyperfl_flwr.privacy.release import RANDOMISED, BoundedBy, Neighbours, Release, Unit

FILE = "privacy.jsonl"
"""Name of the record in the node's state folder."""

NOTHING = "nothing"
"""The value of `bounded_by` in a line of a release that no noise bounds."""

NEEDS_BOUND = (
    "the owner of this node has set max-epsilon, but nothing on the node bounds what the run's uploads reveal; set "
    "dp.epsilon above 0 with dp.heads = noised, or privacy.unit = client with privacy.noise = sum or local and "
    "privacy.noise-multiplier above 0"
)
"""Reason of the refusal of a run without noise, or with noise that the node cannot check; for the server, too."""


_WORDS = {
    "unit": get_args(Unit), "mechanism": (*get_args(Mechanism), RANDOMISED),
    "neighbours": get_args(Neighbours), "bounded_by": get_args(BoundedBy),
}  # fmt: skip
"""The words that a line may have."""


@dataclass(frozen=True, kw_only=True)
class RecordedRelease:
    """A line of the record.

    Attributes:
        time: Time of the line, UTC, ISO 8601.
        experiment: Id of the run.
        client: The client's id.
        round: The federated round; 0 for a release outside rounds.
        release: The release; None if nothing bounds what the upload reveals.
    """

    time: str
    experiment: str
    client: int
    round: int
    release: Release | None

    def line(self) -> bytes:
        """Return the line of the record, with its line break."""
        facts = {"time": self.time, "experiment": self.experiment, "client": self.client, "round": self.round}
        bound = {"bounded_by": NOTHING} if self.release is None else asdict(self.release)
        if not bound.get("epsilon"):
            bound.pop("epsilon", None)  # of randomised response alone
        return (json.dumps(facts | bound) + "\n").encode()

    @classmethod
    def of(cls, line: bytes) -> "RecordedRelease":
        """Parse a line of the record.

        Raises:
            ValueError: If it is not a line that `line` returns.
        """
        found: dict[str, Any] = json.loads(line)
        try:
            facts = {key: found.pop(key) for key in ("time", "experiment", "client", "round")}
            release = None if found == {"bounded_by": NOTHING} else Release(**found)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a line of {FILE}: {error}") from None
        if unknown := [name for name, words in _WORDS.items() if release and getattr(release, name) not in words]:
            raise ValueError(f"a value of {', '.join(unknown)} that this version does not know")
        return cls(**facts, release=release)


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """The record of one client in one run.

    Attributes:
        path: The node's `privacy.jsonl`.
        experiment: Id of the run.
        client: The client's id.
        max_epsilon: Largest epsilon over all runs that the node's owner allows; None for no limit.
        delta: The delta that belongs to it.
        knows_nodes: Whether the node knows the other nodes of a secure sum. Otherwise the server could have invented
            them, and noise that they are to add is recorded as bounded by the `server`.
        is_only_client: Whether all lines are about the same data, under whatever client id; all of them count then.
    """

    path: Path
    experiment: str
    client: int
    max_epsilon: float | None = None
    delta: float = 1e-5
    knows_nodes: bool = False
    is_only_client: bool = False

    def spend(self, server_round: int, release: Release | None) -> None:
        """Record a release before it is computed.

        With `max_epsilon`, all releases of the client are composed, in all runs, see `counted_epsilon`.

        Args:
            server_round: The federated round; 0 outside rounds.
            release: The release; None if nothing bounds what the upload reveals.

        Raises:
            RefusalError: If the owner's budget does not allow it; nothing is recorded.
            StateError: If the record cannot be read or written.
        """
        if release and release.bounded_by == "nodes" and not self.knows_nodes:
            release = replace(release, bounded_by="server")
        entry = RecordedRelease(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            experiment=self.experiment,
            client=self.client,
            round=server_round,
            release=release if release and release.is_bounded else None,
        )
        try:
            with locked(self.path) as file:  # until the line is written: another process must not spend the same rest
                _remove_torn_line(file)
                if self.max_epsilon is not None:
                    self._check(entry, read_record(self.path), self.max_epsilon)
                append(file, entry.line())
        except OSError as error:
            raise StateError(
                f"the privacy record {self.path} cannot be written: {error.strerror}; free disk space, or give the "
                f"node's user write permission"
            ) from error

    def _check(self, entry: RecordedRelease, recorded: Iterable[RecordedRelease], limit: float) -> None:
        """Refuse a release that is not bounded, or that the budget does not allow."""
        if _enforced(entry.release) is None:
            raise RefusalError(NEEDS_BOUND)
        earlier = [other.release for other in recorded if self.is_only_client or other.client == self.client]
        unit, epsilon = counted_epsilon([*earlier, entry.release], self.delta)
        if epsilon <= limit:
            return
        why = f"the {len(earlier)} earlier ones have spent {epsilon_of(earlier, unit, self.delta):.4g}"
        if any(_enforced(release) is None for release in earlier):
            why = "an earlier upload is bounded by nothing that this node can check"
        raise RefusalError(
            f"round {entry.round} of run {self.experiment} would bring the epsilon of client {self.client} for one "
            f"{unit} to {epsilon:.4g} at delta {self.delta:g}, above max-epsilon = {limit:g}: {why}, see {self.path}; "
            f"allow more, or leave the data out of this run",
            public="the privacy budget that this node's owner allows (max-epsilon) does not suffice for this upload",
        )


def _enforced(release: Release | None) -> Release | None:
    """Return a release if the node can check that it is bounded: noise that the server adds is not."""
    return None if release is None or release.bounded_by == "server" else release


def epsilon_of(releases: Iterable[Release | None], unit: Unit, delta: float) -> float:
    """Return the epsilon of a client's releases together.

    Releases for neighbours of equal size count with their own noise multiplier, of at least that for a record removed.

    Args:
        releases: The releases; None for one that nothing bounds.
        unit: What is protected.
        delta: Probability with which the bound may fail.

    Returns:
        The epsilon; infinite if a release does not protect the unit.
    """
    steps: Counter[NoisyStep] = Counter()
    randomised = 0.0
    for release in releases:
        if release is None or (unit == "client" and release.unit == "record"):
            return math.inf
        if release.mechanism == RANDOMISED:  # holds for any two values, so that no sensitivity counts
            randomised += release.epsilon * release.steps
            continue
        sensitivity = 2 if release.unit == "client" and unit == "record" else 1
        step = NoisyStep(release.mechanism, release.noise_multiplier / sensitivity, release.sample_rate)
        steps[step] += release.steps
    return randomised + composed_epsilon(steps, delta)


def counted_epsilon(releases: Iterable[Release | None], delta: float) -> tuple[Unit, float]:
    """Return what `max-epsilon` limits: what the releases of a client protect together, and their epsilon for it.

    They protect the whole client only if each of them does. Epsilon is infinite if the node cannot check a bound.
    """
    enforced = [_enforced(release) for release in releases]
    unit: Unit = "client" if all(release and release.unit == "client" for release in enforced) else "record"
    return unit, epsilon_of(enforced, unit, delta)


def read_record(path: Path) -> list[RecordedRelease]:
    """Return the releases of a record in the order of its lines.

    An incomplete last line, which a process that was killed has left, is left out: its release was not computed.

    Raises:
        StateError: If the record cannot be read, or another line is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StateError(
            f"the privacy record {path} cannot be read: {error.strerror}; give the {FILE} of a node's state folder"
        ) from None
    whole = content[: len(content) - len(_torn_line(content))]
    found = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            found.append(RecordedRelease.of(line))
        except ValueError as error:
            raise StateError(
                f"line {number} of the privacy record {path} is damaged ({error}), so what was spent is not known; "
                f"restore the file from a copy"
            ) from None
    return found


def _torn_line(content: bytes) -> bytes:
    """Return the incomplete last line of a record; empty if the last line can be read."""
    last = content.rpartition(b"\n")[2]
    try:
        if last:
            RecordedRelease.of(last)
    except ValueError:
        return last
    return b""


def _remove_torn_line(file: int) -> None:
    """Remove an incomplete last line, whose release was not computed; otherwise it would look like damage later."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.ftruncate(file, size - len(_torn_line(os.pread(file, size, 0))))
