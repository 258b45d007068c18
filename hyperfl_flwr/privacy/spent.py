"""Sum up a privacy record: what each client's uploads have spent in each run, and in all runs together."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hyperfl_flwr.privacy.budget import (
    NOTHING,
    PrivacyBudget,
    RecordedRelease,
    counted_epsilon,
    epsilon_of,
    read_record,
)

WEAKEST_FIRST = (NOTHING, "server", "nodes", "client")
"""What bounds a release, see `Release.bounded_by`, from the weakest to the strongest."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What the uploads of one client have spent, or those of all clients of a node.

    Attributes:
        client: The client's id; None for all clients, as if their data were the same.
        experiment: Id of the run; empty for all runs.
        releases: Number of releases.
        record_epsilon: Epsilon for one record of the client; infinite if something is not bounded.
        client_epsilon: Epsilon for the whole client; infinite if a release protects only records.
        counted_epsilon: Epsilon that `max-epsilon` limits.
        bounded_by: The weakest of what bounds the releases: `nothing`, `server`, `nodes` or `client`.
        replaces: Whether there are releases for neighbours of equal size.
    """

    client: int | None
    experiment: str
    releases: int
    record_epsilon: float
    client_epsilon: float
    counted_epsilon: float
    bounded_by: str
    replaces: bool


def spent(record: Sequence[RecordedRelease], delta: float) -> list[Spent]:
    """Return what each client has spent: a row for each of its runs, in the order of the record, and one for all.

    Args:
        record: The lines of a privacy record.
        delta: Probability with which each bound may fail.
    """
    groups: dict[int, dict[str, list[RecordedRelease]]] = {}
    for entry in record:
        runs = groups.setdefault(entry.client, {"": []})
        runs.setdefault(entry.experiment, []).append(entry)
        runs[""].append(entry)
    return [
        _row(client, experiment, groups[client][experiment], delta)
        for client in sorted(groups)
        for experiment in [*[name for name in groups[client] if name], ""]
    ]


def spent_together(record: Sequence[RecordedRelease], delta: float) -> Spent:
    """Return what all clients have spent together: of an owner's file or folder, whatever number its node has had.

    Args:
        record: The lines of a privacy record.
        delta: Probability with which each bound may fail.
    """
    return _row(None, "", record, delta)


def _row(client: int | None, experiment: str, entries: Sequence[RecordedRelease], delta: float) -> Spent:
    releases = [entry.release for entry in entries]
    return Spent(
        client=client,
        experiment=experiment,
        releases=len(releases),
        record_epsilon=epsilon_of(releases, "record", delta),
        client_epsilon=epsilon_of(releases, "client", delta),
        counted_epsilon=counted_epsilon(releases, delta)[1],
        bounded_by=min((r.bounded_by if r else NOTHING for r in releases), key=WEAKEST_FIRST.index),
        replaces=any(r is not None and r.neighbours == "replace-one" for r in releases),
    )


def noisy_steps(budget: PrivacyBudget) -> int:
    """Return the number of noisy steps of one client in one run so far: also those of repeated rounds.

    Raises:
        StateError: If the record cannot be read, or a line of the client is damaged.
    """
    # How a line goes on after its time, see `RecordedRelease.line`: parsing all of a long record would take seconds.
    mark = f'"experiment": {json.dumps(budget.experiment)}, "client": {budget.client}, '.encode()
    try:
        lines = [RecordedRelease.of(line) for line in budget.path.read_bytes().splitlines() if mark in line]
    except (OSError, ValueError):
        read_record(budget.path)  # raises the error with the number of the line
        raise
    releases = (line.release for line in lines)
    return sum(release.steps for release in releases if release and release.mechanism == "sampled-gaussian")
