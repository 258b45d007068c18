"""What an attacker who infers a property holds of a federation: features of uploads, and bias gradients.

`upload`: what the client has uploaded in the first round. `server`: what it has uploaded in all rounds. `sum`: the sums
over all clients in all rounds, which is all that a server opens with secure sums, and what other clients receive if the
method shares one state. `model`: the client's personalized model, as `hyperfl export` writes it.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.upload_sketch import Sketch, sketch, sketch_of_upload
from hyperfl_flwr.audit.class_gradients import BIAS, ClassGradients
from hyperfl_flwr.audit.knowledge import TRAINED, public_knowledge
from hyperfl_flwr.audit.membership.shadow_data import GameData
from hyperfl_flwr.audit.membership.shadow_runs import Arrays
from hyperfl_flwr.audit.membership.shadow_views import observations_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.results.export import model_of_run
from hyperfl_flwr.runs.observation import mean_observation

VIEWS = {
    "upload": "the server with a client's first upload",
    "server": "the server with a client's uploads of all rounds",
    "sum": "whoever has the sums of all rounds",
    "model": "whoever holds a client's exported model",
}
"""Attackers by name."""

SHARED = ("sum",)
"""Views that show all clients of a federation together, and not a single one."""

ACCURACIES = ("test_accuracy", "test_accuracy_aggregate")
"""Numbers of summary.json: mean accuracies of the clients' personalized models, and of those that they receive."""


def views_of(config: RunConfig) -> list[str]:
    """Return the names of the views that there are with a run's settings; secure sums leave no single uploads."""
    uploads = METHODS[config.method].active_uploads(config, 1)
    found = []
    if uploads:
        found = [] if config.secagg.enabled else ["upload"] + ["server"] * (config.num_rounds > 1)
        if not any(upload.separate_start or upload.part == "kept-model" for upload in uploads):
            found.append("sum")
    return found + ["model"] * client_of(config.method).is_network  # else there is no network to export


def observed(run: Path, config: RunConfig, data: GameData) -> Arrays:
    """Return what the attackers of all views hold of a federation with N clients and R rounds.

    Args:
        run: Folder of a complete run that has recorded all clients in all rounds, if it has uploads.
        config: Its settings, resolved.
        data: The samples of the game.

    Returns:
        Features of uploads [N, R, L] as `upload/ARRAY`, and of exported models [N, L] as `model/ARRAY`. If the whole
        model is sent, the gradients [N, R, K] of the classifier's `bias` and those of the attacker's own samples of
        each class, `class_bias` [N, R, K, K], see `hyperfl_flwr.attacks.bias_shares`, and those of sums as `sum_bias`
        [1, R, K] and `sum_class_bias`, if there are sums. The numbers `ACCURACIES`.
    """
    clients = range(config.num_clients)
    summary = json.loads((run / "summary.json").read_text())
    found: dict[str, NDArray[np.floating]] = {name: np.array(summary[name], np.float64) for name in ACCURACIES}
    if "model" in views_of(config):
        models = [model_of_run(run, client).tensors.items() for client in clients]
        found |= _stacked("model", [sketch({name: value.numpy() for name, value in each}) for each in models])
    if not METHODS[config.method].active_uploads(config, 1):
        return found
    all_rounds = range(1, config.num_rounds + 1)
    rounds = [list(observations_of(run, config, client, all_rounds)) for client in clients]
    forms = [upload.form for upload in METHODS[config.method].uploads if upload.part in TRAINED]
    uploads = [_stacked("upload", [sketch_of_upload(each, forms[0]) for each in seen]) for seen in rounds]
    found |= {name: np.stack([each[name] for each in uploads]) for name in uploads[0]}
    if (knowledge := _knowledge_of_model(config, data)) is not None and BIAS in rounds[0][0].reply:
        measured = ClassGradients(config, knowledge, data)
        both = [measured.of_rounds(seen, knowledge) for seen in rounds]
        found["bias"], found["class_bias"] = map(np.stack, zip(*both, strict=True))
        if "sum" in views_of(config):
            summed = [mean_observation(seen) for seen in zip(*rounds, strict=True)]
            of_sum = replace(knowledge, summed_clients=config.num_clients)
            found["sum_bias"], found["sum_class_bias"] = (each[None] for each in measured.of_rounds(summed, of_sum))
    return found


def _stacked(prefix: str, sketches: Sequence[Sketch]) -> dict[str, NDArray[np.float32]]:
    return {f"{prefix}/{name}": np.stack([each[name] for each in sketches]) for name in sketches[0]}


def _knowledge_of_model(config: RunConfig, data: GameData) -> PublicKnowledge | None:
    """Return what the closed form needs; None if the network or the data do not suit it."""
    dataset = data.dataset
    try:
        return public_knowledge(
            config, input_shape=dataset.input_shape, num_classes=dataset.num_classes, mean=dataset.mean,
            std=dataset.std,
        )  # fmt: skip
    except ValueError:
        return None
