"""The local round of FedRep: train the classifier first, then the feature extractor.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, algorithm 1. The paper trains ten epochs on the classifier and one on the extractor. Both numbers are settings
here, since HyperFL's round is the same with one and five.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, TrainingData, train_epochs


@dataclass(frozen=True, kw_only=True)
class FedRepRates:
    """Step sizes of FedRep's local round.

    Attributes:
        classifier: Step size of the classifier.
        extractor: Step size of the feature extractor.
        classifier_epochs: Number of passes that train the classifier.
        clip_norm: Largest gradient norm of the extractor; 0 does not clip.
        weight_decay: L2 coefficient of the extractor; None for that of the classifier.
    """

    classifier: float
    extractor: float
    classifier_epochs: int = 1
    clip_norm: float = 0.0
    weight_decay: float | None = None


def train_fedrep(
    extractor: nn.Module,
    classifier: nn.Linear,
    data: TrainingData,
    epochs: Epochs,
    rates: FedRepRates,
    rng: np.random.Generator,
) -> float:
    """Run one local round, changing the parameters in place.

    Args:
        extractor: Maps images [B, C, H, W] to features [B, F].
        classifier: Maps features to logits [B, K].
        data: The client's training samples.
        epochs: Passes that train the extractor, and the settings of SGD for both parts.
        rates: Step sizes, and the passes that train the classifier.
        rng: Order of the samples and augmentation.

    Returns:
        Mean training loss of the last pass, in nats.
    """

    def fixed(images: Tensor) -> Tensor:
        with torch.no_grad():  # only the classifier needs a graph in the first part
            features = extractor(images)
        logits: Tensor = classifier(features)
        return logits

    def predict(images: Tensor) -> Tensor:
        logits: Tensor = classifier(extractor(images))
        return logits

    head = ParameterSet(parameters=list(classifier.parameters()), learning_rate=rates.classifier)
    body = ParameterSet(
        parameters=list(extractor.parameters()), learning_rate=rates.extractor, clip_norm=rates.clip_norm
    )
    classifier.requires_grad_(True)
    train_epochs(fixed, [head], data, replace(epochs, epochs=rates.classifier_epochs), rng)
    classifier.requires_grad_(False)
    extractor.requires_grad_(True)
    decay = epochs.weight_decay if rates.weight_decay is None else rates.weight_decay
    return train_epochs(predict, [body], data, replace(epochs, weight_decay=decay), rng)
