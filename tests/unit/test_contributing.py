"""CONTRIBUTING.md is right: what it names exists, and its steps are enough."""

import importlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from federations import Call, Federate
from torch import nn

from clients.fedavg import FedAvgClient
from experiments import study
from hyperfl_flwr import ROOT
from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.registry import ATTACKS, Attack, attacks_on
from hyperfl_flwr.audit.audit import Options, audit, make_target
from hyperfl_flwr.config.run_config import default_settings
from hyperfl_flwr.core.method import Method
from hyperfl_flwr.data.class_names import CLASS_NAMES
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.data.sources.torchvision import TORCHVISION_FILES
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import TARGETS, build_target
from hyperfl_flwr.runs.observation import Observation
from hyperfl_flwr.runs.run_directory import read_manifest
from strategies.fedavg import FedAvg

PAGE = ROOT / "CONTRIBUTING.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs a checkout of the project")

PLACEHOLDERS = ("NAME", "*", "{")


def page() -> str:
    return PAGE.read_text()


def quoted() -> list[str]:
    """Return what stands in backticks, without the shell commands in fences and indented blocks."""
    return re.findall(r"`([^`\n]+)`", page())


def named_paths() -> list[str]:
    """Return the paths among it that are whole: with a folder or an ending of a file."""
    paths = [text for text in quoted() if re.fullmatch(r"[\w./-]+(/|\.(py|toml|md|txt|csv))|tests/\w+", text)]
    return sorted({path for path in paths if not any(mark in path for mark in PLACEHOLDERS)})


def test_every_path_exists() -> None:
    paths = named_paths()
    assert len(paths) > 25
    folders = [ROOT, ROOT / "hyperfl_flwr"]  # the table of layers names the latter's modules without their folder
    assert [path for path in paths if not any((folder / path).exists() for folder in folders)] == []


def test_every_file_to_be_made_has_its_folder_and_likes_of_it() -> None:
    patterns = sorted({text for text in quoted() if re.fullmatch(r"[\w./-]*/NAME\.\w+", text)})
    assert patterns == [
        "clients/NAME.py",
        "experiments/expected/NAME.csv",
        "experiments/studies/NAME.toml",
        "hyperfl_flwr/attacks/NAME.py",
        "hyperfl_flwr/training/NAME.py",
        "strategies/NAME.py",
    ]
    for pattern in patterns:
        assert len(list(ROOT.glob(pattern.replace("NAME", "*")))) > 3, pattern


REGISTRY = re.compile(r"`([A-Z_]+)`\s+(?:in|of)\s+`([\w/]+)\.py`")


def test_every_registry_is_the_real_one() -> None:
    found = {name: path.replace("/", ".") for name, path in REGISTRY.findall(page())}
    assert found.keys() == {
        "METHODS", "ATTACKS", "DATASETS", "TORCHVISION_FILES", "CLASS_NAMES", "TARGETS", "SMALL", "PARTITIONS",
    }  # fmt: skip
    for name, module in found.items():
        if not module.startswith("tests."):
            registry = getattr(importlib.import_module(module), name)
            assert isinstance(registry, Mapping)
            assert importlib.import_module(module).__name__ == module
    assert importlib.import_module("federations").SMALL


@pytest.mark.parametrize(
    ("name", "path"),
    [("BaseStrategy", "strategies/engine/base.py"), ("BaseClient", "clients/engine/base.py"),
     ("RunConfig", "hyperfl_flwr/config/run_config.py"), ("Run", "hyperfl_flwr/attacks/base.py"),
     ("load_dataset", "hyperfl_flwr/data/registry.py"), ("PERCEPTRONS", "hyperfl_flwr/models/targets.py")],
)  # fmt: skip
def test_what_it_refers_to_stands_there(name: str, path: str) -> None:
    assert f"`{name}`" in page()
    assert f"`{path}`" in page()
    assert hasattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)


def test_a_method_needs_no_more_than_its_two_sides_and_a_row(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(FedAvg):
        """The server's side."""

    class MyClient(FedAvgClient):
        """The client's side, which tells one number more."""

        def train(self, rng: np.random.Generator) -> dict[str, float]:
            return super().train(rng) | {"mine": 7.0}

    row = Method(title="mine", strategy=Mine, client=MyClient, paper="none", leaves="all", learning_rate=0.25)
    monkeypatch.setitem(METHODS, "mine", row)  # type: ignore[arg-type]
    run = federate("mine", num_clients=2)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line][-1]
    assert last["mine"] == 7.0
    assert read_manifest(run)["resolved"]["learning-rate"] == 0.25


def test_a_target_needs_no_more_than_its_builder_and_a_row(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 inputs by 64 pixels and a bias make the extractor, which all clients share: (64 + 1) * 4 floats of 4 bytes."""

    def build_mine(input_shape: tuple[int, ...], num_classes: int) -> Target:
        extractor = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 4, device="meta"))
        return Target(extractor, nn.Linear(4, num_classes, device="meta"))

    monkeypatch.setitem(TARGETS, "mine", build_mine)  # type: ignore[arg-type]
    run = federate("fedrep", num_clients=2, target="mine")
    assert json.loads((run / "summary.json").read_text())["bytes_up_per_client_round"] == (64 + 1) * 4 * 4
    assert isinstance(build_target("mine", (1, 8, 8), 10), Target)


def test_an_attack_needs_no_more_than_its_function_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run on what the server has recorded, and held against the truth: grey images are not recovered."""

    def mine(observed: Sequence[Observation], known: PublicKnowledge, settings: AttackSettings) -> list[Reconstruction]:
        return [Reconstruction(images=np.full((1, *known.input_shape), 0.5, np.float32)) for _ in observed]

    row = Attack(title="mine", source="none", methods=("fedavg",), run=mine)
    monkeypatch.setitem(ATTACKS, "mine", row)  # type: ignore[arg-type]
    assert "mine" in attacks_on("fedavg")
    options = Options(attacks=["mine"], num_images=2)
    target = make_target(default_settings() | {"method": "fedavg", "batch-size": 1, "local-epochs": 1}, options)
    (finding,) = audit(target, options).values()
    assert finding.attack is row
    assert len(finding.comparisons) == 2
    assert all((each.matched.psnr < 20).all() for each in finding.comparisons)  # dB


def idx(values: npt.NDArray[np.uint8]) -> bytes:
    """Return an array in the format of MNIST's files: two zeros, 8 for bytes, the number of axes, their sizes."""
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def test_a_data_set_of_torchvision_needs_no_more_than_its_rows(
    federate: Federate, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KMNIST, which torchvision has and this project has not: 300 images for training and 150 for testing of noise."""
    files = TORCHVISION_FILES["mnist"]
    row = replace(files, class_name="KMNIST", folder="KMNIST/raw")
    monkeypatch.setitem(TORCHVISION_FILES, "kmnist", row)
    info = replace(DATASETS["mnist"], title="Kuzushiji", train_size=300, test_size=150)
    monkeypatch.setitem(DATASETS, "kmnist", info)
    monkeypatch.setitem(CLASS_NAMES, "kmnist", tuple("okstnhmyrw"))  # type: ignore[arg-type]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng, folder = np.random.default_rng(0), tmp_path / "KMNIST" / "raw"
    folder.mkdir(parents=True)
    for file, shape in zip(row.files, ((300, 28, 28), (300,), (150, 28, 28), (150,)), strict=True):
        (folder / file).write_bytes(idx(rng.integers(0, 10, shape, dtype=np.uint8)))
    run = federate("fedavg", num_clients=2, dataset="kmnist", data_root=str(tmp_path))
    code, _, err = call("export", run, "-o", "mine/model.safetensors")
    assert code == 0, err
    assert json.loads(Path("mine/model.json").read_text())["classes"] == list("okstnhmyrw")


def test_a_study_needs_no_more_than_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "studies").mkdir()
    text = 'title = "Mine"\nmetric = "test_accuracy"\nunit = "%"\nseeds = 1\nnum-nodes = 1\n[settings]\n[quick]\n'
    (tmp_path / "studies" / "mine.toml").write_text(f'{text}[rows.local]\nmethod = "local"\n[columns.digits]\n')
    monkeypatch.setattr(study, "FOLDER", tmp_path)
    assert study.study_names() == ["mine"]
    assert study.load_study("mine").title == "Mine"
