"""Takes what a server knows of a run from the run's settings, for attacks."""

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.method import Part
from hyperfl_flwr.methods import METHODS

TRAINED: tuple[Part, ...] = ("model", "kept-model", "extractor", "hypernetwork")
"""Parts whose training makes the client's model."""


def public_knowledge(
    config: RunConfig,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    augmented: bool,
) -> PublicKnowledge:
    """Take the settings that matter to attacks from a run's configuration.

    Args:
        config: The run's settings, without any `auto` of the method's.
        input_shape: Of the data set, (channels, height, width).
        num_classes: Of the data set.
        mean: Of its normalisation.
        std: Of its normalisation.
        augmented: Whether the data set is used with augmentation.

    Raises:
        ValueError: If the attacks cannot work with the data or the target network, see `PublicKnowledge`.
    """
    forms = [upload.form for upload in METHODS[config.method].uploads if upload.part in TRAINED]
    return PublicKnowledge(
        target=config.target,
        input_shape=input_shape,
        num_classes=num_classes,
        mean=mean,
        std=std,
        training=client_of(config.method).public_training(config),
        form=forms[0] if forms else "values",
        augmented=augmented,
        seed=config.seed,
    )
