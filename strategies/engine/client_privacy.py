"""The server's part in differential privacy of whole clients: noise on sums, and the record of what is released.

One client, removed from a round or added, moves the exact sum of changes by at most C. The sum that the server has is
rounded, and the noise covers that, too (`hyperfl_flwr.core.noise.grid_noise`). All clients have the same weight, and
the number of clients that finished is public, so the mean is post-processing of the sum. With noise from the nodes,
alone or in a secure sum, the server only records the releases. Sampling clients (`fraction-train`) does not lower
epsilon: the server, which samples, knows who takes part.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hyperfl_flwr.config.privacy import PrivacyConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.noise.grid_noise import grid_for, noisy_on_grid, sensitivity
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.runs.releases import SumRelease, record_release
from strategies.engine.context import ServerContext


def adds_noise(context: ServerContext) -> bool:
    """Return whether the server adds the noise (`privacy.noise = server`)."""
    privacy = context.config.privacy
    return privacy.protects_clients and privacy.noise == "server"


def are_released(context: ServerContext) -> bool:
    """Return whether each client's upload is a release by itself, to a server that adds nothing to it."""
    return context.config.weight_epsilon > 0 or context.config.privacy.noise == "local"


def record(context: ServerContext, server_round: int, crowd: int, weights: int = 0) -> None:
    """Record a release of this round, before it happens; nothing in a run without privacy of clients.

    Args:
        context: The strategy's context.
        server_round: The federated round.
        crowd: Least number of honest clients in the sum.
        weights: Number of numbers in an upload, which a method with `weight_epsilon` needs.
    """
    privacy, weight_epsilon = context.config.privacy, context.config.weight_epsilon
    if weight_epsilon:
        randomised = SumRelease(
            round=server_round,
            noise="local",
            noise_multiplier=0.0,
            clip_norm=0.0,
            crowd=crowd,
            weights=weights,
            weight_epsilon=weight_epsilon,
        )
        record_release(Path(context.run_directory), randomised)
    if privacy.protects_clients:
        release = SumRelease(
            round=server_round,
            noise=privacy.noise,
            noise_multiplier=privacy.noise_multiplier,
            clip_norm=privacy.clip_norm,
            crowd=crowd,
        )
        record_release(Path(context.run_directory), release)


def noise_of_means(config: RunConfig, num_nodes: int = 0, num_clients: int = 1) -> float:
    """Return the largest standard deviation of the noise in an element of a mean change that the server checks.

    Args:
        config: The run's settings.
        num_nodes: With secure sums, the number of nodes in the step.
        num_clients: With secure sums, the number of clients that finished.
    """
    privacy = config.privacy
    if noise := privacy.sum_noise:  # each node adds at most the noise that suffices on its own
        return noise.multiplier * noise.clip_norm * math.sqrt(num_nodes) / num_clients
    if privacy.noise == "server":
        return privacy.noise_multiplier * privacy.clip_norm / num_clients
    return privacy.local_std


def noisy_means(
    privacy: PrivacyConfig,
    received: SharedArrays,
    changes: SharedArrays,
    roundings: Mapping[str, float],
    num_clients: int,
) -> SharedArrays:
    """Return the mean parameters of a round, of a sum of changes with noise.

    Args:
        privacy: The clipping norm and the noise multiplier.
        received: The arrays that the clients received.
        changes: The sum of their changes, float64, keyed and shaped as `received`.
        roundings: For each array, how far an element of the sum can move more than the client's exact change does.
        num_clients: Number of clients in the sum, above 0.
    """
    norm = privacy.clip_norm
    grid = grid_for(privacy.noise_multiplier * norm, norm * num_clients)
    std = privacy.noise_multiplier * sensitivity(
        norm, [(change.size, roundings[key] + grid) for key, change in changes.items()]
    )
    means = {}
    for key, change in changes.items():
        means[key] = (received[key] + noisy_on_grid(change, std, grid) / num_clients).astype(received[key].dtype)
    return means


def applied(context: ServerContext, received: SharedArrays, means: SharedArrays) -> SharedArrays:
    """Return the parameters after a round: `privacy.server-rate` of the way from the received ones to the means."""
    rate = context.config.privacy.server_rate
    if rate == 1 or not means:
        return means
    moved = {key: rate * np.subtract(mean, received[key], dtype=np.float64) for key, mean in means.items()}
    return {key: (received[key] + change).astype(means[key].dtype) for key, change in moved.items()}
