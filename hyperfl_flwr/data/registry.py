"""Registry of data sets, and loading by name; a new data set is a module and a row.

A row is a `DatasetSpec`: a description, the sizes and learning rates of HyperFL's paper, and the loader. The
normalisation is that of the papers (CIFAR-100 uses the one of CIFAR-10); for data sets that no paper normalises, it is
computed from the training images.
"""

from functools import lru_cache
from pathlib import Path

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.tasks import CLASSIFICATION
from hyperfl_flwr.data.agreement import agreed
from hyperfl_flwr.data.cache import cache_directory, fingerprint
from hyperfl_flwr.data.dataset import Dataset, Split, channel_statistics
from hyperfl_flwr.data.dataset_spec import DatasetSpec
from hyperfl_flwr.data.grouped_split import AUTO, NONE
from hyperfl_flwr.data.sample_format import UNCHANGED, SampleFormat, is_local_data, located, placeholder_of
from hyperfl_flwr.data.sources import torchvision
from hyperfl_flwr.data.sources.cinic10 import CINIC10
from hyperfl_flwr.data.sources.csv_table import read_csv
from hyperfl_flwr.data.sources.digits import DIGITS
from hyperfl_flwr.data.sources.image_folder import read_class_folders, state_of
from hyperfl_flwr.data.sources.npz import read_npz
from hyperfl_flwr.data.sources.omniglot import OMNIGLOT


def _local(title: str) -> DatasetSpec:
    return DatasetSpec(
        title=title, source="their owner", num_classes=None, input_shape=None, train_size=None, test_size=None
    )


DATASETS: dict[str, DatasetSpec] = {
    "digits": DIGITS,
    "mnist": torchvision.MNIST,
    "fashion-mnist": torchvision.FASHION_MNIST,
    "cifar10": torchvision.CIFAR10,
    "cifar100": torchvision.CIFAR100,
    "emnist": torchvision.EMNIST,
    "cinic10": CINIC10,
    "omniglot": OMNIGLOT,
    "npz:PATH": _local(
        "your own data: images or features, labels, optionally clients and test_*, in a numpy .npz file"
    ),
    "csv:PATH": _local(
        "your own table: a column label, columns of numbers, optionally client, group, sample_weight and split"
    ),
    "folder:PATH": _local("your own images: a folder for each class, or train and test with folders of the classes"),
}
"""All data sets by name."""


def class_names(dataset: str, num_classes: int) -> tuple[str, ...]:
    """Return the names of the classes 0..K-1 of a data set; where they have none, the numbers."""
    spec = DATASETS.get(dataset)
    return (spec.classes if spec else ()) or tuple(map(str, range(num_classes)))


def default_data_root() -> Path:
    """Return this user's folder for downloaded data sets; it need not exist."""
    return cache_directory() / "data"


def load_dataset(name: str, data_root: Path | None = None, sample_format: SampleFormat = UNCHANGED) -> Dataset:
    """Load a data set; further calls in the same process return the same object.

    Args:
        name: A name from `DATASETS`, ``npz:PATH``, ``csv:PATH`` or ``folder:PATH``. A relative PATH is resolved in
            `data_root`, never in the working directory, which may differ between the processes of a run. What is no
            longer at an absolute PATH is looked for in `data_root` by its name, unless it is an owner's.
        data_root: Folder of the data sets; None for `default_data_root`, in which relative paths are not resolved.
            Missing data sets of torchvision are downloaded to it.
        sample_format: The federation's agreement on the samples.

    Returns:
        The data set; its arrays are shared and must not be written to.

    Raises:
        DataError: If the name is unknown, or the files are missing or damaged or do not match the agreement.
    """
    kind = placeholder_of(name)
    if is_local_data(name) and name != kind:
        path = located(name, data_root, may_have_moved=not sample_format.has_owner)
        return _load(name, path, state_of(path) if kind == "folder:PATH" else fingerprint([path]), sample_format)
    if name not in DATASETS or is_local_data(name):
        raise DataError(f"dataset must be one of {', '.join(DATASETS)}, got {name!r}")
    root = (data_root or default_data_root()).expanduser().absolute()
    files = DATASETS[name].files(root)
    return _load(name, root if files else Path(), fingerprint(files), sample_format)


@lru_cache(maxsize=8)
def _load(name: str, location: Path, _state: str, sample_format: SampleFormat) -> Dataset:
    """Load a data set; `_state` is only a part of the cache key, so that changed files are read again."""
    kind = placeholder_of(name)
    if sample_format.task is not CLASSIFICATION and kind not in ("npz:PATH", "csv:PATH"):
        raise DataError(
            f"{name} has classes, but task is {sample_format.task.name}, which needs npz: or csv: data; set "
            f"task=classification, or another dataset",
            public=f"its data have classes, which task={sample_format.task.name} does not use",
        )
    if kind == "npz:PATH":
        dataset = read_npz(name, location, sample_format.grouping, sample_format.task)
    elif kind == "csv:PATH":
        dataset = read_csv(name, location, sample_format)
    elif kind == "folder:PATH":
        dataset = read_class_folders(name, location, sample_format)
    elif sample_format.grouping not in (AUTO, NONE):
        raise DataError(
            f"data.group-by = {sample_format.grouping!r} is for folder: data, got {name}; set it to auto",
            public="data.group-by is for folders, which its data are not",
        )
    else:
        dataset = _load_named(name, location)
    return agreed(dataset, sample_format)


def _load_named(name: str, root: Path) -> Dataset:
    spec = DATASETS[name]
    if spec.load is None or spec.num_classes is None or spec.input_shape is None:
        raise ValueError(f"{name} is not a named data set")
    arrays = spec.load(root)
    train, test = (
        Split(images=arrays[f"{part}_images"], labels=arrays[f"{part}_labels"], clients=arrays.get(f"{part}_clients"))
        for part in ("train", "test")
    )
    if train.images.shape[1:] != spec.input_shape or max(train.labels.max(), test.labels.max()) >= spec.num_classes:
        raise DataError(
            f"images of {name} must have the shape {spec.input_shape} and labels below {spec.num_classes}, "
            f"got {train.images.shape[1:]} and labels up to {max(train.labels.max(), test.labels.max())}; replace the "
            f"files"
        )
    mean, std = spec.normalisation or channel_statistics(train.images)
    return Dataset(
        name=name,
        num_classes=spec.num_classes,
        input_shape=spec.input_shape,
        train=train,
        test=test,
        mean=mean,
        std=std,
        augment=spec.augment,
        train_samples=spec.train_samples,
        test_samples=spec.test_samples,
        client_ids=spec.client_ids,
        classes=spec.classes or None,
    )
