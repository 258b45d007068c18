"""Reconstruct images from obfuscated gradients: inversion at a quarter of the resolution.

Yue, Jin, Wong, Baron, Dai: "Gradient Obfuscation Gives a False Sense of Security in Federated Learning", USENIX
Security 2023. Images are enlarged from latents of a quarter of their sides, bicubically as in the public code. That
leaves a sixteenth of the unknowns: 100 steps of Adam suffice, and noise in the gradient disturbs fewer of them. Several
local steps are simulated, as in `hyperfl_flwr.attacks.ig`. The paper then restores the resolution with three networks
that were trained on photographs of 128 pixels and more. They do not apply to images of 28 or 32 pixels and are left out
here: a reconstruction is at most as sharp as an enlarged image.
"""

from collections.abc import Sequence
from dataclasses import replace

from hyperfl_flwr.attacks import any_upload
from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.image_space import low_resolution
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.optimisation import Optimisation
from hyperfl_flwr.attacks.paper_ig import paper_ig
from hyperfl_flwr.runs.observation import Observation

FACTOR = 4
"""Factor by which the sides of the latents are smaller, as in the public code."""

DEFAULTS = Optimisation(
    iterations=100, learning_rate=0.05, schedule="cosine", objective="squared", total_variation=0.0
)  # fmt: skip
"""Defaults: those of the public code."""


def rog(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct images of low resolution from the gradient that an upload has.

    Args:
        observations: Observations of any method that `hyperfl_flwr.attacks.any_upload.invert` supports; of a
            hypernetwork, the extractor and its gradient are read off the upload first.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; without labels, these are recovered where the classifier is shared.

    Returns:
        n images per client, each enlarged from a quarter of its sides.

    Raises:
        ValueError: If the classifier is private, and the extractor one that `head_gradient` cannot use.
    """
    return any_upload.invert(observations, knowledge, _settings(knowledge, settings))


def rog_paper(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct images of low resolution from a hypernetwork as HyperFL's paper does (appendix D, Table 5).

    Latents, embedding and classifier are searched for together, see `hyperfl_flwr.attacks.paper_ig`.

    Args:
        observations: Observations of HyperFL, all of one broadcast.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; without labels, soft labels are searched for, too.

    Raises:
        ValueError: If the observations are not of one broadcast of HyperFL.
    """
    return paper_ig(observations, knowledge, _settings(knowledge, settings))


def _settings(knowledge: PublicKnowledge, settings: AttackSettings) -> AttackSettings:
    space = low_resolution(knowledge.input_shape, FACTOR)
    return replace(settings, space=space, optimisation=settings.optimisation or DEFAULTS)
