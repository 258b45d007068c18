"""Train the private groups of a client that joins a finished federation; shared groups are constants.

For HyperFL (Guo et al., AAAI 2025) this is the local round of algorithm 1 with a constant varphi; the paper does not
discuss new clients. For methods that share a feature extractor it trains the classifier alone.
"""

from dataclasses import replace

import numpy as np
from torch import nn

from hyperfl_flwr.training.hyperfl import HyperFLModel, HyperFLRates
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, Predict, TrainingData, train_epochs


def join_hyperfl(
    model: HyperFLModel, data: TrainingData, epochs: Epochs, rates: HyperFLRates, rounds: int, rng: np.random.Generator
) -> None:
    """Train classifier and embedding in place: in each round one epoch on phi, then E epochs on v.

    Args:
        model: The client's model; its hypernetwork does not change, nor does v if `model.frozen`.
        data: The client's training samples.
        epochs: Number of epochs E, and the settings of SGD.
        rates: Step sizes; the hypernetwork's is not used.
        rounds: Number of rounds.
        rng: Order of the samples and augmentation.
    """
    phi = ParameterSet(parameters=list(model.classifier.parameters()), learning_rate=rates.classifier)
    v = ParameterSet(parameters=[model.embedding], learning_rate=rates.embedding, clip_norm=rates.clip_norm)
    model.hypernetwork.requires_grad_(False)
    for _ in range(rounds):
        model.embedding.requires_grad_(False)
        model.classifier.requires_grad_(True)
        train_epochs(model.fixed(), [phi], data, replace(epochs, epochs=1), rng)
        if not model.frozen:
            model.embedding.requires_grad_(True)
            model.classifier.requires_grad_(False)
            train_epochs(model.predict, [v], data, epochs, rng)


def join_classifier(
    predict: Predict, classifier: nn.Linear, rate: float, data: TrainingData, epochs: Epochs, rng: np.random.Generator
) -> None:
    """Train a classifier in place.

    Args:
        predict: The network; all but the classifier must be constants.
        classifier: The network's last layer.
        rate: Step size.
        data: The client's training samples.
        epochs: Number of passes, and the settings of SGD.
        rng: Order of the samples and augmentation.
    """
    train_epochs(
        predict, [ParameterSet(parameters=list(classifier.parameters()), learning_rate=rate)], data, epochs, rng
    )
