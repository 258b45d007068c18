"""The hypernetwork of the server: it generates the clients' networks from a table of client embeddings.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks" (pFedHN), ICML 2021, sections 3
and 4 and the public code. A client receives theta_i = h(v_i; varphi), trains it, and returns its change
delta_i = theta_i - theta_i'. Taking the client's steps for one gradient step on its loss L_i, the chain rule gives

    dL/dvarphi = (dtheta_i/dvarphi)^T delta_i        dL/dv_i = (dtheta_i/dv_i)^T delta_i        (equation 2)

up to the client's step size. These are vector-Jacobian products, for which the server needs neither data nor loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperfl_flwr.core.optimisers import SGD
from hyperfl_flwr.core.setting_types import Combine
from hyperfl_flwr.models.hypernetwork import Hypernetwork
from hyperfl_flwr.models.initialisation import ordinary_parameters

HEADS = ("head_weight", "head_bias")
"""Names of a hypernetwork's parameters that belong to one target network; all others are its body's."""

MOMENTUM = "momentum/"
"""Prefix of the momentum buffers in `ServerHypernetwork.state`."""


class DeepHypernetwork(Hypernetwork):
    """A hypernetwork with an MLP below the linear heads: Linear(d, p), then L times ReLU and Linear(p, p).

    There is no activation between the MLP and the heads.

    Args:
        generated: The network to generate parameters for; only names and shapes are used.
        embedding_dim: Length d of an embedding.
        hidden_width: Width p of every layer.
        hidden_layers: Number L of layers after the first.
    """

    def __init__(self, generated: nn.Module, *, embedding_dim: int, hidden_width: int, hidden_layers: int) -> None:
        super().__init__(generated, embedding_dim=embedding_dim, hidden_width=hidden_width)
        self.embedding_dim = embedding_dim
        with torch.device("meta"):
            layers: list[nn.Module] = [nn.Linear(embedding_dim, hidden_width)]
            for _ in range(hidden_layers):
                layers += [nn.ReLU(), nn.Linear(hidden_width, hidden_width)]
            self.body = nn.Sequential(*layers)
        del self.hidden

    def activation(self, embedding: Tensor) -> Tensor:
        """Return the heads' input z [..., p] of embeddings [..., d]."""
        hidden: Tensor = self.body(embedding)
        return hidden


@dataclass(frozen=True, kw_only=True)
class ServerRates:
    """Settings of the server's SGD, which updates hypernetwork and embeddings together.

    Attributes:
        learning_rate: Step size.
        momentum: Momentum coefficient.
        weight_decay: L2 coefficient, added to the clipped gradient.
        clip_norm: Largest norm of the joint gradient; 0 does not clip.
        combine: See `Combine`.
        embedding_learning_rate: Step size of the embeddings; None is `learning_rate`.
        embedding_weight_decay: L2 coefficient of the embeddings; None is `weight_decay`.
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    combine: Combine = "mean"
    embedding_learning_rate: float | None = None
    embedding_weight_decay: float | None = None

    def of_embeddings(self) -> dict[str, float]:
        """Return the settings that differ for the embeddings, by the names of torch's optimisers."""
        own = {"lr": self.embedding_learning_rate, "weight_decay": self.embedding_weight_decay}
        return {name: value for name, value in own.items() if value is not None}


class ServerHypernetwork:
    """Generates and updates the clients' networks: a hypernetwork, a table of embeddings, and their optimiser.

    As in the public code the embeddings are one table under one optimiser: weight decay and momentum also act on the
    rows of clients that were not sampled.

    Clients may have different target networks (in the paper, not in its public code). The body is one
    for all; each network has heads of its own. In a round in which no client of a network took part, its heads do not
    move: neither weight decay nor momentum acts on them.

    Args:
        hypernetworks: A hypernetwork for each target network, by its name, on the meta device; their bodies have equal
            shapes. They get torch's default initial values of linear layers, heads included, and the first one's body.
        targets: Names of the clients' target networks: client i has the one at position i modulo their number.
        num_clients: Number of clients N, rows of the table.
        rates: See `ServerRates`.
        generator: CPU generator of the initial values.
        embedding_std: Standard deviation of the embeddings' initial values, which are normal; 1 is torch's for an
            embedding layer.

    Attributes:
        hypernetwork: The hypernetwork of the first target network, with the body of all.
    """

    def __init__(
        self,
        hypernetworks: Mapping[str, DeepHypernetwork],
        targets: Sequence[str],
        num_clients: int,
        rates: ServerRates,
        generator: torch.Generator,
        embedding_std: float = 1.0,
    ) -> None:
        self._hypernetworks, self._targets, self.rates = dict(hypernetworks), list(targets), rates
        self.hypernetwork = hypernetwork = self._hypernetworks[self._targets[0]]
        body = {f"body.{name}": value for name, value in ordinary_parameters(hypernetwork.body, generator).items()}
        bound = 1 / hypernetwork.head_weight.shape[0] ** 0.5
        for each in self._hypernetworks.values():
            heads = {
                name: torch.empty(getattr(each, name).shape).uniform_(-bound, bound, generator=generator)
                for name in HEADS
            }
            # `assign` replaces the meta tensors; copying into them would have no effect.
            each.load_state_dict({**heads, **body}, assign=True)
            each.body = hypernetwork.body
        drawn = torch.randn(num_clients, hypernetwork.embedding_dim, generator=generator)
        self.embeddings = nn.Parameter(drawn * embedding_std)
        common = self._common_parameters()
        self._parameters = {"embeddings": self.embeddings, **common}
        embeddings: dict[str, Any] = {"params": [self.embeddings], **rates.of_embeddings()}
        self._optimiser = SGD(
            [embeddings, {"params": list(common.values())}],
            lr=rates.learning_rate,
            momentum=rates.momentum,
            weight_decay=rates.weight_decay,
        )

    def hypernetwork_of(self, target: str) -> DeepHypernetwork:
        """Return the hypernetwork of a target network, by its name."""
        return self._hypernetworks[target]

    def _common_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of body and heads by name; the heads of several networks have the network's name."""
        if len(self._hypernetworks) == 1:
            return dict(self.hypernetwork.named_parameters())
        heads = {
            f"{target}/{name}": parameter
            for target, each in self._hypernetworks.items()
            for name, parameter in each.named_parameters()
            if name in HEADS
        }
        return heads | {f"body.{name}": parameter for name, parameter in self.hypernetwork.body.named_parameters()}

    def _parts(self, clients: Sequence[int]) -> Iterator[tuple[DeepHypernetwork, list[int]]]:
        """Yield the hypernetwork of each target network that some clients have, and the clients' positions."""
        names = [self._targets[client % len(self._targets)] for client in clients]
        for target, hypernetwork in self._hypernetworks.items():
            if rows := [row for row, name in enumerate(names) if name == target]:
                yield hypernetwork, rows

    @torch.no_grad()
    def generate(self, clients: Sequence[int], inputs: Tensor | None = None) -> dict[int, dict[str, Tensor]]:
        """Generate the networks of some clients: parameters by name, by client.

        Args:
            clients: Ids of the clients [B].
            inputs: Inputs [B, d] of the hypernetwork that replace the clients' embeddings.
        """
        found = {}
        for hypernetwork, rows in self._parts(clients):
            some = [clients[row] for row in rows]
            thetas = hypernetwork(self.embeddings[some] if inputs is None else inputs[rows])
            for client, theta in zip(some, thetas, strict=True):
                found[client] = {name: value.clone() for name, value in hypernetwork.split(theta).items()}
        return {client: found[client] for client in clients}

    def update(self, changes: Mapping[int, Mapping[str, Tensor]], inputs: Tensor | None = None) -> None:
        """Take one step along the vector-Jacobian products of the clients' changes.

        Args:
            changes: For each client theta_i before training minus theta_i after it, by parameter name. The
                hypernetwork must not have changed since it generated them.
            inputs: Inputs [B, d] that replaced the clients' embeddings when the networks were generated: constants.
                The step then updates the hypernetwork alone, and the table of embeddings does not change.
        """
        clients = list(changes)
        self._optimiser.zero_grad()
        for hypernetwork, rows in self._parts(clients):
            some = [clients[row] for row in rows]
            deltas = torch.stack(
                [torch.cat([changes[client][name].flatten() for name in hypernetwork.shapes]) for client in some]
            )
            if self.rates.combine == "mean":
                deltas = deltas / len(clients)
            # `backward` with the changes as the outputs' gradient computes the products of equation 2.
            hypernetwork(self.embeddings[some] if inputs is None else inputs.detach()[rows]).backward(deltas)
        if self.rates.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), self.rates.clip_norm)
        self._optimiser.step()

    def forget_momentum(self) -> None:
        """Clear the momentum buffers."""
        self._optimiser.state.clear()

    def state(self) -> dict[str, Tensor]:
        """Return embeddings, hypernetwork and momentum buffers by name."""
        values = {name: parameter.detach() for name, parameter in self._parameters.items()}
        buffers = {
            MOMENTUM + name: self._optimiser.state[parameter]["momentum_buffer"]
            for name, parameter in self._parameters.items()
            if self._optimiser.state[parameter].get("momentum_buffer") is not None
        }
        return values | buffers

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned."""
        self._optimiser.state.clear()
        for name, parameter in self._parameters.items():
            parameter.copy_(state[name])
            if (buffer := state.get(MOMENTUM + name)) is not None:
                self._optimiser.state[parameter]["momentum_buffer"] = buffer.clone()
