"""Build the attacks' `PublicKnowledge` and `TrainingKnowledge` from a run's settings."""

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.attacks.knowledge import PublicKnowledge, TrainingKnowledge
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.method import Form, Part
from hyperfl_flwr.methods import METHODS

TRAINED: tuple[Part, ...] = ("model", "kept-model", "layers", "extractor", "classifier", "hypernetwork")
"""Parts of an upload that train the client's model."""

WITH_CLASSIFIER: tuple[Part, ...] = ("model", "kept-model", "layers", "classifier")
"""Parts of an upload with the classifier."""


def public_knowledge(
    config: RunConfig,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> PublicKnowledge:
    """Return the knowledge that follows from a run's configuration and data set.

    Args:
        config: Settings of the run, with every `auto` of the method resolved.
        input_shape: Shape (channels, height, width) of the data set's images.
        num_classes: Number of classes of the data set.
        mean: Mean of the data set's normalisation, per channel.
        std: Standard deviation of the data set's normalisation, per channel.

    Raises:
        ValueError: If the attacks do not support the data or the target network, see `PublicKnowledge`.
    """
    uploads = METHODS[config.method].uploads
    return PublicKnowledge(
        target=config.target,
        input_shape=input_shape,
        num_classes=num_classes,
        mean=mean,
        std=std,
        training=client_of(config.method).public_training(config),
        form=_form(config),
        private_classifier=not any(upload.part in WITH_CLASSIFIER for upload in uploads),
        unknown_scale=config.privacy.clip_norm > 0 or config.dp.epsilon > 0,
        seed=config.seed,
    )


def training_knowledge(config: RunConfig, *, input_shape: tuple[int, ...], num_classes: int) -> TrainingKnowledge:
    """Return what it takes to read parameters and gradients off a run's uploads; it refuses no network and no data.

    Arguments are those of `public_knowledge`.
    """
    training = client_of(config.method).public_training(config)
    return TrainingKnowledge(
        target=config.target, input_shape=input_shape, num_classes=num_classes, training=training, form=_form(config)
    )


def _form(config: RunConfig) -> Form:
    """Return the form in which the client's model, or what generates it, is sent."""
    forms = [upload.form for upload in METHODS[config.method].uploads if upload.part in TRAINED]
    return forms[0] if forms else "values"
