"""All methods train a user's network as they train a built-in one."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Call, small_settings
from torch import Tensor, nn

from hyperfl_flwr.app.client import app
from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import AttackedRound, record_round
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import current_private, last_checkpoint, outcome
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError, RunFailedError
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models import initialisation as initialisation_module
from hyperfl_flwr.models.custom.network import CustomTarget
from hyperfl_flwr.models.hypernetwork import Hypernetwork, common_embedding, initial_hypernetwork
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.results.export import model_of_node, model_of_run, write_exported
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.server.in_process_grid import InProcessGrid

SHAPE = (1, 8, 8)


def own(name: str = "build") -> CustomTarget:
    target = build_target(f"own_networks:{name}", SHAPE, 10)
    assert isinstance(target, CustomTarget)
    return target


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_it_and_repeats_itself(method: str, federate: Federate) -> None:
    """A network with dropout, norm, own parameter and constant gives the same run whatever torch's global seed."""
    torch.manual_seed(1)
    one = outcome(federate(method, target="own_networks:build"))
    torch.manual_seed(2)
    other = outcome(federate(method, target="own_networks:build"))
    assert one == other
    assert all(np.isfinite(row["loss"]) for row in one["metrics"] if "loss" in row)
    assert not any("weights" in key for key in one["arrays"])  # the constant


@pytest.mark.parametrize("name", ["attention", "recurrent"])
@pytest.mark.parametrize("method", ["hyperfl", "pfedhn", "priv-hfl", "fedrep"])
def test_other_kinds_of_networks(method: str, name: str, federate: Federate) -> None:
    run = federate(method, target=f"own_networks:{name}")
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["test_accuracy"] <= 1


@pytest.mark.parametrize("method", ["local", "fedavg", "fedrep", "priv-hfl"])
def test_running_statistics_are_those_of_batchnorm(method: str, federate: Federate) -> None:
    """Running means are among the arrays; torch's integer counter of batches, which cannot be averaged, is not."""
    run = federate(method, target="own_networks:with_batchnorm")
    arrays, _ = last_checkpoint(run)
    private = current_private(run).values()
    names = {key for group in (arrays, *private) for key in group}
    assert any(key.endswith("running_mean") for key in names)
    assert not any("num_batches_tracked" in key for key in names)


def test_no_hypernetwork_generates_running_statistics(federate: Federate) -> None:
    with pytest.raises(ConfigError, match=r"own_networks:with_batchnorm has running statistics"):
        federate("hyperfl", target="own_networks:with_batchnorm")


def test_fedavg_starts_from_the_factorys_values() -> None:
    """Initial values are those of the factory under torch's generator, seeded from the run's seed."""
    import own_networks

    generator = torch_generator(3, "model")
    seed = int(torch.randint(2**62, (), generator=torch_generator(3, "model")))
    torch.manual_seed(seed)
    expected = own_networks.build(SHAPE, 10).state_dict()
    target = own()
    got = {
        target.original_name(name): value
        for name, value in initialisation_module.initial_state(target, generator).items()
    }
    del expected["weights"]
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_the_split_network_is_the_factorys() -> None:
    """Extractor and classifier applied in sequence give the whole network's output."""
    import own_networks

    torch.manual_seed(0)
    network = own_networks.build(SHAPE, 10).eval()
    target = own()
    values = network.state_dict()
    target.load_state_dict({name: values[target.original_name(name)] for name in target.state_dict()}, assign=True)
    images = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    target.eval()
    torch.testing.assert_close(target(images), network(images))
    torch.testing.assert_close(target.classifier(target.extractor(images)), network(images))


@pytest.mark.parametrize("initialisation", ["hyperfan-bias", "hyperfan-weight"])
def test_generated_weights_begin_as_wide_as_the_factorys(initialisation: str) -> None:
    """Constants (a norm's scale of 1) are generated exactly; the 36 convolution weights have the factory's spread.

    hyperfan-bias adds a tenth of the factory's standard deviation to its values: sqrt(1.01) of it in total.
    """
    extractor = own().extractor
    v = common_embedding(64, initialisation, 0)
    hypernetwork = Hypernetwork(extractor, embedding_dim=64, hidden_width=128)
    values = initial_hypernetwork(hypernetwork, extractor, initialisation, v, torch_generator(0, "hypernetwork"))
    hypernetwork.load_state_dict(values, assign=True)
    with torch.no_grad():
        theta = hypernetwork.split(hypernetwork(v))
    assert torch.equal(theta["network.norm.weight"], torch.ones(4))
    assert torch.equal(theta["network.norm.bias"], torch.zeros(4))
    assert torch.equal(theta["network.scale"], torch.ones(4, 1, 1))
    assert float(theta["network.conv.weight"].std()) == pytest.approx(1 / 3 / 3**0.5, rel=0.3)  # fan-in 9, 36 weights


def test_dropout_of_maps_is_that_of_torch() -> None:
    """Whole maps become 0 or twice their values, with probability 1/2 each."""
    from hyperfl_flwr.models.layers.dropout import Dropout, seed_dropout

    layer = Dropout(0.5, maps=True)
    seed_dropout([layer], torch.Generator().manual_seed(0))
    found = layer(torch.ones(100, 100, 2, 3)).flatten(2)
    assert set(found.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(found.amin(dim=2), found.amax(dim=2))
    assert float(found.mean()) == pytest.approx(1, abs=4 * 1 / 100)  # 4 standard deviations of a mean of 10,000


def test_a_run_says_whose_network_it_trained_and_keeps_it(
    federate: Federate, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder contains the network's source, and a run with a changed source is not resumed."""
    from hyperfl_flwr.models.provenance import refuse_changed_sources

    run = federate("fedavg", target="own_networks:build")
    manifest = read_manifest(run)
    assert manifest["model"]["factory"] == "own_networks:build"
    import own_networks

    assert (run / "model" / "own_networks.py").read_bytes() == Path(own_networks.__file__).read_bytes()
    refuse_changed_sources(manifest, manifest["settings"])
    monkeypatch.setattr("hyperfl_flwr.core.packages.user_code.digest_of", lambda _: "another")
    with pytest.raises(RunDirectoryError, match="the source of own_networks:build has changed"):
        refuse_changed_sources(manifest, manifest["settings"])
    assert "model" not in read_manifest(federate("fedavg"))


@pytest.mark.parametrize("text", ["a:", ":b", "a b:c", "a.:b", "a:b.c", "os:system()", "a::b", "1a:b", "-:-"])
def test_only_names_of_functions_are_taken(text: str, make_settings: Callable[..., Settings]) -> None:
    assert not is_user_code(text)
    with pytest.raises(ConfigError, match=r"target must name a function as package.module:factory"):
        RunConfig.from_flat(make_settings(target=text))


def test_the_encoder_of_an_own_network(federate: Federate) -> None:
    """The encoder is the extractor (256 features here) without dropout, 200 units, pooling, 200 units, descriptor."""
    from hyperfl_flwr.models.encoder import build_encoder

    encoder = build_encoder("own_networks:build", SHAPE, 3, "mean")
    extractor = sum(parameter.numel() for parameter in own().extractor.parameters())
    linear = 256 * 200 + 200 + 200 * 200 + 200 + 200 * 3 + 3
    assert sum(parameter.numel() for parameter in encoder.parameters()) == extractor + linear
    values = initialisation_module.rectifier_parameters(encoder, torch_generator(0, "encoder"))
    encoder.load_state_dict(values, assign=True)
    samples = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0))
    descriptor: Tensor = encoder(samples)  # in training mode
    assert torch.equal(descriptor, encoder(samples))
    assert not any(isinstance(layer, nn.Dropout) for layer in encoder.modules())


@pytest.mark.parametrize(("method", "name"), [("hyperfl", "build"), ("fedavg", "with_batchnorm")])
def test_an_exported_model_works_without_this_package(
    method: str, name: str, federate: Federate, tmp_path: Path
) -> None:
    """The script builds the network from the exported source; its confidences equal those of the run's model."""
    run = federate(method, target=f"own_networks:{name}")
    found = model_of_run(run, None if method == "fedavg" else 2)
    write_exported(found, tmp_path / "export" / "model.safetensors")
    images = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "images.npy", images.numpy())
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "export" / "use_model.py"), str(tmp_path / "images.npy")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    target = own(name)
    target.load_state_dict(dict(found.tensors), assign=True)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (found.recipe.mean, found.recipe.std))
    expected = target.eval()((images - mean) / std).softmax(dim=1).amax(dim=1).tolist()
    assert [float(line.split()[1]) for line in done.stdout.splitlines()] == pytest.approx(expected, abs=2e-6)


def test_a_classifier_without_a_bias_is_exported(federate: Federate) -> None:
    """HyperFL's model of a client is put together from its extractor and classifier, which has a weight alone."""
    found = model_of_run(federate("hyperfl", target="own_networks:without_bias"), 2)
    own("without_bias").load_state_dict(dict(found.tensors), assign=True)


def test_a_layer_that_no_gradient_reaches_stays(federate: Federate) -> None:
    """FedALA learns weights of the last two layers, of which the loss depends on the last one only."""
    run = federate("fedala", target="own_networks:build", **{"fedala.layers": 2})
    private = current_private(run).values()
    assert len({arrays["personal/extractor.network.idle.weight"] for arrays in private}) == 1
    assert len({arrays["weights/theta"] for arrays in private}) > 1


def test_a_node_keeps_the_source_beside_its_models(federate: Federate, tmp_path: Path) -> None:
    """After the run, the owner of a node exports the model from the stored source, without the app."""
    settings = {"target": "own_networks:build", "num-clients": 1}
    owner = {"state-dir": str(tmp_path / "states")}
    federate("fedavg", 1, grid=lambda number, flat: InProcessGrid(app, number, flat, owner), **settings)
    assert (tmp_path / "states").is_dir()
    found = model_of_node(tmp_path / "states", 0)
    assert found.recipe.target == "own_networks:build"
    (copy,) = (tmp_path / "states").glob("*/model/own_networks.py")
    assert copy.is_file()


def test_a_node_with_another_source_is_refused(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node reports another source hash, and the run fails."""
    hashes = iter(["same", "other", "same"])  # two nodes answer the handshake, then the server compares
    monkeypatch.setattr("hyperfl_flwr.app.node.network_hash", lambda *_: next(hashes))
    monkeypatch.setattr("hyperfl_flwr.server.federation.network_hash", lambda *_: next(hashes))
    with pytest.raises(RunFailedError, match=r"the nodes \[1\] have another source of own_networks:build"):
        federate("fedavg", target="own_networks:build")


def test_a_node_without_the_network_says_so(federate: Federate) -> None:
    """The factory's module is not installed: the handshake fails with the node's reason."""
    with pytest.raises(RunFailedError, match=r"node .* ConfigError: target = nowhere_at_all:build: no module"):
        federate("fedavg", target="nowhere_at_all:build")


def attacked(method: str, name: str) -> AttackedRound:
    local = {"method": method, "batch-size": 2, "learning-rate": 0.05, "num-rounds": 1}
    return make_attacked_round(small_settings(target=f"own_networks:{name}", **local), Options(num_images=2))


@pytest.mark.parametrize("name", ["perceptron", "recurrent"])
def test_an_attack_simulates_it(name: str, tmp_path: Path) -> None:
    """The attack calls the network for several clients at once; one iteration gives a finite objective."""
    target = attacked("fedavg", name)
    (result,) = audit(target, Options(attacks=["ig"], iterations=1), record_round(target, tmp_path))["ig"].results
    assert np.isfinite(result.objective)
    assert result.images.shape == (2, *SHAPE)


@pytest.mark.parametrize(
    ("method", "name", "problem"),
    [
        ("fedavg", "build", "with dropout"),
        ("fedavg", "with_batchnorm", "the classifier's bias, which the own_networks:with_batchnorm target lacks"),
        ("hyperfl", "with_batchnorm", "running statistics"),
    ],
)
def test_attacks_say_what_they_cannot_do(method: str, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        attacked(method, name)


@pytest.mark.usefixtures("imports_as_before")
def test_a_game_about_a_run_trains_the_run_s_network(call: Call, tmp_path: Path) -> None:
    """Also where another version of it is in the working directory, or none."""
    source, run = Path("mine_network.py"), tmp_path / "run"
    source.write_text(
        "from torch import nn\n\n\n"
        "def build(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, num_classes))\n"
    )
    small = [f"--set={key}={value}" for key, value in {"data.train-samples": 20, "data.test-samples": 10}.items()]
    words = ("--method", "fedavg", "--model", "mine_network:build", "--num-clients", "2", "--num-rounds", "1", *small)
    code, _, text = call("run", *words, "--engine", "in-process", "--output", run)
    assert code == 0, text
    source.write_text("raise RuntimeError('another version')\n")
    for game in ("membership", "property"):
        code, _, text = call(game, run, "--federations", "8", "--jobs", "1", "--output", tmp_path / game)
        assert code == 0, text
        source.unlink(missing_ok=True)
