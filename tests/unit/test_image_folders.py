"""`hyperfl image-folders` writes a data set as a folder of images for each client."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.data.federated_data import load_federated_data


def invoke(*words: str) -> list[Path]:
    result = CliRunner().invoke(cli, ["image-folders", *words])
    if result.exception is not None:
        raise result.exception
    return [Path(line) for line in result.stdout.splitlines()]


def test_the_folders_hold_what_the_clients_hold(tmp_path: Path) -> None:
    """The files equal the samples of a simulation's clients with the same settings, pixel by pixel."""
    chosen = {"num-clients": 3, "data.partition": "shards", "data.seed": 4}
    folders = invoke(
        str(tmp_path / "out"), "--num-clients", "3", "--set", "data.partition=shards", "--set", "data.seed=4"
    )
    assert folders == [tmp_path / "out" / f"client-{client}" for client in range(3)]
    data = load_federated_data(RunConfig.from_flat(default_settings() | chosen).data_settings())
    for client, folder in enumerate(folders):
        for name, split, indices in (
            ("train", data.dataset.train, data.train_indices(client)),
            ("test", data.dataset.test, data.test_indices(client)),
        ):
            files = sorted((folder / name).rglob("*.png"), key=lambda file: file.name)
            assert [int(file.stem) for file in files] == indices.tolist()
            assert [int(file.parent.name) for file in files] == split.labels[indices].tolist()
            for file, index in zip(files, indices, strict=True):
                np.testing.assert_array_equal(np.asarray(Image.open(file)), split.images[index][0])


def test_a_sample_that_is_drawn_twice_is_two_files(tmp_path: Path) -> None:
    """A Dirichlet partition draws some samples twice; there is a file for each sample of a simulation's client."""
    chosen = {"data.partition": "dirichlet", "data.dirichlet-alpha": 0.3, "data.train-samples": 300}
    folders = invoke(
        str(tmp_path / "out"), *(word for key, value in chosen.items() for word in ("--set", f"{key}={value}"))
    )
    data = load_federated_data(RunConfig.from_flat(default_settings() | chosen | {"num-clients": 2}).data_settings())
    again = 0
    for client, folder in enumerate(folders):
        indices = data.train_indices(client).tolist()
        files = [file.stem.partition("-")[0] for file in (folder / "train").rglob("*.png")]
        assert sorted(map(int, files)) == sorted(indices)
        again += len(indices) - len(set(indices))
    assert again > 0


def test_colours_and_names_of_classes(tmp_path: Path) -> None:
    """A truck of CIFAR-10 is in a folder named after its class, with its original pixels."""
    root = os.environ.get("HYPERFL_TEST_DATA")
    if not root:
        pytest.skip("HYPERFL_TEST_DATA names no folder of data sets")
    settings = ["--set", "data.train-samples=50", "--set", "data.test-samples=20"]
    (folder,) = invoke(str(tmp_path), "--dataset", "cifar10", "--num-clients", "1", "--data-root", root, *settings)
    chosen = {
        "dataset": "cifar10",
        "data-root": root,
        "num-clients": 1,
        "data.train-samples": 50,
        "data.test-samples": 20,
    }
    dataset = load_federated_data(RunConfig.from_flat(default_settings() | chosen).data_settings()).dataset
    truck = next((folder / "train" / "truck").iterdir())
    assert dataset.train.labels[int(truck.stem)] == 9
    expected = dataset.train.images[int(truck.stem)].transpose(1, 2, 0)
    np.testing.assert_array_equal(np.asarray(Image.open(truck)), expected)


IID = ("--set", "data.partition=iid")


def own_folder(path: Path, *classes: str) -> Path:
    """Write a folder of images with four images of each class, of which the first class has the darkest."""
    for number, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for again in range(4):
            pixels = np.full((8, 8), 50 * number + again, np.uint8)
            Image.fromarray(pixels).save(path / name / f"{again}.png")
    return path


def test_classes_of_folders_keep_their_names(tmp_path: Path) -> None:
    """Also in the order of `data.classes`, and without characters that are none of a folder's name."""
    own = own_folder(tmp_path / "own", "calm", "very sick")
    for number, chosen in enumerate(([], ["--set", "data.classes=very sick,calm,dead"])):
        output = str(tmp_path / f"out-{number}")
        (folder,) = invoke(output, "--dataset", f"folder:{own}", "--num-clients", "1", *IID, *chosen)
        for part in ("train", "test"):
            assert sorted(path.name for path in (folder / part).iterdir()) == ["calm", "very-sick"]
            for name, value in (("calm", 0), ("very-sick", 50)):
                file = next((folder / part / name).iterdir())
                assert np.asarray(Image.open(file)).max() // 50 * 50 == value


def test_classes_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    own = own_folder(tmp_path / "own", "a b", "a+b", "c")
    with pytest.raises(ConfigError, match="'a b', 'a\\+b' would be written to 'a-b'"):
        invoke(str(tmp_path / "out"), "--dataset", f"folder:{own}", "--num-clients", "1")
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="is not empty; choose one that does not exist yet"):
        invoke(str(tmp_path))


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "features.npz"
    np.savez(file, features=np.ones((40, 5), np.float32), labels=np.arange(40) % 2)
    with pytest.raises(ConfigError, match="must have 8-bit images"):
        invoke(str(tmp_path / "out"), "--dataset", f"npz:{file}")
    np.savez(file, images=np.ones((40, 8, 8), np.uint8), labels=np.arange(80).reshape(40, 2) % 2)
    with pytest.raises(ConfigError, match="must have a class each, which task=multi-label lacks"):
        invoke(str(tmp_path / "out"), "--dataset", f"npz:{file}", "--set", "task=multi-label")
