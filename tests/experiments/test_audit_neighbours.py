"""The audit of what the end clients of a chain learn about their neighbours."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from hyperfl_flwr.attacks.dual_difference import read_change
from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import record_round, view
from hyperfl_flwr.audit.report import measure
from hyperfl_flwr.audit.sentences import sentence
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.observation import load_observation, observation_path

OPTIONS = Options(num_images=5, by_neighbours=True, iterations=3)


def settings(**changes: Scalar) -> dict[str, Scalar]:
    chain = {"method": "priv-hfl", "priv-hfl.realisation": "chain", "priv-hfl.distill": False, "batch-size": 1}
    one = {"priv-hfl.local-steps": 1, "local-epochs": 1, "priv-hfl.clip-norm": 0.0}
    return default_settings() | SMALL | chain | one | changes  # type: ignore[return-value]


@pytest.mark.parametrize(("num_clients", "attacked"), [(2, [0, 1]), (3, [1]), (5, [1, 3])])
def test_end_clients_know_what_their_neighbours_sent(num_clients: int, attacked: list[int], tmp_path: Path) -> None:
    """They know the same reply as the server recorded; its gradient is autograd's on the private image."""
    target = make_attacked_round(settings(), Options(num_images=num_clients, by_neighbours=True))
    assert list(target.clients) == attacked
    recorded = record_round(target, tmp_path)
    network = build_target("cnn", (1, 8, 8), 10)
    network.load_state_dict(ordinary_parameters(network, torch_generator(0, "model")), assign=True)
    for seen, client in zip(view(target, recorded).observations, attacked, strict=True):
        sent = load_observation(observation_path(tmp_path, 1, client)).reply["force/theta"]
        assert seen.client == client
        np.testing.assert_allclose(seen.reply["force/theta"], sent, rtol=0, atol=1e-6)
        data = target.data().client(client)
        loss = functional.cross_entropy(network(data.train_images), data.train_labels)
        wanted = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(network.parameters()))])
        read = read_change(seen, target.knowledge()).gradient
        got = torch.cat([value.flatten() for value in read.values()])
        assert float(functional.cosine_similarity(got, wanted, dim=0)) > 0.999


def test_the_report_says_who_attacks() -> None:
    """Two of five clients are attacked, by dual-difference only, and the sentence names the attacker."""
    target = make_attacked_round(settings(), OPTIONS)
    findings = audit(target, OPTIONS)
    assert list(findings) == ["dual-difference"]
    assert len(findings["dual-difference"].results) == 2
    document = measure(target, findings)
    assert document["by_neighbours"] is True
    assert "seen by the next client of the chain" in sentence(document, "dual-difference")
    assert json.dumps(document)


@pytest.mark.parametrize(
    "changes",
    [
        {"priv-hfl.realisation": "mean"}, {"priv-hfl.order": "published"}, {"priv-hfl.mixing": True},
        {"priv-hfl.distill": True}, {"method": "fedavg"},
    ],
    ids=str,
)  # fmt: skip
def test_what_it_does_not_hold_for_is_refused(changes: dict[str, Scalar]) -> None:
    with pytest.raises(ConfigError, match="clients see their neighbours in priv-hfl"):
        make_attacked_round(settings(**changes), OPTIONS)


def test_one_client_has_no_neighbour() -> None:
    with pytest.raises(ConfigError, match="at least two clients"):
        make_attacked_round(settings(), Options(num_images=1, by_neighbours=True))
