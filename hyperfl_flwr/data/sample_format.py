"""The federation's agreement on the format of samples, and the names of custom data sets.

Custom data are an `.npz` file, a CSV file or a folder of images. The classes, the shape of a sample and the
normalisation must be the same for all clients. If each client has only its own data, the settings must define them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperfl_flwr.core.errors import ConfigError, DataError, RefusalError
from hyperfl_flwr.core.tasks import CLASSIFICATION, Task

NPZ_PREFIX = "npz:"
FOLDER_PREFIX = "folder:"
CSV_PREFIX = "csv:"

LOCAL_DATA = (f"{NPZ_PREFIX}PATH", f"{CSV_PREFIX}PATH", f"{FOLDER_PREFIX}PATH")
"""Placeholders of custom data in tables of data sets."""

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel."""

HALF: Normalisation = ((0.5,), (0.5,))
"""Normalisation of images if the statistics over all clients are unknown: maps [0, 1] to [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class SampleFormat:
    """Agreed format of samples, and options for reading them.

    Attributes:
        input_shape: Shape (C, H, W) of images; images in folders are converted to it. None for the shape of the data.
        classes: Names of the classes, labels or targets 0..K-1; None for those of the data.
        normalisation: Mean and standard deviation, per channel or one for all; None for those of the data set.
        window: Values that become black and white in grey images of more than 8 bits; None if there are no such images.
        grouping: What keeps samples together in one part, see `hyperfl_flwr.data.grouped_split`.
        seed: Seed of the split of a folder into training and test data.
        cache: Folder for decoded images; None for the user's cache folder.
        has_owner: True if the data belong to one client, so that their statistics are not known to the others.
        task: What is predicted.
        target_scale: Mean and standard deviation of the targets of a regression, per target or one for all; None for
            those of the training data.
    """

    input_shape: tuple[int, int, int] | None = None
    classes: tuple[str, ...] | None = None
    normalisation: Normalisation | None = None
    window: tuple[float, float] | None = None
    grouping: str = "auto"
    seed: int = 0
    cache: Path | None = None
    has_owner: bool = False
    task: Task = CLASSIFICATION
    target_scale: Normalisation | None = None


_KINDS = {NPZ_PREFIX: ".npz file", CSV_PREFIX: "CSV file", FOLDER_PREFIX: "folder"}

UNCHANGED = SampleFormat()
"""No agreement: samples are read unchanged."""


def placeholder_of(name: str) -> str:
    """Return the key of a data set in `DATASETS`: its name, or one of `LOCAL_DATA` for custom data."""
    return next((own for own in LOCAL_DATA if name.startswith(own.removesuffix("PATH"))), name)


def is_local_data(name: str) -> bool:
    """Return True if a name refers to custom data (a file or folder), and not to a public data set."""
    return placeholder_of(name) in LOCAL_DATA


def local_data_path(name: str) -> Path:
    """Return the path in the name of custom data; a relative path is resolved in data-root, see `located`."""
    return expanded(name.partition(":")[2])


def samples_path(given: str) -> Path:
    """Return the absolute path of samples that a command is given, with or without a prefix of custom data."""
    return (local_data_path(given) if is_local_data(given) else expanded(given)).absolute()


def from_here(name: str, *, has_data_root: bool) -> str:
    """Return the name of a data set as a command in the working directory means it.

    Args:
        name: Name of a data set, or of custom data; a file or folder of the working directory gets its absolute path.
        has_data_root: Whether `data-root` is given, in which a path is looked up that is not in the working directory.
    """
    if not is_local_data(name):
        return name
    path = local_data_path(name)
    return f"{name.partition(':')[0]}:{path.absolute()}" if path.exists() or not has_data_root else name


def refuse_absent(name: str) -> None:
    """Refuse custom data for a new run if there is nothing at their absolute path: they cannot have moved since.

    Raises:
        DataError: If there is nothing.
    """
    if is_local_data(name) and local_data_path(name).is_absolute():
        located(name, None)


def path_hint(name: str) -> str:
    """Return how to name own data at a path that lacks its prefix; empty if a name does not look like a path.

    It does not look for the path: a server could ask a node for names that exist there.
    """
    if not re.search(r"[/\\.]|^~", name):
        return ""
    prefix = {".npz": NPZ_PREFIX, ".csv": CSV_PREFIX}.get(Path(name).suffix, FOLDER_PREFIX)
    return f"; for data of your own write {prefix}{name}"


def expanded(path: str) -> Path:
    """Expand `~` and `~user` in a path.

    Raises:
        ConfigError: If this machine does not know the user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path!r} begins with the home folder of an unknown user; write it in full") from None


def placed(path: str, context: Mapping[str, Path] | None) -> str:
    """Return a path that may be relative to the `folder` of a validation context, if there is one."""
    return str(context["folder"] / expanded(path)) if path and context else path


def title_of(name: str) -> str:
    """Return the title of a data set for people: its name, or the name of a file or folder without the path."""
    folder = "folder " if name.startswith(FOLDER_PREFIX) else ""
    return f"{folder}{local_data_path(name).name}" if is_local_data(name) else name


def located(name: str, data_root: Path | None, *, may_have_moved: bool = True) -> Path:
    """Return the absolute path of custom data.

    Args:
        name: Name of custom data.
        data_root: Folder of the data sets.
        may_have_moved: Whether a file or folder of the same name in `data_root` stands for an absolute path that does
            not exist: a run records where its data were when it began.

    Raises:
        DataError: If the path is relative and there is no data root, or if it is absolute and there is nothing at
            either place; without `may_have_moved` an absolute path is not looked for.
    """
    path, prefix = local_data_path(name), placeholder_of(name).removesuffix("PATH")
    if path.is_absolute():
        if path.exists() or not may_have_moved:
            return path
        moved = data_root.expanduser().absolute() / path.name if data_root else path
        if moved.exists():
            return moved
        raise DataError(
            f"{path}: must be an existing {_KINDS[prefix]}{f', or {moved}' if data_root else ''}; check the path after "
            f"{prefix}, or, if the data of a run have moved, name the folder that they are in now with --data-root"
        )
    if data_root is None:
        raise DataError(
            f"dataset {name} has a relative path, which needs data-root, but data-root is empty; set data-root to the "
            f"folder that contains {path}, or give the absolute path after {prefix}"
        )
    return data_root.expanduser().absolute() / path


def is_same_data(one: str, other: str, data_root: Path | None) -> bool:
    """Return whether two names are of one data set, also where a file or folder is spelled in two ways.

    Args:
        one: Name of a data set or of custom data.
        other: Another one.
        data_root: Folder of the data sets.

    A folder is the same data as one that contains it.

    Raises:
        DataError: If a name is of custom data that cannot be found, see `located`, or its path cannot be resolved.
    """
    if not (is_local_data(one) and is_local_data(other)):
        return one == other
    try:
        first, second = (located(name, data_root).resolve() for name in (one, other))
        is_one_file = first.exists() and second.exists() and first.samefile(second)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that is too long, a zero byte
        raise DataError(f"{one} and {other} cannot be compared: {error}; check the paths") from None
    return is_one_file or first == second or first in second.parents or second in first.parents


def parse_shape(text: str) -> tuple[int, int, int] | None:
    """Parse a shape such as 1x28x28 to (C, H, W); None for `auto`.

    Raises:
        ValueError: If the text is invalid, or the target networks do not accept images of this shape.
    """
    if text == "auto":
        return None
    if not (match := re.fullmatch(r"([13])x([1-9]\d{0,3})x([1-9]\d{0,3})", text)):
        raise ValueError(f"must be auto or CHANNELSxHEIGHTxWIDTH with 1 or 3 channels, such as 1x28x28; got {text!r}")
    channels, height, width = map(int, match.groups())
    return channels, height, width


def parse_classes(text: str) -> tuple[str, ...] | None:
    """Parse a comma-separated list of class names; None for `auto`.

    Raises:
        ValueError: If a name is empty or occurs twice.
    """
    if text == "auto":
        return None
    names = tuple(name.strip() for name in text.split(","))
    if "" in names or len(set(names)) < len(names):
        raise ValueError(f"must be auto or different names, separated by commas; got {text!r}")
    return names


def parse_normalisation(text: str) -> Normalisation | None:
    """Parse a mean and standard deviation such as 0.13/0.31 or 0.5,0.5,0.5/0.2,0.2,0.2; None for `auto`.

    Raises:
        ValueError: If the text is invalid, or a standard deviation is not above 0.
    """
    if text == "auto":
        return None
    number = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
    numbers = rf"{number}(?:,{number})*"
    if match := re.fullmatch(rf"({numbers})/({numbers})", text):
        mean, std = (tuple(map(float, part.split(","))) for part in match.groups())
        if len(mean) == len(std) and min(std) > 0:
            return mean, std
    raise ValueError(
        f"must be auto or MEAN/STD (one number or one per channel or target each, STD above 0), such as 0.13/0.31; "
        f"got {text!r}"
    )


def parse_window(text: str) -> tuple[float, float] | None:
    """Parse the values that become black and white, such as 0/4095 or -1000/400; None for `auto`.

    Raises:
        ValueError: If the text is invalid, or the first value is not below the second.
    """
    if text == "auto":
        return None
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    if match := re.fullmatch(f"({number})/({number})", text):
        low, high = map(float, match.groups())
        if -math.inf < low < high < math.inf:
            return low, high
    raise ValueError(f"must be auto or LOW/HIGH, two numbers of which the first is smaller; got {text!r}")


def window_of(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the window in a description of a run's models, which is empty if there is none."""
    return (values[0], values[1]) if values else None


def normalisation_text(mean: Sequence[float], std: Sequence[float], kind: str = "features") -> str:
    """Return a mean and standard deviation in the format of `parse_normalisation`; for many only a description.

    Args:
        mean: Mean of each channel, feature or target.
        std: Their standard deviations.
        kind: Word for what there are many of.
    """
    if len(mean) > 3:
        return f"mean and standard deviation of each of {len(mean)} {kind}"
    return "/".join(",".join(f"{value:.6g}" for value in values) for values in (mean, std))


def refuse_own_statistics(*, own_statistics: bool) -> None:
    """Refuse to protect single records that are normalised by statistics of their owner's records.

    Args:
        own_statistics: Whether they are, see `Dataset.own_statistics`.

    Raises:
        RefusalError: If they are.
    """
    if own_statistics:
        raise RefusalError(
            "data.normalisation must not be auto where noise protects single records (dp.epsilon, or epsilon of a "
            "descriptor) of feature vectors: auto is the mean and standard deviation of the node's own records, so one "
            "record would move all others; set it to numbers that are public, MEAN/STD, for all features or for each, "
            "for example 0/1 if the owners scale their features"
        )


def shape_text(shape: tuple[int, ...]) -> str:
    """Return the shape of a sample for people: "1x28x28" for an image, "64 features" for a vector."""
    return f"{shape[0]} features" if len(shape) == 1 else "x".join(map(str, shape))
