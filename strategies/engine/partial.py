"""Base of strategies that average one part of the target network; the clients keep the other."""

from collections.abc import Mapping

from torch import Tensor

from hyperfl_flwr.models.groups import initial_groups
from strategies.engine.base import BaseStrategy


class Partial(BaseStrategy):
    """Averages the shared group that the clients declare, see `clients.engine.partial`."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the group's values in FedAvg's initial model."""
        return dict(initial_groups(self.new_target(), self.context.reductions, self.context.config.seed))
