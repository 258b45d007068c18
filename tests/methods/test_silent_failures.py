"""One record must not decide about a failure: with an ε of clients or weights, an owner's `max-epsilon`, `dp.epsilon`.

The server chooses what is trained, and sees which clients fail, without noise.
"""

import logging
from pathlib import Path

import numpy as np
import pytest
from federations import small_settings
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from noisy_clients import CLIPPED

from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import ARRAYS, CLIENTS, CONFIG, Report, Request, record_of
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.server.in_process_grid import InProcessGrid

OWN: Settings = {
    "num_clients": 2, "target": "mlp", "data.train-samples": "auto", "data.test-samples": "auto", "local-epochs": 1,
    "batch-size": 100,
}  # fmt: skip


def crafted(shape: tuple[int, ...], outputs: int) -> SharedArrays:
    """Return a perceptron whose first unit is active for large inputs alone, and overflows in the layers after it."""
    values = build_target("mlp", shape, outputs).state_dict().items()
    state = {f"model/{key}": np.zeros(tuple(value.shape), np.float32) for key, value in values}
    state["model/extractor.fc1.weight"][0], state["model/extractor.fc1.bias"][0] = 1.0, -50.0
    state["model/extractor.fc2.weight"][0, 0], state["model/classifier.weight"][0, 0] = 1e18, 1e25
    return state


def reply_of(settings: Settings, node: dict[str, Scalar], arrays: SharedArrays) -> RecordDict:
    """Return what a deployed node with own data replies to a request to train its client."""
    named = {key.replace("_", "-"): value for key, value in settings.items()}
    request = Request(round=1, experiment="a" * 16, run_directory="", clients=[0], versions=[0], kept_versions=[0])
    content = RecordDict({ARRAYS: pack_arrays(arrays), CONFIG: request.to_record()})
    reply = InProcessGrid(app, 2, named, node).answer(
        Message(content, dst_node_id=1000, message_type=MessageType.TRAIN)
    )
    assert not reply.has_error(), reply.error
    return reply.content


def report_in(content: RecordDict) -> Report:
    """Return the report in a reply."""
    return Report.from_record(record_of(content, CLIENTS, ConfigRecord))


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        (CLIPPED | {"method": "fedavg", "privacy.noise-multiplier": 30.0}, 500.0),
        (CLIPPED | {"method": "fedavg", "privacy.noise-multiplier": 30.0}, None),
        ({"method": "srr-fl"}, 1e9),
        ({"method": "srr-fl"}, None),
    ],
)
def test_a_crafted_model_says_nothing_about_a_record(
    changes: Settings, limit: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It overflows in training only if one record is there; the node's log alone says so."""
    caplog.set_level(logging.WARNING)
    images, labels = np.random.default_rng(0).integers(0, 120, (40, 8, 8)).astype(np.uint8), np.arange(40) % 10
    settings = small_settings() | changes | OWN | {"data.classes": ",".join("abcdefghij"), "learning-rate": 1.0}
    reports, uploads, diverged = [], [], []
    for record in (images[0], np.full((8, 8), 250, np.uint8)):
        own = np.concatenate([images[1:], record[np.newaxis]])
        np.savez(tmp_path / "own.npz", images=own, labels=labels, test_images=images, test_labels=labels)
        node: dict[str, Scalar] = {"state-dir": str(tmp_path / "state"), "data": f"npz:{tmp_path / 'own.npz'}"}
        caplog.clear()
        content = reply_of(settings, node | ({} if limit is None else {"max-epsilon": limit}), crafted((1, 8, 8), 10))
        reports.append(report_in(content))
        uploads.append(unpack_arrays(record_of(content, ARRAYS, ArrayRecord)))
        diverged.append("is not finite after training, so the client stays as before it" in caplog.text)
    assert [report.failures for report in reports] == [[], []]
    assert limit is None or reports[0].results == reports[1].results  # without metrics
    assert all(np.isfinite(value).all() for upload in uploads for value in upload.values())
    assert diverged == [False, True]


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
            content = reply_of(settings, node if limit is None else node | {"max-epsilon": limit}, {})
            found.append([failure.reason for failure in report_in(content).failures])
    diverged = ["FloatingPointError, see the node's log"]
    assert found == [[], diverged, [], []]


@pytest.mark.parametrize("limit", [None, 4.0])
def test_an_infinite_error_on_validation_data_is_no_failure(limit: float | None, tmp_path: Path) -> None:
    """The best model has a merit of minus infinity if its outputs for one of the held-back samples overflow."""
    settings = small_settings(method="fedavg") | OWN | {
        "task": "regression", "data.target-scale": "0/1", "data.normalisation": "0/1", "data.validation-fraction": 0.5,
        "keep": "best", "learning-rate": 1e-12, "dp.epsilon": 4.0,
    }  # fmt: skip
    features = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    features[:, 0] = 100.0  # all samples: some are held back
    own = tmp_path / "own.npz"
    few = np.zeros((5, 8), np.float32)
    np.savez(own, features=features, labels=features[:, 1:2], test_features=few, test_labels=few[:, :1])
    node: dict[str, Scalar] = {"state-dir": str(tmp_path), "data": f"npz:{own}"}
    report = report_in(reply_of(settings, node if limit is None else node | {"max-epsilon": limit}, crafted((8,), 1)))
    assert [failure.reason for failure in report.failures] == []
    assert [result.client for result in report.results] == [0]
