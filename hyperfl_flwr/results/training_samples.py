"""Find the samples that the models of a simulated run were trained on."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.digests import Digests
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.runs.run_directory import is_simulation, read_manifest, settings_of
from hyperfl_flwr.runs.run_sources import method_of


def training_digests(run: Path, changes: Mapping[str, Scalar]) -> Digests | None:
    """Return the digests of all clients' training samples: each model has learned from them through what is shared.

    Args:
        run: Folder of the run.
        changes: Settings of this machine (`data-root`).

    Returns:
        The digests; None if they are not known: in a deployment, or if the data set cannot be read here.

    Raises:
        RunDirectoryError: If the folder is not a run's.
    """
    if not is_simulation(read_manifest(run)):
        return None
    method_of(run)  # or says that it is unknown
    config = resolved(RunConfig.from_flat(settings_of(run) | dict(changes)))
    try:
        data = load_federated_data(config.data_settings())
    except DataError:  # it may have been moved, and predictions do not need it
        return None
    return np.unique(np.concatenate([data.train_digests(client) for client in range(config.num_clients)]))
