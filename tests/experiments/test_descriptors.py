"""What descriptors reveal about novel clients, from a run's folder to descriptors.json."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings, trained
from typer.testing import CliRunner

from hyperfl_flwr.app.personalize import open_run
from hyperfl_flwr.audit.descriptors import measure_descriptors
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import files_below
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.data.federated_data import load_federated_data, normalised
from hyperfl_flwr.protocol.packing import unpack_arrays

NOVEL = [5, 6, 7]
CLASSES = 10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on digits with three novel clients of two classes each, too short to learn anything."""
    settings = small_settings(
        method="it-pfl", target="mlp", output=str(tmp_path_factory.mktemp("descriptors") / "run"),
        **{"novel.clients": len(NOVEL), "data.partition": "shards", "pfedhn.embedding-dim": 4},
    )  # fmt: skip
    return trained(settings)


def test_estimates_are_those_of_the_models_of_the_descriptors(run: Path) -> None:
    """Estimates equal the mean softmax of h(g(D)) over all test images of the training clients (fewer than 1,000).

    With epsilon 1e8 the noise is 3e-6, negligible compared with mean features of about 0.05; with 0.1 it dominates.
    """
    before = files_below(run)
    document = measure_descriptors(run, {"novel.epsilons": "none,0.1,1e8"})
    assert files_below(run) == before
    source = open_run(run)
    data = load_federated_data(source.config.data_settings())
    encoder, target = source.recipe.new_encoder(), source.recipe.new_target()
    arrays = {key.partition("/")[2]: torch.tensor(array) for key, array in unpack_arrays(source.encoder).items()}
    encoder.load_state_dict(arrays, assign=True)
    test = [set(data.test_indices(client).tolist()) for client in range(8)]
    indices = np.array(sorted(set().union(*test[:5]) - set().union(*test[5:])))
    images = normalised(data.dataset.test.scaled(indices), data.dataset.mean, data.dataset.std)
    assert (document["clients"], document["images"]) == (NOVEL, len(images))
    plain, noisy, nearly = (np.array(entry["estimates"]) for entry in document["by_epsilon"])
    hypernetwork = source.strategy.server.hypernetwork
    for row, client in enumerate(NOVEL):
        labels = data.dataset.train.labels[data.train_indices(client)]
        np.testing.assert_allclose(document["truth"][row], np.bincount(labels, minlength=CLASSES) / 40)
        with torch.no_grad():
            theta = hypernetwork(encoder(data.client(client).train_images))
            target.load_state_dict(hypernetwork.split(theta), assign=True)
            expected = torch.softmax(target(images), dim=1).mean(dim=0)
        np.testing.assert_allclose(plain[row], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(nearly, plain, rtol=0, atol=1e-3)
    assert np.abs(noisy - plain).max() > 1e-3


def test_the_measures_are_those_of_estimates_and_truth(run: Path) -> None:
    """Distances are half the sum of absolute differences; equal class shares have no ranks."""
    document = measure_descriptors(run, {"novel.epsilons": "none"})
    (entry,) = document["by_epsilon"]
    estimates, truth = np.array(entry["estimates"]), np.array(document["truth"])
    distances = np.abs(estimates[:, None] - truth[None]).sum(axis=2) / 2
    own = entry["own"]["total_variation"]
    np.testing.assert_allclose(own["per_client"], np.diag(distances), rtol=0, atol=1e-12)
    assert own["mean"] == pytest.approx(np.diag(distances).mean())
    assert own["sem"] == pytest.approx(np.diag(distances).std(ddof=1) / 3**0.5)
    others = (distances.sum(axis=0) - np.diag(distances)) / 2
    np.testing.assert_allclose(entry["other_client"]["total_variation"]["per_client"], others, rtol=0, atol=1e-12)
    shares = np.abs(truth - 1 / CLASSES).sum(axis=1) / 2
    np.testing.assert_allclose(entry["uniform"]["total_variation"]["per_client"], shares, rtol=0, atol=1e-12)
    assert entry["uniform"]["rank_correlation"] == {"mean": None, "sem": None, "per_client": [None] * 3}


def test_the_command_prints_a_row_per_epsilon(run: Path, tmp_path: Path) -> None:
    words = ["descriptors", str(run), "--epsilons", "none,10", "--delta", "0.001", "--output", str(tmp_path / "found")]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads((tmp_path / "found" / "descriptors.json").read_text())
    assert [entry["epsilon"] for entry in document["by_epsilon"]] == [None, 10.0]
    assert document["delta"] == 0.001
    mean = document["by_epsilon"][1]["own"]["total_variation"]["mean"]
    (line,) = [line for line in result.output.splitlines() if " 10 " in line]
    assert f"{mean:.2f}" in line
    assert result.output.split()[-1] == str(tmp_path / "found" / "descriptors.json")


def test_a_run_without_novel_clients_is_refused(federate: Federate) -> None:
    with pytest.raises(RunDirectoryError, match="has 0 novel clients, but at least 2 are needed"):
        measure_descriptors(federate("it-pfl", target="mlp"), {})
