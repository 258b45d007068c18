"""FedAKD's client: trains a private model, sends its logits on public samples, and learns from the mean logits.

Gad and Fadlullah: "Federated Learning via Augmented Knowledge Distillation for Heterogenous Deep Human Activity
Recognition Systems", Sensors 2023; with noisy steps: Gad, Gad, Fadlullah, Fouda, Kato, IEEE Transactions on Vehicular
Technology 2024. In the papers a round is local training, logits, mean, digest. Here the digest opens the client's next
round, in which it gets the mean: the sequence is the same.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.engine.base import BaseClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.public_samples import mixture, public_samples
from hyperfl_flwr.methods.fedakd import FedAKDConfig
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.vector import Vector
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.knowledge_exchange import digest, logits_on, packed, unpacked
from hyperfl_flwr.training.local_sgd import Epochs, TrainingData


class FedAKDClient(BaseClient):
    """Keeps its model, and exchanges the group `knowledge`, in float64: see `hyperfl_flwr.training.knowledge_exchange`.

    Aggregate metrics are of its model after the digest of what it receives.
    """

    shared: ClassVar[Mapping[str, Reduction]] = {"knowledge": Reduction.MEAN}
    private: ClassVar[tuple[str, ...]] = ("model",)
    has_noisy_steps: ClassVar[bool] = True
    unclippable: ClassVar[str] = (
        "its clients send weighted logits and their weights as one vector, and clipping it would change their quotient"
    )

    @classmethod
    def public_data(cls, config: RunConfig) -> str:
        """Return the data set of the public samples; empty if there are none."""
        method = config.section(FedAKDConfig)
        return method.unlabelled if method.samples else ""

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the target network as the group `model`, and the exchanged vector."""
        groups, samples = super().build_groups(), self._method.samples
        self.knowledge = Vector(samples * self.context.data.num_classes + 1 if samples else 0, torch.float64)
        return {**groups, "knowledge": self.knowledge}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return FedAvg's initial model, from which all clients start."""
        return {"model": initial_model(self.model, self.context.config.seed)}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the model in place, and put its weighted logits into the group `knowledge`."""
        metrics = super().train(rng)
        if self._method.samples:
            weight = self._weight()
            logits = logits_on(self.model, self._mixture(self.round), self.steps.batch_size)
            self.knowledge.theta = packed(logits, weight)
        return metrics

    def training_data(self) -> TrainingData:
        """Return the client's samples without those that are held back for its weight."""
        data, held = self.context.data, self._held_back()
        if not len(held):
            return data
        rest = np.setdiff1d(np.arange(len(data.train_labels)), held)
        return data.with_training(torch.from_numpy(rest).to(data.train_labels.device))

    def scored_samples(self) -> list[int]:
        """Return also the number of held-back samples, of which the weight is the accuracy."""
        return [*super().scored_samples(), len(self._held_back())]

    def _load(self, received: SharedArrays, version: int) -> None:
        """Load the groups, and let the model digest the received logits."""
        super()._load(received, version)
        target = unpacked(self.knowledge.theta, self._method.samples) if self._method.samples else None
        if target is None:
            return
        passes = Epochs(epochs=self._method.digest_epochs, batch_size=self.steps.batch_size)
        digest(self.model, self._mixture(self.round - 1), target, passes, self._method.digest_learning_rate)

    @property
    def _method(self) -> FedAKDConfig:
        return self.context.config.section(FedAKDConfig)

    def _mixture(self, server_round: int) -> Tensor:
        config, shape = self.context.config, tuple(self.context.data.train_images.shape[1:])
        samples = public_samples(self._method.unlabelled, shape, config.data_root, self._method.samples, config.seed)
        return mixture(samples, config.seed, server_round).to(self.context.device)

    def _held_back(self) -> NDArray[np.int64]:
        """Return the positions of the held-back samples; none if the weight must not depend on the client's data."""
        data, share = self.context.data, self._method.held_back
        size = len(data.train_labels)
        if not (share and self._method.samples and size > 1) or self.context.config.dp.epsilon:
            return np.zeros(0, np.int64)
        rng = numpy_generator(self.context.config.seed, "held back", self.context.client)
        return rng.choice(size, max(1, data.num_held_back(share)), replace=False)

    def _weight(self) -> float:
        """Return the accuracy on the held-back samples; without any 1, or 0 if there is only one sample."""
        held, data = self._held_back(), self.context.data
        if not len(held):
            return 0.0 if self._method.held_back and not self.context.config.dp.epsilon else 1.0
        self.model.eval()
        return evaluate(self.model, data.train_images[held], data.train_labels[held]).score
