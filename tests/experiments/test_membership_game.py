"""Membership games on real federations, from the command to its report: both controls, resumption, what is compared."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings
from html_pages import Page
from sklearn.linear_model import Ridge
from typer.testing import CliRunner

from hyperfl_flwr.attacks.knowledge import TrainingKnowledge
from hyperfl_flwr.attacks.readout import Readout, read_out
from hyperfl_flwr.audit.membership import shadow_views
from hyperfl_flwr.audit.membership.game import MembershipGame
from hyperfl_flwr.audit.membership.results import is_recognised
from hyperfl_flwr.audit.membership.shadow_data import draws_of, load_shadow_data
from hyperfl_flwr.audit.membership.shadow_runs import open_game, play_some
from hyperfl_flwr.audit.membership.shadow_views import fit_classifier, view_title, views_of
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError, RunFailedError
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.observation import Observation

FEDERATIONS = 8

OVERFITTED = {
    "num-clients": 2, "num-rounds": 2, "local-epochs": 8, "batch-size": 4, "data.train-samples": 16, "target": "mlp",
    "data.test-samples": 10, "learning-rate": 0.1, "device": "cpu",
}  # fmt: skip
"""Each client takes 16 epochs over 8 samples: its model knows them by heart."""


@pytest.fixture(scope="module", autouse=True)
def _without_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def words_of(folder: Path, method: str = "fedavg", **changes: object) -> list[str]:
    given = OVERFITTED | {key.replace("_", "-"): value for key, value in changes.items()}
    settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    return ["membership", "--method", method, "--federations", str(FEDERATIONS), "--jobs", "1", *settings,
            "--output", str(folder)]  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a finished game by the command, and what the command has printed."""
    folder = tmp_path_factory.mktemp("membership") / "game"
    result = CliRunner().invoke(cli, words_of(folder), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder, result.stdout


def game_of(method: str = "fedavg", **changes: object) -> MembershipGame:
    given = {key.replace("secagg_", "secagg.").replace("_", "-"): value for key, value in changes.items()}
    return MembershipGame(settings=small_settings(method=method) | OVERFITTED | given, federations=FEDERATIONS)


def vectors(path: Path) -> Path:
    """Write feature vectors of two classes to a file; return it."""
    rng, labels = np.random.default_rng(0), np.arange(120) % 2
    features = (rng.normal(size=(120, 5)) + labels[:, None]).astype(np.float32)
    np.savez(path, features=features[:80], labels=labels[:80], test_features=features[80:], test_labels=labels[80:])
    return path


def test_an_overfitted_model_is_recognised_and_samples_of_nobody_are_not(played: tuple[Path, str]) -> None:
    """The positive and the negative control, for every attacker."""
    folder, printed = played
    document = json.loads((folder / "membership.json").read_text())
    assert set(document["views"]) == {"server", "client", "model"}
    assert document["members"] == document["non_members"] == FEDERATIONS * 2 * 8
    for view, found in document["views"].items():
        assert found["lira"]["auc"]["value"] > 0.6, view
        assert found["loss"]["auc"]["interval"][0] > 0.5, view
        for control in ("control", "loss-control"):
            low, high = found[control]["auc"]["interval"]
            assert low < 0.5 < high, (view, control)
        assert found["control"] != found["loss-control"], view
        assert found["lira"]["true_positives"] == {"0.01": None, "0.001": None}  # 128 non-members are too few
    assert is_recognised(document, "server")
    assert is_recognised(document, "model")
    assert document["views"]["server"]["lira"]["auc"]["value"] > document["views"]["client"]["lira"]["auc"]["value"]
    assert printed.startswith("The server, from the client's uploads of all rounds, recognises members. The likeli")
    assert "false positives" not in printed
    assert printed.splitlines()[-1] == str(folder / "membership.html")
    page = Page((folder / "membership.html").read_text())
    assert page.title == "fedavg on digits: membership inference"
    assert len(page.figures) == 3


@pytest.mark.extended
def test_a_game_goes_on_where_it_was_interrupted_and_repeats_its_numbers(
    played: tuple[Path, str], tmp_path: Path
) -> None:
    """Federations that are trained again, in two processes, give the same bits; the others are not trained again."""
    folder = Path(shutil.copytree(played[0], tmp_path / "game"))
    files = sorted(folder.glob("observed-*.npz"))
    before = [read_arrays(file)[0] for file in files]
    kept = [file.stat().st_mtime_ns for file in files]
    for number in (3, 4):
        files[number].unlink()
    (folder / "federation-003").mkdir()  # what an interruption leaves
    result = CliRunner().invoke(cli, [*words_of(folder), "--jobs", "2"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    after = [read_arrays(file)[0] for file in files]
    assert [file.stat().st_mtime_ns == time for file, time in zip(files, kept, strict=True)] == [
        number not in (3, 4) for number in range(FEDERATIONS)
    ]
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(np.array_equal(old[key], new[key]) for key in old)
    views = [json.loads((each / "membership.json").read_text())["views"] for each in (played[0], folder)]
    assert views[0] == views[1]
    assert not list(folder.glob("federation-*"))


def test_a_folder_of_other_settings_is_refused(played: tuple[Path, str], tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, [*words_of(played[0]), "--set", "seed=1"])
    assert isinstance(result.exception, RunDirectoryError)
    assert "was created with other settings" in str(result.exception)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="not the folder of a membership game"):
        open_game(game_of(), tmp_path)


def test_a_federation_trains_on_its_draws_and_on_nothing_else(tmp_path: Path) -> None:
    """The file has the drawn samples by client; the attacker's samples and the controls are not among them."""
    data = load_shadow_data(game_of().config)
    drawn, _ = draws_of(data, 0, FEDERATIONS)
    game_of().write_samples(data, 5, tmp_path / "samples.npz")
    written = load_dataset(f"npz:{tmp_path / 'samples.npz'}", None)
    for client, pool in enumerate(data.pools):
        own = written.train.clients == client
        chosen = pool[drawn[client][5]]
        assert np.array_equal(written.train.images[own], data.dataset.train.images[chosen])
        assert np.array_equal(written.train.labels[own], data.dataset.train.labels[chosen])
    assert np.array_equal(written.test.labels, data.dataset.test.labels[data.known])
    assert not set(data.known) & set(data.controls)
    assert len(data.controls) == 16


def test_the_only_client_s_upload_is_the_aggregate_and_the_exported_model(tmp_path: Path) -> None:
    """With one client, the server sees in the last round what is exported; there is no other client."""
    game = game_of(num_clients=1)
    play_some(game, tmp_path, [0])
    found = read_arrays(tmp_path / "observed-000.npz")[0]
    assert set(found) == {"server/0", "model/0"}
    assert found["server/0"].shape == (2, 32)
    np.testing.assert_allclose(found["server/0"][-1:], found["model/0"], rtol=1e-5, atol=1e-5)
    assert not np.allclose(found["server/0"][0], found["server/0"][1])


@pytest.mark.parametrize(
    ("method", "changes", "views"),
    [("fedrep", {}, ("server", "client", "model")), ("local", {}, ("model",)),
     ("hyperfl", {"target": "cnn"}, ("server", "model")),
     ("hyperfl", {"target": "own_networks:without_bias"}, ("server", "model")),
     ("hyperfl", {"target": "own_networks:build"}, ("server", "model")),  # which has dropout
     ("hyperfl", {"dataset": "vectors"}, ("server", "model")),
     ("pfedhn", {"pfedhn.targets": "cnn,mlp"}, ("server", "client", "model"))],
)  # fmt: skip
def test_what_the_attackers_of_a_method_have(
    method: str, changes: dict[str, object], views: tuple[str, ...], tmp_path: Path
) -> None:
    """FedRep shares an extractor, for which the attacker fits a classifier; HyperFL's is read off the upload.

    Of HyperFL any network and any samples will do. With two networks, another client receives parameters of its own.
    """
    if "dataset" in changes:
        changes = {"dataset": f"npz:{vectors(tmp_path / 'vectors.npz')}"}
    game = game_of(method, **({"local_epochs": 1} | changes))
    assert tuple(views_of(game.config)) == views
    play_some(game, tmp_path, [0])
    found = read_arrays(tmp_path / "observed-000.npz")[0]
    rounds = {"server": 2, "client": 1, "model": 1}
    assert {key: array.shape for key, array in found.items()} == {
        f"{view}/{client}": (rounds[view], 32) for view in views for client in range(2)
    }
    assert all(np.isfinite(array).all() for array in found.values())


def test_the_uploads_of_fedbn_are_left_out_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients keep the normalisation layers, without which no network is sent; the exported models have them."""
    monkeypatch.chdir(Path(__file__).parents[1])  # the network's source
    folder = tmp_path / "game"
    words = words_of(folder, method="fedbn", target="own_networks:with_batchnorm", local_epochs=1)
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads((folder / "membership.json").read_text())
    assert list(document["views"]) == ["model"]
    assert list(document["left_out"]) == ["server", "client"]
    lines = result.stdout.splitlines()
    reason = "is not measured: the clients keep their normalisation layers, without which"
    assert lines[1].startswith(f"The server, from the client's uploads of all rounds, {reason}")
    assert lines[2].startswith(f"Another client, from what it receives in all rounds, {reason}")
    page = (folder / "membership.html").read_text()
    assert page.count("is not measured") == 2


def test_an_upload_that_nothing_can_be_read_off_is_named(tmp_path: Path) -> None:
    """A step that rounding to float32 leaves without effect changes nothing."""
    with pytest.raises(RunFailedError, match="cannot be read off what client 0 has uploaded: the reply equals"):
        play_some(game_of("hyperfl", target="cnn", local_epochs=1, learning_rate=1e-30), tmp_path, [0])


def test_with_secure_sums_the_server_has_what_clients_receive_next(tmp_path: Path) -> None:
    """It opens a mean in each round, the same for all clients, and sends it in the next round; it sees no upload."""
    game = game_of(num_clients=3, local_epochs=1, secagg_enabled=True)
    assert game.config.secagg.enabled
    play_some(game, tmp_path, [0])
    found = read_arrays(tmp_path / "observed-000.npz")[0]
    for client in range(3):
        np.testing.assert_allclose(found[f"server/{client}"][:1], found[f"client/{client}"], rtol=1e-3, atol=1e-3)
        assert not np.allclose(found[f"server/{client}"][0], found[f"server/{client}"][1], rtol=1e-2)
    plain = game_of(num_clients=3, local_epochs=1)
    (tmp_path / "plain").mkdir()
    play_some(plain, tmp_path / "plain", [0])
    uploads = read_arrays(tmp_path / "plain" / "observed-000.npz")[0]
    assert not np.allclose(uploads["server/0"][0], found["server/0"][0], rtol=1e-2)
    assert view_title("server", is_secure=True) == "the server, from the sums that it opens in all rounds"


def test_a_sum_of_hypernetworks_is_read_with_the_steps_of_one_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An opening counts the samples of all clients; taken for one client's, its θ would be off by their number."""
    ranks = []

    def reading(observation: Observation, known: TrainingKnowledge) -> Readout:
        found = read_out(observation, known)
        ranks.append(found.findings["rank"])
        return found

    monkeypatch.setattr(shadow_views, "read_out", reading)
    changes = {"target": "cnn", "local_epochs": 2, "hyperfl.embedding": "common-frozen", "weight-decay": 0.01}
    play_some(game_of("hyperfl", num_clients=3, secagg_enabled=True, **changes), tmp_path, [0])
    assert set(ranks) == {1}


def test_the_settings_of_a_run_that_a_game_does_not_need_are_left_out(tmp_path: Path) -> None:
    """The number of nodes and novel clients of a run are not those of the game's federations."""
    game = game_of("pfedhn", **{"num-nodes": 4, "novel.clients": 2})
    config = game.of_federation(load_shadow_data(game.config), tmp_path / "samples.npz", tmp_path / "run")
    assert (config.num_nodes, config.novel.clients) == ("auto", 0)


def test_the_attacker_s_classifier_is_ridge_regression() -> None:
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(30, 4)), rng.integers(0, 3, 30)
    fitted = fit_classifier(torch.tensor(features), torch.tensor(labels), build_target("mlp", (4,), 3)).numpy()
    ones = np.hstack([features, np.ones((30, 1))])
    penalty = 1e-3 * np.mean(np.sum(ones**2, axis=0))
    expected = Ridge(alpha=penalty, fit_intercept=False).fit(ones, np.eye(3)[labels]).coef_.T
    np.testing.assert_allclose(fitted, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"data.train-samples": 2}, "at least 4 training samples"), ({"task": "regression"}, "must be classification"),
     ({"num-clients": 20, "data.train-samples": 200}, "share training samples")],
)  # fmt: skip
def test_unsuitable_settings_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_shadow_data(game_of(**changes).config)
    with pytest.raises(ConfigError, match="even and at least 8, got 9"):
        MembershipGame(settings=game_of().settings, federations=9)
