"""The audit of a run with secure sums: what its server opened is attacked as a sum, with controls and a report."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import record_round, recorded_round, view
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL, Federate
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.runs.observation import Observation

SAMPLES = {"data.train-samples": 4, "batch-size": 4, "secagg.max-examples": 4}
SECURE = SAMPLES | {"secagg.enabled": True, "audit.rounds": "1", "num-rounds": 1}


def secure_run(federate: Federate, method: str = "fedrep", **changes: object) -> Path:
    return federate(method, 3, **SECURE | changes)


def test_what_the_server_opened_is_attacked(federate: Federate, tmp_path: Path) -> None:
    """Five clients with four digits each: one sum of 20 images, without `--summed`."""
    run = secure_run(federate)
    words = ["audit", "--recorded", str(run), "--iterations", "3", "--output", str(tmp_path / "audit")]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert "After one step on 4 images, seen as the sum of 5 clients, head-gradient" in " ".join(result.output.split())
    document = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert (document["summed"], document["opened"], document["clients"]) == (True, True, 5)
    (found,) = document["attacks"].values()
    assert len(found["psnr"]["per_image"]) == len(found["control"]["unrelated"]["psnr"]["per_image"]) == 20
    assert "the mean that the server opened with secure sums" in (tmp_path / "audit" / "audit.md").read_text()


def test_the_attack_sees_the_mean_of_a_run_without_secure_sums(federate: Federate) -> None:
    """The opening is the mean of the five clients' uploads that a plain run with the same settings records."""
    target, opened = recorded_round(secure_run(federate), {})
    (seen,) = view(target, opened).observations
    plain = federate("fedrep", 3, **SECURE | {"secagg.enabled": False, "audit.clients": "all"})
    target, single = recorded_round(plain, {}, summed=True)
    (expected,) = view(target, single).observations
    assert (seen.num_examples, seen.round, opened.clients) == (expected.num_examples, 1, single.clients)
    for key, value in expected.reply.items():
        change = value - expected.received[key]
        np.testing.assert_array_equal(seen.received[key], expected.received[key])
        # Both means are rounded to float32.
        error = np.linalg.norm(seen.reply[key] - value)
        assert error <= 3e-6 * np.linalg.norm(change) + 1e-7 * np.linalg.norm(value)


def test_attacks_that_need_single_uploads_do_not_apply(federate: Federate) -> None:
    """With one frozen embedding HyperFL's heads are summed; nothing has revealed the clients' activations."""
    target, _ = recorded_round(secure_run(federate, "hyperfl", **{"hyperfl.embedding": "common-frozen"}), {})
    assert chosen_attacks([], target) == ["head-gradient", "channels-ica"]
    with pytest.raises(ConfigError, match="channels-known does not apply to the sum of uploads of hyperfl; what does"):
        chosen_attacks(["channels-known"], target)


def test_a_run_that_opened_nothing_is_named(federate: Federate) -> None:
    run = secure_run(federate)
    shutil.rmtree(run / "openings")
    with pytest.raises(RunDirectoryError, match="has secure sums and has recorded no opened sum; start a run with"):
        recorded_round(run, {})


SECURE_ROUND = default_settings() | SMALL | {
    "method": "fedrep", "target": "mlp", "batch-size": 4, "local-epochs": 1, "secagg.enabled": True,
    "secagg.colluding": 0,
}  # fmt: skip


def opened(options: Options, folder: Path, **changes: Scalar) -> Observation:
    """Return what the server opens in a round that is run for the attack."""
    target = make_attacked_round(SECURE_ROUND | {key.replace("__", ".").replace("_", "-"): value
                                         for key, value in changes.items()}, options)  # fmt: skip
    assert (target.summed, target.opened, target.config.audit.clients) == (True, True, "")
    folder.mkdir()
    (seen,) = view(target, record_round(target, folder)).observations
    return seen


def test_a_round_that_is_run_for_the_attack_has_the_settings_secure_sums(tmp_path: Path) -> None:
    """The server opens the mean over the clients' uploads and, with noise in the sum, no more than that."""
    options = Options(num_images=12, samples=4)
    seen = opened(options, tmp_path / "plain")
    plain = make_attacked_round(SECURE_ROUND | {"secagg.enabled": False}, replace(options, summed=True))
    (tmp_path / "single").mkdir()
    (mean,) = view(plain, record_round(plain, tmp_path / "single")).observations
    noise = {"privacy__unit": "client", "privacy__noise": "sum", "privacy__clip_norm": 1.0}
    noisy = opened(options, tmp_path / "noisy", **noise, privacy__noise_multiplier=3.0)
    key = max(mean.reply, key=lambda name: mean.reply[name].size)
    error = np.linalg.norm(seen.reply[key] - mean.reply[key])
    assert error <= 1e-3 * np.linalg.norm(mean.reply[key] - mean.received[key])
    # z C / N in each number of the mean of three clients, with n = G nodes.
    spread = float(np.std(noisy.reply[key] - noisy.received[key]))
    assert 0.8 < spread / (3.0 * 1.0 / 3) < 1.25


def test_the_noise_on_records_is_that_of_the_whole_run() -> None:
    """An attacked round is one of num-rounds rounds, over which a run spends its epsilon."""
    settings = default_settings() | SMALL | {"method": "fedrep", "target": "mlp", "num-rounds": 7}
    options = Options(num_images=4, samples=4)
    assert make_attacked_round(settings | {"dp.epsilon": 8.0}, options).config.num_rounds == 7
    assert make_attacked_round(settings, options).config.num_rounds == 1


def test_labels_are_of_no_use(federate: Federate, tmp_path: Path) -> None:
    words = ["audit", "--recorded", str(secure_run(federate)), "--labels-known", "--output", str(tmp_path / "audit")]
    result = CliRunner().invoke(cli, words)
    assert "attacks on a sum use no labels" in str(result.exception)
    assert not (tmp_path / "audit").exists()
    with pytest.raises(ConfigError, match="attacks on a sum use no labels"):
        make_attacked_round(SECURE_ROUND, Options(num_images=12, samples=4, labels_known=True))


def test_a_secure_sum_of_too_few_clients_is_refused_before_the_round() -> None:
    """The advice is about images, of which the audit makes its clients."""
    with pytest.raises(ConfigError, match=r"needs 3 clients at least .* 8 images at 4 each are those of 2;"):
        make_attacked_round(SECURE_ROUND, Options(num_images=8, samples=4))
