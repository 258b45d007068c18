"""Make what a malicious server sends in an attacked round."""

import math
from dataclasses import replace

import numpy as np

from hyperfl_flwr.attacks.knowledge import PublicImages
from hyperfl_flwr.attacks.readout import target_names
from hyperfl_flwr.attacks.registry import Attack
from hyperfl_flwr.audit.record_round import AttackedRound, Forged
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.runs.observation import Arrays

MOST_PUBLIC = 2000
"""Largest number of images that the server has; more make the reading of convolutional networks a little sharper."""


LEAST_PUBLIC = 200

MOST_NUMBERS = MOST_PUBLIC * 3 * 32 * 32
"""Largest number of pixels and colours of all of these images, unless they are fewer than `LEAST_PUBLIC`: the forger
passes them through the convolutions at once."""


def public_images(target: AttackedRound) -> PublicImages:
    """Return test images, which stand for images of the clients' kind that anyone can get."""
    dataset = target.data().dataset
    number = max(LEAST_PUBLIC, min(MOST_PUBLIC, MOST_NUMBERS // math.prod(dataset.input_shape)))
    rng = numpy_generator(target.config.seed, "audit", "public")
    chosen = np.sort(rng.choice(len(dataset.test), min(len(dataset.test), number), replace=False))
    return PublicImages(images=dataset.test.scaled(chosen), labels=dataset.test.labels[chosen])


def forging(target: AttackedRound, attack: Attack, public: PublicImages) -> Forged | None:
    """Return the function from what an honest server would send to what it sends in an attack; None if it is honest.

    Arrays without a network are not changed: of the arrays for all clients and of those for each client alone, the
    server forges those with the network.

    Args:
        target: The attacked round.
        attack: The attack.
        public: Images that the server has.
    """
    forge = attack.forge
    if forge is None:
        return None
    number = len(target.clients) if target.summed else 1

    def forged(sent: Arrays, client: int) -> Arrays:
        if not _has_network(sent):
            return sent
        knowledge = replace(target.knowledge(client), summed_clients=number)
        found = forge(sent, knowledge, public, number * target.sizes[0])
        layouts = [{key: (value.shape, value.dtype) for key, value in arrays.items()} for arrays in (sent, found)]
        if layouts[0] != layouts[1]:
            raise ValueError("forged arrays must have the names, shapes and types of the sent ones")
        return found

    return forged


def _has_network(sent: Arrays) -> bool:
    """Return whether arrays hold a target network, a part of it, or the hypernetwork that generates it."""
    return bool(target_names(sent)) or any(key.startswith("hypernetwork/") for key in sent)
