"""IT-PFL-HN's server: pFedHN's hypernetwork, and an encoder that makes its inputs of clients' data without labels.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 4 and appendix B. The algorithm
is in docs/methods/it-pfl.md. In the first phase hypernetwork and embeddings move as pFedHN's do, and the encoder is
averaged. In the second the encoder is frozen and the hypernetwork is tuned on the clients' descriptors in the place of
their embeddings (equation 9); as it was before it is kept, for the clients of the federation.
"""

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
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.models.initialisation import rectifier_parameters
from hyperfl_flwr.models.server_hypernetwork import ServerRates
from hyperfl_flwr.protocol.arrays import SharedArrays, pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.queries import DESCRIPTOR, QuerySpec
from hyperfl_flwr.training.server_adam import ServerAdam
from strategies.engine.base import ServerContext
from strategies.engine.query_clients import Answers, ask, descriptors_of
from strategies.pfedhn import PFedHN

KEPT = "federation/"
"""Prefix, in the server's state, of the hypernetwork as it was at the end of the first phase."""

ADAM = "encoder-optimiser/"
"""Prefix, in the server's state, of what the encoder's optimiser remembers."""

ENCODER = "encoder/"
"""Prefix of the encoder's arrays as they travel."""

EMBEDDINGS, FINE_TUNING = "embeddings", "fine-tuning"
"""Names of the phases."""


class ITPFL(PFedHN):
    """Averages the group `encoder`; sends each client its `model` and, in `embedding`, what that was generated of.

    Attributes:
        kept: The hypernetwork's parameters at the end of the first phase, by name; empty before.
        descriptors: g(D_i) [d] of the clients that have sent it.
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
        self._asked_for = Answers()
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
        """Return that no round is of the second phase, in which the encoder does not travel."""
        return {"it-pfl.fine-tune-rounds": 0}

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse noise on descriptors that are made of maxima."""
        novel, pooling = config.novel, config.section(ITPFLConfig).pooling
        if novel.clients and any(novel.budgets) and pooling != "mean":
            raise ConfigError(
                f"novel.epsilons = {novel.epsilons} needs it-pfl.pooling = mean, got {pooling}: of a maximum over "
                f"samples one sample can move the descriptor without bound, so that no noise hides it"
            )

    @classmethod
    def warnings(cls, config: RunConfig) -> Sequence[str]:
        """Return whether no round is left that trains the encoder."""
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
        """Return the descriptors [B, d] of some clients in the second phase."""
        return torch.stack([self.descriptors[client] for client in clients]) if self.kept and clients else None

    def per_client_arrays(self, clients: Sequence[int]) -> Mapping[int, SharedArrays]:
        """Return each client's network and the embedding or descriptor that it was generated of."""
        inputs = self.inputs(clients)
        rows = self._targets(clients) if inputs is None else inputs
        networks = super().per_client_arrays(clients)
        return {
            client: {**networks[client], DESCRIPTOR: row[None].numpy()}
            for client, row in zip(clients, rows, strict=True)
        }

    def evaluated(self, arrays: ArrayRecord, client: int) -> SharedArrays:
        """Return what a client is sent after the last round; a frozen encoder does not travel.

        Raises:
            RunDirectoryError: If the client was never described in the second phase, and so gets no model.
        """
        if self.kept and client not in self.descriptors:
            raise RunDirectoryError(f"client {client} has sent no descriptor; take another client, or resume the run")
        return super().evaluated(pack_arrays({}) if self.kept else arrays, client)

    def models_of(self, descriptors: Mapping[int, NDArray[Any]]) -> Mapping[int, SharedArrays]:
        """Return what the hypernetwork makes of descriptors [1, d] of clients that were not trained."""
        clients = list(descriptors)
        rows = torch.cat([torch.tensor(descriptors[client]) for client in clients]) if clients else torch.zeros(0)
        return {
            client: {f"{self.group}/{name}": value[None].numpy() for name, value in tensors.items()}
            for client, tensors in (self.server.generate(clients, rows) if clients else {}).items()
        }

    def _targets(self, clients: Sequence[int]) -> Tensor:
        """Return what the encoder is to learn in a round of some clients: their embeddings [B, d], moved together.

        Their mean is moved to that of all embeddings. Otherwise an encoder that does not tell clients apart yet is
        mostly drawn to the mean of the round's clients, to another one in each round. With all clients in a round, or
        with one, the embeddings are as they are.
        """
        embeddings = self.server.embeddings.detach()
        mine = embeddings[list(clients)]
        return mine - mine.mean(dim=0) + embeddings.mean(dim=0) if 1 < len(clients) < len(embeddings) else mine

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message]:
        """Return the messages of a round; in the second phase, ask for descriptors that are missing before."""
        self._prepare(server_round, arrays, grid, self.sampled(server_round))
        return super().configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message]:
        """Return the messages of the evaluation after the last round, of models of descriptors if it has tuned."""
        self._prepare(server_round, arrays, grid, self.present)
        return super().configure_evaluate(server_round, arrays, config, grid)

    def _prepare(self, server_round: int, encoder: ArrayRecord, grid: Grid, clients: Sequence[int]) -> None:
        """Have the descriptors of some clients, of all that are there when the second phase begins."""
        self._asked_for = Answers()
        if self.phase(server_round) == EMBEDDINGS:
            return
        wanted: Iterable[int] = clients
        if not self.kept:
            self._begin_fine_tuning(server_round)
            wanted = self.present
        if missing := set(wanted) - set(self.descriptors):
            query = descriptors_of(missing, encoder, self.descriptor_dimension, QuerySpec())
            found = ask(grid, self.context, server_round, query)
            self.descriptors |= {client: torch.tensor(arrays[DESCRIPTOR][0]) for client, arrays in found.arrays.items()}
            gone = {client for mine in found.away.values() for client in mine}
            found.away = {node: [each for each in mine if each in clients] for node, mine in found.away.items()}
            found.failures = [each for each in found.failures if each.client in clients and each.client not in gone]
            self._asked_for = found

    def _begin_fine_tuning(self, server_round: int) -> None:
        hypernetwork = self.server.hypernetwork.named_parameters()
        self.kept = {name: value.detach().clone() for name, value in hypernetwork}
        self.server.forget_momentum()
        self.progress.last_phase_after = server_round - 1

    def _messages(self, kind: str, arrays: ArrayRecord, clients: Sequence[int]) -> Sequence[Message]:
        if not self.kept:
            return super()._messages(kind, arrays, clients)
        self._frozen = unpack_arrays(arrays)
        described = [client for client in clients if client in self.descriptors]
        return super()._messages(kind, pack_arrays({}), described)

    def _begin_outcome(self) -> None:
        super()._begin_outcome()
        self.outcome.failures += self._asked_for.failures
        for node, refused in self._asked_for.refused.items():
            self.outcome.refuse(node, refused)
        for node, mine in self._asked_for.away.items():
            self.outcome.away[node] = [client for client in mine if client not in self.descriptors]
        self.outcome.bytes_on_wire += self._asked_for.bytes_on_wire

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the encoder after a step along the mean; a frozen one has not travelled."""
        if self.kept:
            return self._frozen
        if self._adam is None or not means:
            return means
        stepped = self._adam.step(_encoder(self._current), _encoder(means))
        return {ENCODER + name: value.numpy() for name, value in stepped.items()}

    def server_state(self) -> SharedArrays:
        """Return pFedHN's state, and in the second phase the hypernetwork of before and the descriptors [N, d]."""
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
        """Go back to a state that `server_state` returned."""
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
