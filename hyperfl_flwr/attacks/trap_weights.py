"""Read images off trap weights, which a malicious server has put into the first fully connected layer.

Boenisch, Dziedzic, Schuster, Shamsabadi, Shumailov, Papernot: "When the Curious Abandon Honesty: Federated Learning Is
Not Private", EuroS&P 2023. Each row of the layer is active for few images, and the ratio of the row's gradients is the
image if it is active for a single one, whatever comes from above: neither the classifier nor any other layer above
needs to be known or forged. The paper makes rows rarely active by scaling down the positive half of random weights;
here a row is a random direction h_j, with the bias -c_j such that one of n public images is above c_j, for the n
images that a client holds. A row is then active for exactly one of them with the probability (1 - 1/n)^(n - 1), about
37 %.

Where the rectifier is leaky (cnn), every other image still contributes with the slope 0.01: an error that grows with n.

Several steps. An image moves the row that it activates. With the factor S before h_j and c_j, its steps together move
the row's output for the image by a twentieth of that output's standard deviation, so that few images become active or
inactive.
"""

from collections.abc import Sequence

import torch

from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.forging import BACKWARD, first_linear, normalised, pass_through, read_rows, with_values
from hyperfl_flwr.attacks.knowledge import PublicImages, PublicKnowledge
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.runs.observation import Arrays, Observation

_SHARE = 0.05
"""Movement of a row's output for its image over all steps, in standard deviations of the output."""


@torch.no_grad()
def forge_trap_weights(sent: Arrays, knowledge: PublicKnowledge, public: PublicImages, num_examples: int) -> Arrays:
    """Forge the trap weights, see `hyperfl_flwr.attacks.forging.Forge`.

    Raises:
        ValueError: If the attack cannot forge the target network, see `hyperfl_flwr.attacks.forging.first_linear`.
    """
    layer, images = first_linear(knowledge), normalised(public.images, knowledge)
    values = pass_through(layer, images)
    inputs = layer.inputs(values, images).double()
    generator = torch_generator(knowledge.seed, "trap-weights")
    directions = torch.randn(layer.width, inputs.shape[1], generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=1, keepdim=True)
    measured = inputs @ directions.T
    thresholds = torch.quantile(measured, 1 - 1 / max(num_examples, 2), dim=0)
    # An image's gradients of all steps: a share of num_steps / num_examples in the batches' means.
    moved = knowledge.num_steps(num_examples) / num_examples * (inputs.square().sum(dim=1).mean() + 1)
    rate = _SHARE * measured.std(dim=0).mean() / moved
    scale = knowledge.steps.learning_rate * BACKWARD / rate
    values |= {
        f"{layer.name}.weight": (scale * directions).float(),
        f"{layer.name}.bias": (-scale * thresholds).float(),
    }
    return with_values(sent, values, knowledge)


def trap_weights(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Read the images off the rows.

    Args:
        observations: Observations of clients, or one of their sum, that have received `forge_trap_weights`' arrays.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; only `public_images` is used.

    Returns:
        One image for each of the layer's m rows; of a row without a gradient, the one that normalisation makes 0.

    Raises:
        ValueError: If the attack cannot use the target network, see `hyperfl_flwr.attacks.forging.first_linear`.
    """
    return read_rows(observations, knowledge, settings, lambda rows: rows)
