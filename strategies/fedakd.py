"""FedAKD's server: the weighted mean of the clients' logits; it holds no parameters.

Gad and Fadlullah: "Federated Learning via Augmented Knowledge Distillation for Heterogenous Deep Human Activity
Recognition Systems", Sensors 2023. The mean of weighted logits and of weights suffices, see
`hyperfl_flwr.training.knowledge_exchange`.
"""

from collections.abc import Mapping

from torch import Tensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.methods.fedakd import FedAKDConfig
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.training.knowledge_exchange import LEAST_WEIGHT, nothing
from strategies.engine.base import BaseStrategy


class FedAKD(BaseStrategy):
    """Sends the mean of the round before, or a vector without knowledge."""

    @classmethod
    def check_robust(cls, config: RunConfig) -> None:
        """Refuse rules that are no weighted mean of the nodes: logits are sent multiplied by their weight, and with it.

        Raises:
            ConfigError: With `robust.reduction` = `median`, `trimmed-mean` or `norm-bound`.
        """
        if (rule := config.robust.reduction) in ("median", "trimmed-mean", "norm-bound"):
            raise ConfigError(
                f"robust.reduction must not be {rule} with fedakd: its clients send weighted logits and their weights, "
                f"and the quotient of two such results need not lie between the logits of any nodes; take krum, "
                f"multi-krum or geometric-median"
            )

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return a vector without knowledge; no array at all without public samples."""
        size = self.context.config.section(FedAKDConfig).samples * self.context.federation.num_classes
        return {"knowledge": {"theta": nothing(size)} if size else {}}

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the mean of the logits with the weight 1, so that what is sent never gets small.

        Without a client that has finished, or with a mean weight below `LEAST_WEIGHT`, there is no knowledge: the next
        round has another mixture.
        """
        if any(mean[-1] >= LEAST_WEIGHT for mean in means.values()):
            return {key: mean / mean[-1] for key, mean in means.items()}
        first = self.initial_parameters()["knowledge"]
        return {f"knowledge/{name}": value.numpy() for name, value in first.items()}
