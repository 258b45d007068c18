"""The local round of FedRep: train the classifier first, then the feature extractor; also with noisy steps.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, algorithm 1. The paper trains ten epochs on the classifier and one on the extractor. Both numbers are settings
here, since HyperFL's round is the same with one and five.
"""

from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from hyperfl_flwr.models.target import Target
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, TrainingData
from hyperfl_flwr.training.private_sgd import NoisyEpochs, StepNoise, train_private_epochs
from hyperfl_flwr.training.stacked_sgd import train_in_cohort


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
    model = Target(extractor, classifier)
    _train_head(model, data, epochs, rates, rng)
    return train_in_cohort(model, [_body(extractor, rates)], data, epochs, rng)


def train_centaur(
    model: Target,
    data: TrainingData,
    epochs: Epochs,
    rates: FedRepRates,
    noise: StepNoise,
    rng: np.random.Generator,
    *,
    noised_head: bool,
) -> NoisyEpochs:
    """Run one local round with differential privacy for single samples, changing the parameters in place.

    Shen, Ye, Kang, Hassani, Shokri: "Share Your Representation Only: Guaranteed Improvement of the Privacy-Utility
    Tradeoff in Federated Learning", ICLR 2023 (CENTAUR): the classifier's passes are FedRep's, without noise; the
    extractor's steps are noisy. A sample then moves the classifier, and with it the gradients of all other samples, of
    which only their own length is bounded. With `noised_head`, both parts are trained in the same noisy steps instead.

    Args:
        model: The network.
        data: The client's training samples.
        epochs: Passes of noisy steps, and the settings of SGD for both parts.
        rates: Step sizes, and the passes that train the classifier; `clip_norm` is not used.
        noise: Clipping and noise of a step.
        rng: Order of the samples and augmentation, where there is no noise.
        noised_head: Whether the classifier is trained by the noisy steps.
    """
    extractor, classifier = model.extractor, model.classifier
    if not noised_head:
        _train_head(model, data, epochs, rates, rng)
        return train_private_epochs(model, [_body(extractor, rates)], data, epochs, noise)
    model.requires_grad_(True)
    return train_private_epochs(model, [_body(extractor, rates), _head(classifier, rates)], data, epochs, noise)


def _train_head(
    model: Target, data: TrainingData, epochs: Epochs, rates: FedRepRates, rng: np.random.Generator
) -> None:
    """Train the classifier with a constant extractor, and leave both ready for training the extractor alone."""
    model.extractor.requires_grad_(False)
    model.classifier.requires_grad_(True)
    passes = replace(epochs, epochs=rates.classifier_epochs)
    train_in_cohort(model, [_head(model.classifier, rates)], data, passes, rng)
    model.extractor.requires_grad_(True)
    model.classifier.requires_grad_(False)


def _head(classifier: nn.Linear, rates: FedRepRates) -> ParameterSet:
    return ParameterSet(parameters=list(classifier.parameters()), learning_rate=rates.classifier)


def _body(extractor: nn.Module, rates: FedRepRates) -> ParameterSet:
    return ParameterSet(
        parameters=list(extractor.parameters()),
        learning_rate=rates.extractor,
        clip_norm=rates.clip_norm,
        weight_decay=rates.weight_decay,
    )
