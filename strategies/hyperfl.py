"""HyperFL: only a hypernetwork is averaged; embeddings and classifiers stay with the clients.

Guo, Zeng, Chen, Zhang, Ren, Zhou, Qu: "A New Federated Learning Framework Against Gradient Inversion Attacks", AAAI
2025, algorithm 1 (server): varphi <- sum_i (n_i / n) varphi_i.
"""

from collections.abc import Iterable, Mapping

import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from torch import Tensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Scalar, number
from hyperfl_flwr.methods.hyperfl import HyperFLConfig
from hyperfl_flwr.models.hypernetwork import Hypernetwork, common_embedding, initial_hypernetwork
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.server.exchange import Exchange
from strategies.engine.base import BaseStrategy, Setting


def initial_state(setting: Setting) -> tuple[Hypernetwork, dict[str, Tensor], Tensor]:
    """Return what a run starts with: a hypernetwork without values, its parameters by name, the common embedding."""
    config, federation, method = setting.config, setting.federation, setting.config.section(HyperFLConfig)
    extractor = build_target(config.target, federation.input_shape, federation.num_classes).extractor
    hypernetwork = Hypernetwork(extractor, embedding_dim=method.embedding_dim, hidden_width=method.hidden_width)
    v = common_embedding(method.embedding_dim, method.initialisation, config.seed)
    generator = torch_generator(config.seed, "hypernetwork")
    return hypernetwork, initial_hypernetwork(hypernetwork, extractor, method.initialisation, v, generator), v


class WithEmbedding(BaseStrategy):
    """What both forms of HyperFL recommend."""

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return the embedding's rate, which is that of what is shared."""
        return {"hyperfl.embedding-learning-rate": number(config.learning_rate)}


class HyperFL(WithEmbedding):
    """Shares the group `hypernetwork`."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the hypernetwork's initial values under the chosen initialisation."""
        _, parameters, _ = initial_state(self.setting)
        return {"hypernetwork": parameters}

    def reduce(self, exchanges: Iterable[Exchange]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Reduce as always; with `embedding = common-frozen` the first layer is a constant, free of rounding."""
        arrays, weights = super().reduce(exchanges)
        if arrays is not None and self.setting.config.section(HyperFLConfig).embedding == "common-frozen":
            for name in ("hidden.weight", "hidden.bias"):
                arrays[f"hypernetwork/{name}"] = Array(self._current[f"hypernetwork/{name}"])
        return arrays, weights


class HyperFLFrozen(WithEmbedding):
    """Shares the group `extractor`: what the hypernetwork generates of one frozen embedding for all."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the parameters that the initial hypernetwork generates."""
        hypernetwork, parameters, v = initial_state(self.setting)
        hypernetwork.load_state_dict(parameters, assign=True)
        with torch.no_grad():
            theta = hypernetwork.split(hypernetwork(v))
        return {"extractor": {name: value.clone() for name, value in theta.items()}}
