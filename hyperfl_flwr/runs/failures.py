"""What failed in a run: the clients that were left out or away, and whether its training has diverged."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import DivergedError, RunFailedError
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.tasks import task_of
from hyperfl_flwr.protocol.arrays import DIVERGED
from hyperfl_flwr.protocol.update_norms import TOO_LONG
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics

MOST_AWAY = 10
"""Number of clients in the list of those that were away most often."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A client that was left out of a phase of a run, from a file in `failures/`.

    Attributes:
        round: Number of the round.
        phase: `training`, `evaluation` after the round, `novel` for the assessment of novel clients, or `cross-site`
            for the evaluation of clients' models on each other's data.
        client: The client's id.
        reason: The reason as one line, as reported by the client's node.
        file: The file, in which details follow the reason, if the node reported any.
    """

    round: int
    phase: str
    client: int
    reason: str
    file: Path


def read_failures(path: Path) -> list[LeftOut]:
    """Return the clients of a run that were left out of a phase, by round; without the details in the files."""
    found = []
    for file in sorted((path / "failures").glob("round-*.txt")):
        if name := re.fullmatch(r"round-(\d+)(?:-([a-z-]+))?-client-(\d+)\.txt", file.name):
            with file.open(errors="replace") as text:
                reason = text.readline().strip()
            number, phase, client = name.groups()
            found.append(
                LeftOut(round=int(number), phase=phase or "training", client=int(client), reason=reason, file=file)
            )
    return found


def away_text(path: Path) -> str:
    """Return which clients of a run were away, and in how many of its rounds; empty if all were always there."""
    rounds = [record.get("away", ()) for record in read_metrics(path) if record["kind"] == "train"]
    away = Counter(client for clients in rounds for client in clients)
    if not away:
        return ""
    most = [f"client {client} in {count}" for client, count in away.most_common(MOST_AWAY)]
    more = f" and {counted(len(away) - MOST_AWAY, 'other')}" if len(away) > MOST_AWAY else ""
    return f"{', '.join(most)}{more} of {counted(len(rounds), 'round')}"


def nobody_text(path: Path) -> str:
    """Return a warning if no client finished the last round, which leaves no personalized score of it; else nothing."""
    rounds = [record for record in read_metrics(path) if record["kind"] == "train"]
    if not rounds or rounds[-1]["clients"]:
        return ""
    score = task_of(read_manifest(path)["settings"]).score_title
    return (
        f"no client finished the last round, so that the run has no personalized {score}; see the reasons in failures, "
        f"and resume the run with more rounds or start a new one"
    )


def run_failed(path: Path, text: str) -> RunFailedError:
    """Return the error for a run in which too many clients failed.

    It is a `DivergedError` if all of them failed in training for one of two reasons: what they trained was not finite,
    or further from what they had received than `max-update-ratio`. With secure sums no reason is known.

    Args:
        path: The run's folder.
        text: The message.
    """
    reasons = [each.reason for each in read_failures(path) if each.phase == "training"]
    if reasons and all(any(known in reason for known in (DIVERGED, TOO_LONG)) for reason in reasons):
        return DivergedError(text)
    return RunFailedError(text)


def has_diverged(manifest: Mapping[str, Any]) -> bool:
    """Return whether a run has failed since its training has diverged, see `run_failed`."""
    return bool(manifest.get("status") == "failed" and manifest.get("diverged", False))
