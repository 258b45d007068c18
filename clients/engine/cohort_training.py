"""Interface of what trains several clients of a node together."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

MOST_TOGETHER = 10
"""Largest cohort with `cohort = auto` on a CPU, and with a pre-trained body; a larger one is hardly faster."""


class CohortTraining(Protocol):
    """Trains clients that have received the same message; `BaseClient.together` returns it for a method.

    Attributes:
        most: Largest cohort with `cohort = auto`.
    """

    most: int

    def admit(self, member: object) -> bool:
        """Return whether a client can be trained together with others, and prepare it for `BaseClient.begin`.

        A client that is trained alone after this, by `BaseClient.fit`, has the same results as in a cohort.
        """

    def memory_of(self, member: object) -> int:
        """Return the bytes that an admitted client needs until its upload is summed."""

    def train(self, members: Sequence[tuple[object, np.random.Generator]]) -> Sequence[dict[str, float] | Exception]:
        """Train admitted clients that have begun their round; what one computes does not depend on the others.

        Args:
            members: The clients, each with the random numbers of its training.

        Returns:
            For each client the metrics of its training, or the error that ended it.
        """
