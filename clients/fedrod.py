"""FedRoD's client: shares a model trained on a class-balanced loss and adds a private classifier to its own.

Chen, Chao: "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022, the form with
a linear personalized head. The generic logits g of the shared model are trained by balanced softmax, CE(g + log n, y)
with the numbers n of samples of each class in a pass of the client; the private classifier's logits p by CE(g + p, y),
where features and g are constants. The server is FedAvg's.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from clients.ppsgd import PPSGDClient
from hyperfl_flwr.data.client_data import ClientData
from hyperfl_flwr.training.local_sgd import Objective, ParameterSet, Predict


def balanced_softmax(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return the cross-entropy of logits + log counts, in nats; a class with the count 0 has the probability 0.

    Ren, Yu, Sheng, Ma, Zhao, Yi, Li: "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020, eq. 3.

    Args:
        logits: Logits [B, K].
        labels: Labels [B], int64, of classes with positive counts.
        counts: Numbers [K] of training samples of each class, or anything in proportion to them.
    """
    return functional.cross_entropy(logits + counts.log(), labels)


def samples_in_a_pass(data: ClientData) -> Tensor:
    """Return how many samples of each class [K] a pass of local training has, on average if samples have weights."""
    if data.train_weights is None:
        return torch.bincount(data.train_labels, minlength=data.num_classes)
    labels = data.train_labels.cpu().numpy()  # on a GPU, sums of weights would not be repeatable
    shares = np.bincount(labels, data.train_weights / data.train_weights.sum(), minlength=data.num_classes)
    return torch.tensor(len(labels) * shares, dtype=torch.get_default_dtype(), device=data.train_labels.device)


class FedRoDClient(PPSGDClient):
    """Trains the shared model and the private classifier `offset` in the same steps, on separate losses."""

    has_noisy_steps: ClassVar[bool] = False

    def objective(self) -> Objective:
        """Return the balanced loss of the shared model, and the cross-entropy of both classifiers' sum."""
        model, offset = self.model, self.network.offset
        # All samples are counted: a batch's label never has the count 0.
        counts = samples_in_a_pass(self.context.data)

        def objective(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            features = model.extractor(images)
            generic = model.classifier(features)
            personalized = generic.detach() + offset(features.detach())
            return balanced_softmax(generic, labels, counts), functional.cross_entropy(personalized, labels)

        return objective

    def received_predictor(self) -> Predict:
        """Return the shared model alone."""
        return self.model

    def received_state(self) -> Mapping[str, Tensor]:
        """Return the shared model alone."""
        return self.model.state_dict()

    def offset_set(self) -> ParameterSet:
        """Return the private classifier's parameters, at the rate of the shared model."""
        parameters = list(self.network.offset.parameters())
        return ParameterSet(parameters=parameters, learning_rate=self.steps.learning_rate)
