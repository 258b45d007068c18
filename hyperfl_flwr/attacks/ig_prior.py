"""Gradient inversion with a prior that is learned from public images of another data set.

Images are searched for in the space of a decoder (`hyperfl_flwr.attacks.learned_prior`), and then, from there, in that
of all pixels. The first search finds the image where noise or the gradient of several images leaves much open. The
second one, a fifth of the iterations, adds what the decoder cannot draw.
"""

from collections.abc import Sequence
from dataclasses import replace

from hyperfl_flwr.attacks import any_upload, ig
from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.optimisation import Optimisation
from hyperfl_flwr.attacks.optimiser_loop import Progress
from hyperfl_flwr.runs.observation import Observation

DEFAULTS = replace(ig.DEFAULTS, learning_rate=0.2)
"""Defaults of the search for codes, which have the standard deviation 1; as many signed steps as in `ig`. The number
of steps for the pixels is `polish`."""

PIXEL_RATE = 0.02
"""Learning rate of the signed steps for the pixels, which begin near the image."""


def ig_prior(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct images by gradient inversion in the space of the settings, and then in that of all pixels.

    Args:
        observations: Observations of any method that `hyperfl_flwr.attacks.any_upload.invert` supports.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack, with a space; without labels, these are recovered where the classifier is
            shared.

    Returns:
        n images per client; iterations and seconds are those of both searches.

    Raises:
        ValueError: If there is no space.
    """
    if settings.space is None:
        raise ValueError("ig-prior searches in a space that is learned from public images, but got none")
    optimisation = settings.optimisation or DEFAULTS
    in_codes, in_pixels = _searches(optimisation)
    first = replace(settings, optimisation=in_codes, progress=_half(settings.progress, 0))
    drawn = any_upload.invert(observations, knowledge, first)
    start = [result.images for result in drawn]
    second = replace(
        settings, optimisation=in_pixels, space=None, start=start, progress=_half(settings.progress, 1)
    )  # fmt: skip
    found = any_upload.invert(observations, knowledge, second)
    return [
        replace(last, iterations=one.iterations + last.iterations, seconds=one.seconds + last.seconds)
        for one, last in zip(drawn, found, strict=True)
    ]


def _searches(optimisation: Optimisation) -> tuple[Optimisation, Optimisation]:
    """Return the settings of the search for codes, with all restarts, and of that for pixels."""
    for_pixels = replace(
        optimisation, iterations=max(1, optimisation.polish), polish=0, restarts=1, learning_rate=PIXEL_RATE
    )
    return replace(optimisation, polish=0), for_pixels


def _half(progress: Progress | None, number: int) -> Progress | None:
    """Return a callback for the first (0) or second (1) search that reports its share of both."""
    if progress is None:
        return None
    return lambda step, steps: progress(number * steps + step, 2 * steps)
