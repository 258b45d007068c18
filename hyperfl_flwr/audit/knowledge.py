"""Takes what a server knows of a run from the run's settings, for attacks."""

import math

from hyperfl_flwr.attacks.knowledge import GENERATED, EncoderKnowledge, PublicKnowledge
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.fedrep import FedRepConfig
from hyperfl_flwr.methods.hyperfl import HyperFLConfig
from hyperfl_flwr.methods.it_pfl import ITPFLConfig
from hyperfl_flwr.methods.pfedhn import PFedHNConfig
from hyperfl_flwr.methods.priv_hfl import PrivHFLConfig
from hyperfl_flwr.models.hypernetwork import frozen_hidden
from hyperfl_flwr.training.dual_stability import dual_rule


def public_knowledge(
    config: RunConfig,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    learning_rate: float,
    augmented: bool,
) -> PublicKnowledge:
    """Take the settings that matter to attacks from a run's configuration.

    Args:
        config: The run's settings.
        input_shape: Of the data set, (channels, height, width).
        num_classes: Of the data set.
        mean: Of its normalisation.
        std: Of its normalisation.
        learning_rate: The setting, or the method's own where that is `auto`.
        augmented: Whether the data set is used with augmentation.

    Raises:
        ValueError: If the attacks cannot work with the data or the target network, see `PublicKnowledge`.
    """
    hyperfl, distills = (
        config.method == "hyperfl",
        config.method == "priv-hfl" and config.section(PrivHFLConfig).distill,
    )
    learning_rate, weight_decay, clip_norm = _rates(config, learning_rate)
    return PublicKnowledge(
        method=config.method,
        target=config.target,
        input_shape=input_shape,
        num_classes=num_classes,
        mean=mean,
        std=std,
        augmented=augmented,
        local_epochs=config.local_epochs,
        local_steps=_local_steps(config),
        batch_size=config.batch_size,
        learning_rate=learning_rate,
        momentum=config.momentum,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        embedding_dim=config.section(HyperFLConfig).embedding_dim if hyperfl else 0,
        hidden_width=config.section(HyperFLConfig).hidden_width if hyperfl else 0,
        embedding_frozen=hyperfl and config.section(HyperFLConfig).embedding == "common-frozen",
        initialisation=config.section(HyperFLConfig).initialisation if hyperfl else "",
        seed=config.seed,
        dual=dual_rule(config.section(PrivHFLConfig)) if config.method == "priv-hfl" else None,
        pseudo_samples=config.section(PrivHFLConfig).pseudo_samples if distills else 0,
        generator_width=config.section(PrivHFLConfig).generator_width if distills else 0,
        class_balance=config.section(PrivHFLConfig).class_balance if distills else 0.0,
        encoder=_encoder_training(config),
    )


def _rates(config: RunConfig, learning_rate: float) -> tuple[float, float, float]:
    """Return learning rate, weight decay and clip norm of the steps on what is shared."""
    weight_decay, clip_norm = config.weight_decay, _clip_norm(config)
    if config.method == "hyperfl-frozen":  # FedRep's round at other rates
        method = config.section(HyperFLConfig)
        hidden = frozen_hidden(method.embedding_dim, method.hidden_width, method.initialisation, config.seed)
        factor = 1 + float(hidden.square().sum())
        learning_rate, weight_decay = learning_rate * factor, weight_decay / factor
        clip_norm = method.clip_norm / math.sqrt(factor)
    return learning_rate, weight_decay, clip_norm


def _local_steps(config: RunConfig) -> int:
    """Return the number of local steps that the method's settings ask for; 0 where they ask for passes."""
    generated = dict.fromkeys(GENERATED, config.section(PFedHNConfig).local_steps)
    return (generated | {"priv-hfl": config.section(PrivHFLConfig).local_steps}).get(config.method, 0)


def _clip_norm(config: RunConfig) -> float:
    norms = {"hyperfl": config.section(HyperFLConfig).clip_norm, "fedrep": config.section(FedRepConfig).clip_norm}
    norms |= {"priv-hfl": config.section(PrivHFLConfig).clip_norm} | dict.fromkeys(
        GENERATED, config.section(PFedHNConfig).clip_norm
    )
    return norms.get(config.method, 0.0)


def _encoder_training(config: RunConfig) -> EncoderKnowledge | None:
    """Return how IT-PFL-HN's clients train the encoder; None for other methods."""
    method = config.section(ITPFLConfig)
    if config.method != "it-pfl":
        return None
    return EncoderKnowledge(
        pooling=method.pooling,
        learning_rate=method.encoder_learning_rate,
        local_epochs=config.local_epochs,
        steps=method.encoder_steps or config.section(PFedHNConfig).local_steps,
        batch_size=method.encoder_batch_size,
    )
