"""HyperFL: the hypernetwork is averaged, embeddings and classifiers stay on the clients.

Guo, Zeng, Chen, Zhang, Ren, Zhou, Qu: "A New Federated Learning Framework Against Gradient Inversion Attacks", AAAI
2025, algorithm 1 (server): varphi <- sum_i (n_i / n) varphi_i.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Scalar, resolved_number
from hyperfl_flwr.methods.hyperfl import HyperFLConfig
from hyperfl_flwr.models.hypernetwork import Hypernetwork, common_embedding, initial_hypernetwork
from hyperfl_flwr.protocol.arrays import SharedArrays
from strategies.engine.base import BaseStrategy


class WithEmbedding(BaseStrategy):
    """Shared base of both forms of HyperFL: the initial hypernetwork and the meaning of `auto`."""

    def initial_state(self) -> tuple[Hypernetwork, dict[str, Tensor], Tensor]:
        """Return a hypernetwork on the meta device, its initial parameters by name, and the common embedding [d]."""
        config, method, extractor = (
            self.context.config,
            self.context.config.section(HyperFLConfig),
            self.new_target().extractor,
        )
        hypernetwork = Hypernetwork(extractor, embedding_dim=method.embedding_dim, hidden_width=method.hidden_width)
        v = common_embedding(method.embedding_dim, method.initialisation, config.seed)
        generator = torch_generator(config.seed, "hypernetwork")
        return hypernetwork, initial_hypernetwork(hypernetwork, extractor, method.initialisation, v, generator), v

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return the embedding's learning rate, and whether clients keep their generated weights."""
        return {
            "hyperfl.embedding-learning-rate": resolved_number(config.learning_rate),
            "hyperfl.keep-last": config.section(HyperFLConfig).keeps_last(config.num_clients),
        }


class HyperFL(WithEmbedding):
    """Averages the shared group `hypernetwork`."""

    def lighter(self) -> str:
        """Return what the frozen form would send: the generated extractor, in float32."""
        size = 4e-6 * sum(value.numel() for value in self.new_target().extractor.parameters())
        return f"hyperfl-frozen, with a constant embedding, would send {size:.1f} MB"

    @classmethod
    def warnings(cls, config: RunConfig) -> Sequence[str]:
        """Return what is not known of clients that do not keep their generated weights."""
        if config.section(HyperFLConfig).keeps_last(config.num_clients):
            return ()
        return (
            "hyperfl.keep-last is false, so theta_change is not measured, and models after local training cannot be "
            "exported from the run's folder; hyperfl.keep-last=true keeps what both need",
        )

    @classmethod
    def check_secure_sum(cls, config: RunConfig) -> None:
        """Refuse sums of hypernetworks that are trained with different embeddings.

        Raises:
            ConfigError: Without `hyperfl.embedding = common-frozen`.
        """
        embedding = config.section(HyperFLConfig).embedding
        if embedding != "common-frozen":
            raise ConfigError(
                f"secagg.enabled must be false with hyperfl.embedding = {embedding}: a sum of hypernetworks that were "
                f"trained with different embeddings can be separated into the clients' parts (docs/privacy/audit.md); "
                f"use hyperfl-frozen, or hyperfl.embedding=common-frozen"
            )

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the hypernetwork's initial values, drawn as `hyperfl.initialisation` says."""
        _, parameters, _ = self.initial_state()
        return {"hypernetwork": parameters}

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the means; with `embedding = common-frozen` the first layer keeps its values."""
        if self.context.config.section(HyperFLConfig).embedding != "common-frozen":
            return means
        # No client trains the first layer then; its mean would differ from it by rounding.
        first = ("hypernetwork/hidden.weight", "hypernetwork/hidden.bias")
        return {key: self._current[key] if key in first else mean for key, mean in means.items()}


class HyperFLFrozen(WithEmbedding):
    """Averages the shared group `extractor`, which the hypernetwork generates from one frozen embedding for all."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the extractor that the initial hypernetwork generates from the common embedding."""
        hypernetwork, parameters, v = self.initial_state()
        hypernetwork.load_state_dict(parameters, assign=True)
        with torch.no_grad():
            theta = hypernetwork.split(hypernetwork(v))
        return {"extractor": {name: value.clone() for name, value in theta.items()}}
