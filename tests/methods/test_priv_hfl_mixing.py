"""PRIV-HFL with the clients' secret rotation: the models stay the same, and the server sees rotated vectors only."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_priv_hfl import CHAIN, FOUR, counted_models, keep_versions, start_vector

from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.rng import seed_for
from hyperfl_flwr.privacy.secret_rotation import Mixing, run_key
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.server.in_process_grid import InProcessGrid

PLAN: dict[str, Any] = {**FOUR, "num_rounds": 4, "checkpoint_every": 1, "learning-rate": 0.05, "priv-hfl.sigma": 0.5}
MIXED = {"priv-hfl.mixing": True}
SECRET = b"a secret of the nodes' owners"


def simulated_key() -> bytes:
    return seed_for(0, "mixing").to_bytes(8, "big")


def turned_back(array: np.ndarray, key: bytes) -> np.ndarray:
    return Mixing(key, len(array)).unmix(torch.from_numpy(array)).numpy()


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("changes", [{}, CHAIN, {"priv-hfl.order": "published"}], ids=["mean", "chain", "published"])
def test_a_mixed_run_has_the_models_of_the_plain_one(
    changes: dict[str, Any], federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After four rounds the models agree in float32; the server's arrays have the same shapes and are rotated."""
    keep_versions(monkeypatch)
    plan = PLAN | {"priv-hfl.dual-step": 0.1} | changes
    plain, mixed = federate("priv-hfl", **plan), federate("priv-hfl", **plan, **MIXED)
    models = counted_models(plain, 4)
    np.testing.assert_allclose(counted_models(mixed, 4), models, rtol=0, atol=2e-5)
    assert np.abs(models - start_vector()).max() > 1e-2
    (here, _), (there, _) = last_checkpoint(plain), last_checkpoint(mixed)
    assert {key: value.shape for key, value in here.items()} == {key: value.shape for key, value in there.items()}
    for key, value in here.items():
        for row, other in zip(value.reshape(-1, value.shape[-1]), there[key].reshape(-1, value.shape[-1]), strict=True):
            assert abs(cosine(row, other)) < 0.1
            np.testing.assert_allclose(turned_back(other, simulated_key()), row, rtol=0, atol=1e-4)


def test_what_is_clipped_and_noised_is_what_counts_behind_the_rotation(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping precedes mixing, which keeps norms: the server's sum, rotated back, is the mean of the models."""
    keep_versions(monkeypatch)
    plan = {**PLAN, **MIXED, "num_rounds": 2, "privacy.clip-norm": 0.005, "privacy.noise-multiplier": 0.01}
    run = federate("priv-hfl", **plan)
    for number in (1, 2):
        arrays, _ = Checkpoints(run / "checkpoints").load(number)
        counted = counted_models(run, number)
        mean = turned_back(arrays["server/consensus"], simulated_key())
        np.testing.assert_allclose(mean, counted.mean(axis=0) - start_vector(), rtol=0, atol=1e-7)
    moved = np.linalg.norm(counted_models(run, 1) - start_vector(), axis=1)
    noise = 0.005 * 0.01 * np.sqrt(len(start_vector()))
    np.testing.assert_allclose(moved, np.hypot(0.005, noise), rtol=0.02)


def test_with_the_projection_the_path_is_another_one(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection lambda >= 0 acts on single numbers, so a rotation changes the models, but less than training."""
    keep_versions(monkeypatch)
    plan = PLAN | CHAIN | {"priv-hfl.projection": True, "priv-hfl.dual-step": 0.4}
    plain, mixed = (counted_models(federate("priv-hfl", **plan, **each), 4) for each in ({}, MIXED))
    assert np.abs(plain - mixed).max() > 1e-4
    assert np.linalg.norm(plain - mixed) < np.linalg.norm(plain - start_vector())


class OwnersGrid(InProcessGrid):
    """Nodes with owners, with or without a key file."""

    def __init__(self, num_nodes: int, settings: Settings, folder: Path, key: bytes | None) -> None:
        owned = {"state-dir": str(folder / "states")}
        if key is not None:
            (folder / "key").write_bytes(key)
            owned["mixing-key-file"] = str(folder / "key")
        super().__init__(app, num_nodes, settings, owned)


def test_nodes_with_owners_mix_by_their_key_file(federate: Federate, tmp_path: Path) -> None:
    """Rotated back with the key file and run id, the server's sum is the plain run's; the seed does not help."""

    def nodes(num_nodes: int, settings: Settings) -> OwnersGrid:
        return OwnersGrid(num_nodes, settings, tmp_path, SECRET)

    run, plain = federate("priv-hfl", grid=nodes, **PLAN, **MIXED), federate("priv-hfl", **PLAN)
    experiment = read_manifest(run)["experiment"]
    (arrays, _), (expected, _) = last_checkpoint(run), last_checkpoint(plain)
    key = "server/consensus"
    found = turned_back(arrays[key], run_key(SECRET, experiment))
    np.testing.assert_allclose(found, expected[key], rtol=0, atol=2e-5)
    assert abs(cosine(turned_back(arrays[key], simulated_key()), expected[key])) < 0.1
    said = "".join(path.read_text(errors="replace") for path in run.rglob("*") if path.suffix in (".json", ".log"))
    assert SECRET.decode() not in said


@pytest.mark.parametrize(
    ("key", "message"),
    [(None, "start the SuperNode with mixing-key-file="), (b"short", "must have at least 16 bytes")],
)
def test_a_node_without_a_good_key_takes_no_part(
    key: bytes | None, message: str, federate: Federate, tmp_path: Path
) -> None:
    refused = {"node_timeout": 0.5} | PLAN | MIXED
    with pytest.raises(RunFailedError, match=f"node 0 is refused: .*{message}"):
        federate("priv-hfl", grid=lambda number, s: OwnersGrid(number, s, tmp_path, key), **refused)
    federate("priv-hfl", grid=lambda number, s: OwnersGrid(number, s, tmp_path, key), **PLAN | {"num_rounds": 1})
