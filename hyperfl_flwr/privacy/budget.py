"""Record what a node's uploads spend of its clients' privacy budgets, and refuse what its owner does not allow.

The record, `privacy.jsonl` in the node's state folder, has a line for each release, of all runs. A line is on disk
before the release leaves the node, so a message that is sent again, or a process that is killed, is counted, too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FILE = "privacy.jsonl"
"""Name of the record in the node's state folder."""

Unit = Literal["record", "client"]
Mechanism = Literal["sampled-gaussian", "gaussian", "discrete-gaussian"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """What one upload releases about a client's data.

    Attributes:
        unit: What is protected: one record, or all that the client contributes.
        mechanism: `sampled-gaussian` for noisy steps on Poisson batches, `gaussian` or `discrete-gaussian` for noise
            on a vector or a sum.
        noise_multiplier: Standard deviation of the noise in units of the sensitivity.
        sample_rate: Probability with which a record is in a batch.
        steps: Number of steps.
    """

    unit: Unit
    mechanism: Mechanism
    noise_multiplier: float
    sample_rate: float = 1.0
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """The record of one client in one run.

    Attributes:
        path: The node's `privacy.jsonl`.
        experiment: Id of the run.
        client: The client's id.
        max_epsilon: Largest epsilon over all runs that the node's owner allows; None for no limit.
        delta: The delta that belongs to it.
    """

    path: Path
    experiment: str
    client: int
    max_epsilon: float | None = None
    delta: float = 1e-5

    def spend(self, server_round: int, release: Release | None) -> None:
        """Record a release before it is computed.

        Args:
            server_round: The federated round.
            release: The release; None if nothing bounds what the upload tells.

        Raises:
            RefusalError: If the owner's budget does not allow it.
            StateError: If the record cannot be read or written.
        """
        raise NotImplementedError
