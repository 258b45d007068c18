"""Read custom images or feature vectors from a numpy `.npz` file.

=====================================  ==============================================================================
key                                    content
=====================================  ==============================================================================
images                                 [n, H, W], [n, H, W, C] or [n, C, H, W], C = 1 or 3; uint8, or floats in [0, 1]
features (instead of images)           [n, D], floats
labels                                 [n], integers 0..K-1; with task=multi-label [n, K], 0 or 1 for each label;
                                       with task=regression [n] or [n, K], numbers
clients (optional)                     [n], the client of each sample: integers or strings, numbered in sorted order
test_images or test_features, and      as above; without them a quarter of the data, drawn with a fixed seed, becomes
test_labels (optional)                 the test data: of every client, or of every class if there are no clients
test_clients (optional)                [n_test], ids that occur in `clients`; without them the test data are divided
                                       among the clients like a common pool
weights (optional)                     [n], the weight of each training sample: numbers of at least 0
groups, test_groups (optional)         [n] and [n_test], the group of each sample, such as a patient: integers or
                                       strings; a group is in one part only, unless data.group-by is none
=====================================  ==============================================================================

Float pixels may be NaN (a federation must survive a client with broken data), but not infinite. They stay floats; files
of uint8 are four times smaller. Features must be finite; each is normalised by the mean and standard deviation of the
training samples, like the channels of images. Other keys are not read, and those that are nearly one of these are
refused. Every process reads the file itself, and it is
never copied to the cache, since it may be private. Large arrays without compression (`numpy.savez`) are mapped, so that
the processes of a machine share one copy; float32 features and uint8 images [n, C, H, W] are used as they are.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.files.checked_files import MalformedFileError, map_arrays, open_archive
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.core.target_scale import scale_of
from hyperfl_flwr.core.tasks import CLASSIFICATION, REGRESSION, Task
from hyperfl_flwr.data.dataset import (
    TEST_FRACTION,
    Dataset,
    ImageArray,
    IntArray,
    Split,
    Targets,
    channel_statistics,
    split_train_test,
)
from hyperfl_flwr.data.grouped_split import AUTO, NONE, refuse_lost, split_groups
from hyperfl_flwr.data.sources.npz_columns import (
    RawArrays,
    class_numbers,
    client_numbers,
    group_numbers,
    match_clients,
    refuse_near_keys,
    sample_weights,
    target_values,
    wrong,
)
from hyperfl_flwr.data.sources.npz_samples import KINDS, reader_of, refuse_copies
from hyperfl_flwr.data.strata import strata_of

_OTHERS = ("labels", "clients", "groups", "weights", "test_labels", "test_clients", "test_groups")
_KEYS = (*KINDS, *(f"test_{kind}" for kind in KINDS), *_OTHERS)
_SPLIT_SEED = 0


def read_npz(name: str, path: Path, grouping: str = AUTO, task: Task = CLASSIFICATION) -> Dataset:
    """Read a data set from a `.npz` file.

    Args:
        name: The data set's name.
        path: The file; see the module's docstring for its contents.
        grouping: `auto` to use the key `groups`, `none` to ignore it.
        task: What is predicted.

    Returns:
        The data set, without augmentation and recommended sizes, normalised by its training samples.

    Raises:
        DataError: If the file is missing, is not an `.npz` file, or has invalid content.
    """
    return dataset_of(_read_arrays(path), name, path, grouping, task=task)


def dataset_of(
    arrays: RawArrays, name: str, path: Path, grouping: str, classes: int = 0, task: Task = CLASSIFICATION
) -> Dataset:
    """Return the data set that the arrays of a file are, as `read_npz`; `classes` is their number if it is known."""
    if grouping not in (AUTO, NONE):
        raise wrong(path, f"data.group-by = {grouping!r} is for folders", "store the key groups, and set it to auto")
    if grouping == NONE:
        arrays = {key: array for key, array in arrays.items() if not key.endswith("groups")}
    train, test, client_ids = _splits(arrays, path, task)
    if train.targets is not None:
        classes = train.targets.shape[1]
    num_classes = classes or int(max(train.labels.max(), test.labels.max())) + 1
    if not classes and num_classes > len(train) + len(test):
        raise wrong(
            path,
            f"labels must be 0..K-1 with at most as many classes as samples, got the label {num_classes - 1}",
            "renumber the classes from 0",
        )
    mean, std = channel_statistics(train.images)
    target_mean, target_std = ((), ()) if task is not REGRESSION else scale_of(_numbers(train))
    return Dataset(
        name=name,
        num_classes=num_classes,
        input_shape=tuple(int(size) for size in train.images.shape[1:]),
        train=train,
        test=test,
        mean=mean,
        std=std,
        augment=False,
        train_samples=None,
        test_samples=None,
        client_ids=client_ids,
        task=task,
        target_mean=target_mean,
        target_std=target_std,
    )


def _numbers(split: Split) -> npt.NDArray[np.float64]:
    """Return the targets of a regression [n, K]."""
    assert split.targets is not None
    return split.targets.astype(np.float64, copy=False)


def read_samples(path: Path) -> tuple[ImageArray, list[str]]:
    """Read samples without labels from the key `images` or `features` of a `.npz` file.

    Returns:
        Images [n, C, H, W], uint8 or float32 in [0, 1], or feature vectors [n, D], and the names of the other keys.

    Raises:
        DataError: If the file is missing, is not an `.npz` file, or its samples are invalid.
    """
    arrays, others = _open(path)
    kinds = [kind for kind in KINDS if kind in arrays]
    if len(kinds) != 1:
        raise wrong(
            path, f"must have the key images or features, got {' and '.join(kinds) or 'neither'}", "store one of them"
        )
    refuse_copies({kinds[0]: arrays[kinds[0]]}, path)
    return reader_of(kinds[0])(arrays[kinds[0]], kinds[0], path), [key for key in (*arrays, *others) if key != kinds[0]]


def read_labels(path: Path, count: int) -> IntArray | None:
    """Read the labels of `count` samples from a `.npz` file; None if it has none.

    Raises:
        DataError: If they are not integers 0..K-1, one per sample.
    """
    arrays, _ = _open(path)
    return class_numbers(arrays["labels"], "labels", count, path) if "labels" in arrays else None


def read_targets(path: Path, count: int, task: Task) -> Targets | None:
    """Read what is true of `count` samples for another task than classification; None if the file does not say it.

    Raises:
        DataError: If the labels are not those of the task, see the module's docstring.
    """
    arrays, _ = _open(path)
    return target_values(arrays["labels"], "labels", count, task, path) if "labels" in arrays else None


def _read_arrays(path: Path) -> RawArrays:
    """Read all known arrays of the file, and check that none is missing or misspelt."""
    arrays, others = _open(path)
    refuse_near_keys(others, [key for key in _KEYS if key not in arrays], path)
    if missing := _missing(arrays):
        raise wrong(
            path,
            f"must have the {'key' if len(missing) == 1 else 'keys'} {', '.join(missing)}, "
            f"got only {', '.join(arrays) or 'other keys'}",
            "add what is missing",
        )
    if kinds := [key for key in arrays if key.removeprefix("test_") != _kind(arrays) and key not in _OTHERS]:
        raise wrong(
            path, f"must have either images or features, got {_kind(arrays)} and {', '.join(kinds)}", "drop one kind"
        )
    return arrays


def _open(path: Path) -> tuple[RawArrays, list[str]]:
    """Return all known arrays of the file, without unpickling, and the names of the other members."""
    if not path.is_file():
        raise wrong(path, "must be an existing .npz file", "check the path after npz:")
    try:
        with open_archive(path) as archive:
            names = archive.namelist()
            members = {key: f"{key}.npy" for key in _KEYS if f"{key}.npy" in names}
            arrays = dict(zip(members, map_arrays(archive, members.values()), strict=True))
    except (OSError, MalformedFileError) as error:
        problem = f"must be an .npz archive of plain arrays, but {error}"
        raise wrong(path, problem, "write it with numpy.savez from arrays of numbers and strings") from error
    return arrays, [name.removesuffix(".npy") for name in names if name not in members.values()]


def _kind(arrays: RawArrays) -> str:
    """Return the key of the training samples."""
    return "images" if "images" in arrays else "features"


def _missing(arrays: RawArrays) -> list[str]:
    missing = [] if any(kind in arrays for kind in KINDS) else ["images or features"]
    missing += [] if "labels" in arrays else ["labels"]
    test = f"test_{_kind(arrays)}"
    if (test in arrays) != ("test_labels" in arrays):
        missing.append("test_labels" if test in arrays else test)
    if "test_clients" in arrays:
        missing += [name for name in ("clients", test) if name not in arrays]
    return missing


def _splits(arrays: RawArrays, path: Path, task: Task) -> tuple[Split, Split, tuple[str, ...] | None]:
    kind = _kind(arrays)
    read = reader_of(kind)
    samples = {key: arrays[key] for key in (kind, f"test_{kind}") if key in arrays}
    refuse_copies(samples, path, divided=len(samples) == 1)
    images = read(arrays[kind], kind, path)
    labels, targets = _labels(arrays, "labels", len(images), task, path)
    clients, ids = client_numbers(arrays, len(images), path)
    weights = sample_weights(arrays, len(images), path)
    names = None if ids is None else tuple(str(name) for name in ids)
    if (test_kind := f"test_{kind}") not in arrays:
        groups, _ = group_numbers(arrays, len(images), None, path)
        if targets is not None:
            (labels,) = strata_of(task, [targets])
        whole = Split(images=images, labels=labels, clients=clients, groups=groups, weights=weights, targets=targets)
        return (*_split(whole, path), names)
    test_images = read(arrays[test_kind], test_kind, path)
    if (of_test := test_images.shape[1:]) != (of_train := images.shape[1:]):
        shapes = (
            f"{of_test} and {of_train} (C, H, W)" if kind == "images" else f"lengths {of_test[0]} and {of_train[0]}"
        )
        raise wrong(path, f"{test_kind} must have the shape of {kind}, got {shapes}", "convert one of them")
    test_labels, test_targets = _labels(arrays, "test_labels", len(test_images), task, path)
    if targets is not None and test_targets is not None:
        if targets.shape[1] != test_targets.shape[1]:
            columns = f"{test_targets.shape[1]} and {targets.shape[1]}"
            raise wrong(path, f"test_labels must have the columns of labels, got {columns}", "fix one of them")
        labels, test_labels = strata_of(task, [targets, test_targets])
    test_clients = None
    if ids is not None and "test_clients" in arrays:
        test_clients = match_clients(arrays["test_clients"], ids, len(test_images), path)
    groups, test_groups = group_numbers(arrays, len(images), len(test_images), path)
    train = Split(images=images, labels=labels, clients=clients, groups=groups, weights=weights, targets=targets)
    test = Split(images=test_images, labels=test_labels, clients=test_clients, groups=test_groups, targets=test_targets)
    return train, test, names


def _labels(arrays: RawArrays, key: str, count: int, task: Task, path: Path) -> tuple[IntArray, Targets | None]:
    """Return the classes of the samples; with another task zeros, and the targets."""
    if task is CLASSIFICATION:
        return class_numbers(arrays[key], key, count, path), None
    return np.zeros(count, np.int64), target_values(arrays[key], key, count, task, path)


def _split(whole: Split, path: Path) -> tuple[Split, Split]:
    """Split off a quarter of the data as test data: of each client or class, or about that of whole groups."""
    strata, rng = whole.labels if whole.clients is None else whole.clients, numpy_generator(_SPLIT_SEED, "npz", "split")
    smallest = int(np.unique(strata, return_counts=True)[1].min())
    if (whole.clients is not None and smallest < 2) or len(whole) < 2:
        raise wrong(
            path,
            f"without test data every client must have 2 or more samples, one of them for the test, got {smallest}",
            f"add samples, or {_how_to_add_test_data(path)}",
        )
    if whole.groups is None:
        train, test = split_train_test(strata, rng)
    elif len(np.unique(whole.groups)) < 2:
        raise wrong(path, "must have 2 or more groups, one of them for the test, got 1", "add samples of others")
    else:
        train, test = split_groups(strata, whole.groups, TEST_FRACTION, rng)
        if whole.clients is not None:
            _refuse_one_sided(whole.clients, train, test, path)
        elif whole.targets is None:
            refuse_lost(strata, train, str(path))
    if len(test) == 0:
        raise wrong(path, "must have a class with 2 or more samples, one of them for the test", "add test data")
    return whole.chosen(train), whole.chosen(test)


def _how_to_add_test_data(path: Path) -> str:
    return (
        "mark test rows with `test` in a column `split`" if path.suffix == ".csv" else "add test data and test_labels"
    )


def _refuse_one_sided(clients: IntArray, train: IntArray, test: IntArray, path: Path) -> None:
    """Refuse a division by groups that leaves a client without training or without test samples."""
    for part, name in ((train, "training"), (test, "test")):
        if without := np.setdiff1d(clients, clients[part]).size:
            raise wrong(
                path,
                f"divided by whole groups, {without} clients have no {name} samples",
                f"give every client samples of more groups, or {_how_to_add_test_data(path)}",
            )
