"""The server's unlabelled samples, which a setting of a method names."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError, DataError
from hyperfl_flwr.data.unlabelled_pool import unlabelled_pool

Batches = Callable[[int, np.random.Generator], Tensor]
"""Returns a random batch [B, *shape] of B normalised samples."""


def unlabelled_batches(config: RunConfig, key: str, name: str, input_shape: Sequence[int]) -> Batches:
    """Return batches of the samples that a setting names.

    Args:
        config: The run's settings, for the folder of the data sets.
        key: Key of the setting.
        name: Its value, see `hyperfl_flwr.data.unlabelled_pool.unlabelled_pool`.
        input_shape: Required shape of a sample.

    Raises:
        ConfigError: If there are no such samples, or they have another shape.
    """
    try:
        return unlabelled_pool(name, input_shape, Path(config.data_root) if config.data_root else None).batch
    except DataError as error:
        raise ConfigError(f"{key}: {error}") from None
