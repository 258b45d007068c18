"""Fish for the images of one class: a malicious server forges the shared classifier so that only they have a gradient.

Wen, Geiping, Fowl, Goldblum, Goldstein: "Fishing for User Data in Large-Batch Federated Learning via Gradient
Magnification", ICML 2022, class fishing. All rows of the classifier are zero except that of one class c, whose bias
makes its probability p_c nearly zero. The gradient that reaches the features a_n of an image with label y_n is then

    dL/da_n = W_c (p_c - 1[y_n = c])

nearly zero for all other classes, however large the batch. If it has one image of class c, the extractor's gradient is
that of this image alone, and `hyperfl_flwr.attacks.head_gradient` finds it as if it had been alone in the batch.

The server fishes for one class in a round. With several images of the class the search is for their mean gradient, and
`hyperfl_flwr.attacks.feature_fishing` separates them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.forging import with_values
from hyperfl_flwr.attacks.head_gradient import invert
from hyperfl_flwr.attacks.knowledge import PublicImages, PublicKnowledge
from hyperfl_flwr.attacks.nothing_to_read import NothingToReadError
from hyperfl_flwr.attacks.readout import CLASSIFIER, Readout, read_out, target_names
from hyperfl_flwr.runs.observation import Arrays, Observation

FISHED = 0
"""The class c. A server would take the classes in turn."""

_WEIGHT, _BIAS = f"{CLASSIFIER}.weight", f"{CLASSIFIER}.bias"

_NONE = 0.01
"""Number of images behind a gradient below which there was none: the rest is rounding."""

_LEVEL = 20.0
"""Minus the bias of class c: p_c is 2e-9 times as large as the other probabilities."""


def forge_fishing(sent: Arrays, knowledge: PublicKnowledge, public: PublicImages, num_examples: int) -> Arrays:
    """Forge the classifier, see `hyperfl_flwr.attacks.forging.Forge`; the public images are not used.

    Raises:
        ValueError: If the classifier is not sent.
    """
    shared = torch.tensor(sent[_classifier(sent)[_WEIGHT]])
    return with_row(sent, knowledge, shared[FISHED], -_LEVEL)


def with_row(sent: Arrays, knowledge: PublicKnowledge, weight: Tensor, bias: float) -> Arrays:
    """Return the arrays to send with a classifier of which all rows are zero, except that of the fished class.

    Args:
        sent: Arrays that an honest server would send, by `group/name`.
        knowledge: Public knowledge of the run.
        weight: The row's weights [F].
        bias: The row's bias.

    Raises:
        ValueError: If the classifier is not sent.
    """
    values = {name: torch.zeros(sent[key].shape) for name, key in _classifier(sent).items()}
    values[_WEIGHT][FISHED], values[_BIAS][FISHED] = weight, bias
    return with_values(sent, values, knowledge)


def _classifier(sent: Arrays) -> dict[str, str]:
    """Return the keys of the classifier's parameters by the target's names; raises a ValueError if it is not sent."""
    keys = {name: key for key, name in target_names(sent).items() if name in (_WEIGHT, _BIAS)}
    if len(keys) < 2:
        raise ValueError("fishing forges the classifier, but this method keeps it private")
    return keys


def fishing(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct one image of the fished class of each client.

    Args:
        observations: Observations of clients, or one of their sum, that have received arrays of `forge_fishing` or of
            `hyperfl_flwr.attacks.feature_fishing.forge_feature_fishing`.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; labels are not used.

    Returns:
        One image per observation. After one step without clipping the finding `caught` is the number of images behind
        the gradient: minus that of class c's bias, times n.

    Raises:
        NothingToReadError: If `caught` is 0: the client has no image of the class.
        ValueError: If `hyperfl_flwr.attacks.head_gradient.check_extractor` refuses the extractor.
    """
    readouts = [_of_one(read_out(each, knowledge), knowledge, each.client) for each in observations]
    return invert(readouts, lambda readout: readout, knowledge, replace(settings, labels=None))


def _of_one(readout: Readout, knowledge: PublicKnowledge, client: int) -> Readout:
    """Return a readout as that of a single image, with the number of images that were caught as a finding."""
    findings = dict(readout.findings)
    if readout.num_steps == 1 and not knowledge.steps.clip_norm:
        findings["caught"] = -readout.num_examples * float(readout.gradient[_BIAS][FISHED])
        if findings["caught"] < _NONE:
            raise NothingToReadError(f"there was no image of class {FISHED}, which it looks for", client)
    return replace(readout, num_examples=1, findings=findings)
