"""Local-only training: nothing is shared; the baseline that federated learning has to beat."""

from collections.abc import Mapping

from torch import Tensor

from strategies.engine.base import BaseStrategy


class Local(BaseStrategy):
    """Shares no group."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return no groups."""
        return {}
