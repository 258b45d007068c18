"""SRR-FL's server: FedAvg's, with equal weights; the clients randomise their models."""

from collections.abc import Sequence

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.layers.batchnorm import has_statistics
from hyperfl_flwr.models.targets import build_target
from strategies.fedavg import FedAvg


class SRRFL(FedAvg):
    """Averages the randomised models."""

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse running statistics.

        Raises:
            ConfigError: If the target has BatchNorm.
        """
        if has_statistics(build_target(config.target, tuple(input_shape), 2)):
            raise ConfigError(
                f"target = {config.target} has running statistics (BatchNorm), which are not on the grid of srr-fl and "
                f"would become negative; take cnn, lenet, mlp or mlp-500, or a network of your own with GroupNorm"
            )
