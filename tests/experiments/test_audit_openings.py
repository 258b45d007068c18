"""The audit of a run with secure sums: what its server opened is attacked as a sum, with controls and a report."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.record_round import recorded_round, view
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.launch.contract.base import Federate

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


def test_labels_are_of_no_use(federate: Federate, tmp_path: Path) -> None:
    words = ["audit", "--recorded", str(secure_run(federate)), "--labels-known", "--output", str(tmp_path / "audit")]
    result = CliRunner().invoke(cli, words)
    assert "attacks on a sum use no labels" in str(result.exception)
    assert not (tmp_path / "audit").exists()
