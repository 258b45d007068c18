"""FedBN: all layers but those that normalise are averaged.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
algorithm 1.
"""

from collections.abc import Sequence

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.groups import normalisation_names
from hyperfl_flwr.models.targets import build_target
from strategies.engine.partial import Partial


class FedBN(Partial):
    """Averages the shared group `layers`."""

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse a target without normalisation layers, with which a run would be one of FedAvg.

        Raises:
            ConfigError: Naming the target.
        """
        # The number of classes changes the classifier alone.
        if not normalisation_names(build_target(config.target, tuple(input_shape), 2)):
            raise ConfigError(
                f"target = {config.target} has no normalisation layers, which fedbn keeps on the clients, so that the "
                f"run would be one of fedavg; take resnet18, a network of your own with BatchNorm, or the method fedavg"
            )
