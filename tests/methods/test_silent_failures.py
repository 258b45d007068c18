"""One record must not decide about a failure: with an owner's `max-epsilon`, or of records under `dp.epsilon`.

The server chooses what is trained, and sees which clients fail, without noise.
"""

from pathlib import Path

import numpy as np
import pytest
from federations import small_settings
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import ARRAYS, CLIENTS, CONFIG, Report, Request, record_of
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.server.in_process_grid import InProcessGrid

OWN: Settings = {
    "num_clients": 2, "target": "mlp", "data.train-samples": "auto", "data.test-samples": "auto", "local-epochs": 1,
    "batch-size": 100,
}  # fmt: skip


def report_of(settings: Settings, node: dict[str, Scalar], arrays: SharedArrays) -> Report:
    """Return a deployed node's report on the training of its client, with own data."""
    named = {key.replace("_", "-"): value for key, value in settings.items()}
    request = Request(round=1, experiment="a" * 16, run_directory="", clients=[0], versions=[0], kept_versions=[0])
    content = RecordDict({ARRAYS: pack_arrays(arrays), CONFIG: request.to_record()})
    reply = InProcessGrid(app, 2, named, node).answer(
        Message(content, dst_node_id=1000, message_type=MessageType.TRAIN)
    )
    assert not reply.has_error(), reply.error
    return Report.from_record(record_of(reply.content, CLIENTS, ConfigRecord))


def test_training_alone_says_nothing_about_a_record_of_a_limited_budget(tmp_path: Path) -> None:
    """A normalisation with which bright images overflow: one client trains on such an image, the other does not."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 120, (40, 8, 8)).astype(np.uint8), np.arange(40) % 10
    settings = small_settings(method="local") | OWN | {
        "learning-rate": 100.0, "data.normalisation": "0/3e-38", "data.classes": ",".join("abcdefghij"),
    }  # fmt: skip
    found = []
    for limit in (None, 4.0):
        for brightness in (100, 250):
            own = tmp_path / f"{limit}-{brightness}"
            own.mkdir()
            bright = np.concatenate([images[1:], np.full((1, 8, 8), brightness, np.uint8)])
            np.savez(own / "own.npz", images=bright, labels=labels, test_images=images, test_labels=labels)
            node: dict[str, Scalar] = {"state-dir": str(own), "data": f"npz:{own / 'own.npz'}"}
            report = report_of(settings, node if limit is None else node | {"max-epsilon": limit}, {})
            found.append([failure.reason for failure in report.failures])
    diverged = ["FloatingPointError, see the node's log"]
    assert found == [[], diverged, [], []]


@pytest.mark.parametrize("limit", [None, 4.0])
def test_an_infinite_error_on_validation_data_is_no_failure(limit: float | None, tmp_path: Path) -> None:
    """The best model has a merit of minus infinity if its outputs for one of the held-back samples overflow."""
    settings = small_settings(method="fedavg") | OWN | {
        "task": "regression", "data.target-scale": "0/1", "data.normalisation": "0/1", "data.validation-fraction": 0.5,
        "keep": "best", "learning-rate": 1e-12, "dp.epsilon": 4.0,
    }  # fmt: skip
    state = build_target("mlp", (8,), 1).state_dict()
    arrays = {f"model/{name}": np.zeros(tuple(value.shape), np.float32) for name, value in state.items()}
    arrays["model/extractor.fc1.weight"][0, 0], arrays["model/extractor.fc1.bias"][0] = 1.0, -50.0
    arrays["model/extractor.fc2.weight"][0, 0], arrays["model/classifier.weight"][0, 0] = 1e18, 1e25
    features = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    features[:, 0] = 100.0  # all samples: some are held back
    own = tmp_path / "own.npz"
    few = np.zeros((5, 8), np.float32)
    np.savez(own, features=features, labels=features[:, 1:2], test_features=few, test_labels=few[:, :1])
    node: dict[str, Scalar] = {"state-dir": str(tmp_path), "data": f"npz:{own}"}
    report = report_of(settings, node if limit is None else node | {"max-epsilon": limit}, arrays)
    assert [failure.reason for failure in report.failures] == []
    assert [result.client for result in report.results] == [0]
