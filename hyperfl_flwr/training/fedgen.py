"""FedGen: training of the generator on the server, and the clients' terms on what it generates.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, equations 4 and 5.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperfl_flwr.core.device import send
from hyperfl_flwr.core.optimisers import Adam
from hyperfl_flwr.models.feature_generator import NOISE_DIM, FeatureGenerator
from hyperfl_flwr.training.ensemble import Ensemble, distillation_loss


def class_weights(counts: Tensor) -> Tensor:
    """Return each model's weight for each class, n_ky / sum_k n_ky; 0 for a class that no client has.

    Args:
        counts: Numbers of samples n_ky [S, K] of the S clients.
    """
    return counts / counts.sum(dim=0).clamp(min=1.0)


def diversity_loss(noise: Tensor, outputs: Tensor) -> Tensor:
    """Return exp(-mean_ij |e_i - e_j|^2 |g_i - g_j|_1), which falls as the outputs of different noise differ more.

    Distances are means over components, as in the authors' code.

    Args:
        noise: The noise e [B, Z].
        outputs: What was generated from it, g [B, *shape].
    """
    flat = outputs.flatten(1)
    of_noise = (noise[:, None] - noise[None]).square().mean(dim=2)
    of_outputs = torch.cdist(flat, flat, p=1) / flat.shape[1]
    return torch.exp(-(of_noise * of_outputs).mean())


@dataclass(frozen=True, kw_only=True)
class GeneratorSteps:
    """Settings of the generator's training in a round.

    Attributes:
        steps: Number of steps.
        batch_size: Generated samples per step, at least 2.
        diversity: Weight of `diversity_loss`.
    """

    steps: int
    batch_size: int
    diversity: float


def generator_loss(
    generator: FeatureGenerator, heads: Ensemble, weights: Tensor, noise: Tensor, labels: Tensor, diversity: float
) -> Tensor:
    """Return sum_k mean_b w_ky CE(h_k(G(e, y)), y), plus the weighted diversity loss.

    Args:
        generator: The generator G.
        heads: The clients' classifiers h_k.
        weights: Weights w [S, K], see `class_weights`.
        noise: Noise e [B, 32].
        labels: Labels y [B].
        diversity: Weight of the diversity loss.
    """
    features = generator(noise, labels)
    loss = diversity * diversity_loss(noise, features)
    for row, logits in zip(weights, heads.each(features), strict=True):
        loss = loss + (row[labels] * functional.cross_entropy(logits, labels, reduction="none")).mean()
    return loss


def train_generator(
    generator: FeatureGenerator,
    optimiser: Adam,
    heads: Ensemble,
    counts: Tensor,
    settings: GeneratorSteps,
    rng: torch.Generator,
) -> None:
    """Train the generator in place; labels are uniform over the classes that a client has.

    Args:
        generator: The generator.
        optimiser: Its optimiser.
        heads: The clients' classifiers.
        counts: Their numbers of samples by class [S, K].
        settings: Number and size of the steps.
        rng: Labels and noise.
    """
    generator.train()
    weights, present = class_weights(counts), torch.nonzero(counts.sum(dim=0)).flatten()
    for _ in range(settings.steps):
        labels = present[torch.randint(len(present), (settings.batch_size,), generator=rng)]
        noise = torch.randn(settings.batch_size, NOISE_DIM, generator=rng)
        optimiser.zero_grad()
        generator_loss(generator, heads, weights, noise, labels, settings.diversity).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


@dataclass(frozen=True, kw_only=True)
class GeneratedTerms:
    """The terms that a client adds to its loss.

    Attributes:
        generator: The received generator, in evaluation mode; it is not trained.
        classifier: The classifier that the client trains.
        generated: Weight of the cross-entropy on generated features, the ratio of the batch sizes included.
        latent: Weight of the divergence of the model's predictions from those on generated features of the same label.
        batch_size: Number of generated features per step.
        rng: Labels and noise, a CPU generator.
    """

    generator: FeatureGenerator
    classifier: nn.Module
    generated: float
    latent: float
    batch_size: int
    rng: torch.Generator

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the terms for a batch with its logits [B, K] and labels [B]."""
        total = torch.zeros((), device=logits.device)
        if self.generated:
            drawn = send(torch.randint(logits.shape[1], (self.batch_size,), generator=self.rng), labels.device)
            generated = functional.cross_entropy(self.classifier(self._features(drawn)), drawn)
            total = total + self.generated * generated
        if self.latent:
            goal = self.classifier(self._features(labels)).detach()
            total = total + self.latent * distillation_loss(logits, goal)
        return total

    @torch.no_grad()
    def _features(self, labels: Tensor) -> Tensor:
        noise = send(torch.randn(len(labels), NOISE_DIM, generator=self.rng), labels.device)
        features: Tensor = self.generator(noise, labels)
        return features


def decayed(value: float, decay: float, server_round: int) -> float:
    """Return a weight or a rate in a round, which begins as it is and is multiplied by `decay` after each round."""
    return value * math.pow(decay, server_round - 1)
