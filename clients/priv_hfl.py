"""PRIV-HFL's clients: local steps on their own loss plus a dual force that draws their models together.

Najafi, Alavizadeh, Shahraki, Kayes, Rahayu: "PRIV-HFL: Privacy-Preserving and Robust Federated Learning for
Heterogeneous Clients Against Data Reconstruction Attacks", algorithms 1 and 2 without the generator, corrected.

docs/priv_hfl.md has the algorithm. A client keeps its model and, in the mean form, the accumulated A from which its
multiplier follows (of its models, not of their changes, the first of which is what it has sent). It sends the change of
its model since the version that the server has counted last. That is the version a request names: where a reply was
lost, the client starts again from the one before, and the multipliers of all clients sum to zero whoever takes part.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.common import Scalar
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from clients.base import BaseClient, ClientSetting
from hyperfl_flwr.messages import Reduction
from hyperfl_flwr.models.targets import ordinary_parameters
from hyperfl_flwr.privacy.mixing import mixing_of
from hyperfl_flwr.rng import torch_generator
from hyperfl_flwr.state import INITIAL
from hyperfl_flwr.training.dual import MeanClient
from hyperfl_flwr.training.dual_stability import dual_rule
from hyperfl_flwr.training.sgd import Epochs, ParameterSet, Predict, train_epochs


class Vector(nn.Module):
    """Holds one vector [m] under the name `theta`, or nothing.

    Attributes:
        theta: The vector.

    Args:
        size: Its length m; 0 for nothing.
        dtype: Its type.
    """

    theta: Tensor

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if size:
            self.register_buffer("theta", torch.empty(size, dtype=dtype, device="meta"))


class PrivHFLClient(BaseClient):
    """Shares changes of its model; which of the two shared groups is empty is the realisation's choice.

    The group `changes` brings the server's S down (mean), `force` the client's own r_i (chain); the change of the
    client's model goes up in their place.
    """

    shared: ClassVar[Mapping[str, Reduction]] = {"changes": Reduction.SUM, "force": Reduction.PER_CLIENT}
    private: ClassVar[tuple[str, ...]] = ("model", "accumulated")

    def __init__(self, setting: ClientSetting) -> None:
        self.rule = dual_rule(setting.config)
        self._round, self._version = 1, INITIAL
        super().__init__(setting)

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the target network as the group `model`, and vectors of the length of all its parameters."""
        self.model = self.new_target()
        size = sum(parameter.numel() for parameter in self.model.parameters())
        is_mean = self.rule.realisation == "mean"
        self.received = Vector(size)
        self.accumulated = Vector(size * is_mean, torch.float64)
        nothing = Vector(0)
        return {
            "changes": self.received if is_mean else nothing,
            "force": nothing if is_mean else self.received,
            "model": self.model,
            "accumulated": self.accumulated,
        }

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the model that all clients start from, which is FedAvg's, and A = 0."""
        buffers = self.accumulated.state_dict()
        accumulated = {name: torch.zeros(buffer.shape, dtype=buffer.dtype) for name, buffer in buffers.items()}
        return {"model": self._start(), "accumulated": accumulated}

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Scalar]]:
        """Train as every client does, from the version that the server has counted, however many rounds ago."""
        self._round, self._version = config["round"], config["version"]
        return super().fit(parameters, config)

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Run the local steps along the gradient plus the dual force; reports `train-loss`."""
        before, received = self._theta(), self._mixed(self.received.theta, back=True)
        if self.rule.realisation == "mean":
            start = self._start_vector()
            total = self.accumulated.theta - self._of_start(start, self._version)
            dual = MeanClient(rule=self.rule, change=before - start, total=total)
            force = dual.multiplier(received, self._round - 1 - self._version).float()
            loss, change = self._local_steps(force, rng), self._upload(before)
            dual.move(self._theta() - start)
            self.accumulated.theta = dual.total + self._of_start(start, self._round)
        else:
            force = received
            loss, change = self._local_steps(force, rng), self._upload(before)
        self.received.theta = self._mixed(change)
        return {"train-loss": loss}

    def _local_steps(self, force: Tensor, rng: np.random.Generator) -> float:
        parameters, pieces, begin = list(self.model.parameters()), [], 0
        for parameter in parameters:
            pieces.append(force[begin : begin + parameter.numel()].view_as(parameter))
            begin += parameter.numel()
        everything = ParameterSet(parameters=parameters, learning_rate=self.setting.learning_rate, force=pieces)
        return train_epochs(self.model, [everything], self.setting.data, self.epochs(), rng)

    def _mixed(self, vector: Tensor, *, back: bool = False) -> Tensor:
        """Return a vector [m] as it travels, or turned back."""
        if not self.setting.config.priv_hfl.mixing:
            return vector
        mixing = mixing_of(self.setting.mixing_key, len(vector))
        return mixing.unmix(vector) if back else mixing.mix(vector)

    def _upload(self, before: Tensor) -> Tensor:
        """Return the change [m] that is sent, and go to where the server will think that the model is."""
        sent = self._theta() - before
        if self.setting.config.privacy.clip_norm:
            nothing = np.zeros(sent.shape, np.float32)
            (protected,) = self.protected([nothing], [sent.cpu().numpy()])
            sent = torch.from_numpy(protected).to(sent.device)
            vector_to_parameters(before + sent, self.model.parameters())
        return sent

    def reply(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the change, which is protected already."""
        return trained

    def epochs(self) -> Epochs:
        """Return K local steps, the same number for all clients."""
        settings = self.setting.config
        return Epochs(
            epochs=0,
            batch_size=settings.batch_size,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            steps=settings.priv_hfl.local_steps,
        )

    def predictor(self) -> Predict:
        """Return the client's model: `aggregate` is its own too, before training, since no other one is received."""
        return self.model

    def _theta(self) -> Tensor:
        """Return all parameters [m] as one new vector."""
        return parameters_to_vector(self.model.parameters()).detach()

    def _start(self) -> Mapping[str, Tensor]:
        return ordinary_parameters(self.new_target(), torch_generator(self.setting.config.seed, "model"))

    def _start_vector(self) -> Tensor:
        return torch.cat([value.flatten() for value in self._start().values()]).to(self.setting.device)

    def _of_start(self, start: Tensor, rounds: int) -> Tensor:
        """Return what A of models is more than A of changes, after some rounds."""
        return self.rule.accumulated(torch.zeros_like(start), start, rounds)
