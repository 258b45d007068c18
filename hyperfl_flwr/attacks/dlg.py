"""Deep leakage from gradients: images and labels searched for together by L-BFGS.

Zhu, Liu, Han: "Deep Leakage from Gradients", NeurIPS 2019, algorithm 1: random images and random labels, which a
softmax turns into probabilities, are changed until their gradient has the smallest squared distance from the observed
one. L-BFGS needs curvature: the paper replaces ReLU by sigmoid, and pooling by strides. The targets `cnn` (LeakyReLU)
and `lenet` (ReLU) have linear pieces and pooling, between which the gradient jumps.

Unlike in the public code, each step has a line search with the strong Wolfe conditions. Several local steps are
simulated, as in `hyperfl_flwr.attacks.ig`.
"""

from collections.abc import Sequence
from dataclasses import replace

from hyperfl_flwr.attacks import ig
from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.optimisation import Optimisation
from hyperfl_flwr.attacks.readout import read_out
from hyperfl_flwr.runs.observation import Observation

DEFAULTS = Optimisation(
    iterations=300, learning_rate=1.0, optimiser="l-bfgs", objective="squared", total_variation=0.0
)  # fmt: skip
"""Defaults: the paper's rate and no prior; the paper's 300 steps are of up to 20 of these iterations each."""


def dlg(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct the images behind an update of the whole network.

    Args:
        observations: Observations of whole models.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; without labels, probabilities of the classes are searched for, too.

    Raises:
        ValueError: If the classifier is private.
    """
    settings = replace(settings, optimisation=settings.optimisation or DEFAULTS)
    return ig.invert(observations, knowledge, settings, read_out, soft_labels=True)
