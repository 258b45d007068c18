"""Read images off the bins of an imprint layer, which a malicious server has forged.

Fowl, Geiping, Czaja, Goldblum, Goldstein: "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with
Modified Models", ICLR 2022. All m rows of the first fully connected layer measure the same number h of an image, and
have ascending thresholds c_1 < ... < c_m as biases: row j is active for the images with h > c_j. If all rows get the
same gradient delta_n from above, the difference of the gradients of two neighbouring rows

    G_j - G_(j+1) = sum over n with c_j < h_n <= c_(j+1) of delta_n [u_n, 1]

holds the images of one bin, and its ratio is the image if it is alone there. The thresholds are the quantiles of h
among public images, and h is their first principal component. Of B images (1 - 1/m)^(B - 1) are expected to be alone:
78 % of 50 images in 200 bins, and 5 % of 600.

Equal gradients from above need equal columns in the next fully connected layer. That is a second layer of the extractor
(mlp, lenet) or the classifier where it is shared (cnn of fedavg). Where it is private, see
`hyperfl_flwr.attacks.trap_weights`.

Several steps. What the layer learns moves its thresholds. With the factor S before W and b, a step moves them by
r = eta delta / S times |u|^2. The server chooses r, since it chooses S and the next layer's weights, so that all steps
together move a threshold by about a tenth of a bin. A smaller r would lose the images in the rounding to float32. The
columns of the next layer move apart in proportion to the square of the learning rate eta, which the server sets, too:
through many steps the attack needs a small one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.forging import (
    BACKWARD,
    FirstLinear,
    first_component,
    first_linear,
    normalised,
    pass_through,
    read_rows,
    with_values,
)
from hyperfl_flwr.attacks.knowledge import PublicImages, PublicKnowledge
from hyperfl_flwr.attacks.readout import CLASSIFIER
from hyperfl_flwr.runs.observation import Arrays, Observation

_SHARE = 2.0
"""Movement of the thresholds over all steps, in bins, if the losses' derivatives of all images had one sign; as they
mostly cancel, it is about a twentieth of that."""

_FEATURES = 0.1
"""Largest output of the layer above the imprint layer, so that no classifier saturates."""


def check_imprint(knowledge: PublicKnowledge) -> None:
    """Check that the attack can forge a run's target network.

    Raises:
        ValueError: If there is no suitable layer, or if the layer above it is a private classifier.
    """
    layer = first_linear(knowledge)
    if layer.above[0] == CLASSIFIER and knowledge.private_classifier:
        raise ValueError(
            "imprint forges the layer above the first fully connected one, which is the private classifier here"
        )


@torch.no_grad()
def forge_imprint(sent: Arrays, knowledge: PublicKnowledge, public: PublicImages, num_examples: int) -> Arrays:
    """Forge the imprint layer, see `hyperfl_flwr.attacks.forging.Forge`.

    Raises:
        ValueError: If the attack cannot forge the target network, see `check_imprint`.
    """
    check_imprint(knowledge)
    layer, images = first_linear(knowledge), normalised(public.images, knowledge)
    values = pass_through(layer, images)
    inputs = layer.inputs(values, images).double()
    direction = first_component(inputs)
    measured = inputs @ direction
    quantiles = torch.quantile(measured, torch.arange(1, layer.width, dtype=torch.float64) / layer.width)
    extent = measured.max() - measured.min()
    thresholds = torch.cat([(measured.min() - extent)[None], quantiles])
    steps, width = knowledge.num_steps(num_examples), extent / layer.width
    rate = _SHARE * width / (steps * (inputs.square().sum(dim=1).mean() + 1))
    is_classifier = layer.above[0] == CLASSIFIER
    ratio = rate / (knowledge.steps.learning_rate * (1.0 if is_classifier else BACKWARD))
    scale = (_FEATURES / (ratio * layer.width * extent)).sqrt()
    values |= {
        f"{layer.name}.weight": (scale * direction).float().repeat(layer.width, 1),
        f"{layer.name}.bias": (-scale * thresholds).float(),
        **_equal_columns(layer, knowledge, float(ratio * scale)),
    }
    return with_values(sent, values, knowledge)


def _equal_columns(layer: FirstLinear, knowledge: PublicKnowledge, size: float) -> dict[str, Tensor]:
    """Return the next layer's parameters, of the size `size`: one active unit, or logits of alternating signs."""
    if layer.above[0] == CLASSIFIER:
        weight = torch.full((knowledge.num_classes, layer.width), size)
        weight[1::2] *= -1
        return {f"{CLASSIFIER}.weight": weight, f"{CLASSIFIER}.bias": torch.zeros(knowledge.num_classes)}
    name = layer.above[0]
    shape = layer.shapes[f"{name}.weight"]
    weight, bias = torch.zeros(shape), torch.full((shape[0],), -1.0)
    weight[0], bias[0] = size, 0.0
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def imprint(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Read the images off the bins.

    Args:
        observations: Observations of clients, or one of their sum, that have received `forge_imprint`'s arrays.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; only `public_images` is used.

    Returns:
        One image for each of the layer's m rows; that of an empty bin is the mean of the normalisation.

    Raises:
        ValueError: If the attack cannot use the target network, see `check_imprint`.
    """
    return read_rows(observations, knowledge, settings, _bins)


def _bins(rows: Tensor) -> Tensor:
    return rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])])
