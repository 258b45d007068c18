"""The parameter groups of a client: load them from messages and from the node's disk, and store them."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.engine.best_model import BestModel
from clients.engine.context import ClientContext
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.device import send
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.node.private_state import INITIAL
from hyperfl_flwr.protocol.arrays import SharedArrays, diverged, layout_problem, not_finite
from hyperfl_flwr.protocol.messages import Reduction, group_of


class ParameterGroups:
    """Shared and private parameter groups, a module for each.

    Attributes:
        context: The client's context.
        groups: Module of each group.
        best: The client's best model so far, with `keep = best`; None before its first local training.
        shared: Names of the shared groups, and the reduction of each on the server.
        private: Names of the groups that never leave the node.
    """

    context: ClientContext
    groups: dict[str, nn.Module]
    best: BestModel | None = None
    shared: ClassVar[Mapping[str, Reduction]] = {}
    private: ClassVar[tuple[str, ...]] = ()

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the private groups' initial values, by group and name; by default equal for all clients."""
        seed = self.context.config.seed
        return {group: initial_state(self.groups[group], torch_generator(seed, group)) for group in self.private}

    @classmethod
    def active_groups(cls, config: RunConfig) -> Mapping[str, Reduction]:
        """Return the shared groups that hold parameters with some settings; by default all of `shared`."""
        return cls.shared

    @classmethod
    def kept_groups(cls, config: RunConfig) -> tuple[str, ...]:
        """Return the private groups that are stored with some settings; by default all of `private`."""
        return cls.private

    @classmethod
    def keeps_state(cls, config: RunConfig) -> bool:
        """Return whether anything of a client is stored on its node: private groups, or its best model."""
        return bool(cls.kept_groups(config)) or config.keep == "best"

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

    def _named(self, parameters: list[NDArray[Any]]) -> SharedArrays:
        """Return received arrays by key; they are in the order of `keys`."""
        keys = self.keys()
        if len(parameters) != len(keys):
            raise ValueError(f"received {len(parameters)} arrays, expected {len(keys)}: {', '.join(keys)}")
        return dict(zip(keys, parameters, strict=True))

    def _load(self, received: SharedArrays, version: int) -> None:
        config = self.context.config
        kept = self.kept_groups(config)
        if version == INITIAL:
            private = {
                f"{group}/{name}": tensor
                for group, tensors in self.initial_private().items()
                for name, tensor in tensors.items()
            }
        else:
            stored = self.context.state.load(version) if self.keeps_state(config) else {}
            tensors = {key: torch.tensor(value) for key, value in stored.items()}
            if config.keep == "best":
                self.best = BestModel.of(tensors)
            # What the node has stored never takes the place of what it has received: it would be sent.
            private = {key: tensor for key, tensor in tensors.items() if group_of(key) in kept}
        tensors = {key: self.received_tensor(key, value) for key, value in received.items()} | private
        for group in (*self.exchanged_groups(), *kept):
            self.load_group(group, tensors)

    def received_tensor(self, key: str, value: NDArray[Any]) -> Tensor:
        """Return a received array as a tensor that the client may change: by default a copy."""
        return torch.tensor(value)

    def undo(self, received: SharedArrays, version: int) -> None:
        """Replace what training has made of the groups by what they were before, for a client that has diverged.

        Args:
            received: The received arrays.
            version: Version of the private state that the round has started from.
        """
        self._load(received, version)

    def not_finite(self) -> str | None:
        """Return the key of the first uploaded or private array that is not finite; None if all are finite."""
        return not_finite({**self._uploads(), **self._private_arrays()})

    def uploaded_arrays(self) -> list[Any]:
        """Return the arrays of the uploaded groups: of numpy, or `BlockArray`."""
        return list(self._uploads().values())

    def _uploads(self) -> dict[str, Any]:
        named = ((f"{group}/{name}", value) for group in self.uploaded_groups() for name, value in self._values(group))
        return {key: self.uploaded_array(key, value) for key, value in named}

    def _private_arrays(self) -> SharedArrays:
        """Return the arrays of the private groups that are stored."""
        kept = self.kept_groups(self.context.config)
        return {f"{group}/{name}": to_numpy(value) for group in kept for name, value in self._values(group)}

    def _values(self, group: str) -> Iterable[tuple[str, Tensor]]:
        return self.groups[group].state_dict().items()

    def uploaded_array(self, key: str, value: Tensor) -> Any:  # noqa: ANN401 - of numpy, or `BlockArray`
        """Return the array of a tensor of an uploaded group."""
        return to_numpy(value)

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

    def _store(self, version: int, kept: set[int], *, must_finish: bool) -> None:
        if not self.keeps_state(self.context.config):
            return
        arrays = self._private_arrays()
        if self.best is not None:
            arrays |= self.best.to_store()
        # An error on validation data may be infinite; a failure would tell the server so, without noise.
        parameters = {key: value for key, value in arrays.items() if key != BestModel.FACTS}
        if not must_finish and (key := not_finite(parameters)):
            raise diverged(key)
        self.context.state.save(version, arrays)
        self.context.state.forget_before(version, but=kept)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array on the CPU, without a copy if it is there."""
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _shape_of(tensor: Tensor) -> NDArray[Any]:
    """Return a stand-in with a tensor's shape and type that occupies no memory."""
    dtype = torch.empty((), dtype=tensor.dtype).numpy().dtype
    return np.broadcast_to(np.zeros((), dtype), tuple(tensor.shape))
