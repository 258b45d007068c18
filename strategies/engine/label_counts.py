"""Checks and warnings of strategies that receive each client's numbers of training samples by class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import LABEL_COUNTS
from strategies.engine.hooks import Hooks


class LabelCounts(Hooks):
    """Refuses settings with which the counts would be wrong, and warns that they are a leak."""

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse clipping and noise on uploads, which are for parameters.

        Raises:
            ConfigError: If `privacy.clip-norm` is set.
        """
        super().check(config, input_shape)
        if config.privacy.clip_norm:
            raise ConfigError(
                f"privacy.clip-norm must be 0 with {config.method}, got {config.privacy.clip_norm:g}: its clients send "
                f"their numbers of samples of each class, which clipping and noise would falsify; set it to 0, or take "
                f"another method"
            )

    @classmethod
    def warnings(cls, config: RunConfig) -> Sequence[str]:
        """Return a warning that the server gets the label counts."""
        return [
            *super().warnings(config),
            f"with {config.method} every client sends its number of training samples of each class to the server, "
            f"exactly and in every round (docs/privacy/threat-model.md)",
        ]


def counts_in(uploads: Sequence[SharedArrays]) -> Tensor:
    """Return the label counts [S, K] in what clients sent."""
    return torch.stack([torch.tensor(arrays[LABEL_COUNTS]) for arrays in uploads])
