"""The local round of HyperFL (Guo et al., AAAI 2025, algorithm 1, equations 4 to 6).

    theta = h(v; varphi)
    step 1: one epoch on the classifier phi, theta fixed            (rate eta_g)
    step 2: E epochs on (varphi, v), phi fixed                      (rates eta_h, eta_v)

What the paper leaves open follows its public code: the gradients of varphi and of v are clipped to norm 50 separately,
weight decay acts on v too, and every round starts with empty momentum buffers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperfl_flwr.models.hypernetwork import Hypernetwork
from hyperfl_flwr.training.sgd import Epochs, ParameterSet, Predict, TrainingData, train_epochs


@dataclass(frozen=True, kw_only=True)
class HyperFLRates:
    """Step sizes of HyperFL's local round.

    Attributes:
        classifier: eta_g.
        hypernetwork: eta_h.
        embedding: eta_v.
        clip_norm: Largest gradient norm of varphi, and of v; 0 does not clip.
    """

    classifier: float
    hypernetwork: float
    embedding: float
    clip_norm: float = 50.0


@dataclass(frozen=True, kw_only=True)
class HyperFLModel:
    """A client's model.

    Attributes:
        extractor: Structure of the feature extractor; its own parameters are not used.
        classifier: The private last layer.
        hypernetwork: Generates the extractor's parameters.
        embedding: The private embedding v [d].
        frozen: Whether v and the hypernetwork's first layer are constants, so that z is one.
    """

    extractor: nn.Module
    classifier: nn.Linear
    hypernetwork: Hypernetwork
    embedding: Tensor
    frozen: bool = False

    def predict(self, images: Tensor) -> Tensor:
        """Return the logits [B, K] of images [B, C, H, W]; theta is generated anew, with its graph."""
        features = functional_call(
            self.extractor, self.hypernetwork.split(self.hypernetwork(self.embedding)), (images,)
        )
        logits: Tensor = self.classifier(features)
        return logits

    @torch.no_grad()
    def fixed(self) -> Predict:
        """Return a classifier with theta generated once, for evaluation and for step 1; only phi gets a graph."""
        theta = self.hypernetwork.split(self.hypernetwork(self.embedding))

        def predict(images: Tensor) -> Tensor:
            with torch.no_grad():
                features = functional_call(self.extractor, theta, (images,))
            logits: Tensor = self.classifier(features)
            return logits

        return predict


def train_hyperfl(
    model: HyperFLModel, data: TrainingData, epochs: Epochs, rates: HyperFLRates, rng: np.random.Generator
) -> float:
    """Run one local round, changing the model's parameters in place.

    Args:
        model: Its parameters are leaves on the data's device.
        data: The client's training samples.
        epochs: E and the settings of SGD, which step 1 shares but for its single epoch.
        rates: Step sizes.
        rng: Order of the samples and augmentation.

    Returns:
        Mean training loss of the last epoch of step 2, in nats.
    """
    phi = list(model.classifier.parameters())
    hypernetwork = list(model.hypernetwork.parameters())
    if model.frozen:
        hypernetwork = [model.hypernetwork.head_weight, model.hypernetwork.head_bias]
    _trainable([*phi, *model.hypernetwork.parameters(), model.embedding], False)

    _trainable(phi)
    step1 = [ParameterSet(parameters=phi, learning_rate=rates.classifier)]
    train_epochs(model.fixed(), step1, data, replace(epochs, epochs=1), rng)
    _trainable(phi, False)

    step2 = [ParameterSet(parameters=hypernetwork, learning_rate=rates.hypernetwork, clip_norm=rates.clip_norm)]
    if not model.frozen:
        own = ParameterSet(parameters=[model.embedding], learning_rate=rates.embedding, clip_norm=rates.clip_norm)
        step2.append(own)
    for part in step2:
        _trainable(part.parameters)
    return train_epochs(model.predict, step2, data, epochs, rng)


def _trainable(tensors: Iterable[Tensor], flag: bool = True) -> None:
    for tensor in tensors:
        tensor.requires_grad_(flag)
