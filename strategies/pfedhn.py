"""pFedHN and pFedHN-PC: a hypernetwork on the server generates a model, or an extractor, for each client.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021, algorithm 1 and
section 4.1 (PC: a personal classifier that never leaves the client).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Scalar, resolved_number
from hyperfl_flwr.methods.pfedhn import PFedHNConfig
from hyperfl_flwr.models.new_embedding import NewEmbedding
from hyperfl_flwr.models.server_hypernetwork import DeepHypernetwork, ServerHypernetwork, ServerRates
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.protocol.arrays import SharedArrays, not_finite
from hyperfl_flwr.protocol.messages import group_of
from strategies.engine.base import BaseStrategy
from strategies.engine.context import ServerContext


class PFedHN(BaseStrategy):
    """Generates the per-client group `model`, the whole target network, and trains the hypernetwork.

    Attributes:
        group: Name of the generated group.
        rates: Default step sizes of the server.
        embedding_std: Default standard deviation of the embeddings' initial values.
        has_new_clients: Whether clients can join a finished run, see `strategies.novel.joining`.
        server: The hypernetwork, the embeddings and their optimiser.
    """

    novel_modes: ClassVar[tuple[str, ...]] = ("sampled", "ensemble", "nearest")

    has_new_clients: ClassVar[bool] = True
    group: ClassVar[str] = "model"
    rates: ClassVar[ServerRates] = ServerRates(learning_rate=1e-2)
    """From the authors' public code."""
    embedding_std: ClassVar[float] = 1.0

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        config, method = context.config, context.config.section(PFedHNConfig)
        networks = {
            name: DeepHypernetwork(
                self.generated(self.new_target(name)),
                embedding_dim=method.dimension(config.num_clients),
                hidden_width=method.hidden_width,
                hidden_layers=method.hidden_layers,
            )
            for name in config.targets
        }
        rates = ServerRates(
            learning_rate=resolved_number(method.server_learning_rate),
            momentum=method.server_momentum,
            weight_decay=method.server_weight_decay,
            clip_norm=method.server_clip_norm,
            combine=method.combine,
            embedding_learning_rate=resolved_number(method.embedding_learning_rate),
            embedding_weight_decay=resolved_number(method.embedding_weight_decay),
        )
        self.server = ServerHypernetwork(
            networks,
            config.targets,
            config.num_clients,
            rates,
            torch_generator(config.seed, "pfedhn"),
            resolved_number(method.embedding_std),
        )

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return the embeddings' length, step sizes and initial spread, and the hypernetwork's learning rate."""
        method, rates = config.section(PFedHNConfig), cls.rates
        rate = rates.learning_rate if method.server_learning_rate == "auto" else method.server_learning_rate
        decay = method.server_weight_decay
        return {
            "pfedhn.embedding-dim": method.dimension(config.num_clients),
            "pfedhn.server-learning-rate": rate,
            "pfedhn.embedding-learning-rate": _first(rates.embedding_learning_rate, rate),
            "pfedhn.embedding-weight-decay": _first(rates.embedding_weight_decay, decay),
            "pfedhn.embedding-std": cls.embedding_std,
        }

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse more target networks than clients, and several of them with novel clients.

        Raises:
            ConfigError: If `pfedhn.targets` is such a list.
        """
        number = len(config.targets)
        if number > config.num_clients:
            raise ConfigError(
                f"pfedhn.targets must have at most one network for each of the {config.num_clients} clients, got "
                f"{number}; shorten the list, or raise num-clients"
            )
        if config.novel.clients and len(set(config.targets)) > 1:
            raise ConfigError(
                f"novel.clients must be 0 with several networks in pfedhn.targets, got {config.novel.clients}: a novel "
                f"client is assessed with the models of all training clients, which must be of one network"
            )

    def generated(self, target: Target) -> nn.Module:
        """Return the part of the target network that the hypernetwork generates."""
        return target

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return no groups, since every client gets different parameters."""
        return {}

    def inputs(self, clients: Sequence[int]) -> Tensor | None:
        """Return the hypernetwork's inputs [B, d] for some clients; None for their embeddings."""
        return None

    def per_client_arrays(self, clients: Sequence[int]) -> Mapping[int, SharedArrays]:
        """Return the network that the hypernetwork generates for each client."""
        return {
            client: {f"{self.group}/{name}": value.numpy() for name, value in tensors.items()}
            for client, tensors in self.server.generate(clients, self.inputs(clients)).items()
        }

    def models(self, arrays: SharedArrays) -> SharedArrays:
        """Return the models of all N trained clients, in the order of their ids."""
        generated = self.server.generate(range(self.context.config.num_clients)).values()
        return {
            f"{self.group}/{name}": torch.stack([tensors[name] for tensors in generated]).numpy()
            for name in self.server.hypernetwork.shapes
        }

    def update(self, per_client: Mapping[int, SharedArrays], num_examples: Mapping[int, int]) -> None:
        """Step the hypernetwork and the embeddings along the clients' changes (algorithm 1).

        A step that does not end in finite numbers is taken back.
        """
        before = {name: value.clone() for name, value in self.server.state().items()}
        self.server.update(
            {
                client: {
                    key.removeprefix(f"{self.group}/"): torch.tensor(value)
                    for key, value in arrays.items()
                    if group_of(key) == self.group
                }
                for client, arrays in per_client.items()
            },
            self.inputs(list(per_client)),
        )
        if key := not_finite({name: value.numpy() for name, value in self.server.state().items()}):
            self.remarks.append(f"{key} is not finite after the server's step, so the hypernetwork is kept as it was")
            self.server.load(before)

    def new_embedding(self, target: str) -> NewEmbedding:
        """Return the embedding of a client that joins, at the mean of the trained clients' embeddings.

        Args:
            target: Name of the client's target network, one of the run's.
        """
        return NewEmbedding(self.server.hypernetwork_of(target), self.server.embeddings.mean(dim=0), self.server.rates)

    def server_state(self) -> SharedArrays:
        """Return the hypernetwork, the embeddings and the momentum buffers."""
        return {name: value.numpy() for name, value in self.server.state().items()}

    def load_server_state(self, arrays: SharedArrays) -> None:
        """Restore a state that `server_state` returned."""
        self.server.load({name: torch.tensor(value) for name, value in arrays.items()})


def _first(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


class PFedHNPC(PFedHN):
    """Generates the per-client group `extractor`; each client keeps a private classifier."""

    novel_modes: ClassVar[tuple[str, ...]] = ()
    has_new_clients: ClassVar[bool] = False

    group: ClassVar[str] = "extractor"
    rates: ClassVar[ServerRates] = ServerRates(learning_rate=5e-2)

    def generated(self, target: Target) -> nn.Module:
        """Return the feature extractor."""
        return target.extractor
