"""HyperFL-frozen sends theta instead of the hypernetwork; compared with HyperFL, which sends the hypernetwork."""

import json

import numpy as np
import pytest
import torch
from federations import small_settings

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint, metrics
from hyperfl_flwr.models.hypernetwork import Hypernetwork, common_embedding
from hyperfl_flwr.models.targets import build_target

CHANGES = {"num_rounds": 3, "hyperfl.clip-norm": 0.5, "weight-decay": 0.01, "fraction_train": 0.6}
"""Settings in which clipping is active, weight decay matters and some clients do not take part."""


def test_a_run_that_sends_theta_is_hyperfl_with_a_common_frozen_embedding(federate: Federate) -> None:
    """Both runs agree up to float32 rounding, amplified by training; here an upload is less than an eighth as large.

    At full width it is about a hundredth.
    """
    one = federate("hyperfl", **CHANGES, **{"hyperfl.embedding": "common-frozen"})
    other = federate("hyperfl-frozen", **CHANGES)
    settings = small_settings()
    extractor = build_target("cnn", (1, 8, 8), 10).extractor
    hypernetwork = Hypernetwork(extractor, embedding_dim=4, hidden_width=8)
    arrays, _ = last_checkpoint(one)
    values = {key.partition("/")[2]: torch.tensor(value) for key, value in arrays.items()}
    hypernetwork.load_state_dict(values, assign=True)
    with torch.no_grad():
        theta = hypernetwork(common_embedding(4, "hyperfan-bias", int(settings["seed"]))).numpy()
    sent, _ = last_checkpoint(other)
    names = [name for name, _ in extractor.named_parameters()]
    flat = np.concatenate([sent[f"extractor/{name}"].ravel() for name in names])
    assert np.linalg.norm(flat - theta) < 1e-4 * np.linalg.norm(theta)
    for ours, theirs in zip(metrics(one), metrics(other), strict=True):
        assert ours["kind"] == theirs["kind"]
        for key in {"train_loss", "personalized_loss", "aggregate_loss", "hidden_squared_norm", "theta_norm"} & set(
            ours
        ):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-3)
    sizes = [json.loads((run / "summary.json").read_text())["bytes_up_per_client_round"] for run in (one, other)]
    assert sizes[0] > 8 * sizes[1]
