"""Base of all clients: parameter groups, private state, and the evaluation before and after training."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ConfigScalar as Scalar
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.engine.client_model import ClientModel
from clients.engine.context import ClientContext, keep_model
from clients.engine.local_training import LocalTraining
from clients.engine.protected_upload import ProtectedUpload, protected_upload
from clients.engine.reported_metrics import ReportedMetrics, accuracy_metrics
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.device import send
from hyperfl_flwr.core.rng import numpy_generator, torch_generator
from hyperfl_flwr.flower.numpy_client import NumPyClient
from hyperfl_flwr.metrics.classification import ClassificationSums, evaluate
from hyperfl_flwr.models.groups import groups_of
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.models.layers.dropout import seed_dropout
from hyperfl_flwr.node.private_state import INITIAL
from hyperfl_flwr.protocol.arrays import SharedArrays, layout_problem, not_finite
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.protocol.queries import QuerySpec
from hyperfl_flwr.training.local_sgd import Predict

CHUNK = 2000
"""Number of images of the global test set that are moved to the device at a time."""


class BaseClient(ClientModel, ReportedMetrics, LocalTraining, ProtectedUpload, NumPyClient):
    """A client whose model is a set of parameter groups, some shared with the server, some private.

    A method's client declares its groups, builds a module for each, and trains them. By default the groups are the
    target network or its parts, and all of it is trained. This class receives, merges, stores and uploads groups.

    Attributes:
        shared: Names of the shared groups, and the reduction of each on the server.
        private: Names of the groups that never leave the node.
        copies_of_uploads: Those of them that hold what the client itself has uploaded, before clipping and noise.
        is_generated: Whether a hypernetwork generates parameters of the target network.
        can_join: Whether a client that joins later can train its private groups alone, see `join`.
    """

    shared: ClassVar[Mapping[str, Reduction]] = {}
    private: ClassVar[tuple[str, ...]] = ()
    copies_of_uploads: ClassVar[tuple[str, ...]] = ()
    is_generated: ClassVar[bool] = False
    can_join: ClassVar[bool] = False

    def __init__(self, context: ClientContext) -> None:
        self.context = context
        self.groups = self.build_groups()

    def build_groups(self) -> dict[str, nn.Module]:
        """Return a module for each group; its values are ignored and may be on the meta device.

        The default knows the target network and its parts, see `hyperfl_flwr.models.groups.groups_of`.
        """
        self.model = self.new_target()
        parts = groups_of(self.model)
        return {group: parts[group] for group in (*self.shared, *self.private) if group in parts}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the private groups' initial values, by group and name; by default equal for all clients."""
        seed = self.context.config.seed
        return {group: initial_state(self.groups[group], torch_generator(seed, group)) for group in self.private}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the modules in place, by default `parameter_sets` for the local epochs; return metrics to report."""
        return self.train_sets(self.model, self.parameter_sets(), rng)

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

        Args:
            parameters: The shared groups' arrays, in the order of `keys`.
            config: `round`, `version` (of the private state to start from) and `kept-version`.

        Returns:
            The arrays of `reply`, with `privacy.unit = client` protected here, the number of training samples, and the
            client's metrics. Among them are `aggregate-accuracy` (received parameters with the client's private ones)
            and `personalized-accuracy` (after local training), both on the client's test data.

        Raises:
            ValueError: If the arrays do not fit the client's model.
            FloatingPointError: If a private parameter is not finite after training.
            StateError: If the private state cannot be read.
            RefusalError: If the owner's privacy budget does not allow the upload.
        """
        context = self.context
        began = time.perf_counter()
        self._load(self._named(parameters), config["version"])
        release = self.release()
        if context.budget is not None and self.uploaded_groups():
            # Before training: a process that is killed has spent it, too.
            context.budget.spend(config["round"], release)
        metrics: dict[str, Scalar] = accuracy_metrics("aggregate", self._evaluate(self.received_predictor))
        evaluated = time.perf_counter()
        self.set_mode(training=True)
        path = (context.client, config["round"])
        # One stream per purpose, client and round: neither the hosting node nor a resume changes the results.
        seed_dropout(self.networks(), torch_generator(context.config.seed, "dropout", *path))
        metrics |= self.train(numpy_generator(context.config.seed, "training", *path))
        self.check_release(release, metrics)
        metrics |= self.spent_steps(release)
        trained = time.perf_counter()
        metrics |= accuracy_metrics("personalized", self._evaluate(self.predictor))
        if config["round"] == context.config.num_rounds:
            metrics |= self._global_accuracy("personalized", self.predictor)
        # The version before must stay: the server may not count this round's reply, or resume from a checkpoint.
        self._store(config["round"], {config["version"], config["kept-version"]})
        if context.keeps_model and self.is_network:
            keep_model(context, self.target_state(), config["round"], metrics)
        uploaded = self.uploaded_groups()
        arrays = [_to_numpy(t) for group in uploaded for t in self.groups[group].state_dict().values()]
        received = [value for key, value in self._named(parameters).items() if group_of(key) in uploaded]
        metrics |= {"train-seconds": trained - evaluated, "seconds": time.perf_counter() - began}
        reply = self.reply(received, arrays)
        upload = protected_upload(context.config.privacy, received, reply)  # whatever `reply` leaves out
        return upload, len(context.data.train_labels), metrics

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate the received parameters with the private ones on the client's test data; see `fit` and `receive`."""
        self.receive(self._named(parameters), config["version"])
        sums = self._evaluate(self.received_predictor)
        everywhere = self._global_accuracy("aggregate", self.received_predictor)
        return sums.mean_loss, sums.total, accuracy_metrics("aggregate", sums) | everywhere

    def describe(self, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
        """Return a descriptor of training samples and their number, for a method with an encoder.

        Args:
            received: The encoder's arrays, by key.
            question: The samples to describe, and the noise.

        Raises:
            ValueError: If the method has no encoder.
        """
        raise ValueError(f"{self.context.config.method} has no encoder")

    @classmethod
    def active_groups(cls, config: RunConfig) -> Mapping[str, Reduction]:
        """Return the shared groups that hold parameters with some settings; by default all of `shared`."""
        return cls.shared

    def exchanged_groups(self) -> tuple[str, ...]:
        """Return the shared groups that are exchanged in this round; by default all."""
        return tuple(self.shared)

    def uploaded_groups(self) -> tuple[str, ...]:
        """Return the exchanged groups that are sent back after training: all but `DOWN` ones."""
        return tuple(group for group in self.exchanged_groups() if self.shared[group] is not Reduction.DOWN)

    def keys(self) -> list[str]:
        """Return the keys `group/name` of the exchanged arrays, in the order of Flower's lists of arrays."""
        return [f"{group}/{name}" for group in self.exchanged_groups() for name in self.groups[group].state_dict()]

    def shared_bytes(self) -> int:
        """Return the size of the shared arrays in bytes."""
        tensors = (tensor for group in self.shared for tensor in self.groups[group].state_dict().values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def receive(self, received: SharedArrays, version: int) -> None:
        """Load the parameters for the last evaluation: the received groups, and the private ones of a version.

        Raises as `fit`.
        """
        if problem := layout_problem(*(dict.fromkeys(keys, np.zeros(0)) for keys in (self.keys(), received))):
            raise ValueError(problem)
        self._load(received, version)

    def _named(self, parameters: list[NDArray[Any]]) -> SharedArrays:
        """Return received arrays by key; they are in the order of `keys`."""
        keys = self.keys()
        if len(parameters) != len(keys):
            raise ValueError(f"received {len(parameters)} arrays, expected {len(keys)}: {', '.join(keys)}")
        return dict(zip(keys, parameters, strict=True))

    def _load(self, received: SharedArrays, version: int) -> None:
        if version == INITIAL:
            private = {
                f"{group}/{name}": tensor
                for group, tensors in self.initial_private().items()
                for name, tensor in tensors.items()
            }
        else:
            stored = self.context.state.load(version) if self.private else {}
            private = {key: torch.tensor(value) for key, value in stored.items()}
        tensors = {key: torch.tensor(value) for key, value in received.items()} | private
        for group in (*self.exchanged_groups(), *self.private):
            self.load_group(group, tensors)

    def load_group(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Load one group's tensors into its module; tensors of other groups are ignored.

        Raises:
            ValueError: If the tensors do not fit the module.
        """
        module = self.groups[group]
        expected = {f"{group}/{name}": _shape_of(tensor) for name, tensor in module.state_dict().items()}
        received = {key: _shape_of(value) for key, value in tensors.items() if group_of(key) == group}
        if problem := layout_problem(expected, received):
            raise ValueError(problem)
        values = {key.partition("/")[2]: send(tensors[key], self.context.device) for key in received}
        module.load_state_dict(values, assign=True)

    def _store(self, version: int, kept: set[int]) -> None:
        if not self.private:
            return
        arrays = {
            f"{group}/{name}": _to_numpy(tensor)
            for group in self.private
            for name, tensor in self.groups[group].state_dict().items()
        }
        if key := not_finite(arrays):
            raise FloatingPointError(f"{key} is not finite after training")
        self.context.state.save(version, arrays)
        self.context.state.forget_before(version, but=kept)

    def networks(self) -> Sequence[nn.Module]:
        """Return all modules that are switched between training and evaluation; by default the groups' modules."""
        return list(self.groups.values())

    def set_mode(self, *, training: bool) -> None:
        """Switch BatchNorm between batch (training) and running statistics, and Dropout on (training) or off."""
        for module in self.networks():
            module.train(training)

    def _evaluate(self, predictor: Callable[[], Predict]) -> ClassificationSums:
        data = self.context.data
        self.set_mode(training=False)
        return evaluate(predictor(), data.test_images, data.test_labels)

    def _global_accuracy(self, kind: str, predictor: Callable[[], Predict]) -> dict[str, Scalar]:
        """Return the accuracy on all test data of the data set; empty without `data.global-test`."""
        if self.context.global_test is None:
            return {}
        images, labels = self.context.global_test
        predict, device = predictor(), self.context.device
        parts = zip(torch.split(images, CHUNK), torch.split(labels, CHUNK), strict=True)
        sums = (evaluate(predict, send(some, device), send(truth, device)) for some, truth in parts)
        total = sum(sums, ClassificationSums())
        return {f"{kind}-global-accuracy": total.accuracy}


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _shape_of(tensor: Tensor) -> NDArray[Any]:
    """Return a stand-in with a tensor's shape and type that occupies no memory."""
    dtype = torch.empty((), dtype=tensor.dtype).numpy().dtype
    return np.broadcast_to(np.zeros((), dtype), tuple(tensor.shape))
