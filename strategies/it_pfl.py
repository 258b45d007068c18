"""IT-PFL-HN's server: pFedHN's hypernetwork, and an encoder that computes its inputs from unlabelled data.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 4 and appendix B. The algorithm
is in docs/methods/it-pfl.md. In the first phase the hypernetwork and the embeddings are trained as in pFedHN, and the
encoder is averaged. In the second phase the encoder is frozen, and the hypernetwork is tuned on the clients'
descriptors instead of their embeddings (equation 9). A copy of the hypernetwork from the end of the first phase is kept
for the clients of the federation.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods.it_pfl import ITPFLConfig
from hyperfl_flwr.methods.pfedhn import PFedHNConfig
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.models.initialisation import rectifier_parameters
from hyperfl_flwr.models.new_embedding import NewEmbedding
from hyperfl_flwr.models.server_hypernetwork import ServerRates
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.queries import DESCRIPTOR, QuerySpec
from hyperfl_flwr.training.server_adam import ServerAdam
from strategies.engine.context import ServerContext
from strategies.engine.query_clients import Answers, ask, descriptors_of
from strategies.pfedhn import PFedHN

KEPT = "federation/"
"""Prefix, in the server's state, of the hypernetwork from the end of the first phase."""

ADAM = "encoder-optimiser/"
"""Prefix, in the server's state, of the state of the encoder's optimiser."""

ENCODER = "encoder/"
"""Prefix of the encoder's arrays in messages."""

EMBEDDINGS, FINE_TUNING = "embeddings", "fine-tuning"
"""Names of the phases."""


class ITPFL(PFedHN):
    """Averages the group `encoder`; sends each client its `model` and, in `embedding`, the input that generated it.

    Attributes:
        kept: The hypernetwork's parameters at the end of the first phase, by name; empty before.
        descriptors: Descriptors g(D_i) [d] of the clients that have sent one, by client.
    """

    novel_modes: ClassVar[tuple[str, ...]] = ("descriptor",)
    rates: ClassVar[ServerRates] = ServerRates(
        learning_rate=2e-2, embedding_learning_rate=2.0, embedding_weight_decay=0.0
    )
    embedding_std: ClassVar[float] = 0.1

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        self.kept: dict[str, Tensor] = {}
        self._frozen: SharedArrays = {}
        self.descriptors: dict[int, Tensor] = {}
        self.descriptor_dimension = self.server.hypernetwork.embedding_dim
        self._query_answers = Answers()
        config = context.config
        encoder = build_encoder(
            config.target,
            context.federation.input_shape,
            self.descriptor_dimension,
            config.section(ITPFLConfig).pooling,
        )
        self._initial_encoder = rectifier_parameters(encoder, torch_generator(config.seed, "encoder"))
        self._adam = (
            ServerAdam(self._initial_encoder, config.section(ITPFLConfig).encoder_server_learning_rate)
            if config.section(ITPFLConfig).encoder_optimiser == "adam"
            else None
        )

    def phase(self, server_round: int) -> str:
        """Return `embeddings` or `fine-tuning`."""
        config = self.context.config
        return FINE_TUNING if config.section(ITPFLConfig).fine_tunes(server_round, config.num_rounds) else EMBEDDINGS

    @classmethod
    def only_round(cls) -> Mapping[str, Scalar]:
        """Return settings without a second phase, since the encoder is not uploaded in it."""
        return {"it-pfl.fine-tune-rounds": 0}

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse noise on descriptors that contain maxima, several target networks, and an end before the last phase.

        Raises:
            ConfigError: If descriptors are to be noised and `it-pfl.pooling` is not `mean`, if `pfedhn.targets` is set,
                or if validation data would decide about rounds and the last ones are a phase.
        """
        if config.selects_rounds and config.section(ITPFLConfig).fine_tunes(config.num_rounds, config.num_rounds):
            raise ConfigError(
                f"early-stopping must be 0 and keep must be last with it-pfl, got {config.early_stopping} and "
                f"{config.keep}: its last rounds, which tune the hypernetwork on descriptors, belong to the method; "
                f"set it-pfl.fine-tune-rounds to 0, or choose the number of rounds with data.validation-fraction alone"
            )
        if names := config.section(PFedHNConfig).targets:
            raise ConfigError(
                f"pfedhn.targets must be empty with it-pfl, got {names}: its encoder has the layers of one network, "
                f"and a descriptor does not choose a network; set target, or take pfedhn"
            )
        novel, pooling = config.novel, config.section(ITPFLConfig).pooling
        if novel.clients and any(novel.budgets) and pooling != "mean":
            raise ConfigError(
                f"novel.epsilons = {novel.epsilons} needs it-pfl.pooling = mean, got {pooling}: a single "
                f"sample can change a maximum without bound, so that no amount of noise hides it"
            )

    @classmethod
    def warnings(cls, config: RunConfig) -> Sequence[str]:
        """Return a warning if all rounds are of the second phase, so that none trains the encoder."""
        if not config.section(ITPFLConfig).fine_tunes(1, config.num_rounds):
            return ()
        return [
            f"it-pfl.fine-tune-rounds = {config.section(ITPFLConfig).fine_tune_rounds} leaves none of num-rounds = "
            f"{config.num_rounds} to train the encoder"
        ]

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the encoder's initial values."""
        return {"encoder": self._initial_encoder}

    def inputs(self, clients: Sequence[int]) -> Tensor | None:
        """Return the descriptors [B, d] of some clients in the second phase; None (embeddings) in the first."""
        return torch.stack([self.descriptors[client] for client in clients]) if self.kept and clients else None

    def per_client_arrays(self, clients: Sequence[int]) -> Mapping[int, SharedArrays]:
        """Return each client's network and the embedding or descriptor [1, d] that generated it."""
        inputs = self.inputs(clients)
        rows = self._targets(clients) if inputs is None else inputs
        networks = super().per_client_arrays(clients)
        return {
            client: {**networks[client], DESCRIPTOR: row[None].numpy()}
            for client, row in zip(clients, rows, strict=True)
        }

    def evaluated(self, arrays: ArrayRecord, client: int) -> SharedArrays:
        """Return the arrays that a client is sent after the last round, without a frozen encoder.

        Raises:
            RunDirectoryError: If the client has sent no descriptor in the second phase, so that it has no model.
        """
        if self.kept and client not in self.descriptors:
            raise RunDirectoryError(f"client {client} has sent no descriptor; take another client, or resume the run")
        return super().evaluated(pack_arrays({}) if self.kept else arrays, client)

    def models_of(self, descriptors: Mapping[int, NDArray[Any]]) -> Mapping[int, SharedArrays]:
        """Return the models that the hypernetwork generates from descriptors [1, d] of novel clients."""
        clients = list(descriptors)
        rows = torch.cat([torch.tensor(descriptors[client]) for client in clients]) if clients else torch.zeros(0)
        return {
            client: {f"{self.group}/{name}": value[None].numpy() for name, value in tensors.items()}
            for client, tensors in (self.server.generate(clients, rows) if clients else {}).items()
        }

    def new_embedding(self, target: str) -> NewEmbedding:
        """Return the embedding of a client that joins, under the hypernetwork that generates from embeddings.

        After the second phase, that is the copy from the end of the first.
        """
        found = super().new_embedding(target)
        if not self.kept:
            return found
        hypernetwork = copy.deepcopy(self.server.hypernetwork)
        hypernetwork.load_state_dict(self.kept)
        return NewEmbedding(hypernetwork, found.embedding, self.server.rates)

    def _targets(self, clients: Sequence[int]) -> Tensor:
        """Return the encoder's training targets in a round: the clients' embeddings [B, d], shifted by one vector.

        The shift moves their mean to the mean of all embeddings. Without it, an encoder that cannot distinguish clients
        yet mostly follows the mean of the round's clients, which differs from round to round. Nothing is shifted if a
        round has all clients or only one.
        """
        embeddings = self.server.embeddings.detach()
        targets = embeddings[list(clients)]
        return targets - targets.mean(dim=0) + embeddings.mean(dim=0) if 1 < len(clients) < len(embeddings) else targets

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message]:
        """Return the messages of a round; in the second phase, first query the descriptors that are missing."""
        self._prepare(server_round, arrays, grid, self.sampled(server_round))
        return super().configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message]:
        """Return the messages of the last evaluation; after a second phase, of models generated from descriptors."""
        self._prepare(server_round, arrays, grid, self.evaluators())
        return super().configure_evaluate(server_round, arrays, config, grid)

    def _prepare(self, server_round: int, encoder: ArrayRecord, grid: Grid, clients: Sequence[int]) -> None:
        """Query the missing descriptors of some clients, or of all present ones when the second phase begins."""
        self._query_answers = Answers()
        if self.phase(server_round) == EMBEDDINGS:
            return
        described: Iterable[int] = clients
        if not self.kept:
            self._begin_fine_tuning(server_round)
            described = self.present
        if missing := set(described) - set(self.descriptors):
            query = descriptors_of(missing, encoder, self.descriptor_dimension, QuerySpec())
            found = ask(grid, self.context, server_round, query)
            self.descriptors |= {client: torch.tensor(arrays[DESCRIPTOR][0]) for client, arrays in found.arrays.items()}
            # This round's outcome must mention only clients that take part in it, and each of them once.
            gone = {client for node_clients in found.away.values() for client in node_clients}
            found.away = {node: [client for client in away if client in clients] for node, away in found.away.items()}
            found.failures = [
                failure for failure in found.failures if failure.client in clients and failure.client not in gone
            ]
            self._query_answers = found

    def _begin_fine_tuning(self, server_round: int) -> None:
        hypernetwork = self.server.hypernetwork.named_parameters()
        self.kept = {name: value.detach().clone() for name, value in hypernetwork}
        self.server.forget_momentum()
        self.progress.last_phase_after = server_round - 1

    def _messages(self, kind: str, arrays: ArrayRecord, clients: Sequence[int], grid: Grid) -> Sequence[Message]:
        if not self.kept:
            return super()._messages(kind, arrays, clients, grid)
        self._frozen = unpack_arrays(arrays)
        described = [client for client in clients if client in self.descriptors]
        return super()._messages(kind, pack_arrays({}), described, grid)

    def _begin_outcome(self) -> None:
        super()._begin_outcome()
        self.outcome.failures += self._query_answers.failures
        for node, refused in self._query_answers.refused.items():
            self.outcome.refuse(node, refused)
        for node, clients in self._query_answers.away.items():
            self.outcome.away[node] = [client for client in clients if client not in self.descriptors]
        self.outcome.bytes_on_wire += self._query_answers.bytes_on_wire

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the encoder after the server's step; in the second phase the frozen encoder."""
        if self.kept:
            return self._frozen
        if self._adam is None or not means:
            return means
        stepped = self._adam.step(_encoder(self._current), _encoder(means))
        return {ENCODER + name: value.numpy() for name, value in stepped.items()}

    def server_state(self) -> SharedArrays:
        """Return pFedHN's state; in the second phase also the kept hypernetwork and the descriptors [N, d]."""
        state = super().server_state()
        if self.kept:
            number = self.context.config.num_clients
            state["descriptors"] = np.zeros((number, self.descriptor_dimension), np.float32)
            state["described"] = np.zeros(number, np.uint8)
            for client, row in self.descriptors.items():
                state["descriptors"][client], state["described"][client] = row.numpy(), 1
        remembered = self._adam.state() if self._adam and not self.kept else {}
        return (
            state
            | {KEPT + name: value.numpy() for name, value in self.kept.items()}
            | {ADAM + name: value.numpy() for name, value in remembered.items()}
        )

    def load_server_state(self, arrays: SharedArrays) -> None:
        """Restore a state that `server_state` returned."""
        super().load_server_state(arrays)
        self.kept = {
            name.removeprefix(KEPT): torch.tensor(value) for name, value in arrays.items() if name.startswith(KEPT)
        }
        if self._adam:
            remembered = {name.removeprefix(ADAM): value for name, value in arrays.items() if name.startswith(ADAM)}
            self._adam.load({name: torch.tensor(value) for name, value in remembered.items()})
        known = np.flatnonzero(arrays["described"]).tolist() if self.kept else []
        self.descriptors = {client: torch.tensor(arrays["descriptors"][client]) for client in known}


def _encoder(arrays: SharedArrays) -> dict[str, Tensor]:
    return {key.removeprefix(ENCODER): torch.tensor(value) for key, value in arrays.items() if key.startswith(ENCODER)}
