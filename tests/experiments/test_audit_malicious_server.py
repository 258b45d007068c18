"""The audit of a malicious server: real messages with forged weights, a verdict, a page, and what stops it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from typer.testing import CliRunner

from clients.engine.node_checks import REFUSED
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import new_strategy
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.secure_sums import secure_context
from hyperfl_flwr.attacks.base import AttackSettings
from hyperfl_flwr.attacks.registry import ATTACKS
from hyperfl_flwr.audit import forged_round
from hyperfl_flwr.audit.audit import attack, audit, controls
from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.forged_round import forging, public_images
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.observation_files import OpeningFiles
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import AttackedRound, forge_per_client, record_round, view
from hyperfl_flwr.audit.report import write_audit
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.deploy.ledger_view import runs_of
from hyperfl_flwr.protocol.messages import ARRAYS
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.runs.observation import opening_path
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.federation import handshake
from hyperfl_flwr.server.in_process_grid import InProcessGrid

OPTIONS = Options(num_images=12, samples=12, malicious_server=True)


def target(options: Options = OPTIONS, **changes: Any) -> AttackedRound:
    own = {"method": "hyperfl", "target": "mlp", "batch-size": 12, "local-epochs": 1, "learning-rate": 0.01}
    settings = default_settings() | SMALL | own | {key.replace("_", "-"): value for key, value in changes.items()}
    return make_attacked_round(settings, options)


def test_a_forged_hypernetwork_gives_the_images_away(tmp_path: Path) -> None:
    """Twelve images in one step: both attacks recover them, and the page says that the server is malicious."""
    attacked = target()
    findings = audit(attacked, OPTIONS)
    assert list(findings) == ["imprint", "trap-weights"]
    write_audit(attacked, findings, tmp_path)
    document = json.loads((tmp_path / "audit.json").read_text())
    assert document["malicious_server"] is True
    for found in document["attacks"].values():
        assert found["verdict"] == "recovered"
        assert found["images_recovered"] > 6
        assert found["control"]["next_client"] is None
    for name in ("audit.md", "audit.html"):
        assert "The server is malicious in these attacks: it sends forged weights" in (tmp_path / name).read_text()
    assert "with forged weights from a malicious server" in (tmp_path / "audit.md").read_text()


@pytest.mark.parametrize(
    ("method", "network"), [("pfedhn", "mlp"), ("pfedhn-pc", "mlp"), ("it-pfl", "cnn"), ("pfedhn", "mlp,cnn")]
)
def test_a_generated_network_gives_the_images_away(method: str, network: str) -> None:
    """The server forges what it makes for each of two clients, with an encoder beside it, or of different layers."""
    options = replace(OPTIONS, num_images=24, attacks=["trap-weights"])
    names = {"pfedhn.targets": network} if "," in network else {"target": network}
    attacked = target(options, method=method, **names)
    found = audit(attacked, options)["trap-weights"]
    assert [comparison.recovered.sum() > 3 for comparison in found.comparisons] == [True, True]
    assert [comparison.recovered.sum() < 2 for comparison in found.crossed] == [True, True]


def test_only_the_generated_network_is_forged(tmp_path: Path) -> None:
    """The encoder, which all clients get, and the embedding are sent as the method makes them."""
    options = replace(OPTIONS, attacks=["fishing"])
    attacked = target(options, method="it-pfl", target="cnn")
    (honest,) = record_round(attacked, make(tmp_path / "honest"))
    forged = forging(attacked, ATTACKS["fishing"], public_images(attacked))
    (seen,) = record_round(attacked, make(tmp_path / "forged"), forged)
    changed = {key for key, value in seen.received.items() if not np.array_equal(value, honest.received[key])}
    assert changed == {"model/classifier.weight", "model/classifier.bias"}
    assert {key.partition("/")[0] for key in seen.received} == {"model", "encoder", "embedding"}


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_an_attack_says_which_server_it_needs() -> None:
    with pytest.raises(ConfigError, match="imprint assumes that the server is malicious; give --malicious-server"):
        chosen_attacks(["imprint"], target(Options(num_images=12, samples=12)))
    with pytest.raises(
        ConfigError, match="head-gradient assumes that the server follows the protocol; leave --malicious-server out"
    ):
        chosen_attacks(["head-gradient"], target())
    with pytest.raises(ConfigError, match=r"imprint does not apply to target = cnn: .* private classifier"):
        chosen_attacks(["imprint"], target(target="cnn"))
    assert chosen_attacks([], target(target="cnn")) == ["trap-weights"]


@pytest.mark.parametrize(
    ("method", "names", "reason"),
    [
        ("priv-hfl", {}, r"its server sends no network, since each .* leave --malicious-server out"),
        ("lg-fedavg", {}, "its clients keep the first fully connected layer"),
        ("fedbn", {"target": "resnet18"}, "its networks have normalisation layers"),
        ("fedakd", {}, r"its server sends none of what they forge \(model, extractor, hypernetwork\)"),
        (
            "fedavg",
            {"target": "resnet18"},
            "imprint: forged weights need .* without normalisation layers; trap-weights: ",
        ),
    ],
)
def test_what_cannot_be_forged_is_refused_with_the_reason(method: str, names: dict[str, str], reason: str) -> None:
    with pytest.raises(
        ConfigError, match=f"no attack of a malicious server applies to {method} with target = .*: {reason}"
    ):
        chosen_attacks([], target(method=method, **names))


def test_networks_for_each_client_have_no_sum() -> None:
    summed = replace(target(method="pfedhn"), summed=True)
    with pytest.raises(ConfigError, match="each client starts from a network of its own, and the server sees single"):
        chosen_attacks([], summed)


@pytest.mark.parametrize("words", [["--recorded", "x"], ["--by-neighbours"]])
def test_recorded_rounds_and_neighbours_are_not_forged(words: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["audit", "--malicious-server", *words, "--output", str(tmp_path / "a")])
    assert isinstance(result.exception, ConfigError)
    assert "--malicious-server cannot be given with" in str(result.exception)


def test_a_malicious_server_uses_no_labels() -> None:
    with pytest.raises(ConfigError, match="attacks of a malicious server use no labels"):
        replace(OPTIONS, labels_known=True)


def test_large_images_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's public images are bounded by their pixels, except for the least number."""
    attacked = target()
    pixels = math.prod(attacked.data().dataset.input_shape)
    monkeypatch.setattr(forged_round, "LEAST_PUBLIC", 3)
    monkeypatch.setattr(forged_round, "MOST_NUMBERS", 5 * pixels)
    assert len(public_images(attacked).images) == len(public_images(attacked).labels) == 5
    monkeypatch.setattr(forged_round, "MOST_NUMBERS", 2 * pixels)
    assert len(public_images(attacked).images) == 3


def test_forged_rounds_are_removed_once_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attack's uploads are gone when the next attack's are made: a hypernetwork's take 120 MB for each client."""
    kept = []

    def attacked(*given: Any) -> Any:
        kept.append(len(list(given[-1].observations.paths[0].parents[2].iterdir())))
        return attack(*given)

    monkeypatch.setattr("hyperfl_flwr.audit.audit.attack", attacked)
    audit(target(), OPTIONS)
    assert kept == [1, 1]


def test_controls_repeat_no_image_before_all_have_been_used() -> None:
    """With more candidates than test images each of these is used equally often, and the first ones are distinct."""
    attacked = target()
    number = len(attacked.data().dataset.test)
    unrelated, _ = controls(attacked, 2 * number + 1)
    rows = [image.tobytes() for image in unrelated]
    assert len(rows) == 2 * number + 1
    assert set(rows[:number]) == set(rows[number : 2 * number]) == set(rows)
    np.testing.assert_array_equal(controls(attacked, 5)[0], controls(attacked, 5)[0])


@pytest.mark.parametrize(
    ("method", "name", "check"),
    [
        ("hyperfl", "imprint", "duplicates"),
        ("hyperfl", "trap-weights", "rare"),
        ("pfedhn", "trap-weights", "rare"),
        ("pfedhn", "feature-fishing", "duplicates"),
    ],
)
def test_a_node_that_checks_refuses_the_audit_s_forged_round(
    method: str, name: str, check: str, tmp_path: Path
) -> None:
    """In the first round, of a hypernetwork or a generated model: no reply, and the owner's ledger has the finding."""
    attacked = target(Options(num_images=40, samples=40, malicious_server=True), method=method)
    config, state = attacked.config, tmp_path / "state"
    grid = InProcessGrid(app, 1, config.flat(), {"state-dir": str(state), f"check-{check}": "refuse"})
    federation = handshake(grid, config.hosted_clients, 10.0)
    strategy = new_strategy(config, federation, experiment="e" * 16, run_directory=str(tmp_path))
    forged = forging(attacked, ATTACKS[name], public_images(attacked))
    assert forged is not None
    arrays = pack_arrays(forged(unpack_arrays(strategy.initial_arrays()), 0))
    forge_per_client(strategy, forged)
    strategy.reduce(exchange(grid, strategy.configure_train(1, arrays, ConfigRecord(), grid), 10.0))
    assert strategy.outcome.finished == []
    assert {failure.reason for failure in strategy.outcome.failures} == {REFUSED}
    assert not list(tmp_path.rglob("observations/*"))
    (run,), _ = runs_of(state)
    assert any(found.startswith(f"round 1: client 0: check-{check}: ") for found in run.findings)


class SecureRound:
    """A training step with secure sums of three nodes, with one client of twelve images each."""

    def __init__(self, folder: Path) -> None:
        own = {"method": "fedrep", "target": "mlp", "batch-size": 12, "local-epochs": 1, "learning-rate": 0.01}
        secure = {"num-clients": 3, "secagg.enabled": True, "secagg.max-examples": 12, "audit.rounds": "1"}
        samples = {"data.train-samples": 12, "data.partition": "iid", "secagg.colluding": 0}
        settings = default_settings() | SMALL | own | secure | samples
        self.config = resolved(RunConfig.from_flat(settings))
        self.grid = InProcessGrid(app, 3, settings, {"simulated": True})
        context = secure_context(self.config)
        assert context is not None
        federation = handshake(self.grid, 3, 10.0, context.session)
        self.strategy = new_strategy(
            self.config, federation, experiment="e" * 16, run_directory=str(folder), secure=context
        )
        self.target = AttackedRound(
            config=self.config, clients=[0, 1, 2], summed=True, opened=True, malicious_server=True, recorded_round=1
        )
        self.public = public_images(self.target)
        forged = forging(self.target, ATTACKS["trap-weights"], self.public)
        assert forged is not None
        self.honest = self.strategy.initial_arrays()
        self.forged = pack_arrays(forged(unpack_arrays(self.honest), 0))


def test_secure_sums_do_not_hide_images_from_forged_weights(tmp_path: Path) -> None:
    """All nodes get the same forged model: the step is accepted, and the opened sum of 36 images shows most of them."""
    run = SecureRound(tmp_path)
    messages = run.strategy.configure_train(1, run.forged, ConfigRecord(), run.grid)
    run.strategy.reduce(exchange(run.grid, messages, 10.0))
    assert len(run.strategy.outcome.finished) == 3
    seen = view(run.target, OpeningFiles([opening_path(tmp_path, 1)]))
    found = attack(run.target, ATTACKS["trap-weights"], AttackSettings(public_images=run.public.images), seen)
    (comparison,) = found.comparisons
    assert len(comparison.recovered) == 36
    assert comparison.recovered.sum() > 18


def test_secure_sums_refuse_a_model_for_one_node(tmp_path: Path) -> None:
    """Another model for one node alone (Pasquini et al., 2022): the node refuses it, and no sum is opened."""
    run = SecureRound(tmp_path)
    messages = list(run.strategy.configure_train(1, run.honest, ConfigRecord(), run.grid))
    messages[0].content[ARRAYS] = run.forged
    run.strategy.reduce(exchange(run.grid, messages, 10.0))
    assert run.strategy.outcome.finished == []
    assert not opening_path(tmp_path, 1).exists()
    assert "other arrays than this node has received" in str(run.strategy.outcome.failures)
