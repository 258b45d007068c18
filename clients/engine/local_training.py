"""Local training as a run's public settings define it, for clients and for attacks that simulate them."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from clients.engine.context import ClientContext
from clients.engine.protected_upload import client_release
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import resolved_number
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.privacy.release import Release
from hyperfl_flwr.privacy.spent import noisy_steps
from hyperfl_flwr.training.local_sgd import Epochs, Objective, ParameterSet, TrainingData
from hyperfl_flwr.training.private_sgd import (
    Companion,
    NoisyEpochs,
    StepNoise,
    sample_rate,
    train_private_epochs,
)
from hyperfl_flwr.training.public_training import LocalSteps, PublicTraining
from hyperfl_flwr.training.stacked_sgd import train_in_cohort

STEPS = "private-steps"
"""Metric: number of noisy steps that a client took in a round; what it reports is that of all its rounds so far.

It is public, and no part of secure sums."""


class LocalTraining:
    """Local steps of a method's clients; by default passes of plain SGD over the client's data.

    Attributes:
        context: The client's context.
        model: The target network; a client without it overrides the methods that use it.
        heads: Names of the private groups that `dp.heads` is about: classifiers that it may leave without noise.
        has_noisy_steps: Whether the method's local training can take noisy steps, see `step_noise`.
    """

    context: ClientContext
    model: Target
    heads: ClassVar[tuple[str, ...]] = ()
    has_noisy_steps: ClassVar[bool] = False

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return the local steps that train the shared parameters.

        Args:
            config: The run's settings, with the method's `auto` values replaced.
        """
        return LocalSteps(
            epochs=config.local_epochs,
            batch_size=config.batch_size,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            learning_rate=resolved_number(config.learning_rate),
        )

    @classmethod
    def public_training(cls, config: RunConfig) -> PublicTraining:
        """Return all public knowledge of local training, with which `hyperfl audit` attacks."""
        return PublicTraining(steps=cls.local_steps(config))

    @classmethod
    def public_data(cls, config: RunConfig) -> str:
        """Return the data set on which clients send what their models compute; empty, by default, for none."""
        return ""

    @property
    def steps(self) -> LocalSteps:
        """The local steps that train the shared parameters."""
        return self.local_steps(self.context.config)

    def epochs(self) -> Epochs:
        """Return the number of local epochs and the SGD settings of the run."""
        return self.steps

    def parameter_sets(self) -> list[ParameterSet]:
        """Return the parameters to train and their rates; by default the target network, by `steps`."""
        steps, parameters = self.steps, list(self.model.parameters())
        return [
            ParameterSet(
                parameters=parameters,
                learning_rate=steps.learning_rate,
                clip_norm=steps.clip_norm,
                pull=steps.pull,
                anchor=self.as_received() if steps.pull > 0 else (),
            )
        ]

    def as_received(self) -> list[Tensor]:
        """Return copies of the target network's parameters, which before local training are those received."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def objective(self) -> Objective | None:
        """Return what local training minimises; None, by default, for the cross-entropy of the network's logits."""
        return None

    def training_data(self) -> TrainingData:
        """Return the samples that the local steps train on; by default all training samples of the client."""
        return self.context.data

    def step_noise(self) -> StepNoise | None:
        """Return clipping and noise of the local steps that `dp.*` protects; None for plain steps.

        The noise is that of the whole run: `num-rounds` rounds in which this client takes part.
        """
        config, size = self.context.config, len(self.training_data().train_labels)
        if not config.dp.epsilon:
            return None
        from hyperfl_flwr.privacy.accounting import record_noise  # deferred: takes a tenth of a second

        steps = config.num_rounds * self.steps.num_steps(size)
        rate = sample_rate(size, self.steps.batch_size)
        noise = record_noise(config.dp.epsilon, config.dp.delta, rate, steps)
        return StepNoise(clip_norm=config.dp.clip_norm, noise_multiplier=noise)

    def train_sets(
        self,
        network: nn.Module,
        sets: Sequence[ParameterSet],
        rng: np.random.Generator,
        companions: Sequence[Companion] = (),
    ) -> dict[str, float]:
        """Train parameters of a network in place for the local epochs, by plain or noisy steps.

        Args:
            network: Maps samples to logits.
            sets: The parameters.
            rng: Order of the samples and augmentation of plain steps.
            companions: Parameters that noisy steps train, too; plain steps train them as further sets.

        Returns:
            The metrics `train-loss` and, of noisy steps, their number `private-steps`.
        """
        data, epochs, noise = self.training_data(), self.epochs(), self.step_noise()
        if noise is None:
            every = [*sets, *(companion.part for companion in companions)]
            return {"train-loss": train_in_cohort(network, every, data, epochs, rng, self.objective())}
        return noisy_metrics(train_private_epochs(network, sets, data, epochs, noise, companions))

    def check_release(self, release: Release | None, metrics: Mapping[str, object]) -> None:
        """Check that the local training took the noisy steps that a release states.

        Raises:
            RuntimeError: If it took another number, for example because a subclass replaces `train`.
        """
        if release is not None and release.mechanism == "sampled-gaussian":
            taken = metrics.get(STEPS, 0)
            if taken != release.steps:
                raise RuntimeError(
                    f"local training took {taken} noisy steps instead of {release.steps}; train with `train_sets`, or "
                    f"set has_noisy_steps to False in {type(self).__name__}"
                )

    def spent_steps(self, release: Release | None) -> dict[str, float]:
        """Return the metric `private-steps` of all rounds so far, with which the server states the run's epsilon.

        A round that is repeated, or a message that is delivered twice, takes other noise and counts twice.

        Args:
            release: The release of this round.
        """
        budget = self.context.budget
        if budget is None or release is None or release.mechanism != "sampled-gaussian":
            return {}
        return {STEPS: float(noisy_steps(budget))}

    def release(self) -> Release | None:
        """Return what the upload of one round releases about the client's data; None if nothing bounds it.

        With `dp.*`, nothing bounds the upload of a method without noisy steps: it trains some parameters without noise.
        """
        noise = self.step_noise()
        if noise is not None:
            if not self.has_noisy_steps:
                return None
            # A private group that is trained without noise moves the gradients of all samples.
            if self.heads and self.context.config.dp.heads == "published":
                return None
            size = len(self.training_data().train_labels)
            return Release(
                unit="record",
                mechanism="sampled-gaussian",
                noise_multiplier=noise.noise_multiplier,
                sample_rate=sample_rate(size, self.steps.batch_size),
                steps=self.steps.num_steps(size),
            )
        return client_release(self.context.config)


def noisy_metrics(epochs: NoisyEpochs) -> dict[str, float]:
    """Return the metrics of noisy steps."""
    return {"train-loss": epochs.loss, STEPS: float(epochs.steps)}
