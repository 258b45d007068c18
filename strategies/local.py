"""Local-only training, the baseline that federated learning has to beat: nothing is shared."""

from collections.abc import Mapping

from torch import Tensor

from strategies.engine.base import BaseStrategy


class Local(BaseStrategy):
    """Has no shared groups; clients train their private models only."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return no groups, since none is shared."""
        return {}
