"""Run an attack on the clients whose replies hold something to read, and say of the others that there was nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import numpy as np

from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.nothing_to_read import NothingToReadError
from hyperfl_flwr.attacks.registry import Attack
from hyperfl_flwr.runs.observation import Observation


def run_on_readable(
    row: Attack,
    observations: Sequence[Observation],
    clients: Sequence[int],
    knowledge: PublicKnowledge,
    settings: AttackSettings,
) -> list[Reconstruction]:
    """Run an attack, without the clients in whose replies it finds nothing to read.

    Args:
        row: The attack.
        observations: One observation of each client, or a single one of their sum.
        clients: Ids of the clients.
        knowledge: Public knowledge that holds for all of them.
        settings: Settings of the attack.

    Returns:
        One result per client, of a sum one per separated client. Where there was nothing to read, it has no images and
        says why.
    """
    left, silent = list(range(len(observations))), dict[int, Reconstruction]()
    while left:
        labels = None if settings.labels is None else [settings.labels[position] for position in left]
        chosen = _Chosen(observations, left) if silent else observations
        try:
            results = row.run(chosen, knowledge, replace(settings, labels=labels))
        except NothingToReadError as error:
            position = left[0] if len(left) == 1 else clients.index(error.client)
            left.remove(position)
            no_images = np.zeros((0, *knowledge.input_shape), dtype=np.float32)
            silent[position] = Reconstruction(images=no_images, nothing_to_read=str(error))
        else:
            found = silent | dict(zip(left, results, strict=True)) if silent else dict(enumerate(results))
            return [found[position] for position in range(len(found))]
    return [silent[position] for position in range(len(observations))]


class _Chosen(Sequence[Observation]):
    """Some of the observations, read on access."""

    def __init__(self, observations: Sequence[Observation], positions: Sequence[int]) -> None:
        self._observations, self._positions = observations, positions

    @overload
    def __getitem__(self, index: int) -> Observation: ...
    @overload
    def __getitem__(self, index: slice) -> "_Chosen": ...
    def __getitem__(self, index: int | slice) -> "Observation | _Chosen":
        if isinstance(index, slice):
            return _Chosen(self._observations, self._positions[index])
        return self._observations[self._positions[index]]

    def __len__(self) -> int:
        return len(self._positions)
