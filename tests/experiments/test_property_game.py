"""Property games on real federations, from the command to its report: both controls, and what is drawn."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from federations import small_settings
from html_pages import Page
from typer.testing import CliRunner

from hyperfl_flwr.audit.membership.shadow_runs import check_failures, open_game, play_some
from hyperfl_flwr.audit.property.attacks import by_bias, views_in
from hyperfl_flwr.audit.property.game import PropertyGame
from hyperfl_flwr.audit.property.views import ACCURACIES, views_of
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.cli.shadow_federations import play_all
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError, RunFailedError
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.data.registry import load_dataset

FEDERATIONS = 8

ONE_STEP = {
    "num-clients": 2, "num-rounds": 1, "local-epochs": 1, "batch-size": 20, "data.train-samples": 20, "target": "mlp",
    "data.test-samples": 10, "learning-rate": 0.1, "device": "cpu",
}  # fmt: skip
"""Each client takes one step with all of its samples: the bias gradient counts them."""


@pytest.fixture(scope="module", autouse=True)
def _without_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def game_of(method: str = "fedavg", label: int = 0, largest_share: float = 0.6, **changes: object) -> PropertyGame:
    given = {key.replace("_", "-"): value for key, value in changes.items()}
    settings = small_settings(method=method) | ONE_STEP | given
    return PropertyGame(settings=settings, federations=FEDERATIONS, label=label, largest_share=largest_share)


def test_one_step_reveals_the_share_and_permuted_shares_do_not(tmp_path: Path) -> None:
    """The positive and the negative control, for one upload and for the sum."""
    folder = tmp_path / "game"
    settings = [word for key, value in ONE_STEP.items() for word in ("--set", f"{key}={value}")]
    words = ["property", "--method", "fedavg", "--label", "3", "--federations", str(FEDERATIONS), "--jobs", "1",
             *settings, "--output", str(folder)]  # fmt: skip
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads((folder / "property.json").read_text())
    assert set(document["views"]) == {"upload", "sum", "model"}
    for view in ("upload", "sum"):
        found = document["views"][view]
        assert found["bias"]["r2"]["interval"][0] > 0.99, view
        assert found["bias"]["error"]["value"] < 0.01, view
        assert found["permuted"]["r2"]["value"] < 0.1, view
        assert found["prior"]["r2"]["value"] <= 0, view
    assert document["views"]["upload"]["bias"]["auc"]["value"] == 1.0
    assert "bias" not in document["views"]["model"]
    lines = result.stdout.splitlines()
    assert lines[0].startswith("The server with a client's first upload estimates the share of class 3 in the client's")
    assert lines[1].startswith(
        "Whoever has the sums of all rounds estimates the share of class 3 in the data of all cl"
    )
    assert lines[-1] == str(folder / "property.html")
    page = Page((folder / "property.html").read_text())
    assert page.title == "fedavg on digits: property inference"
    assert len(page.figures) == 3
    with pytest.raises(RunDirectoryError, match="was created with other settings"):
        open_game(game_of(label=4), folder)


def test_clients_draw_their_shares_from_halves_without_a_common_sample(tmp_path: Path) -> None:
    game = game_of(label=7)
    data = game.load()
    labels = data.dataset.train.labels
    used = [set(), set()]
    for number in range(FEDERATIONS):
        parts = data.drawn(number)
        together = np.concatenate(parts)
        assert len(set(together)) == len(together) == 40
        used[number % 2] |= set(together)
        for client, positions in enumerate(parts):
            counts = np.bincount(labels[positions], minlength=10)
            assert counts[7] == data.counts[number, client]
            others = np.delete(counts, 7)
            assert others.max() - others.min() <= 1
    assert not used[0] & used[1]
    assert data.counts.max() <= 12
    assert len(np.unique(data.counts)) > 5
    np.testing.assert_array_equal(data.shares * 20, data.counts)
    game.write_samples(data, 3, tmp_path / "samples.npz")
    written = load_dataset(f"npz:{tmp_path / 'samples.npz'}", None)
    for client, positions in enumerate(data.drawn(3)):
        own = written.train.clients == client
        assert np.array_equal(written.train.images[own], data.dataset.train.images[positions])


def test_an_extractor_is_observed_without_a_classifier(tmp_path: Path) -> None:
    """Two rounds of two clients: features of the extractor's change, no bias gradient; the export has a classifier."""
    game = game_of("fedrep", num_rounds=2)
    assert views_of(game.config) == ["upload", "server", "sum", "model"]
    play_some(game, tmp_path, [0])
    found = read_arrays(tmp_path / "observed-000.npz")[0]
    uploads = {name: values.shape for name, values in found.items() if name.startswith("upload/")}
    assert uploads
    assert all(name.startswith("upload/extractor/") and shape[:2] == (2, 2) for name, shape in uploads.items())
    assert {"model/classifier.weight", "model/classifier.bias"} < set(found)
    assert not {"bias", "class_bias"} & set(found)
    assert all(0 <= found[name] <= 1 for name in ACCURACIES)


def test_a_sum_is_attacked_with_the_mean_network_alone(tmp_path: Path) -> None:
    """Its gradients of classes are not the mean of those of the clients' networks, which nobody sees in a sum."""
    game = game_of("fedavg", **{"batch-size": 5, "learning-rate": 1.0})
    play_some(game, tmp_path, [0])
    found = read_arrays(tmp_path / "observed-000.npz")[0]
    np.testing.assert_allclose(found["sum_bias"][0], found["bias"].mean(axis=0), atol=1e-6)
    assert np.abs(found["sum_class_bias"][0] - found["class_bias"].mean(axis=0)).max() > 1e-3
    views = views_in(game.config, [found], game.load().shares[:1], 0)
    np.testing.assert_array_equal(views["sum"].class_gradients, [found["sum_class_bias"]])
    np.testing.assert_array_equal(views["upload"].class_gradients, [found["class_bias"]])


@pytest.mark.parametrize("batch_size", [20, 50])
def test_clipped_gradients_of_samples_reveal_the_share(batch_size: int, tmp_path: Path) -> None:
    """With the attacker's gradients clipped and divided as the clients' are; the noise of epsilon = 500 is small."""
    noisy = {"dp.epsilon": 500.0, "dp.clip-norm": 1.0, "batch-size": batch_size, "target": "cnn", "num-clients": 4}
    game = game_of("fedavg", **noisy)
    play_some(game, tmp_path, [0])
    found = read_arrays(tmp_path / "observed-000.npz")[0]
    truth = game.load().shares[0]
    for view, expected in (("upload", truth), ("sum", truth.mean())):
        shown = views_in(game.config, [found], truth[None], 0)[view]
        assert np.abs(by_bias(shown, np.array([0]), np.array([0])) - np.reshape(expected, (-1, 1))).mean() < 0.05, view


@pytest.mark.parametrize(
    ("method", "views"),
    [("local", ["model"]), ("pfedhn", ["upload", "model"]), ("hyperfl", ["upload", "sum", "model"]),
     ("priv-hfl", ["upload", "model"]), ("knn-per", ["upload", "sum"]), ("fedakd", ["model"])],
)  # fmt: skip
def test_what_the_attackers_of_a_method_have(method: str, views: list[str]) -> None:
    """Local-only training sends nothing; sums of different starts and predictions of samples are not attacked."""
    game = game_of(method)
    assert views_of(game.config) == views
    assert game.records_uploads == ("upload" in views)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"label": 10}, "one of 0 to 9 of digits, got 10"), ({"largest_share": 0.0}, "above 0 and at most 1, got 0"),
     ({"data.train-samples": 200}, r"must be 5 to \d+ for 2 clients .* got 200"),
     ({"largest_share": 0.04}, "at least one of a client's 20 samples, got 0.04"),
     ({"num_clients": 40, "data.train-samples": "auto"}, r"at least 5 .* has 3 for each of 40 clients")],
)  # fmt: skip
def test_unsuitable_settings_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        game_of(**changes).load()


def test_a_refused_game_leaves_no_folder(tmp_path: Path) -> None:
    """So that the command can be repeated with another label."""
    with pytest.raises(ConfigError, match="one of 0 to 9"):
        play_all(game_of(label=10), tmp_path / "game", 1)
    assert not (tmp_path / "game").exists()


def test_a_federation_that_cannot_be_trained_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"federation 0 cannot be trained: every client failed: .*/failures$"):
        play_some(game_of(**{"learning-rate": 1e12}), tmp_path, [0])


def test_noise_of_secure_sums_is_refused() -> None:
    """Each node adds only its share, so that the recorded uploads have less noise than the sum."""
    noise = {"privacy.unit": "client", "privacy.clip-norm": 1.0, "privacy.noise-multiplier": 1.0}
    with pytest.raises(ConfigError, match=r"must be local or server, .* got 'sum'"):
        game_of(**noise, **{"privacy.noise": "sum", "secagg.enabled": True})


def test_with_secure_sums_nobody_has_single_uploads(tmp_path: Path) -> None:
    """The sums are those of the federation without them."""
    game = game_of("fedavg", num_rounds=2, **{"secagg.enabled": True})
    assert views_of(game.config) == ["sum", "model"]
    play_some(game, tmp_path, [0])
    found = read_arrays(tmp_path / "observed-000.npz")[0]
    assert list(views_in(game.config, [found], game.load().shares[:1], 0)) == ["sum", "model"]
    (tmp_path / "observed-000.npz").unlink()
    play_some(game_of("fedavg", num_rounds=2), tmp_path, [0])
    without = read_arrays(tmp_path / "observed-000.npz")[0]
    np.testing.assert_array_equal(found["sum_bias"], without["sum_bias"])


def test_networks_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must train the same network.*got cnn, mlp"):
        game_of("pfedhn", **{"pfedhn.targets": "cnn,mlp"})


def test_a_client_that_failed_ends_the_game(tmp_path: Path) -> None:
    """Attacks on the others would have shadows that miss a client's uploads."""
    (tmp_path / "failures").mkdir()
    check_failures(tmp_path, 2)
    (tmp_path / "failures" / "round-000001-client-00002.txt").write_text("node 0: its update is too large\n\ndetails")
    with pytest.raises(RunFailedError, match="in federation 2, round 000001 client 00002 failed: node 0: its update"):
        check_failures(tmp_path, 2)
