"""The row of a named data set: its facts, where its files lie, and how they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hyperfl_flwr.data.cache import Arrays


def _no_files(root: Path) -> list[Path]:
    return []


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Facts of a data set that are known without loading it, and its loader.

    Attributes:
        title: One line for people.
        source: Citation, and the licence where there is one.
        num_classes: K; None where the file decides.
        input_shape: (C, H, W); None where the file decides.
        train_size: Number of training images in all; None where the file decides.
        test_size: Number of test images in all; None where the file decides.
        download_mb: Size of the download in megabytes, 0 for none.
        normalisation: Mean and standard deviation per channel; None where they are computed from the training images.
        augment: Whether training crops and flips at random.
        train_samples: Recommended training images per client (HyperFL's paper), None for no limit.
        test_samples: Recommended test images per client (HyperFL's paper), None for no limit.
        learning_rate: HyperFL's in its paper. Runs whose manifest has no `resolved` had it where `learning-rate` was
            `auto`; where the paper does not use the data set, they had 0.01.
        classes: Names of the classes in the order of the labels; empty where they have none but their numbers.
        client_ids: Names of the clients where the data set itself assigns its samples to clients.
        load: Reads the arrays below a data root: ``train_images`` and ``test_images`` uint8 [n, C, H, W],
            ``train_labels`` and ``test_labels`` int64 [n], and with `client_ids` ``train_clients`` and
            ``test_clients`` int64 [n]. It raises `DataError` if files are missing or damaged. None for a file or
            folder of the user's.
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
