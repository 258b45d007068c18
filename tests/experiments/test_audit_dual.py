"""The audit of PRIV-HFL: new, trained and recorded rounds, and what the clients' rotation does not hide."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from typer.testing import CliRunner

from experiments.attack_cell import run_attack
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.attacks.base import build_structure
from hyperfl_flwr.attacks.dual_difference import read_change
from hyperfl_flwr.attacks.registry import attacks_on
from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.history import ObservationHistory, attacked_round, require_history
from hyperfl_flwr.audit.make_round import local_epochs_setting, make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import AttackedRound, record_round, recorded_round
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL, Federate
from hyperfl_flwr.contract.folders import last_checkpoint, private_arrays
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.methods.priv_hfl import PrivHFLConfig
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.runs.run_directory import settings_of
from hyperfl_flwr.training.dual_stability import dual_rule

ALL = {"audit.clients": "all", "audit.rounds": "all"}
ALONE = {"priv-hfl.distill": False}
CANDIDATES = 1000


def settings(**changes: object) -> Settings:
    local = {"method": "priv-hfl", "batch-size": 1, "local-epochs": 1, "priv-hfl.local-steps": 1, **ALONE}
    return default_settings() | SMALL | local | changes  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], 1),
        (["--samples", "4", "--batch-size", "2", "--local-epochs", "3"], 6),
        (["--samples", "4", "--set", "batch-size=4"], 1),
        (["--set", "priv-hfl.local-steps=3"], 3),
    ],
)
@pytest.mark.slow
def test_the_command_takes_passes_over_the_images_unless_told(words: list[str], steps: int, tmp_path: Path) -> None:
    all_words = ["audit", "--method", "priv-hfl", "--num-images", "4", "--iterations", "2", *words]
    result = CliRunner().invoke(cli, [*all_words, "--output", str(tmp_path / "a")], catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads((tmp_path / "a" / "audit.json").read_text())
    assert (document["local_steps"], list(document["attacks"])) == (steps, ["dual-difference"])


@pytest.mark.slow
def test_images_are_found_in_later_rounds_too(federate: Federate, tmp_path: Path) -> None:
    """After two rounds under forces, one step on one digit per client is attacked, using the recorded changes.

    The attacked round has the run's multipliers but other local steps. Just 200 iterations find at least one digit,
    more than 15 dB above the mean image.
    """
    run = federate("priv-hfl", **ALL, **ALONE, **{"learning-rate": 0.05})
    options = Options(attacks=["dual-difference"], num_images=3, iterations=200, total_variation=1e-4)
    base = settings_of(run) | {"batch-size": 1, "local-epochs": 1}
    target = make_attacked_round(base | local_epochs_setting(base, options), options, run)
    assert (attacked_round(target), set(target.steps)) == (3, {1})
    assert dual_rule(target.config.section(PrivHFLConfig)) == dual_rule(
        resolved(RunConfig.from_flat(settings_of(run))).priv_hfl
    )
    observed = ObservationHistory(record_round(target, tmp_path).paths, run)
    names = [name for name, _ in build_structure(target.knowledge()).named_parameters()]
    for client, observation in enumerate(observed):
        stored = private_arrays(run)[f"client-{client:05d}/round-000002.npz"]
        reading = read_change(observation, target.knowledge())
        assert [each.round for each in observation.earlier] == [1, 2]
        assert reading.findings["force-norm"] > 1e-3
        for name in names:
            np.testing.assert_allclose(reading.parameters[name], stored[f"model/{name}"], rtol=0, atol=1e-6)
    found = audit(target, options)["dual-difference"]
    assert max(float(each.matched.psnr[0] - each.mean_image[0]) for each in found.comparisons) > 15
    assert found.labels_found == 1.0


def test_a_run_that_kept_no_record_is_named(federate: Federate) -> None:
    run = federate("priv-hfl")
    target = make_attacked_round(settings_of(run) | {"batch-size": 1}, Options(num_images=2), run)
    with pytest.raises(
        ConfigError, match=r"not all rounds before round 3 .*--set audit.clients=0,1 --set audit.rounds"
    ):
        audit(target, Options())
    require_history(make_attacked_round(settings(), Options(num_images=2)))
    assert attacks_on(METHODS["priv-hfl"].uploads) == ["dual-difference", "generator-dlg"]
    assert chosen_attacks([], make_attacked_round(settings(), Options(num_images=2))) == ["dual-difference"]
    assert attacks_on(METHODS["priv-hfl"].uploads, summed=True) == []


@pytest.mark.slow
def test_a_recorded_round_is_attacked(federate: Federate) -> None:
    """The last of two rounds has several batches; only the chain's first client is recorded."""
    run = federate("priv-hfl", **{"audit.clients": "0", "audit.rounds": "all", "priv-hfl.realisation": "chain"})
    target, observed = recorded_round(run, {})
    assert (target.recorded_round, set(target.steps), set(target.sizes)) == (2, {2}, {40})
    findings = audit(target, Options(attacks=["dual-difference"], iterations=2), observed)["dual-difference"]
    assert len(findings.comparisons[0].matched.psnr) == 40
    _, progress = last_checkpoint(run)
    assert progress.versions[0] == 2
    assert findings.results[0].findings["moved-norm"] > 1e-3


@pytest.mark.slow
def test_a_study_can_have_it_as_a_cell(tmp_path: Path) -> None:
    cell = {"attack.name": "dual-difference", "attack.num-images": 2, "attack.iterations": 2, "attack.rounds-before": 2}
    config = RunConfig.from_flat(default_settings() | SMALL | {"method": "priv-hfl", "num-clients": 3})
    run_attack(config, cell, tmp_path / "cell")
    document = json.loads((tmp_path / "cell" / "audit.json").read_text())
    assert (document["trained"], document["local_steps"]) == (True, 1)
    assert document["attacks"]["dual-difference"]["findings"][0]["moved-norm"] > 1e-3


def gradients(target: AttackedRound, images: Tensor, labels: Tensor) -> Tensor:
    """Return autograd's gradient [n, m] of each sample at the common start, including weight decay."""
    structure = build_structure(target.knowledge())
    start = ordinary_parameters(structure, torch_generator(0, "model"))

    def loss(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(structure, values, (image[None],)), label[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(start, images, labels)
    decayed = {name: value + target.config.weight_decay * start[name] for name, value in found.items()}
    return torch.cat([value.flatten(1) for value in decayed.values()], dim=1)


@pytest.mark.parametrize("realisation", ["mean", "chain"])
def test_a_rotation_hides_the_gradient_and_not_its_length(realisation: str, tmp_path: Path) -> None:
    """After one step on one digit, the change is the gradient without rotation, and unrelated to it with rotation.

    Without clipping, the length of the change alone identifies the client's digit among a thousand.
    """
    cosines = {}
    for mixing in (False, True):
        changes = {"priv-hfl.mixing": mixing, "priv-hfl.realisation": realisation, "priv-hfl.clip-norm": 0.0}
        target = make_attacked_round(settings(**changes), Options(num_images=5))
        (tmp_path / str(mixing)).mkdir()
        readings = [read_change(each, target.knowledge()) for each in record_round(target, tmp_path / str(mixing))]
        data = target.data()
        truth = torch.cat(
            [gradients(target, data.client(i).train_images, data.client(i).train_labels) for i in range(5)]
        )
        read = [torch.cat([v.flatten() for v in reading.gradient.values()]) for reading in readings]
        cosines[mixing] = [float(functional.cosine_similarity(a, b, dim=0)) for a, b in zip(read, truth, strict=True)]
    assert min(cosines[False]) > 0.99
    assert max(map(abs, cosines[True])) < 0.1
    rate = target.knowledge().steps.learning_rate
    for client, reading in enumerate(readings):
        others = torch.arange(len(data.dataset.train))
        mine = int(data.train_indices(client)[0])
        chosen = torch.cat([torch.tensor([mine]), others[others != mine][: CANDIDATES - 1]])
        images, labels = candidates(target, chosen)
        norms = torch.cat([gradients(target, *part).norm(dim=1) for part in zip(images, labels, strict=True)])
        assert len(norms) == CANDIDATES
        assert int((rate * norms - reading.findings["change-norm"]).abs().argmin()) == 0


def candidates(target: AttackedRound, chosen: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return normalised images and their labels in parts of 250."""
    dataset = target.data().dataset
    images = (torch.from_numpy(dataset.train.scaled(chosen.numpy())) - dataset.mean[0]) / dataset.std[0]
    return images.split(250), torch.from_numpy(dataset.train.labels[chosen.numpy()]).split(250)
