"""Fixtures: a finished run that serves models on demand, and a novel client's images."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from federations import small_settings, trained
from novel_owner import CLASSES, SIDE, N
from PIL import Image

from hyperfl_flwr.core.packages.package_finder import finders_of
from hyperfl_flwr.privacy.staircase import Staircase


@pytest.fixture(scope="session")
def serving_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished it-pfl run on random 3-class images: LeNet targets, and an encoder with mean pooling."""
    folder, rng = tmp_path_factory.mktemp("personalize"), np.random.default_rng(0)
    images = rng.integers(0, 256, (120, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(folder / "noise.npz", images=images, labels=np.arange(120) % CLASSES)
    settings = small_settings(
        method="it-pfl", target="lenet", dataset=f"npz:{folder / 'noise.npz'}", output=str(folder / "run"),
        **{"data.partition": "iid", "data.train-samples": 16, "data.test-samples": 4, "it-pfl.pooling": "mean"},
        **{"pfedhn.embedding-dim": 4},
    )  # fmt: skip
    return trained(settings)


@pytest.fixture(scope="session")
def pixels() -> np.ndarray:
    """Return the novel client's images [N, H, W, 3]."""
    return np.random.default_rng(1).integers(0, 256, (N, SIDE, SIDE, 3), dtype=np.uint8)


@pytest.fixture
def photographs(tmp_path: Path, pixels: np.ndarray) -> Path:
    """Write these images as private-0.png to private-6.png into two sub-folders and return the folder."""
    folder = tmp_path / "photographs"
    for number, image in enumerate(pixels):
        path = folder / f"ward-{number % 2}" / f"private-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder


@pytest.fixture(autouse=True)
def repeatable_randomised_response(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let randomised weights follow from the weights, where runs are compared: no two runs of srr-fl are equal."""
    if not request.module.__name__.startswith(("test_contract", "test_own_model")):
        return
    randomise = Staircase.randomise

    def repeatable(self: Staircase, values: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng(list(hashlib.sha256(values.tobytes()).digest()))
        return randomise(self, values, lambda count: rng.integers(0, 2**64, count, np.uint64))

    monkeypatch.setattr(Staircase, "randomise", repeatable)


@pytest.fixture(autouse=True)
def kept_sources_forgotten() -> Iterator[None]:
    """Forget the copies of the tests' networks that a test has imported from its folder, which is removed after it."""
    yield
    module = sys.modules.get("own_networks")
    if module is not None and not Path(str(module.__file__)).is_relative_to(Path(__file__).parents[1]):
        del sys.modules["own_networks"]
    copies = finders_of("own_networks")
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in copies]


@pytest.fixture
def imports_as_before() -> Iterator[None]:
    """Restore Python's finders, and the modules of users' methods that a test has imported or forgotten."""
    finders, modules = list(sys.meta_path), dict(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith(("mine", "own_method", "broken_methods"))]:
        del sys.modules[name]
    sys.modules.update({name: modules[name] for name in ("own_method", "broken_methods") if name in modules})
