"""Declare the settings of a run's nodes: how many they are, and what happens if they are missing or fail."""

from typing import Annotated, ClassVar

from pydantic import Field

from hyperfl_flwr.core.settings import (
    Auto,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
    setting,
)
from hyperfl_flwr.protocol.hosting import MOST_NODES


class NodesConfig(Section):
    """Handling of nodes that are missing, fail or send invalid replies."""

    title: ClassVar[str] = "Nodes and failures"

    num_nodes: Auto | Annotated[int, Field(ge=1, le=MOST_NODES)] = setting(
        "auto",
        "Number P of nodes of a run: those with the numbers 0 to P - 1. Other nodes of the deployment take no part in "
        "it. `auto`: all nodes of the deployment, or as many as the resumed run had; without `hyperfl run`, the number "
        "in the nodes' configs. A resumed run has as many nodes as before: give `auto` or the same number. With secure "
        "sums, a node refuses a run with more or fewer nodes than its `peers-file` has. For simulations, `--num-nodes` "
        "is the same setting.",
        values="`auto`, whole number from 1 to 10000",
        resumable=True,
    )
    failure_budget: Share = setting(
        0.25,
        "Share of all client trainings so far that may fail before the run does. Refused replies do not count.",
        resumable=True,
    )
    max_failed_rounds: Positive = setting(
        3, "Number of consecutive rounds without a finished client after which the run fails.", resumable=True
    )
    max_update_ratio: NonNegativeFloat = setting(
        10.0,
        "Largest mean change of a shared group in a reply, as a multiple of the norm of the sent parameters (which "
        "counts as at least 0.05 for each parameter, and 0.2 for each control variate of scaffold). A reply with a "
        "larger one is left out; 0 allows any.",
        resumable=True,
    )
    exclusion_rounds: NonNegative = setting(
        5,
        "Number of rounds for which a deployment excludes a node after a refused reply; it doubles with each further "
        "refusal. 0 does not exclude nodes.",
        resumable=True,
    )
    min_nodes: Auto | Positive = setting(
        "auto",
        "Number of nodes that a deployment needs to start, and before each round. `auto`: all must have answered at "
        "the start, and half of them, rounded up, must be accepted and stay.",
        resumable=True,
    )
    node_timeout: PositiveFloat = setting(
        120.0, "Seconds to wait for nodes that are missing, at the start and before a round.", resumable=True
    )
    round_timeout: PositiveFloat = setting(3600.0, "Seconds to wait for the replies of a phase.", resumable=True)
    ledger: bool = setting(
        False,
        "Record what the nodes of a simulation send. The nodes of a deployment always record it.",
        resumable=True,
    )
