"""kNN-Per's client: FedAvg's client, whose predictions also come from its nearest training samples.

Marfoq, Neglia, Kameni, Vidal: "Personalized Federated Learning through Local Memorization", ICML 2022: the network's
probabilities and those of the k nearest own training samples, by distances of features, are mixed with the shares
lambda and 1 - lambda. Training and server are FedAvg's. The setting `knn-per.held-back` holds back samples to choose
lambda, as the paper does.
"""

from typing import ClassVar

import torch
from torch import Tensor

from clients.engine.context import ClientContext
from clients.fedavg import FedAvgClient
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.methods.knn_per import KNNPerConfig
from hyperfl_flwr.training.local_sgd import Predict
from hyperfl_flwr.training.neighbours import Neighbours, best_weight, mixed

WEIGHTS = tuple(tenth / 10 for tenth in range(11))
"""Shares of the network that a client chooses from."""

BATCH = 200
"""Number of stored samples whose features are computed at a time."""


class KNNPerClient(FedAvgClient):
    """Mixes the predictions of the received, and of the locally trained, network with those of its neighbours.

    Attributes:
        held_back: Images [h, ...] and labels [h] on which lambda is chosen; h may be 0.
    """

    has_noisy_steps: ClassVar[bool] = False
    is_network: ClassVar[bool] = False

    def __init__(self, context: ClientContext) -> None:
        super().__init__(context)
        data, share = context.data, context.config.section(KNNPerConfig).held_back
        size, number = len(data.train_labels), data.num_held_back(share)
        order = torch.from_numpy(numpy_generator(context.config.seed, "held-back", context.client).permutation(size))
        held = order[:number].sort().values.to(data.train_labels.device)
        kept = order[number:].sort().values.to(data.train_labels.device)
        self.held_back = data.train_images[held], data.train_labels[held]
        self._data = data.with_training(kept)

    def training_data(self) -> ClientData:
        """Return the training samples that are not held back."""
        return self._data

    @torch.no_grad()
    def predictor(self) -> Predict:
        """Return the current network mixed with the neighbours of its features, as logarithms of probabilities."""
        settings, model, data = self.context.config.section(KNNPerConfig), self.model, self._data
        images, labels = self.held_back
        weight = settings.weight
        if not len(data.train_labels) or (weight == 1 and not len(labels)):
            return model
        features = torch.cat([model.extractor(some) for some in torch.split(data.train_images, BATCH)])
        neighbours = Neighbours(features, data.train_labels, data.num_classes, settings.neighbours)
        if len(labels):
            features = torch.cat([model.extractor(some) for some in torch.split(images, BATCH)])
            weight = best_weight(model.classifier(features), neighbours.probabilities(features), labels, WEIGHTS)

        def predict(images: Tensor) -> Tensor:
            features = model.extractor(images)
            return mixed(model.classifier(features), neighbours.probabilities(features), weight)

        return predict
