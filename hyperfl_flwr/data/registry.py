"""Registry of data sets, and loading by name.

An entry of `DATASETS` describes a data set, with the sizes and learning rates of HyperFL's paper; `load_dataset`
returns the images. The normalisation is that of the papers (CIFAR-100 uses the one of CIFAR-10); for data sets that no
paper normalises, it is computed from the training images.
"""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from hyperfl_flwr.core.errors import DataError, InstallationError
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.cache import cache_directory, fingerprint
from hyperfl_flwr.data.class_names import CLASS_NAMES
from hyperfl_flwr.data.dataset import Dataset, Split, channel_statistics, split_train_test
from hyperfl_flwr.data.sample_format import AS_IT_IS, Reading, agreed, is_own, located, placeholder_of
from hyperfl_flwr.data.sources.cinic10 import folders, load_cinic
from hyperfl_flwr.data.sources.image_folder import read_class_folders, state_of
from hyperfl_flwr.data.sources.npz import read_npz
from hyperfl_flwr.data.sources.omniglot import DRAWERS, load_omniglot, sources
from hyperfl_flwr.data.sources.torchvision import TORCHVISION_FILES, load_arrays

__all__ = ["DATASETS", "Dataset", "DatasetInfo", "Split", "default_data_root", "load_dataset"]

_GREY = ((0.1307,), (0.3081,))
_CINIC = ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835))
_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_DIGITS_SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Description of a data set that is available without loading it.

    Attributes:
        title: One line for people.
        source: Citation, and the licence if there is one.
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
    """

    title: str
    source: str
    num_classes: int | None
    input_shape: tuple[int, int, int] | None
    train_size: int | None
    test_size: int | None
    download_mb: int
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None
    augment: bool
    train_samples: int | None
    test_samples: int | None
    learning_rate: float


def _grey(title: str, source: str, download_mb: int) -> DatasetInfo:
    return DatasetInfo(
        title=title,
        source=source,
        num_classes=10,
        input_shape=(1, 28, 28),
        train_size=60_000,
        test_size=10_000,
        download_mb=download_mb,
        normalisation=_GREY,
        augment=False,
        train_samples=600,
        test_samples=600,
        learning_rate=0.01,
    )


def _cifar(title: str, num_classes: int, download_mb: int) -> DatasetInfo:
    return DatasetInfo(
        title=title,
        source="Krizhevsky, Learning multiple layers of features from tiny images, 2009; no formal licence",
        num_classes=num_classes,
        input_shape=(3, 32, 32),
        train_size=50_000,
        test_size=10_000,
        download_mb=download_mb,
        normalisation=_CIFAR,
        augment=True,
        train_samples=600,
        test_samples=300,
        learning_rate=0.02,
    )


def _own(title: str) -> DatasetInfo:
    return DatasetInfo(
        title=title,
        source="their owner",
        num_classes=None,
        input_shape=None,
        train_size=None,
        test_size=None,
        download_mb=0,
        normalisation=None,
        augment=False,
        train_samples=None,
        test_samples=None,
        learning_rate=0.01,
    )


DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(
        title="1,797 handwritten digits, part of scikit-learn",
        source="Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI 1998; CC BY 4.0",
        num_classes=10,
        input_shape=(1, 8, 8),
        train_size=1347,
        test_size=450,
        download_mb=0,
        normalisation=None,
        augment=False,
        train_samples=None,
        test_samples=None,
        learning_rate=0.01,
    ),
    "mnist": _grey("70,000 handwritten digits", "LeCun, Cortes and Burges, The MNIST database, 1998; CC BY-SA 3.0", 12),
    "fashion-mnist": _grey("70,000 pieces of clothing", "Xiao, Rasul and Vollgraf, arXiv:1708.07747, 2017; MIT", 31),
    "cifar10": _cifar("60,000 colour photographs of 10 kinds of things", 10, 171),
    "cifar100": _cifar("60,000 colour photographs of 100 kinds of things", 100, 170),
    "emnist": DatasetInfo(
        title="814,255 handwritten digits and letters (byclass: 0-9, A-Z, a-z)",
        source="Cohen, Afshar, Tapson and van Schaik, EMNIST, IJCNN 2017, from NIST Special Database 19",
        num_classes=62,
        input_shape=(1, 28, 28),
        train_size=697_932,
        test_size=116_323,
        download_mb=562,
        normalisation=_GREY,
        augment=False,
        train_samples=1000,
        test_samples=600,
        learning_rate=0.01,
    ),
    "cinic10": DatasetInfo(
        title="270,000 photographs of CIFAR-10's kinds of things, from CIFAR-10 and ImageNet",
        source="Darlow, Crowley, Antoniou and Storkey, arXiv:1810.03505, 2018; not downloaded here",
        num_classes=10,
        input_shape=(3, 32, 32),
        train_size=90_000,
        test_size=90_000,
        download_mb=0,
        normalisation=_CINIC,
        augment=True,
        train_samples=600,
        test_samples=300,
        learning_rate=0.02,
    ),
    "omniglot": DatasetInfo(
        title="4,840 handwritten characters of 8 alphabets (the classes) by 20 drawers, who are the clients",
        source="Lake, Salakhutdinov and Tenenbaum, Science 350, 2015; MIT; not downloaded here",
        num_classes=8,
        input_shape=(1, 28, 28),
        train_size=3640,
        test_size=1200,
        download_mb=0,
        normalisation=None,
        augment=False,
        train_samples=None,
        test_samples=None,
        learning_rate=0.01,
    ),
    "npz:PATH": _own("your own data: images or features, labels, optionally clients and test_*, in a numpy .npz file"),
    "folder:PATH": _own("your own images: a folder for each class, or train and test with folders of the classes"),
}


def default_data_root() -> Path:
    """Return this user's folder for downloaded data sets; it need not exist."""
    return cache_directory() / "data"


def load_dataset(name: str, data_root: Path | None = None, reading: Reading = AS_IT_IS) -> Dataset:
    """Load a data set; further calls in the same process return the same object.

    Args:
        name: A name from `DATASETS`, ``npz:PATH`` or ``folder:PATH``. A relative PATH is resolved in `data_root`, never
            in the working directory, which may differ between the processes of a run.
        data_root: Folder of the data sets; None for `default_data_root`, in which relative paths are not resolved.
            Missing data sets of torchvision are downloaded to it.
        reading: The federation's agreement on the samples.

    Returns:
        The data set; its arrays are shared and must not be written to.

    Raises:
        DataError: If the name is unknown, or the files are missing or damaged or do not match the agreement.
    """
    kind = placeholder_of(name)
    if is_own(name) and name != kind:
        path = located(name, data_root)
        return _load(name, path, state_of(path) if kind == "folder:PATH" else fingerprint([path]), reading)
    if name == "digits":
        return _load(name, Path(), "", reading)
    root = (data_root or default_data_root()).expanduser().absolute()
    if name in TORCHVISION_FILES:
        return _load(name, root, fingerprint(TORCHVISION_FILES[name].paths(root)), reading)
    if name == "cinic10":
        return _load(name, root, fingerprint(folders(root)), reading)
    if name == "omniglot":
        return _load(name, root, fingerprint(sources(root)), reading)
    raise DataError(f"dataset must be one of {', '.join(DATASETS)}, got {name!r}")


@lru_cache(maxsize=8)
def _load(name: str, location: Path, _state: str, reading: Reading) -> Dataset:
    """Load a data set; `_state` is only a part of the cache key, so that changed files are read again."""
    kind = placeholder_of(name)
    if kind == "npz:PATH":
        dataset = read_npz(name, location)
    elif kind == "folder:PATH":
        dataset = read_class_folders(name, location, reading)
    else:
        dataset = _load_named(name, location)
    return agreed(dataset, reading)


def _load_named(name: str, location: Path) -> Dataset:
    if name == "digits":
        return _dataset(name, *_digits())
    if name == "omniglot":
        arrays, client_ids = load_omniglot(location), DRAWERS
    else:
        arrays, client_ids = load_cinic(location) if name == "cinic10" else load_arrays(name, location), None
    train, test = (
        Split(images=arrays[f"{part}_images"], labels=arrays[f"{part}_labels"], clients=arrays.get(f"{part}_clients"))
        for part in ("train", "test")
    )
    return _dataset(name, train, test, client_ids)


def _dataset(name: str, train: Split, test: Split, client_ids: tuple[str, ...] | None = None) -> Dataset:
    info = DATASETS[name]
    if info.num_classes is None or info.input_shape is None:
        raise ValueError(f"{name} has no fixed number of classes and input shape")
    if train.images.shape[1:] != info.input_shape or max(train.labels.max(), test.labels.max()) >= info.num_classes:
        raise DataError(
            f"images of {name} must have the shape {info.input_shape} and labels below {info.num_classes}, "
            f"got {train.images.shape[1:]} and labels up to {max(train.labels.max(), test.labels.max())}; replace the "
            f"files"
        )
    mean, std = info.normalisation or channel_statistics(train.images)
    return Dataset(
        name=name,
        num_classes=info.num_classes,
        input_shape=info.input_shape,
        train=train,
        test=test,
        mean=mean,
        std=std,
        augment=info.augment,
        train_samples=info.train_samples,
        test_samples=info.test_samples,
        client_ids=client_ids,
        classes=CLASS_NAMES.get(name),
    )


def _digits() -> tuple[Split, Split]:
    """Return scikit-learn's digits, 0..16 scaled to 0..255, in a fixed split that keeps the class proportions."""
    package = importlib.util.find_spec("sklearn")  # read its file directly: the import takes a second per process
    if package is None or package.origin is None:
        raise InstallationError(
            "the package 'sklearn' (scikit-learn), which contains the data set digits, is missing; install "
            "hyperfl-flwr again"
        )
    rows = np.loadtxt(Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    # Pixels are 0 to 16 in the file.
    images = np.rint(rows[:, :-1].reshape(-1, 1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)
    labels = rows[:, -1].astype(np.int64)
    train, test = split_train_test(labels, numpy_generator(_DIGITS_SPLIT_SEED, "digits", "split"))
    return Split(images=images[train], labels=labels[train]), Split(images=images[test], labels=labels[test])
