"""A new client joins a finished run: its private part is trained, the shared part stays, and accuracy improves."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Call, small_settings, trained
from safetensors.torch import load_file

from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.models.hypernetwork import Hypernetwork
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.results.join import shared_of


@pytest.fixture(scope="module", params=["hyperfl", "hyperfl-frozen", "fedrep", "ppsgd", "ditto"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of each method that supports joining, on scikit-learn's digits 0 to 9."""
    return trained(small_settings(method=request.param, output=str(tmp_path_factory.mktemp("runs") / request.param)))


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the digits 3 and 8 only, as a client with few classes has them."""
    digits, kept = load_dataset("digits"), {}
    for name, part in (("", digits.train), ("test_", digits.test)):
        chosen = np.flatnonzero(np.isin(part.labels, (3, 8)))
        kept |= {f"{name}images": part.images[chosen], f"{name}labels": part.labels[chosen]}
    path = tmp_path_factory.mktemp("mine") / "mine.npz"
    np.savez(path, **kept)
    return path


def test_a_client_joins(run: Path, mine: Path, call: Call) -> None:
    """Accuracy on two classes exceeds 60 % and the accuracy before; the numbers are those of the written model."""
    code, out, err = call("join", run, "--data", f"npz:{mine}", "-o", "joined", "--device", "cpu")
    assert (code, err) == (0, "")
    facts = json.loads(Path("joined/model.json").read_text())
    assert facts["accuracy"] > max(0.6, facts["accuracy_before"])
    assert out.startswith(f"accuracy {100 * facts['accuracy_before']:.2f} % before and {100 * facts['accuracy']:.2f} %")
    assert facts["test_examples"] == len(np.load(mine)["test_labels"])
    assert {path.name for path in Path("joined").iterdir()} == {"model.safetensors", "model.json", "use_model.py"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in Path("joined").iterdir())
    with np.load(mine) as file:
        np.savez("test.npz", images=file["test_images"], labels=file["test_labels"])
    code, out, _ = call("predict", "joined", "--data", "test.npz", "-o", "p.csv")
    assert out.startswith(f"accuracy {100 * facts['accuracy']:.2f} %")


def test_what_is_shared_stays(run: Path, mine: Path, call: Call) -> None:
    """The joined extractor is the shared one, or with HyperFL z H + c of the run's head for some z >= 0.

    Ditto's client trains a whole model from the shared one.
    """
    assert call("join", run, "--data", f"npz:{mine}", "-o", "joined", "--device", "cpu")[0] == 0
    shared, model = shared_of(run), load_file("joined/model.safetensors")
    values = {key.partition("/")[2]: torch.tensor(value) for key, value in shared.arrays.items()}
    if shared.config.method == "ditto":
        assert all(0 < (model[name] - value).abs().max() < 1 for name, value in values.items())
        return
    if shared.config.method != "hyperfl":
        names = {name: name if name in model else f"extractor.{name}" for name in values}
        kept = {name: value for name, value in values.items() if names[name].startswith("extractor.")}
        assert kept
        assert all(torch.equal(model[names[name]], value) for name, value in kept.items())
        return
    extractor = build_target("cnn", (1, 8, 8), 10).extractor
    names = Hypernetwork(extractor, embedding_dim=4, hidden_width=8).shapes
    theta = torch.cat([model[f"extractor.{name}"].flatten() for name in names]) - values["head_bias"]
    z = torch.linalg.lstsq(values["head_weight"].T.double(), theta.double()).solution
    assert float(z.min()) > -1e-4
    assert float((values["head_weight"].T.double() @ z - theta).abs().max()) < 1e-5


@pytest.mark.parametrize("target", ["own_networks:with_batchnorm", "own_networks:build"])
def test_shared_layers_with_other_modes_stay(target: str, mine: Path, tmp_path: Path, call: Call) -> None:
    """Joining updates no running statistics of a shared BatchNorm, and a shared Dropout is off."""
    run = trained(small_settings(method="fedrep", target=target, num_rounds=1, output=str(tmp_path / "fedrep")))
    assert call("join", run, "--data", f"npz:{mine}", "-o", "joined", "--device", "cpu")[0] == 0
    model = load_file("joined/model.safetensors")
    kept = {key.replace("extractor/", "extractor."): torch.tensor(v) for key, v in shared_of(run).arrays.items()}
    assert len(kept) > 3
    assert [name for name, value in kept.items() if not torch.equal(model[name], value)] == []


def test_the_operators_file_gives_the_same(run: Path, mine: Path, call: Call) -> None:
    """A file of the shared parameters, which contains no paths, gives the same bits as the run's folder."""
    code, out, err = call("export", run, "--shared", "-o", "shared.safetensors")
    assert (code, err, out) == (0, "", f"{Path('shared.safetensors').absolute()}\n")
    assert str(run).encode() not in Path("shared.safetensors").read_bytes()
    words = ("--data", f"npz:{mine}", "--rounds", "1", "--device", "cpu", "-o")
    assert call("join", run, *words, "a")[0] == call("join", "shared.safetensors", *words, "b")[0] == 0
    first, second = (load_file(f"{name}/model.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_other_methods_cannot_be_joined(mine: Path, tmp_path: Path, call: Call) -> None:
    run = trained(small_settings(method="fedavg", num_rounds=1, output=str(tmp_path / "fedavg")))
    for words in (
        ("join", run, "--data", f"npz:{mine}", "-o", "joined"),
        ("export", run, "--shared", "-o", "a.safetensors"),
    ):
        code, _, err = call(*words)
        assert code == 2
        assert "is a run of fedavg, which a client cannot join" in err
        able = err.split("use a run of ")[1].split()
        assert {"ditto,", "fedrep,", "hyperfl,", "hyperfl-frozen,"} <= set(able)
        assert "fedavg," not in able
        assert "or the folder of a run of it-pfl or pfedhn, whose server takes part" in err


def test_a_place_where_nothing_can_be_made_is_told_before_training(run: Path, mine: Path, call: Call) -> None:
    code, out, err = call("join", run, "--data", f"npz:{mine}", "-o", "/dev/null/joined")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "cannot create the output folder /dev/null/joined: /dev/null is a file" in err


def test_join_refuses_bad_input(run: Path, mine: Path, call: Call) -> None:
    np.savez("large.npz", images=np.zeros((8, 9, 9), np.uint8), labels=np.arange(8) % 2)
    np.savez("eleven.npz", images=np.zeros((22, 8, 8), np.uint8), labels=np.arange(22) % 11)
    Path("used").mkdir()
    Path("used/file").write_text("")
    Path("torn.safetensors").write_bytes(b"torn")
    npz = f"npz:{mine}"
    for words, expected in (
        ((run, "--data", mine, "-o", "a"), "--data must be npz:FILE, csv:FILE or folder:PATH"),
        ((run, "--data", "npz:large.npz", "-o", "a"), "must have the shape 1x8x8"),
        ((run, "--data", "npz:eleven.npz", "-o", "a"), "classes"),
        ((run, "--data", npz, "-o", "used"), "used exists and is not empty"),
        (("torn.safetensors", "--data", npz, "-o", "a"), "is damaged or not a file of"),
        (("gone.safetensors", "--data", npz, "-o", "a"), "cannot be read"),
        ((run.parent, "--data", npz, "-o", "a"), "is not a run's folder"),
    ):
        code, out, err = call("join", *words)
        assert (code, out) == (2, ""), words
        assert expected in err, err
        assert not Path("a").exists()
    code, _, err = call("export", run, "--shared", "--client", "1", "-o", "a.safetensors")
    assert (code, "--shared is the same for all clients" in err) == (2, True)
