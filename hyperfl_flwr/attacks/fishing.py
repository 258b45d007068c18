"""Fish for the images of one class: a cheating server forges the shared classifier so that only they have a gradient.

Wen, Geiping, Fowl, Goldblum, Goldstein: "Fishing for User Data in Large-Batch Federated Learning via Gradient
Magnification", ICML 2022, class fishing. All rows of the classifier are zero except that of one class c, whose bias
makes its probability p_c nearly zero. The gradient that reaches the features a_n of an image with label y_n is then

    dL/da_n = W_c (p_c - 1[y_n = c])

nearly zero for all other classes, however large the batch. If it has one image of class c, the extractor's gradient is
that of this image alone, and `hyperfl_flwr.attacks.head_gradient` finds it as if it had been alone in the batch.

The server fishes for one class in a round. The paper's feature fishing, which separates several images of one class
over some rounds, is not used here: with two images of the class the search is for their mean gradient.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from hyperfl_flwr.attacks.base import AttackSettings, FloatArray, Reconstruction
from hyperfl_flwr.attacks.forging import with_values
from hyperfl_flwr.attacks.head_gradient import invert
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.readout import CLASSIFIER, read_out, target_names
from hyperfl_flwr.runs.observation import Arrays, Observation

FISHED = 0
"""The class c. A server would take the classes in turn."""

_LEVEL = 20.0
"""Minus the bias of class c: p_c is 2e-9 times as large as the other probabilities."""


def forge_fishing(sent: Arrays, knowledge: PublicKnowledge, public: FloatArray, num_examples: int) -> Arrays:
    """Forge the classifier, see `hyperfl_flwr.attacks.forging.Forge`; the public images are not used.

    Raises:
        ValueError: If the classifier is not sent.
    """
    keys = {name: key for key, name in target_names(sent).items() if name.startswith(f"{CLASSIFIER}.")}
    if not keys:
        raise ValueError("fishing forges the classifier, but this method keeps it private")
    values = {name: torch.zeros(sent[key].shape) for name, key in keys.items()}
    weight, bias = (f"{CLASSIFIER}.{part}" for part in ("weight", "bias"))
    values[weight][FISHED] = torch.from_numpy(sent[keys[weight]][FISHED].copy())
    values[bias][FISHED] = -_LEVEL
    return with_values(sent, values, knowledge)


def fishing(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct one image of the fished class of each client.

    Args:
        observations: Observations of clients that have received `forge_fishing`'s arrays.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; labels are not used.

    Returns:
        One image per client; noise if the client has none of the class.

    Raises:
        ValueError: If `hyperfl_flwr.attacks.head_gradient.check_extractor` refuses the extractor.
    """
    readouts = [replace(read_out(observation, knowledge), num_examples=1) for observation in observations]
    return invert(readouts, lambda readout: readout, knowledge, replace(settings, labels=None))
