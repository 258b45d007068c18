"""Measure the mean bias gradient of each class on the attacker's own samples, clipped as clients clip it.

With `dp.epsilon` they clip the gradient of each sample, and a step's gradient is the sum divided by `batch-size`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from hyperfl_flwr.attacks.bias_shares import Shares, class_gradients, during_round
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.readout import AFTER, mean_gradients
from hyperfl_flwr.audit.membership.shadow_data import GameData
from hyperfl_flwr.audit.membership.shadow_views import Parameters, features_of, load_parameters, named, tensor_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.observation import Observation
from hyperfl_flwr.training.per_example import PerExampleGradients

BIAS = "model/classifier.bias"
"""Key of the classifier's bias in an upload of the whole model."""

MOST_CLIPPED = 2000
"""Largest number of the attacker's samples of which the gradients are clipped, which takes longer than predictions."""


class ClassGradients:
    """The gradients of each class by a network's parameters, as clients clip them.

    Args:
        config: Settings of the clients.
        knowledge: What everyone knows of them.
        data: The samples of the game.
    """

    def __init__(self, config: RunConfig, knowledge: PublicKnowledge, data: GameData) -> None:
        self._target = build_target(knowledge.target, knowledge.input_shape, knowledge.num_classes)
        self._samples, self._labels = data.attackers()
        self._clip_norm = config.dp.clip_norm if config.dp.epsilon else 0.0
        if self._clip_norm:
            chosen = torch.linspace(0, len(self._labels) - 1, min(MOST_CLIPPED, len(self._labels))).long()
            self._samples, self._labels = self._samples[chosen], self._labels[chosen]

    def of_rounds(self, rounds: Sequence[Observation], knowledge: PublicKnowledge) -> tuple[Shares, Shares]:
        """Return the bias's mean gradient [R, K] in each round, and that of the samples of each class [R, K, K].

        Args:
            rounds: Uploads of the whole model of one client, or their sums, for which M is that of the mean network.
            knowledge: What everyone knows of them.
        """
        gradients, expected = zip(*(self._of_round(each, knowledge) for each in rounds), strict=True)
        return np.array(gradients), np.array(expected)

    def _of_round(self, observation: Observation, knowledge: PublicKnowledge) -> tuple[Shares, Shares]:
        before = {key: tensor_of(value) for key, value in observation.received.items()}
        after = {key: AFTER[knowledge.form](value, tensor_of(observation.reply[key])) for key, value in before.items()}
        steps = knowledge.num_steps(observation.num_examples)
        expected = during_round(self._by(named(before)), self._by(named(after)), steps)
        if self._clip_norm:  # batches are smaller than the number by which their sum is divided
            size = observation.num_examples / knowledge.summed_clients
            expected = expected * min(1.0, size / knowledge.steps.batch_size)
        return mean_gradients(observation, knowledge)[BIAS].numpy(), expected

    def _by(self, parameters: Parameters) -> Shares:
        """Return M [K, K] by a network's parameters."""
        load_parameters(self._target, parameters)
        with torch.no_grad():
            features = features_of(self._target, self._samples)
            logits = self._target.classifier(features.float())
        return class_gradients(logits, self._labels, self._factors())

    def _factors(self) -> torch.Tensor | None:
        """Return the factor by which each sample's gradient is clipped; None without clipping."""
        if not self._clip_norm:
            return None
        trained = [parameter for parameter in self._target.parameters() if parameter.requires_grad]
        norms = PerExampleGradients(self._target, trained, self._samples[:1]).norms(self._samples, self._labels)
        return (self._clip_norm / norms).clamp(max=1)
