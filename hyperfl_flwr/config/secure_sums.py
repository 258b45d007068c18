"""Settings of secure sums, see `hyperfl_flwr.protocol.secure_sums`."""

from typing import Annotated, ClassVar

from pydantic import Field

from hyperfl_flwr.core.settings import Auto, NonNegative, Positive, PositiveFloat, Section, setting


class SecureSumConfig(Section):
    """Secure sums: the server learns the sum over all nodes' clients, of parameters and of metrics, and no summand."""

    key: ClassVar[str] = "secagg"
    title: ClassVar[str] = "Secure sums"

    enabled: bool = setting(
        False,
        "Whether nodes mask what they send, so that the server can open only the sum over all of them. For methods of "
        "which all shared groups are sums or means.",
    )
    range: PositiveFloat = setting(
        10.0,
        "Largest change of a parameter that is sent, as a multiple of the largest parameter of its array (0.05 at "
        "least). Larger changes are cut off there and counted. A larger range makes the rounding coarser.",
    )
    max_examples: Positive = setting(
        1000,
        "Clients with this many training samples or more have the same weight, where samples are weights. Smaller "
        "clients are weighted by their samples, as without secure sums.",
    )
    colluding: Auto | NonNegative = setting(
        "auto",
        "Number of nodes that may collude with the server. `auto`: below a third of all nodes.",
    )
    threshold: Auto | Positive = setting(
        "auto",
        "Number of nodes that must answer to open a sum; the others may drop out in a round. `auto`: the least that "
        "leaves `secagg.min-cohort` honest nodes, and half of them, in every sum that a lying server can open.",
    )
    min_cohort: Annotated[int, Field(ge=2)] = setting(
        3, "Least number of honest nodes in a sum. A node's owner may require more.", values="whole number ≥ 2"
    )
