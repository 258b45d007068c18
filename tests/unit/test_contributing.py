"""CONTRIBUTING.md is correct: everything that it names exists, and its steps are sufficient."""

import importlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from federations import Call, small_settings
from torch import nn

from experiments import study
from hyperfl_flwr import ROOT
from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.registry import ATTACKS, Attack, attacks_on
from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint
from hyperfl_flwr.core.files.toml_files import settings_text
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.data.sources.torchvision import TorchvisionFiles, grey_images
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models import targets
from hyperfl_flwr.models.names import TARGETS
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.observation import Observation
from hyperfl_flwr.runs.run_directory import read_manifest

PAGE = ROOT / "CONTRIBUTING.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs a checkout of the project")

PLACEHOLDERS = ("NAME", "*", "{")


def page() -> str:
    return PAGE.read_text()


def quoted() -> list[str]:
    """Return the texts in single backticks; commands in fences and indented blocks are not among them."""
    return re.findall(r"`([^`\n]+)`", page())


def named_paths() -> list[str]:
    """Return the complete paths among the quoted texts: those with a folder or a file suffix, without placeholders."""
    paths = [text for text in quoted() if re.fullmatch(r"[\w./-]+(/|\.(py|toml|md|txt|csv))|tests/\w+", text)]
    return sorted({path for path in paths if not any(mark in path for mark in PLACEHOLDERS)})


def test_every_path_exists() -> None:
    paths = named_paths()
    assert len(paths) > 25
    folders = [ROOT, ROOT / "hyperfl_flwr"]  # the table of floors omits the latter
    assert [path for path in paths if not any((folder / path).exists() for folder in folders)] == []


def test_every_file_to_be_made_has_its_folder_and_likes_of_it() -> None:
    patterns = sorted({text for text in quoted() if re.fullmatch(r"[\w./-]*/NAME\.\w+", text)})
    assert patterns == [
        "clients/NAME.py",
        "docs/methods/NAME.md",
        "experiments/expected/NAME.csv",
        "experiments/studies/NAME.toml",
        "hyperfl_flwr/attacks/NAME.py",
        "hyperfl_flwr/data/sources/NAME.py",
        "hyperfl_flwr/methods/NAME.py",
        "hyperfl_flwr/training/NAME.py",
        "strategies/NAME.py",
    ]
    for pattern in patterns:
        assert len(list(ROOT.glob(pattern.replace("NAME", "*")))) > 3, pattern


REGISTRY = re.compile(r"`([A-Z_]+)`\s+(?:in|of)\s+`([\w/]+)\.py`")


def test_every_registry_is_the_real_one() -> None:
    found = {name: path.replace("/", ".") for name, path in REGISTRY.findall(page())}
    assert found.keys() == {
        "ATTACKS", "DATASETS", "TARGETS", "SMALL", "PARTITIONS", "TOTALS",
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
     ("Part", "hyperfl_flwr/core/method.py"), ("AttackFunction", "hyperfl_flwr/attacks/base.py"),
     ("grey_images", "hyperfl_flwr/data/sources/torchvision.py"), ("PERCEPTRONS", "hyperfl_flwr/models/targets.py")],
)  # fmt: skip
def test_what_it_refers_to_stands_there(name: str, path: str) -> None:
    assert f"`{name}`" in page()
    assert f"`{path}`" in page()
    assert hasattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)


CLIENT = '''
"""Mine: FedAvg with steps of another length."""

from dataclasses import replace

from clients.fedavg import FedAvgClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.mine import MyConfig
from hyperfl_flwr.training.public_training import LocalSteps


class MyClient(FedAvgClient):
    """Takes longer steps."""

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return FedAvg's, longer by the factor."""
        steps = super().local_steps(config)
        return replace(steps, learning_rate=config.section(MyConfig).factor * steps.learning_rate)
'''

METHOD = '''
"""Mine: FedAvg with steps of another length."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import PositiveFloat, Section, setting


class MyConfig(Section):
    """Settings of mine."""

    key: ClassVar[str] = "mine"
    title: ClassVar[str] = "Mine"

    factor: PositiveFloat = setting(4.0, "How much longer a step is than FedAvg's.")


METHOD = Method(
    name="mine",
    title="FedAvg with longer steps",
    paper="none",
    sends="the whole model",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.0625,
    client="clients.mine:MyClient",
    strategy="strategies.fedavg:FedAvg",
    settings=(MyConfig,),
)
'''


ATTACKS_ON_MINE = """
from hyperfl_flwr.attacks.registry import attacks_on
from hyperfl_flwr.methods import METHODS

print(*attacks_on(METHODS["mine"].uploads))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the parts of the project to which a method is added."""
    for name in ("hyperfl_flwr", "clients", "strategies", "experiments", "scripts", "docs/reference"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "copy" / name)
    return tmp_path / "copy"


def environment_of(checkout: Path) -> dict[str, str]:
    """Return the environment of programs that import a copy of the project."""
    path = os.pathsep.join([str(checkout), *(part for part in sys.path if part != str(ROOT))])
    return {**os.environ, "PYTHONPATH": path}


def in_checkout(checkout: Path, *words: object) -> str:
    """Run a Python program in a copy of the project and return its output."""
    command = [sys.executable, *map(str, words)]
    environment = environment_of(checkout)
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.extended
def test_a_method_needs_no_more_than_two_files(checkout: Path, federate: Federate, tmp_path: Path) -> None:
    """Two files add a method with settings, pages and attacks; its steps of 4 * 0.0625 equal FedAvg's at rate 0.25."""
    (checkout / "clients" / "mine.py").write_text(CLIENT)
    (checkout / "hyperfl_flwr" / "methods" / "mine.py").write_text(METHOD)
    forgotten = [sys.executable, "-m", "hyperfl_flwr", "run", "--method", "mine"]
    done = subprocess.run(
        forgotten, cwd=checkout, env=environment_of(checkout), capture_output=True, text=True, check=False
    )
    assert "pyproject.toml lacks the settings mine.factor; run `make generate`" in done.stderr
    in_checkout(checkout, "scripts/generate_settings.py")
    assert "[tool.flwr.app.config.mine]\nfactor = 4.0\n" in (checkout / "pyproject.toml").read_text()
    assert "### `mine.factor`\n" in (checkout / "docs" / "reference" / "settings.md").read_text()
    assert "How much longer a step is" in in_checkout(checkout, "-m", "hyperfl_flwr", "settings", "mine.")
    assert in_checkout(checkout, "-c", ATTACKS_ON_MINE) == "ig head-gradient idlg rog dlg ig-prior\n"
    settings = small_settings(method="mine", num_clients=2)
    (tmp_path / "small.toml").write_text(settings_text(settings))
    run = tmp_path / "mine"
    words = ("--engine", "in-process", "--config", tmp_path / "small.toml", "--output", run, "--quiet")
    in_checkout(checkout, "-m", "hyperfl_flwr", "run", *words)
    assert read_manifest(run)["resolved"]["learning-rate"] == 0.0625
    same = federate("fedavg", num_clients=2, learning_rate=0.25)
    assert exact(last_checkpoint(run)[0]) == exact(last_checkpoint(same)[0])


def test_a_target_needs_no_more_than_its_builder_and_a_row(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run uploads the new target's extractor, of 64 pixels and a bias to 4 units: (64 + 1) * 4 floats of 4 bytes."""

    def build_mine(input_shape: tuple[int, ...], num_classes: int) -> Target:
        extractor = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 4, device="meta"))
        return Target(extractor, nn.Linear(4, num_classes, device="meta"))

    monkeypatch.setattr(targets, "build_mine", build_mine, raising=False)
    monkeypatch.setitem(TARGETS, "mine", "hyperfl_flwr.models.targets:build_mine")  # type: ignore[arg-type]
    run = federate("fedrep", num_clients=2, target="mine")
    assert json.loads((run / "summary.json").read_text())["bytes_up_per_client_round"] == (64 + 1) * 4 * 4
    assert isinstance(build_target("mine", (1, 8, 8), 10), Target)


def test_an_attack_needs_no_more_than_its_function_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack runs on the recorded uploads and is scored against the truth: its grey images recover nothing."""

    def mine(observed: Sequence[Observation], known: PublicKnowledge, settings: AttackSettings) -> list[Reconstruction]:
        return [Reconstruction(images=np.full((1, *known.input_shape), 0.5, np.float32)) for _ in observed]

    row = Attack(title="mine", source="none", needs=("model",), run=mine)
    monkeypatch.setitem(ATTACKS, "mine", row)  # type: ignore[arg-type]
    assert "mine" in attacks_on(METHODS["fedavg"].uploads)
    options = Options(attacks=["mine"], num_images=2)
    target = make_attacked_round(default_settings() | {"method": "fedavg", "batch-size": 1, "local-epochs": 1}, options)
    (finding,) = audit(target, options).values()
    assert finding.attack is row
    assert len(finding.comparisons) == 2
    assert all((each.matched.psnr < 20).all() for each in finding.comparisons)  # dB


def idx(values: npt.NDArray[np.uint8]) -> bytes:
    """Return an array in the format of MNIST's files: two zeros, 8 for bytes, the number of axes, their sizes."""
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def test_a_data_set_of_torchvision_needs_no_more_than_its_row(
    federate: Federate, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KMNIST, which torchvision has and this project lacks, is used, with 300 training and 150 test images of noise."""
    files = TorchvisionFiles(name="kmnist", class_name="KMNIST", folder="KMNIST/raw")
    row = grey_images(files, "Kuzushiji", "Clanuwat et al., 2018", 21, tuple("okstnhmyrw"))
    monkeypatch.setitem(DATASETS, "kmnist", replace(row, train_size=300, test_size=150))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng, folder = np.random.default_rng(0), tmp_path / "KMNIST" / "raw"
    folder.mkdir(parents=True)
    for file, shape in zip(files.names, ((300, 28, 28), (300,), (150, 28, 28), (150,)), strict=True):
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
