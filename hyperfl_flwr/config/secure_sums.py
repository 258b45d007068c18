"""Settings of secure sums, see `hyperfl_flwr.protocol.secure_sums`."""

from collections.abc import Collection
from typing import Annotated, ClassVar

from pydantic import Field

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.settings import Auto, NonNegative, Positive, PositiveFloat, Section, setting
from hyperfl_flwr.protocol.secure_sums.header import MOST_EXAMPLES
from hyperfl_flwr.protocol.secure_sums.thresholds import (
    MOST_NODES,
    check_threshold,
    fewest_nodes,
    smallest_threshold,
    usual_colluding,
)

USUAL_EXAMPLES = 1000
"""`secagg.max-examples` where no node announces the number of its samples."""


class SecureSumConfig(Section):
    """Secure sums: the server learns only the sums of parameters and metrics over all clients, and no client's part."""

    key: ClassVar[str] = "secagg"
    title: ClassVar[str] = "Secure sums (secure aggregation)"

    enabled: bool = setting(
        False,
        "Whether nodes mask what they send, so that the server can open only the sum over all of them. For methods of "
        "which all shared groups are sums or means.",
    )
    range: PositiveFloat = setting(
        10.0,
        "Largest change of a parameter that is sent, as a multiple of the largest parameter of its array (0.05 at "
        "least). Larger changes are cut off there and counted; a client with more than one in a thousand of "
        "an array fails. A larger range makes the rounding coarser.",
    )
    max_examples: Auto | Annotated[int, Field(ge=1, le=MOST_EXAMPLES)] = setting(
        "auto",
        "Number of training samples from which on all clients have the same weight, with methods that weight clients "
        "by their number of samples. Smaller clients are weighted as without secure sums. The closer the number is to "
        "that of the largest client, the finer the rounding. `auto`: that of the largest client in a simulation; 1000 "
        "in a deployment, where nodes do not report their numbers of samples.",
    )
    colluding: Auto | NonNegative = setting(
        "auto",
        "Number of nodes that may collude with the server. `auto`: below a third of all nodes.",
    )
    threshold: Auto | Positive = setting(
        "auto",
        "Number of nodes that must answer to open a sum; the others may drop out in a round. `auto`: the smallest "
        "number with which every sum that a malicious server can open covers at least `secagg.min-cohort` honest "
        "nodes, and at least half of all honest ones.",
    )
    min_cohort: Annotated[int, Field(ge=2)] = setting(
        3, "Least number of honest nodes in a sum. A node's owner may require more.", values="whole number ≥ 2"
    )

    def max_examples_of(self, num_examples: Collection[int]) -> int:
        """Return the number of training samples with the weight 1.

        Args:
            num_examples: Numbers of training samples of the clients; empty if no node announces them.
        """
        if self.max_examples != "auto":
            return self.max_examples
        return min(MOST_EXAMPLES, max(num_examples, default=USUAL_EXAMPLES))

    def threshold_of(self, num_nodes: int, num_present: int) -> int:
        """Return the threshold of a step.

        Args:
            num_nodes: Number P of all nodes of the federation.
            num_present: Number n of nodes in the step.

        Raises:
            ConfigError: If so few, or so many, nodes cannot have a secure sum.
        """
        if num_present > MOST_NODES:
            raise ConfigError(
                f"secagg.enabled allows at most {MOST_NODES} nodes in a round, got {num_present}; host several clients "
                f"on each node"
            )
        colluding = self.colluding_of(num_nodes)
        if self.threshold == "auto":
            return smallest_threshold(num_present, colluding, self.min_cohort)
        check_threshold(num_present, self.threshold, colluding, self.min_cohort)
        return self.threshold

    def fewest_nodes(self, num_nodes: int) -> int:
        """Return the least number of nodes in a step, for P nodes in all."""
        least = fewest_nodes(self.colluding_of(num_nodes), self.min_cohort)
        return least if self.threshold == "auto" else max(least, min(self.threshold, num_nodes))

    def colluding_of(self, num_nodes: int) -> int:
        """Return the number of nodes that may collude with the server, for P nodes in all."""
        return usual_colluding(num_nodes) if self.colluding == "auto" else self.colluding
