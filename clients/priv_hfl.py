"""PRIV-HFL's clients: local steps on the loss plus a dual force that pulls the clients' models together.

Najafi, Alavizadeh, Shahraki, Kayes, Rahayu: "PRIV-HFL: Privacy-Preserving and Robust Federated Learning for
Heterogeneous Clients Against Data Reconstruction Attacks", algorithms 1 and 2, corrected.

The algorithm is in docs/methods/priv-hfl.md. A client stores its model and, in the mean form, the accumulated A that
determines its multiplier. This is the A of its models, not of their changes: after one round the latter equals the
client's upload.

The client uploads the change of its model since the last version that the server has counted, which the request names.
If a reply was lost, the client starts again from the version before it. So the multipliers of all clients sum to zero,
whichever clients participate.

With distillation the server also sends a generator, and the client uploads the gradient of the generator's loss on the
client's model.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from clients.engine.base import BaseClient
from clients.engine.context import ClientContext
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.rng import numpy_generator, torch_generator
from hyperfl_flwr.methods.priv_hfl import PrivHFLConfig
from hyperfl_flwr.models.generator import Generator
from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.vector import Vector, num_parameters, pieces
from hyperfl_flwr.privacy.secret_rotation import mixing_of
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.distillation import PseudoData
from hyperfl_flwr.training.dual_averaging import MeanClient
from hyperfl_flwr.training.dual_stability import dual_rule
from hyperfl_flwr.training.local_sgd import Objective, Predict
from hyperfl_flwr.training.public_training import DualForm, GeneratorForm, LocalSteps, PublicTraining
from hyperfl_flwr.training.stacked_sgd import train_in_cohort


class PrivHFLClient(BaseClient):
    """Uploads changes of its private model; `priv-hfl.realisation` decides which of the first two groups is empty.

    The client receives the server's S in the group `changes` (mean), or its own r_i in `force` (chain), and uploads the
    change of its model in the same group. `generator` is empty without distillation.
    """

    shared: ClassVar[Mapping[str, Reduction]] = {
        "changes": Reduction.SUM,
        "force": Reduction.PER_CLIENT,
        "generator": Reduction.MEAN,
        "mean": Reduction.DOWN,
    }
    private: ClassVar[tuple[str, ...]] = ("model", "accumulated")
    keeps_upload: ClassVar[bool] = True

    @classmethod
    def hides_models(cls, config: RunConfig) -> bool:
        """Return whether the exchanged vectors are rotated by a secret of the nodes."""
        return config.section(PrivHFLConfig).mixing

    @classmethod
    def active_groups(cls, config: RunConfig) -> Mapping[str, Reduction]:
        """Return the group of the realisation, with distillation the generator, with `send-mean` the mean change."""
        method = config.section(PrivHFLConfig)
        exchanged = "changes" if method.realisation == "mean" else "force"
        names = (exchanged, *(("generator",) if method.distill else ()), *(("mean",) if method.send_mean else ()))
        return {name: cls.shared[name] for name in names}

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return K local steps, the same number for all clients."""
        method = config.section(PrivHFLConfig)
        return replace(super().local_steps(config), epochs=0, steps=method.local_steps, clip_norm=method.clip_norm)

    @classmethod
    def public_training(cls, config: RunConfig) -> PublicTraining:
        """Return the local steps, the rule of the multipliers, and with distillation the form of the generator."""
        method = config.section(PrivHFLConfig)
        generator = GeneratorForm(
            width=method.generator_width, pseudo_samples=method.pseudo_samples, class_balance=method.class_balance
        )
        return replace(
            super().public_training(config),
            dual=DualForm(rule=dual_rule(method), mixed=method.mixing),
            generator=generator if method.distill else None,
        )

    @classmethod
    def training_metrics(cls, config: RunConfig) -> tuple[str, ...]:
        """Return the losses on private data and, with distillation, on pseudo-data."""
        return (*super().training_metrics(config), *(("pseudo-loss",) if config.section(PrivHFLConfig).distill else ()))

    def __init__(self, context: ClientContext) -> None:
        self.rule = dual_rule(context.config.section(PrivHFLConfig))
        super().__init__(context)

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the target network as the group `model`, vectors with one entry per parameter, and the generator."""
        self.model = self.new_target()
        size = num_parameters(self.model)
        is_mean = self.rule.realisation == "mean"
        self.received = Vector(size)
        self.accumulated = Vector(size * is_mean, torch.float64)
        config, data, empty = self.context.config, self.context.data, Vector(0)
        self.mean = Vector(size * config.section(PrivHFLConfig).send_mean)
        if config.section(PrivHFLConfig).distill:
            shape = tuple(data.train_images.shape[1:])
            self.generator = Generator(shape, data.num_classes, config.section(PrivHFLConfig).generator_width)
        return {
            "changes": self.received if is_mean else empty,
            "force": empty if is_mean else self.received,
            "generator": self.generator if config.section(PrivHFLConfig).distill else empty,
            "mean": self.mean,
            "model": self.model,
            "accumulated": self.accumulated,
        }

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return FedAvg's initial model, from which all clients start, and A = 0."""
        return super().initial_private() | {"model": self._start(self.model)}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Run the local steps along the gradient plus the dual force.

        Reports `train-loss` on the private data; with distillation also `pseudo-loss` of the trained model.
        """
        before, received = self._theta(), self._mixed(self.received.theta, back=True)
        if self.rule.realisation == "mean":
            start = self._start_vector()
            total = self.accumulated.theta - self._start_share(start, self.version)
            dual = MeanClient(rule=self.rule, change=before - start, total=total)
            force = dual.multiplier(received, self.round - 1 - self.version).float()
            change, numbers = self._train_along(force, before, rng)
            dual.record_change(self._theta() - start)
            self.accumulated.theta = dual.total + self._start_share(start, self.round)
        else:
            change, numbers = self._train_along(received, before, rng)
        self.received.theta = self._mixed(change)
        return numbers

    def _train_along(self, force: Tensor, before: Tensor, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the change [m] to upload and the numbers to report; puts the gradient into the group `generator`."""
        if not self.context.config.section(PrivHFLConfig).distill:
            numbers = {"train-loss": self._local_steps(force, rng)}
            return self._upload(before, {}), numbers
        pseudo = self._pseudo_data()
        numbers = {"train-loss": self._local_steps(force, rng, pseudo)}
        gradients, numbers["pseudo-loss"] = pseudo.gradients(self.model)
        return self._upload(before, gradients), numbers

    def _pseudo_data(self) -> PseudoData:
        """Draw this round's pseudo-data, with more samples of the classes that the client has few of."""
        settings, data = self.context.config, self.context.data
        path = ("pseudo-data", self.context.client, self.round)
        return PseudoData.draw(
            self.generator,
            torch.bincount(data.train_labels, minlength=data.num_classes),
            number=settings.section(PrivHFLConfig).pseudo_samples,
            balance=settings.section(PrivHFLConfig).class_balance,
            rng=torch_generator(settings.seed, *path),
        )

    def _local_steps(self, force: Tensor, rng: np.random.Generator, pseudo: PseudoData | None = None) -> float:
        (everything,) = self.parameter_sets()
        everything = replace(everything, force=pieces(force, everything.parameters))
        objective = None if pseudo is None else self._with_pseudo_data(pseudo)
        return train_in_cohort(self.model, [everything], self.context.data, self.epochs(), rng, objective)

    def _with_pseudo_data(self, pseudo: PseudoData) -> Objective:
        settings = self.context.config
        draws = numpy_generator(settings.seed, "pseudo-batches", self.context.client, self.round)

        def objective(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            loss = functional.cross_entropy(self.model(images), labels)
            return loss, pseudo.loss(self.model, settings.batch_size, draws)

        return objective

    def _mixed(self, vector: Tensor, *, back: bool = False) -> Tensor:
        """Rotate a vector [m] for a message by the run's secret, or rotate it `back`."""
        if not self.context.config.section(PrivHFLConfig).mixing:
            return vector
        mixing = mixing_of(self.context.mixing_key, len(vector))
        return mixing.unmix(vector) if back else mixing.mix(vector)

    def _upload(self, before: Tensor, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the protected change [m] to upload, and move the model to where the server will assume it.

        Change and gradient are clipped together: the norm is that of the whole upload.
        """
        sent = [self._theta() - before, *gradients.values()]
        if self.context.config.privacy.clip_norm:
            arrays = [part.cpu().numpy() for part in sent]
            protected = self.protected([np.zeros_like(array) for array in arrays], arrays)
            sent = [torch.from_numpy(array).to(before.device) for array in protected]
            # The server counts what was sent, so the client must continue from there.
            vector_to_parameters(before + sent[0], self.model.parameters())
        self.groups["generator"].load_state_dict(dict(zip(gradients, sent[1:], strict=True)), assign=True)
        return sent[0]

    def reply(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the change and the gradient, which `_upload` has protected already."""
        return trained

    def receive(self, received: SharedArrays, version: int) -> None:
        """Load the model for the last evaluation: the mean model from its received change, or the private one (chain).

        Within a round, `aggregate` metrics are of the client's private model in both forms, without `send-mean`: no
        other one is received.
        """
        super().receive(received, version)
        if self.rule.realisation == "mean":
            self._load_change(self.model, self.received.theta)

    def received_predictor(self) -> Predict:
        """Return the mean model if its change is received in every round, else the client's."""
        if not self.context.config.section(PrivHFLConfig).send_mean:
            return super().received_predictor()
        found = copy.deepcopy(self.model)
        self._load_change(found, self.mean.theta)
        return found

    def _load_change(self, model: nn.Module, change: Tensor) -> None:
        """Set a network's parameters to the common start plus a received change [m]."""
        vector_to_parameters(self._start_vector() + self._mixed(change, back=True), model.parameters())

    def _theta(self) -> Tensor:
        """Return all parameters [m] as one new vector."""
        return parameters_to_vector(self.model.parameters()).detach()

    def _start_vector(self) -> Tensor:
        start = self._start(self.model)
        parts = [start[name].flatten() for name, _ in self.model.named_parameters()]
        return torch.cat(parts).to(self.context.device)

    def _start(self, target: nn.Module) -> Mapping[str, Tensor]:
        return initial_model(target, self.context.config.seed)

    def _start_share(self, start: Tensor, rounds: int) -> Tensor:
        """Return the difference between A of models and A of changes after some rounds: the share of the start."""
        return self.rule.accumulated(torch.zeros_like(start), start, rounds)
