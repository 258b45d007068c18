"""A model on demand through Flower's simulation engine: the same messages, with a novel node in a Ray process."""

import csv
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings, trained

from clients.novel.on_demand import NovelOwner
from hyperfl_flwr.launch.app_bundle import build_app
from hyperfl_flwr.launch.flower.env import federation_config
from hyperfl_flwr.launch.flower.local_superlink import LocalSuperLink
from hyperfl_flwr.results.personalize import personalize

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def predictions(folder: Path) -> list[list[str]]:
    with (folder / "predictions.csv").open() as file:
        return list(csv.reader(file))


def test_a_simulated_novel_node_gets_what_one_in_this_process_gets(tmp_path: Path) -> None:
    """Predictions are equal; the server's log mentions the vector of 2 numbers."""
    run = trained(small_settings(method="it-pfl", target="mlp", output=str(tmp_path / "run")))
    data = tmp_path / "private.npz"
    np.savez(data, images=np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8))
    settings = {"personalize.run": run, "personalize.data": data, "personalize.output": tmp_path / "simulated"}
    with LocalSuperLink() as superlink:
        file = tmp_path / "settings.toml"
        file.write_text("".join(f'"{key}" = {json.dumps(str(value))}\n' for key, value in settings.items()))
        run_id = superlink.submit(build_app(superlink.home / "app"), file, federation_config(1, 1))
        while not (status := superlink.status(run_id)).finished:
            time.sleep(0.2)
        log, _ = superlink.read_log(run_id)
    assert status.completed, log
    here = NovelOwner(data=data, output=tmp_path / "here", device=torch.device("cpu"))
    served = personalize(run, here, {}).served
    assert f"novel client 0: {served.seen()}" in log
    assert "vector of 2 numbers" in served.seen()
    assert predictions(tmp_path / "simulated") == predictions(tmp_path / "here")
