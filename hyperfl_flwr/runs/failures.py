"""What failed in a run: the clients that were left out, and whether the run's training has diverged."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperfl_flwr.protocol.arrays import DIVERGED
from hyperfl_flwr.protocol.update_norms import TOO_LONG


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


def has_diverged(manifest: Mapping[str, Any]) -> bool:
    """Return whether a run failed since its clients' training has diverged: a result, as others of the same settings.

    What they trained was not finite, or further from what they had received than `max-update-ratio`.
    """
    return manifest["status"] == "failed" and any(text in manifest.get("problem", "") for text in (DIVERGED, TOO_LONG))
