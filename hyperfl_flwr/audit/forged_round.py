"""Make what a cheating server sends in an attacked round."""

import math
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


LEAST_PUBLIC = 200

MOST_NUMBERS = MOST_PUBLIC * 3 * 32 * 32
"""Largest number of pixels and colours of all of these images, unless they are fewer than `LEAST_PUBLIC`: the forger
passes them through the convolutions at once."""


def public_images(target: AttackedRound) -> NDArray[np.float32]:
    """Return test images [m, C, H, W] in [0, 1], which stand for images of the clients' kind that anyone can get."""
    dataset = target.data().dataset
    number = max(LEAST_PUBLIC, min(MOST_PUBLIC, MOST_NUMBERS // math.prod(dataset.input_shape)))
    rng = numpy_generator(target.config.seed, "audit", "public")
    chosen = rng.choice(len(dataset.test), min(len(dataset.test), number), replace=False)
    return dataset.test.scaled(np.sort(chosen))


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
