"""Gradient inversion of whatever a client sends: the whole network, its feature extractor, or a hypernetwork."""

from collections.abc import Sequence

from hyperfl_flwr.attacks import head_gradient, ig
from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.readout import read_out
from hyperfl_flwr.runs.observation import Observation


def invert(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct images by `ig` if the classifier is shared, and otherwise by `head_gradient`.

    Args:
        observations: Observations of one method.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; `head_gradient` ignores the labels.

    Raises:
        ValueError: If the classifier is private, and the extractor one that `head_gradient` cannot use.
    """
    if read_out(observations[0], knowledge).shares_classifier:
        return ig.ig(observations, knowledge, settings)
    return head_gradient.head_gradient(observations, knowledge, settings)
