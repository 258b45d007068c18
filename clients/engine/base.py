"""Base of all clients: parameter groups, private state, and the evaluation before and after training."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ConfigScalar as Scalar
from numpy.typing import NDArray
from torch import nn

from clients.engine.body_cohort import BodyCohort
from clients.engine.checked_network import CheckedNetwork
from clients.engine.cohort_training import CohortTraining
from clients.engine.context import ClientContext, keep_model
from clients.engine.local_evaluation import LocalEvaluation
from clients.engine.local_training import LocalTraining
from clients.engine.own_mistakes import check_groups, numbers_of
from clients.engine.protected_upload import ProtectedUpload, protected_upload
from clients.engine.reported_metrics import ReportedMetrics
from clients.engine.stacked_cohort import StackedCohort
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.rng import numpy_generator, torch_generator
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.flower.numpy_client import NumPyClient
from hyperfl_flwr.models.groups import groups_of
from hyperfl_flwr.models.layers.dropout import seed_dropout
from hyperfl_flwr.models.pretrained.names import is_pretrained
from hyperfl_flwr.node.private_state import INITIAL
from hyperfl_flwr.privacy.release import Release
from hyperfl_flwr.protocol.arrays import SharedArrays, formed, layout_problem
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.protocol.queries import QuerySpec


@dataclass(frozen=True, kw_only=True)
class BegunRound:
    """A client's round between `BaseClient.begin` and `BaseClient.end`.

    Attributes:
        received: The received arrays, in the order of `keys`.
        kept_version: Version of the private state that the last durable checkpoint needs.
        release: What the upload will release about the client's data; None if nothing bounds it.
        metrics: The metrics of the received parameters.
        rng: Random numbers of the training.
        seconds: Wall time of `begin`.
        at: Time at which `begin` ended, of `time.perf_counter`.
    """

    received: list[NDArray[Any]]
    kept_version: int
    release: Release | None
    metrics: dict[str, Scalar]
    rng: np.random.Generator
    seconds: float
    at: float = field(default_factory=time.perf_counter)


class BaseClient(LocalEvaluation, ReportedMetrics, LocalTraining, ProtectedUpload, CheckedNetwork, NumPyClient):
    """A client whose model is a set of parameter groups, some shared with the server, some private.

    A method's client declares its groups, builds a module for each, and trains them. By default the groups are the
    target network or its parts, and all of it is trained. This class receives, merges, stores and uploads groups.

    Attributes:
        shared: Names of the shared groups, and the reduction of each on the server.
        private: Names of the groups that never leave the node.
        copies_of_uploads: Those of them that hold what the client itself has uploaded, before clipping and noise.
        is_generated: Whether a hypernetwork generates parameters of the target network.
        can_join: Whether a client that joins later can train its private groups alone, see `join`.
        round: The federated round that is trained; before `begin` the one after that of the message.
        version: Version of the private state that this round starts from.
    """

    shared: ClassVar[Mapping[str, Reduction]] = {}
    private: ClassVar[tuple[str, ...]] = ()
    copies_of_uploads: ClassVar[tuple[str, ...]] = ()
    is_generated: ClassVar[bool] = False
    can_join: ClassVar[bool] = False

    def __init__(self, context: ClientContext) -> None:
        self.context = context
        self.round, self.version = context.round + 1, INITIAL
        self.groups = self.build_groups()
        for attribute, names in (
            ("shared", self.active_groups(context.config)),
            ("private", self.kept_groups(context.config)),
        ):
            check_groups(type(self), attribute, names, list(self.groups))

    def build_groups(self) -> dict[str, nn.Module]:
        """Return a module for each group; its values are ignored and may be on the meta device.

        The default knows the target network and its parts, see `hyperfl_flwr.models.groups.groups_of`.
        """
        self.model = self.new_target()
        parts = groups_of(self.model)
        return {group: parts[group] for group in (*self.shared, *self.private) if group in parts}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the modules in place, by default `parameter_sets` for the local epochs; return metrics to report."""
        return self.train_sets(self.model, self.parameter_sets(), rng)

    @classmethod
    def together(cls, config: RunConfig, received: SharedArrays, device: torch.device) -> CohortTraining | None:
        """Return a trainer that trains several clients of a message together; None to train one after another.

        By default clients are trained together if their networks share a pre-trained body, and on a GPU.

        Args:
            config: The run's settings.
            received: The arrays that all clients receive.
            device: Device that trains.
        """
        if config.dp.epsilon:  # noisy steps have gradients of single samples
            return None
        if is_pretrained(config.of_client(0).target):
            return BodyCohort()
        return None if device.type == "cpu" else StackedCohort()

    def join(self, rounds: int, rng: np.random.Generator) -> None:
        """Train the private groups in place for some rounds, with constant shared groups.

        All modules are in evaluation mode, so that running statistics stay; a method switches those that it trains.

        Raises:
            ValueError: If the method's clients cannot join (`can_join` is false).
        """
        raise ValueError(f"clients of {self.context.config.method} cannot join by training private groups alone")

    def reply(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the arrays to upload, in the order of the uploaded groups; by default the trained ones, protected."""
        return self.protected(received, trained)

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Scalar]]:
        """Evaluate the received parameters, train, evaluate again, and store the private groups.

        That is `begin`, `train` and `end`. A trainer of several clients calls these instead.

        Args:
            parameters: The shared groups' arrays, in the order of `keys`.
            config: `round`, `version` (of the private state to start from) and `kept-version`.

        Returns:
            The arrays of `reply`, with `privacy.unit = client` protected here, the number of training samples, and the
            client's metrics. Among them are `aggregate-accuracy` (received parameters with the client's private ones)
            and `personalized-accuracy` (after local training), both on the client's test data; with another task its
            main score.

        Raises:
            ValueError: If the arrays do not fit the client's model.
            FloatingPointError: If a private parameter is not finite after training, unless the client `must_finish`.
            StateError: If the private state cannot be read.
            RefusalError: If the owner's privacy budget does not allow the upload, or a check the received model.
        """
        begun = self.begin(parameters, config)
        arrays, num_examples, metrics = self.end(begun, self.train(begun.rng))
        return [formed(array) for array in arrays], num_examples, metrics

    def begin(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> BegunRound:
        """Load and evaluate the received parameters, and prepare for training; arguments and errors as of `fit`."""
        context = self.context
        began = time.perf_counter()
        self.round, self.version = config["round"], config["version"]
        self.refuse_novel()
        self._load(self._named(parameters), self.version)
        self.check_received()
        release = self.release()
        if context.budget is not None and self.uploaded_groups():
            # Before training: a process that is killed has spent it, too.
            context.budget.spend(self.round, release)
        _, metrics = self.scored("aggregate", self.round - 1)
        spent = time.perf_counter() - began
        self.set_mode(training=True)
        path = (context.client, self.round)
        # One stream per purpose, client and round: neither the hosting node nor a resume changes the results.
        seed_dropout(self.networks(), torch_generator(context.config.seed, "dropout", *path))
        return BegunRound(
            received=parameters,
            kept_version=config["kept-version"],
            release=release,
            metrics=metrics,
            rng=numpy_generator(context.config.seed, "training", *path),
            seconds=spent,
        )

    def end(
        self, begun: BegunRound, trained: Mapping[str, Scalar], seconds: float | None = None
    ) -> tuple[list[Any], int, dict[str, Scalar]]:
        """Evaluate after training and store the private groups; returns and raises as `fit`.

        Without clipping, some arrays may be a `BlockArray`.

        Args:
            begun: The result of `begin`.
            trained: The metrics of training.
            seconds: Wall time of training; None for the time since `begin`.
        """
        context = self.context
        began = time.perf_counter()
        seconds = began - begun.at if seconds is None else seconds
        metrics: dict[str, Scalar] = {**begun.metrics, **numbers_of(trained, type(self))}
        self.check_release(begun.release, metrics)
        metrics |= self.spent_steps(begun.release)
        if self.must_finish:
            self._undo_if_diverged(begun)
        scores, scored = self.scored("personalized", self.round)
        metrics |= scored
        if context.config.keep == "best":
            self.keep_best(scores, metrics)
        if self.round == context.config.num_rounds:
            metrics |= self.global_score("personalized", self.predictor)
        # The version before must stay: the server may not count this round's reply, or resume from a checkpoint.
        self._store(self.round, {self.version, begun.kept_version}, must_finish=self.must_finish)
        if context.keeps_model and self.is_network:
            if best := self.best:
                keep_model(context, best.tensors, best.round, best.test_score)
            else:
                keep_model(context, self.target_state(), self.round, scores.score)
        uploaded, arrays = self.uploaded_groups(), self.uploaded_arrays()
        if context.config.privacy.clip_norm:  # the norm is that of the numbers that are sent
            arrays = [formed(array) for array in arrays]
        received = [value for key, value in self._named(begun.received).items() if group_of(key) in uploaded]
        around = begun.seconds + time.perf_counter() - began
        metrics |= {"train-seconds": seconds, "seconds": around + seconds}
        reply = self.reply(received, arrays)
        upload = protected_upload(context.config.privacy, received, reply)  # whatever `reply` leaves out
        return upload, len(context.data.train_labels), metrics

    def _undo_if_diverged(self, begun: BegunRound) -> None:
        """Undo a training that has not ended in finite numbers; only the node's log says so."""
        if key := self.not_finite():
            text = f"{key} is not finite after training, so the client stays as before it; lower learning-rate"
            log(WARNING, "round %d: client %d: %s", self.round, self.context.client, text)
            self.undo(self._named(begun.received), self.version)

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate the received parameters with the private ones on the client's test data; see `fit` and `receive`."""
        self.receive(self._named(parameters), config["version"])
        scores, metrics = self.scored("aggregate", self.context.round)
        metrics |= self.global_score("aggregate", self.received_predictor)
        if self.context.config.keep == "best":
            metrics |= self.scored_best()
        return scores.mean_loss, scores.total, metrics

    def describe(self, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
        """Return a descriptor of training samples and their number, for a method with an encoder.

        Args:
            received: The encoder's arrays, by key.
            question: The samples to describe, and the noise.

        Raises:
            ValueError: If the method has no encoder.
        """
        raise ValueError(f"{self.context.config.method} has no encoder")

    def receive(self, received: SharedArrays, version: int) -> None:
        """Load the parameters for the last evaluation: the received groups, and the private ones of a version.

        Raises as `fit`.
        """
        if problem := layout_problem(*(dict.fromkeys(keys, np.zeros(0)) for keys in (self.keys(), received))):
            raise ValueError(problem)
        self._load(received, version)
