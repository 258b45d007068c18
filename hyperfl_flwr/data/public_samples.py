"""Public samples that all clients of a run have, and their mixtures."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.unlabelled_pool import unlabelled_pool


@lru_cache(maxsize=1)
def public_samples(name: str, input_shape: Sequence[int], data_root: str, count: int, seed: int) -> Tensor:
    """Return the public samples [count, *shape] of a run, equal on all nodes; must not be written to.

    Args:
        name: Where they come from, see `unlabelled_pool`.
        input_shape: Shape of a sample; a tuple.
        data_root: Folder of the data sets; empty for the default.
        count: Their number.
        seed: The run's seed.

    Raises:
        DataError: If there are no such samples.
    """
    pool = unlabelled_pool(name, input_shape, Path(data_root) if data_root else None)
    return pool.batch(count, numpy_generator(seed, "public samples"))


def mixture(samples: Tensor, seed: int, server_round: int) -> Tensor:
    """Return u P + (1 - u) P[permutation] of samples P, with u from U(0, 1), which everyone draws alike in a round.

    Args:
        samples: The samples P [n, ...].
        seed: The run's seed.
        server_round: The federated round.
    """
    rng = numpy_generator(seed, "public mixture", server_round)
    share = float(rng.random())
    order = torch.from_numpy(rng.permutation(len(samples)).astype(np.int64))
    return share * samples + (1 - share) * samples[order]
