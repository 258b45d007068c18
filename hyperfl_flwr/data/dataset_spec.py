"""Description of a data set, and its loader: a row of the registry."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hyperfl_flwr.data.cache import Arrays


def _no_files(root: Path) -> list[Path]:
    return []


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Description of a data set that is available without loading it, and its loader.

    Attributes:
        title: One line for people.
        source: Citation, and the licence where there is one.
        num_classes: Number of classes K; None if it depends on the file.
        input_shape: Shape (C, H, W) of an image; None if it depends on the file.
        train_size: Total number of training images; None if it depends on the file.
        test_size: Total number of test images; None if it depends on the file.
        download_mb: Size of the download in megabytes; 0 for none.
        normalisation: Mean and standard deviation per channel; None to compute them from the training images.
        augment: True if training uses random crops and flips.
        train_samples: Recommended number of training images per client (HyperFL's paper); None for no limit.
        test_samples: Recommended number of test images per client (HyperFL's paper); None for no limit.
        learning_rate: Learning rate in HyperFL's paper; 0.01 for data sets that it does not use. Runs with a manifest
            without `resolved` used this rate for `learning-rate = auto`.
        classes: Names of the classes in the order of the labels; empty if the classes have numbers only.
        client_ids: Names of the clients if the data set itself assigns its samples to clients.
        load: Reads the arrays below a data root: ``train_images`` and ``test_images`` uint8 [n, C, H, W],
            ``train_labels`` and ``test_labels`` int64 [n], and with `client_ids` ``train_clients`` and
            ``test_clients`` int64 [n]. It raises `DataError` if files are missing or damaged. None for a user's
            own file or folder.
        files: The files or folders that `load` reads below a data root. The data set is read again when they change.
    """

    title: str
    source: str
    num_classes: int | None
    input_shape: tuple[int, int, int] | None
    train_size: int | None
    test_size: int | None
    download_mb: int = 0
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    augment: bool = False
    train_samples: int | None = None
    test_samples: int | None = None
    learning_rate: float = 0.01
    classes: tuple[str, ...] = ()
    client_ids: tuple[str, ...] | None = None
    load: Callable[[Path], Arrays] | None = None
    files: Callable[[Path], list[Path]] = _no_files
