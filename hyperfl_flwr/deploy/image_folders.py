"""Write a data set, divided among clients, as folders of images: sample data of several owners for a deployment."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from rich.progress import Progress

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import CLASSIFICATION
from hyperfl_flwr.data.dataset import IntArray, Split
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.data.registry import class_names
from hyperfl_flwr.runs.run_directory import refuse_used_directory


def write_image_folders(changes: Mapping[str, Scalar], output: Path, progress: Progress) -> list[Path]:
    """Write `client-I/train/CLASS/NUMBER.png` and `client-I/test/CLASS/NUMBER.png` for each client of a federation.

    Each client gets the samples that it has in a simulation with these settings. A class without samples of a client
    has no folder. NUMBER is the image's index in the data set, with the suffix -1, -2, ... for repeated draws.

    Args:
        changes: Settings that differ from the defaults: data set, number of clients, partition.
        output: Folder to create; it must not exist, or be empty.
        progress: Progress display.

    Returns:
        The clients' folders.

    Raises:
        ConfigError: If a setting is wrong, the data set does not have 8-bit images of one or three channels, or two
            classes would have the same folder.
        DataError: If the data set cannot be read or downloaded.
        RunDirectoryError: If the folder is in use.
    """
    config = RunConfig.from_flat({**default_settings(), **changes})
    refuse_used_directory(output)
    data = load_federated_data(config.data_settings())
    dataset = data.dataset
    if dataset.train.images.dtype != np.uint8 or dataset.input_shape[0] not in (1, 3):
        raise ConfigError(f"{dataset.name} must have 8-bit images of one or three channels; choose another data set")
    if dataset.task is not CLASSIFICATION:
        raise ConfigError(f"the samples of {dataset.name} must have a class each, which task={dataset.task.name} lacks")
    names = _folder_names(dataset.classes or class_names(dataset.name, dataset.num_classes))
    folders = [output / f"client-{client}" for client in range(config.num_clients)]
    for client, folder in enumerate(progress.track(folders, description="writing images")):
        _write(folder / "train", dataset.train, data.train_indices(client), names)
        _write(folder / "test", dataset.test, data.test_indices(client), names)
    return folders


def _folder_names(classes: Sequence[str]) -> list[str]:
    """Return a folder's name for each class.

    Raises:
        ConfigError: If two classes would get the same folder, or one a folder that is there already.
    """
    names = [re.sub(r"[^\w.-]+", "-", name) for name in classes]
    for name, times in Counter(names).items():
        if times > 1 or name in (".", ".."):
            same = ", ".join(repr(each) for each, folder in zip(classes, names, strict=True) if folder == name)
            raise ConfigError(
                f"every class must have a folder of its own, but {same} would be written to {name!r}; set data.classes "
                f"to other names, or rename the folders of {'these classes' if times > 1 else 'this class'}"
            )
    return names


def _write(folder: Path, split: Split, indices: IntArray, names: list[str]) -> None:
    for label in np.unique(split.labels[indices]):
        (folder / names[label]).mkdir(parents=True)
    for index, times in zip(indices, _times_before(indices), strict=True):
        again = f"-{times}" if times else ""
        file = folder / names[split.labels[index]] / f"{index:06d}{again}.png"
        _picture(np.asarray(split.images[index], np.uint8)).save(file)


def _times_before(indices: IntArray) -> Iterator[int]:
    """Yield for each sample how often it occurred before: a partition may draw a sample more than once."""
    seen: Counter[int] = Counter()
    for index in map(int, indices):
        yield seen[index]
        seen[index] += 1


def _picture(image: npt.NDArray[np.uint8]) -> Image.Image:
    """Convert an image [C, H, W], C 1 or 3, to a Pillow image."""
    return Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
