"""Train clients of a hypernetwork's heads together, from one H_0: see `hyperfl_flwr.training.shared_heads`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clients.engine.base import BaseClient
from clients.engine.cohort_training import MOST_TOGETHER
from clients.engine.stacked_cohort import step_activations
from hyperfl_flwr.core.lockstep import run_in_lockstep
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.training.factored_sgd import SPARE_UNITS
from hyperfl_flwr.training.shared_heads import HeadsOnShared, HeadSteps, SharedHeads, finish_alone

HEAD_WEIGHT = "hypernetwork/head_weight"
"""Key of H, nearly all of a hypernetwork."""

VECTORS = 6
"""Number of vectors of the length of theta that a step holds: theta, its gradient, c, the buffer of c, two copies."""


class HeadClient(BaseClient):
    """A client with the group `hypernetwork` that can be trained in a `HeadCohort`."""

    _shared: SharedHeads | None = None
    """H_0 of all clients of a message; None for a client with a copy of its own."""
    _heads: HeadsOnShared | None = None
    """The heads after `begin_steps`; the hypernetwork itself still has those that were received."""

    @property
    def trains_with_steps(self) -> bool:
        """Whether `train` and `train_own` are those of the method, which `begin_steps` and `end_steps` then replace."""
        return False

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train all groups in place; on a shared H_0 with the results that the client has in any cohort."""
        if self._shared is None:
            return self.train_own(rng)
        return self.end_steps(finish_alone(self.begin_steps(rng)))

    def train_own(self, rng: np.random.Generator) -> dict[str, float]:
        """Train all groups in place, with a copy of H_0 that becomes H; returns the metrics of `train`.

        Args:
            rng: Random numbers of the training.
        """
        raise NotImplementedError

    def head_steps(self, shared: SharedHeads, rng: np.random.Generator) -> tuple[HeadsOnShared, HeadSteps]:
        """Return heads on the shared H_0, and the steps of `train` with them.

        Args:
            shared: The shared H_0.
            rng: Random numbers of the training.
        """
        raise NotImplementedError

    def after_steps(self, heads: HeadsOnShared, loss: float) -> dict[str, float]:
        """Return the metrics of `train` after all steps of `head_steps`.

        Args:
            heads: The heads, after training.
            loss: Mean training loss of the last epoch.
        """
        raise NotImplementedError

    def share(self, shared: SharedHeads) -> None:
        """Use an H_0 that is never changed, in place of a copy of the received one."""
        self._shared = shared

    def begin_steps(self, rng: np.random.Generator) -> HeadSteps:
        """Return the steps of `train` on the shared H_0; the heads that they train are uploaded."""
        if self._shared is None:
            raise ValueError("the client shares no H_0; call share first")
        self._heads, steps = self.head_steps(self._shared, rng)
        return steps

    def end_steps(self, loss: float) -> dict[str, float]:
        """Return the metrics of `train` after all steps of `begin_steps`."""
        if self._heads is None:
            raise ValueError("the steps have not begun; call begin_steps first")
        return self.after_steps(self._heads, loss)

    def undo(self, received: SharedArrays, version: int) -> None:
        """Replace the groups by what they were before training, see `BaseClient.undo`; H is the received one again."""
        self._heads = None
        super().undo(received, version)

    def received_tensor(self, key: str, value: NDArray[Any]) -> Tensor:
        """Return a copy of a received array; for H_0 of a cohort the one that all its clients share."""
        if key == HEAD_WEIGHT and self._shared is not None:
            return self._shared.weight
        return super().received_tensor(key, value)

    def uploaded_array(self, key: str, value: Tensor) -> Any:  # noqa: ANN401 - of numpy, or `BlockArray`
        """Return an array of the hypernetwork; in a cohort H as its factors."""
        if key == HEAD_WEIGHT and self._heads is not None:
            return self._heads.result()
        return super().uploaded_array(key, value)


class HeadCohort:
    """Trains clients together that start from one H_0; see `CohortTraining`.

    Args:
        weight: H_0 [p, P], on the device that trains.
        units: Units whose rows of H_0 are read for all clients, see `SharedHeads`.
        stacked: Whether a step is one for all clients, see `hyperfl_flwr.training.hyperfl_cohort`.
    """

    most = MOST_TOGETHER

    def __init__(self, weight: Tensor, units: Tensor, *, stacked: bool) -> None:
        self._weight, self._shared, self._stacked = weight, SharedHeads(weight, units), stacked

    def admit(self, member: object) -> bool:
        """Let a client share H_0, and return whether it can be trained in the cohort.

        A client that takes more than p steps shares nothing: its factors would be larger than H. Neither does one of a
        subclass with another training, which may change H_0 in place, and with it the next client's.
        """
        if not isinstance(member, HeadClient) or not member.trains_with_steps:
            return False
        if not 0 < self._num_steps(member) <= len(self._weight):
            return False
        member.share(self._shared)
        return True

    def memory_of(self, member: object) -> int:
        """Return the bytes of a client's rows and vectors."""
        rows = self._num_steps(member) + SPARE_UNITS + VECTORS
        if not self._stacked:
            return rows * self._weight.shape[1] * self._weight.element_size()
        assert isinstance(member, HeadClient)
        numbers = (2 * rows + len(self._weight)) * self._weight.shape[1] + step_activations(member)
        return numbers * self._weight.element_size()

    def train(self, members: Sequence[tuple[object, np.random.Generator]]) -> list[dict[str, float] | Exception]:
        """Train the clients together, see `CohortTraining`."""
        if self._stacked:
            works = [partial(member.train, rng) for member, rng in members if isinstance(member, HeadClient)]
            return run_in_lockstep(works, stacks_training=True)
        found: list[dict[str, float] | Exception] = []
        clients = [(member, rng) for member, rng in members if isinstance(member, HeadClient)]
        losses = self._shared.finish([client.begin_steps(rng) for client, rng in clients])
        for (client, _), loss in zip(clients, losses, strict=True):
            try:
                found.append(loss if isinstance(loss, Exception) else client.end_steps(loss))
            except Exception as error:  # noqa: BLE001 - a failing client must not stop the others
                found.append(error)
        return found

    @staticmethod
    def _num_steps(member: object) -> int:
        if not isinstance(member, HeadClient):
            raise TypeError(f"a cohort trains clients with heads, got {type(member).__name__}")
        return member.steps.num_steps(len(member.context.data.train_labels))
