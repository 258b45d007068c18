"""Measure what novel clients' descriptors reveal of their labels, in a finished run of IT-PFL-HN.

The clients send descriptors in the messages of a run. The server estimates each client's label distribution
(`hyperfl_flwr.attacks.descriptor_labels`) with test images of the training clients, which stand in for public images.
The true distribution is used only afterwards, for scoring.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.personalize import Source, open_run
from hyperfl_flwr.attacks.descriptor_labels import Fit, Shares, expected_shares, paired_fit, swapped_fit
from hyperfl_flwr.core.errors import RunDirectoryError, RunFailedError
from hyperfl_flwr.core.packages.code_version import code_entry
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import FederatedData, load_federated_data, normalised
from hyperfl_flwr.protocol.queries import DESCRIPTOR, QuerySpec
from hyperfl_flwr.runs.novel_results import mean_of
from hyperfl_flwr.runs.run_data import require_dataset
from hyperfl_flwr.server.federation import handshake
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.engine.query_clients import ask, descriptors_of

IMAGES = 1000
"""Largest number of images for which each model predicts."""

FEWEST = 2
"""Smallest number of novel clients: the control uses another client's descriptor."""


def measure_descriptors(run: Path, changes: Mapping[str, Scalar]) -> dict[str, Any]:
    """Estimate the labels of a run's novel clients from descriptors; the run's folder is not changed.

    Args:
        run: Folder of a run with novel clients.
        changes: Settings of this machine (`data-root`, `device`), `novel.epsilons` and `novel.delta`.

    Returns:
        Content of descriptors.json, see docs/privacy/audit.md.

    Raises:
        HyperFLError: If the run has no tuned hypernetwork or too few novel clients, or a client returns no descriptor.
    """
    require_dataset(run)
    source = open_run(run, {"output": "", "resume": "", **changes})
    config = source.config
    if config.novel.clients < FEWEST:
        raise RunDirectoryError(
            f"{run} has {config.novel.clients} novel clients, but at least {FEWEST} are needed (novel.clients)"
        )
    data = load_federated_data(config.data_settings())
    novel = range(config.num_clients, config.hosted_clients)
    images = _public_images(data, config.num_clients, config.seed)
    counts = data.label_counts()[0][list(novel)]
    truth: list[Shares] = [row / row.sum() for row in counts]
    return {
        "run": run.name,
        "clients": list(novel),
        "samples": counts.sum(axis=1).tolist(),
        "images": len(images),
        "delta": config.novel.delta,
        "truth": [row.tolist() for row in truth],
        "by_epsilon": [_estimates_at(source, novel, epsilon, images, truth) for epsilon in config.novel.budgets],
        "settings": config.flat(),
        "code": code_entry(),
    }


def _public_images(data: FederatedData, trained: int, seed: int) -> Tensor:
    """Return test images [m, ...] of the training clients, none of them a novel client's."""
    used = np.unique(np.concatenate([data.test_indices(client) for client in range(trained)]))
    novel = np.concatenate([data.test_indices(client) for client in range(trained, data.num_clients)])
    indices = np.setdiff1d(used, novel)
    rng = numpy_generator(seed, "audit", "descriptors")
    chosen = np.sort(rng.choice(indices, min(len(indices), IMAGES), replace=False))
    dataset = data.dataset
    return normalised(dataset.test.scaled(chosen), dataset.mean, dataset.std)


def _estimates_at(
    source: Source, clients: Sequence[int], epsilon: float | None, images: Tensor, truth: Sequence[Shares]
) -> dict[str, Any]:
    """Return the scores for descriptors with the noise of one epsilon; None means no noise."""
    estimates = _estimates(source, clients, epsilon, images)
    uniform = [np.full_like(shares, 1 / len(shares)) for shares in truth]
    fits = {
        "own": paired_fit(estimates, truth),
        "other_client": swapped_fit(estimates, truth),
        "uniform": paired_fit(uniform, truth),
    }
    return {
        "epsilon": epsilon,
        "estimates": [row.tolist() for row in estimates],
        **{name: _numbers(fit) for name, fit in fits.items()},
    }


def _estimates(source: Source, clients: Sequence[int], epsilon: float | None, images: Tensor) -> list[Shares]:
    """Query clients for descriptors, as the server does, and estimate shares with the models generated from them."""
    config = source.config
    query = descriptors_of(
        clients,
        source.encoder,
        source.recipe.descriptor_length,
        QuerySpec(epsilon=epsilon, delta=config.novel.delta),
    )
    # A state folder of its own: these descriptors are not releases of the run, so its privacy record stays as it is.
    with tempfile.TemporaryDirectory() as state:
        grid = InProcessGrid(app, 1, config.flat(), {"simulated": True, "state-dir": state})
        federation = handshake(grid, config.hosted_clients, config.node_timeout)
        setting = replace(source.strategy.context, federation=federation)
        answers = ask(grid, setting, config.num_rounds, query)
    for failure in answers.failures:
        raise RunFailedError(f"client {failure.client} returned no descriptor: {failure.reason}")
    models = source.strategy.models_of({client: answers.arrays[client][DESCRIPTOR] for client in clients})
    target = source.recipe.new_target().eval()
    return [
        expected_shares(target, {key.partition("/")[2]: value[0] for key, value in models[client].items()}, images)
        for client in clients
    ]


def _numbers(fit: Fit) -> dict[str, Any]:
    """Return both measures for JSON: values by client (null if undefined), mean, and its standard error."""
    found = {}
    for name, values in (("total_variation", fit.total_variation), ("rank_correlation", fit.rank_correlation)):
        known = [value for value in values if not math.isnan(value)]
        mean = mean_of(known) if known else None
        found[name] = {
            "mean": mean and mean.mean,
            "sem": mean and mean.sem,
            "per_client": [None if math.isnan(value) else value for value in values],
        }
    return found
