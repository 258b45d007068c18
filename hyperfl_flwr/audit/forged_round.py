"""Make what a cheating server sends in an attacked round."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.attacks.registry import Attack
from hyperfl_flwr.audit.record_round import AttackedRound
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.runs.observation import Arrays

MOST_PUBLIC = 2000
"""Largest number of images that the server has; more make the reading of convolutional networks a little sharper."""


def public_images(target: AttackedRound) -> NDArray[np.float32]:
    """Return test images [m, C, H, W] in [0, 1], which stand for images of the clients' kind that anyone can get."""
    test = target.data().dataset.test
    rng = numpy_generator(target.config.seed, "audit", "public")
    return test.scaled(np.sort(rng.choice(len(test), min(len(test), MOST_PUBLIC), replace=False)))


def forging(target: AttackedRound, attack: Attack, public: NDArray[np.float32]) -> Callable[[Arrays], Arrays] | None:
    """Return the function from what an honest server would send to what it sends in an attack; None if it is honest.

    Args:
        target: The attacked round.
        attack: The attack.
        public: Images that the server has.

    Raises:
        ConfigError: If the clients have different target networks.
    """
    forge = attack.forge
    if forge is None:
        return None
    if len(set(target.config.targets)) > 1:
        raise ConfigError("forged weights are for one target network, but the clients' networks differ")
    number = len(target.clients) if target.summed else 1
    knowledge = replace(target.knowledge(), summed_clients=number)

    def forged(sent: Arrays) -> Arrays:
        found = forge(sent, knowledge, public, number * target.num_examples)
        layouts = [{key: (value.shape, value.dtype) for key, value in arrays.items()} for arrays in (sent, found)]
        if layouts[0] != layouts[1]:
            raise ValueError("forged arrays must have the names, shapes and types of the sent ones")
        return found

    return forged
