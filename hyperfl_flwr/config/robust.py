"""Settings of robust reductions, see `hyperfl_flwr.training.robust_rules`."""

from typing import ClassVar, Literal

from pydantic import ValidationInfo, field_validator

from hyperfl_flwr.core.settings import Auto, NonNegative, PositiveFloat, Section, setting

Rule = Literal["mean", "norm-bound", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median"]
"""Names of the rules; all but `mean` are those of `hyperfl_flwr.training.robust_rules`."""


class RobustConfig(Section):
    """Reductions that a minority of malicious nodes cannot move at will."""

    key: ClassVar[str] = "robust"
    title: ClassVar[str] = "Robust reductions"

    reduction: Rule = setting(
        "mean",
        "How the server reduces the shared parameters. With all but `mean`, each node counts as one, whatever the "
        "number of its clients and samples, so that the result depends on which node hosts which client; without "
        "`--num-nodes`, a simulation then has a node for each client. For methods of which all shared groups are "
        "averaged.\n\n"
        "`mean`: the method's mean over the clients. `norm-bound`: the mean over the nodes, of changes that are "
        "shortened to `robust.norm-bound`. `median`: the median of each parameter. `trimmed-mean`: the mean of each "
        "parameter without the f largest and the f smallest values. `krum`: the parameters of the node with the "
        "least sum of squared distances from its n - f - 2 nearest ones. `multi-krum`: the mean of the n - f nodes "
        "with the least such sums. `geometric-median`: the point with the least sum of distances from the nodes "
        "(RFA).",
    )
    byzantine: Auto | NonNegative = setting(
        "auto",
        "Number f of nodes of a round that may be malicious. The smaller it is, the more nodes count, and the fewer "
        "are needed: 2 f + 1 replies, with `krum` and `multi-krum` 2 f + 3. A round with fewer changes nothing, and "
        "its clients count as failed. `auto`: a fifth of the nodes that are asked, rounded down, but 1 at least.",
    )
    norm_bound: Auto | PositiveFloat = setting(
        "auto",
        "Largest norm of a node's mean change, over all of its arrays, with `robust.reduction = norm-bound`. `auto`: "
        "the median of the nodes' norms in the round.",
    )

    @field_validator("byzantine")
    @classmethod
    def _needs_rule(cls, value: int | str, info: ValidationInfo) -> int | str:
        if value != "auto" and info.data.get("reduction") == "mean":
            raise ValueError(f"must be auto with robust.reduction = mean, which trusts all nodes; got {value}")
        return value

    @field_validator("norm_bound")
    @classmethod
    def _needs_norm_bound(cls, value: float | str, info: ValidationInfo) -> float | str:
        reduction = info.data.get("reduction")
        if value != "auto" and reduction is not None and reduction != "norm-bound":
            raise ValueError(f"must be auto with robust.reduction = {reduction}, which bounds no norm; got {value:g}")
        return value

    @property
    def is_robust(self) -> bool:
        """Whether the nodes are reduced by another rule than the method's mean."""
        return self.reduction != "mean"

    def byzantine_of(self, num_asked: int) -> int:
        """Return the number f of nodes that may be malicious in a round that asks some number of nodes."""
        return max(1, num_asked // 5) if self.byzantine == "auto" else self.byzantine

    def fewest_nodes(self, num_asked: int) -> int:
        """Return the least number of replies with which the rule holds in a round that asks some number of nodes.

        With fewer than 2 f + 1, malicious nodes may be in the majority; Krum's bound needs 2 f + 3. A norm bound that
        is a number holds for any.
        """
        if self.norm_bound != "auto" or not self.is_robust:
            return 1
        return 2 * self.byzantine_of(num_asked) + (3 if self.reduction in ("krum", "multi-krum") else 1)
