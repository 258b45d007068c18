"""HyperFL's client: shares the hypernetwork, not embedding or classifier (Guo et al., AAAI 2025, algorithm 1)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from clients.engine.cohort_training import CohortTraining
from clients.engine.head_cohort import HEAD_WEIGHT, HeadClient, HeadCohort
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.device import send
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import resolved_number
from hyperfl_flwr.methods.hyperfl import HyperFLConfig
from hyperfl_flwr.models.hypernetwork import (
    Hypernetwork,
    HypernetworkHealth,
    common_embedding,
    health,
    initial_embedding,
)
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.pretrained.names import is_pretrained
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.finetune_private import join_hyperfl
from hyperfl_flwr.training.hyperfl import (
    HyperFLModel,
    HyperFLRates,
    head_settings,
    train_hyperfl,
)
from hyperfl_flwr.training.hyperfl_cohort import train_with_shared_heads
from hyperfl_flwr.training.local_sgd import Predict
from hyperfl_flwr.training.public_training import HypernetworkForm, LocalSteps, PublicTraining
from hyperfl_flwr.training.shared_heads import HeadsOnShared, HeadSteps, SharedHeads


class Embedding(nn.Module):
    """Holds the client's private embedding v [d].

    Args:
        embedding_dim: Length d of the embedding.
    """

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.empty(embedding_dim, device="meta"))


class LastTheta(nn.Module):
    """Holds the generated weights theta [P] after the client's last round; NaN before its first round.

    Args:
        num_weights: Number P of generated weights.
    """

    theta: Tensor

    def __init__(self, num_weights: int) -> None:
        super().__init__()
        self.register_buffer("theta", torch.empty(num_weights, device="meta"))


def hyperfl_rates(config: RunConfig) -> HyperFLRates:
    """Return the step sizes and the clipping that a run's settings define."""
    method = config.section(HyperFLConfig)
    return HyperFLRates(
        classifier=method.classifier_learning_rate,
        hypernetwork=resolved_number(config.learning_rate),
        embedding=resolved_number(method.embedding_learning_rate),
        clip_norm=method.clip_norm,
        factored=method.head_optimiser == "factored",
    )


FIRST_LAYER = ("hypernetwork/hidden.weight", "hypernetwork/hidden.bias")
"""Keys of the hypernetwork's first layer."""

HEALTH = ("hidden-squared-norm", "hidden-active-units", "theta-norm")
"""Metrics of a hypernetwork's health after training."""


class HyperFLClient(HeadClient):
    """Trains the classifier (step 1), then the hypernetwork and the embedding (step 2)."""

    shared: ClassVar[Mapping[str, Reduction]] = {"hypernetwork": Reduction.MEAN_BY_EXAMPLES}
    private: ClassVar[tuple[str, ...]] = ("embedding", "classifier", "last")
    is_generated: ClassVar[bool] = True
    can_join: ClassVar[bool] = True
    _theta: Tensor | None = None
    """The generated weights [P] of the current values; None if they have not been generated yet."""

    @classmethod
    @torch.no_grad()
    def together(cls, config: RunConfig, received: SharedArrays, device: torch.device) -> CohortTraining | None:
        """Return what trains clients that share a pre-trained body, or one received hypernetwork.

        None with plain heads, and if the received arrays have another form: then each client refuses them.
        """
        if is_pretrained(config.target):
            return super().together(config, received, device)
        method, names = config.section(HyperFLConfig), (HEAD_WEIGHT, *FIRST_LAYER)
        if method.head_optimiser != "factored" or not all(name in received for name in names):
            return None
        head, weight, bias = (received[name] for name in names)
        if (head.ndim, weight.shape, bias.shape) != (2, (len(head), method.embedding_dim), (len(head),)):
            return None
        v = common_embedding(method.embedding_dim, method.initialisation, config.seed).numpy()
        # The units of the common embedding, on all nodes the same: most clients use most of them.
        units = torch.from_numpy(np.flatnonzero(weight @ v.astype(weight.dtype) + bias > 0))
        return HeadCohort(send(torch.tensor(head), device), send(units, device), stacked=device.type != "cpu")

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return the local steps that train the hypernetwork."""
        return replace(super().local_steps(config), clip_norm=config.section(HyperFLConfig).clip_norm)

    @classmethod
    def public_training(cls, config: RunConfig) -> PublicTraining:
        """Return the local steps and the form of the hypernetwork."""
        method = config.section(HyperFLConfig)
        form = HypernetworkForm(
            embedding_dim=method.embedding_dim,
            hidden_width=method.hidden_width,
            initialisation=method.initialisation,
            embedding_frozen=method.embedding == "common-frozen",
        )
        return replace(super().public_training(config), hypernetwork=form)

    @classmethod
    def training_metrics(cls, config: RunConfig) -> tuple[str, ...]:
        """Return the loss and the hypernetwork's health; a client has no `theta-change` in its first round."""
        return (*super().training_metrics(config), *HEALTH)

    @classmethod
    def kept_groups(cls, config: RunConfig) -> tuple[str, ...]:
        """Return the private groups; `last` only with `hyperfl.keep-last`, since no training needs it."""
        keeps_last = config.section(HyperFLConfig).keeps_last(config.num_clients)
        return tuple(group for group in cls.private if keeps_last or group != "last")

    @classmethod
    def why_no_model(cls, config: RunConfig) -> str:
        """Return that the run's clients did not keep their generated weights."""
        return "hyperfl.keep-last was false, so that only a SuperNode keeps it"

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the groups `hypernetwork`, `embedding`, `classifier`, and `last`, see `kept_groups`."""
        method = self.context.config.section(HyperFLConfig)
        target = self.new_target()
        self.extractor, self.classifier = target.extractor, target.classifier
        self.embedding = Embedding(method.embedding_dim)
        self.hypernetwork = Hypernetwork(
            self.extractor, embedding_dim=method.embedding_dim, hidden_width=method.hidden_width
        )
        self.last = LastTheta(self.hypernetwork.head_bias.numel())
        return {
            "hypernetwork": self.hypernetwork,
            "embedding": self.embedding,
            "classifier": self.classifier,
            "last": self.last,
        }

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the common initial classifier, and the embedding: common, or drawn per client."""
        seed, method = self.context.config.seed, self.context.config.section(HyperFLConfig)
        if method.embedding == "per-client":
            generator = torch_generator(seed, "own-embedding", self.context.client)
            v = initial_embedding(method.embedding_dim, method.initialisation, generator)
        else:
            v = common_embedding(method.embedding_dim, method.initialisation, seed)
        classifier = ordinary_parameters(self.classifier, torch_generator(seed, "classifier"))
        last = torch.full((self.hypernetwork.head_bias.numel(),), float("nan"))
        groups = {"embedding": {"v": v}, "classifier": classifier, "last": {"theta": last}}
        return {group: groups[group] for group in self.kept_groups(self.context.config)}

    def networks(self) -> Sequence[nn.Module]:
        """Return the groups' modules and the extractor, which is not a group since its weights are generated."""
        return [*super().networks(), self.extractor]

    def train_own(self, rng: np.random.Generator) -> dict[str, float]:
        """Train all groups in place; reports `train-loss`, the hypernetwork's health afterwards, and `theta-change`.

        `theta-change` is the L2 distance between theta now and after the client's previous round; it is absent in the
        first round, and without `hyperfl.keep-last`.
        """
        model = self._model(self._generated())
        loss = train_hyperfl(model, self.context.data, self.epochs(), self.rates, rng)
        return self._trained(loss, health(self.hypernetwork, self.embedding.v))

    @property
    def trains_with_steps(self) -> bool:
        """Whether `train` and `train_own` are those of the method, which a subclass may replace."""
        return type(self).train is TRAIN and type(self).train_own is TRAIN_OWN

    @property
    def rates(self) -> HyperFLRates:
        """The step sizes and the clipping: those of the hypernetwork as `local_steps` says."""
        steps = self.steps
        return replace(hyperfl_rates(self.context.config), hypernetwork=steps.learning_rate, clip_norm=steps.clip_norm)

    def head_steps(self, shared: SharedHeads, rng: np.random.Generator) -> tuple[HeadsOnShared, HeadSteps]:
        """Return heads on the shared H_0, and the steps of `train` with them."""
        data, epochs, rates = self.context.data, self.epochs(), self.rates
        number = epochs.num_steps(len(data.train_labels))
        heads = HeadsOnShared(shared, self.hypernetwork.head_bias, **head_settings(epochs, rates), steps=number)
        return heads, train_with_shared_heads(self._model(self._generated()), heads, data, epochs, rates, rng)

    @torch.no_grad()
    def after_steps(self, heads: HeadsOnShared, loss: float) -> dict[str, float]:
        """Return the metrics of `train` after all steps of `head_steps`."""
        theta = heads.forward(self.hypernetwork.activation(self.embedding.v))
        return self._trained(loss, health(self.hypernetwork, self.embedding.v, theta))

    def _trained(self, loss: float, state: HypernetworkHealth) -> dict[str, float]:
        """Remember the new theta, and return the metrics of `train`."""
        self._theta = state.theta
        numbers = (state.squared_norm, float(state.active_units), state.weight_norm)
        metrics = {"train-loss": loss, **dict(zip(HEALTH, numbers, strict=True))}
        if "last" not in self.kept_groups(self.context.config):
            return metrics
        change = float((state.theta - self.last.theta).norm())
        self.last.theta = state.theta
        return metrics if math.isnan(change) else {**metrics, "theta-change": change}

    def join(self, rounds: int, rng: np.random.Generator) -> None:
        """Train the private embedding and classifier in place; the hypernetwork is constant."""
        join_hyperfl(self._model(), self.context.data, self.epochs(), self.rates, rounds, rng)
        self._theta = None

    def load_group(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Load one group's tensors, see `BaseClient.load_group`; theta is generated again."""
        super().load_group(group, tensors)
        self._theta = None

    def undo(self, received: SharedArrays, version: int) -> None:
        """Replace the groups by what they were before training, see `BaseClient.undo`; `last` by their theta."""
        super().undo(received, version)
        if "last" in self.kept_groups(self.context.config):
            self.last.theta = self._generated()

    def predictor(self) -> Predict:
        """Return the target network with theta generated once, not for every batch."""
        return self._model(self._generated()).fixed()

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the generated extractor theta = h(v) and the classifier."""
        return self._assembled(self._generated(), self.classifier.state_dict())

    @torch.no_grad()
    def _generated(self) -> Tensor:
        """Return theta = h(v) [P]; it is generated once after each change of the parameters."""
        if self._theta is None:
            self._theta = self.hypernetwork(self.embedding.v)
        return self._theta

    def personalized_model(self, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return theta and the classifier from the end of the client's last round; None if it has not kept theta."""
        if "last/theta" not in stored:
            return None
        classifier = {name: stored[f"classifier/{name}"] for name in self.classifier.state_dict()}
        return self._assembled(stored["last/theta"], classifier)

    def _assembled(self, theta: Tensor, classifier: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {f"extractor.{name}": value for name, value in self.hypernetwork.split(theta).items()} | {
            f"classifier.{name}": value for name, value in classifier.items()
        }

    def _model(self, theta: Tensor | None = None) -> HyperFLModel:
        return HyperFLModel(
            extractor=self.extractor,
            classifier=self.classifier,
            hypernetwork=self.hypernetwork,
            embedding=self.embedding.v,
            frozen=self.context.config.section(HyperFLConfig).embedding == "common-frozen",
            theta=theta,
        )


TRAIN, TRAIN_OWN = HyperFLClient.train, HyperFLClient.train_own
"""The training that may be taken step by step; a class with another one is trained alone."""
