"""What an attacker holds of a client's model after a federation, and the model's confidence in samples.

`server`: what the client uploads in each round, which is its model after local training, or the part that it shares. Of
HyperFL it is the extractor that the client begins a round with, read off its upload (`hyperfl_flwr.attacks.readout`).
With secure sums it is the mean over all clients that the server opens in each round.
`client`: what another client receives in the rounds after the first: the shared part as aggregated.
`model`: the client's whole personalized model, as `hyperfl export` writes it.

If a part has no classifier, the attacker fits one to the features of labelled samples of its own. FedBN's shared layers
are not attacked: without the normalisation layers, which stay with the clients, they are no network.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.attacks.readout import AFTER, read_out
from hyperfl_flwr.attacks.shadow_scores import Confidences, scaled_confidences
from hyperfl_flwr.audit.knowledge import TRAINED, training_knowledge
from hyperfl_flwr.audit.membership.shadow_data import ShadowData
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.method import Form
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.results.export import model_of_run
from hyperfl_flwr.runs.observation import Observation, load_observation, load_opening, observation_path, opening_path

Parameters = Mapping[str, Tensor]
"""Parameters and buffers by the names of the target network: all, or those of its extractor alone."""

VIEWS: Mapping[str, str] = {
    "server": "the server, from the client's uploads of all rounds",
    "client": "another client, from what it receives in all rounds",
    "model": "whoever holds the client's exported model",
}
"""Attackers by name."""

FROM_SUMS = "the server, from the sums that it opens in all rounds"
"""The attacker `server` of a run with secure sums."""

RIDGE = 1e-3
"""Weight of the squared norm in the attacker's linear classifier, relative to the features' mean square."""

_SUPPORTED = {"model", "extractor"}
_PREFIXES = {"model/": "", "extractor/": "extractor.", "classifier/": "classifier."}

_NO_NETWORK = (
    "the clients keep their normalisation layers, without which the layers that they send are no network that could "
    "recognise a sample"
)


def view_title(view: str, *, is_secure: bool) -> str:
    """Return who attacks in a view.

    Args:
        view: Name of the view.
        is_secure: Whether sums are secure.
    """
    return FROM_SUMS if is_secure and view == "server" else VIEWS[view]


def views_of(config: RunConfig) -> list[str]:
    """Return the names of the views that the attacks of this module support with a run's settings."""
    found = [] if left_out(config) else _views_of_uploads(config, _SUPPORTED)
    return found + ["model"] * client_of(config.method).is_network  # else there is no network to export


def left_out(config: RunConfig) -> dict[str, str]:
    """Return why views of uploads with parameters of the client's model are not supported, by view."""
    parts = {upload.part for upload in METHODS[config.method].active_uploads(config, 1)}
    return dict.fromkeys(_views_of_uploads(config, {"layers"}), _NO_NETWORK) if "layers" in parts else {}


def _views_of_uploads(config: RunConfig, supported: Collection[str]) -> list[str]:
    parts = {upload.part for upload in METHODS[config.method].active_uploads(config, 1)}
    found = []
    if parts & {*supported, "hypernetwork"}:
        found.append("server")
    if parts & {*supported} and config.num_clients > 1 and config.num_rounds > 1:
        found.append("client")
    return found


def confidences(run: Path, config: RunConfig, data: ShadowData, client: int) -> dict[str, Confidences]:
    """Return the scaled confidences [q, n + c] of each view's models in a client's pool and the controls.

    Args:
        run: Folder of a complete run that has recorded all clients in all rounds.
        config: Its settings, resolved.
        data: The samples of the game.
        client: The client's id.
    """
    samples, labels = data.samples(client)
    known, known_labels = data.attackers()
    found = {}
    for view in views_of(config):
        owner = _other(client, config) if view == "client" else client  # of the network
        target = build_target(config.of_client(owner).target, data.dataset.input_shape, data.dataset.num_classes)
        rows = []
        for parameters in _READERS[view](run, config, data, client):
            has_classifier = load_parameters(target, parameters)
            fitted = None if has_classifier else fit_classifier(features_of(target, known), known_labels, target)
            features = features_of(target, samples)
            rows.append(scaled_confidences(_logits(target, features, fitted), labels))
        found[view] = np.stack(rows)
    return found


def fit_classifier(features: Tensor, labels: Tensor, target: Target) -> Tensor:
    """Fit a linear classifier [F + 1, K] to features [n, F] by ridge regression on the labels [n], one for each class.

    The last row has the biases.
    """
    ones = _with_ones(features)
    truth = torch.nn.functional.one_hot(labels, target.classifier.out_features).double()
    gram = ones.T @ ones
    penalty = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    fitted: Tensor = torch.linalg.solve(gram + penalty, ones.T @ truth)
    return fitted


def _with_ones(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], dim=1)


def _logits(target: Target, features: Tensor, fitted: Tensor | None) -> Tensor:
    if fitted is not None:
        return _with_ones(features) @ fitted
    with torch.no_grad():
        logits: Tensor = target.classifier(features.float())
    return logits


@torch.no_grad()
def features_of(target: Target, samples: Tensor) -> Tensor:
    """Return the features [n, F] that a network in evaluation mode extracts of samples [n, ...]."""
    return torch.cat([target.extractor(chunk) for chunk in torch.split(samples, 500)]).double()


def load_parameters(target: Target, parameters: Parameters) -> bool:
    """Put parameters into a network for evaluation; returns whether they include the classifier."""
    missing, _ = target.load_state_dict(dict(parameters), strict=False, assign=True)
    if lacking := [name for name in missing if name.startswith("extractor.")]:
        raise ValueError(f"the shared part lacks {', '.join(lacking)} of the extractor")
    target.eval()
    return not missing


def _uploads(run: Path, config: RunConfig, data: ShadowData, client: int) -> Iterator[Parameters]:
    forms: list[Form] = [upload.form for upload in METHODS[config.method].uploads if upload.part in TRAINED]
    for observation in observations_of(run, config, client, range(1, config.num_rounds + 1)):
        if "hypernetwork/head_weight" in observation.received:
            known = training_knowledge(
                config.of_client(client), input_shape=data.dataset.input_shape, num_classes=data.dataset.num_classes
            )
            if config.secagg.enabled:  # an opening has the samples, and so the steps, of all clients
                known = replace(known, summed_clients=config.num_clients)
            try:
                yield read_out(observation, known).parameters
            except ValueError as error:
                raise RunFailedError(
                    f"the extractor cannot be read off what client {client} has uploaded: {error}; change the "
                    f"settings, such as a higher learning-rate"
                ) from error
        else:
            after = AFTER[forms[0]]
            yield named(
                {key: after(tensor_of(start), tensor_of(observation.reply[key]))
                 for key, start in observation.received.items()}
            )  # fmt: skip


def _received(run: Path, config: RunConfig, data: ShadowData, client: int) -> Iterator[Parameters]:
    for observation in observations_of(run, config, _other(client, config), range(2, config.num_rounds + 1)):
        yield named({key: tensor_of(value) for key, value in observation.received.items()})


def _other(client: int, config: RunConfig) -> int:
    """Return the other client, which attacks."""
    return (client + 1) % config.num_clients


def _exported(run: Path, config: RunConfig, data: ShadowData, client: int) -> Iterator[Parameters]:
    yield model_of_run(run, client).tensors


_READERS: Mapping[str, Callable[[Path, RunConfig, ShadowData, int], Iterator[Parameters]]] = {
    "server": _uploads, "client": _received, "model": _exported,
}  # fmt: skip


def observations_of(run: Path, config: RunConfig, client: int, rounds: range) -> Iterator[Observation]:
    """Yield what the server saw of a client in some rounds of a run; with secure sums, what it opened."""
    for number in rounds:
        if config.secagg.enabled:
            yield load_opening(opening_path(run, number))[0]
        else:
            yield load_observation(observation_path(run, number, client))


def named(arrays: Mapping[str, Tensor]) -> Parameters:
    """Return the arrays that belong to the target network, by its names."""
    return {
        new + key[len(old) :]: value for key, value in arrays.items() for old, new in _PREFIXES.items()
        if key.startswith(old)
    }  # fmt: skip


def tensor_of(value: NDArray[np.float32]) -> Tensor:
    """Return a copy of an observed array."""
    return torch.from_numpy(np.array(value))
