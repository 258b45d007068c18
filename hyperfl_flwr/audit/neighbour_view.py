"""Reconstruct what the end clients of PRIV-HFL's chain learn of their neighbours, from what they receive.

After the first round of the alternating order mu_b = kappa beta (x_b - x_{b+1}), with x the changes. The first client
receives the force mu_0 and the last one -mu_{N-2}. Each knows its own change, so

    x_neighbour = x_own - force / (kappa beta)

is its neighbour's change, as the server received it. The next rounds add forces that an end client does not see.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.storage import read_arrays, write_arrays
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.runs.observation import Observation, load_observation, observation_path
from hyperfl_flwr.training.dual_averaging import KAPPA, DualRule

FORCE = "force/theta"


def attackable_clients(config: RunConfig) -> Sequence[int]:
    """Return the clients next to an end of the chain.

    Raises:
        ConfigError: If the run's settings do not let end clients see their neighbours.
    """
    training = client_of(config.method).public_training(config)
    dual, distils = training.dual, training.generator is not None
    if dual is None or dual.mixed or distils or not _reveals_neighbour(dual.rule) or config.num_clients < 2:
        raise ConfigError(
            "clients see their neighbours in priv-hfl with priv-hfl.realisation = chain, the alternating order and at "
            "least two clients; the audit of it takes no projection, mixing or distillation"
        )
    return sorted(_observers(config.num_clients))


def _reveals_neighbour(rule: DualRule) -> bool:
    """Return whether an end client's force is its first multiplier, which is a difference of two clients."""
    return rule.realisation == "chain" and rule.order == "alternating" and not rule.projection


def _observers(num_clients: int) -> dict[int, int]:
    """Map each client next to an end to the end client that sees it; with two clients each sees the other."""
    return {num_clients - 2: num_clients - 1, 1: 0}


def save_next_messages(own: Mapping[int, SharedArrays], folder: Path) -> None:
    """Store what the server sends to each of some clients in the next round."""
    for client, arrays in own.items():
        write_arrays(_next_path(folder, client), arrays, {})


def neighbour_observations(config: RunConfig, clients: Sequence[int], folder: Path) -> list[Observation]:
    """Return the observation of each client's first round that its neighbour at the end can compute.

    Args:
        config: Settings of the run.
        clients: Clients next to an end.
        folder: Folder with the observations of the first round and the files of `save_next_messages`.

    Raises:
        ValueError: If the method has no dual variables.
    """
    dual = client_of(config.method).public_training(config).dual
    if dual is None:
        raise ValueError("clients without dual variables do not see their neighbours")
    found = []
    for client in clients:
        observer = _observers(config.num_clients)[client]
        own = load_observation(observation_path(folder, 1, observer))
        force = read_arrays(_next_path(folder, observer))[0][FORCE].astype(np.float64)
        change = (own.reply[FORCE] - force / (KAPPA * dual.rule.step)).astype(np.float32)
        found.append(
            Observation(
                received={FORCE: np.zeros_like(change)},
                reply={FORCE: change},
                num_examples=own.num_examples,
                client=client,
            )
        )
    return found


def _next_path(folder: Path, client: int) -> Path:
    return folder / f"next-client-{client:05d}.npz"
