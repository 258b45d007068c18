"""Read a folder of images with one folder per class.

::

    PATH/train/CLASS/*.png, PATH/test/CLASS/*.png      training and test data as divided by their owner; or
    PATH/CLASS/*.png                                   all data; a quarter of each class becomes the test data

The names of the folders are the classes, numbered in alphabetical order unless the federation lists them. Images may
lie in subfolders of their class's folder, for example one for each patient; `data.group-by` keeps those of one group
together. Names that begin with a dot are skipped, and so are other folders next to
`train` and `test`. Images are decoded once; later processes map the decoded arrays from a cache that only its owner can
read.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.cache import Arrays, fingerprint, load_or_build
from hyperfl_flwr.data.dataset import TEST_FRACTION, Dataset, IntArray, Split, split_train_test
from hyperfl_flwr.data.grouped_split import (
    AUTO,
    NONE,
    group_names,
    numbered,
    refuse_lost,
    refuse_shared,
    split_groups,
)
from hyperfl_flwr.data.sample_format import HALF, SampleFormat
from hyperfl_flwr.data.sources.class_folders import Images, class_folders
from hyperfl_flwr.data.sources.image_files import (
    SUFFIXES,
    Misfit,
    Shape,
    decode,
    describe_shape,
    files_below,
    is_image,
    window_needed,
)

WINDOW = (
    "set data.window to the values that are to become black and white, as LOW/HIGH (the first image's smallest and "
    "largest are {})"
)
"""What to do about images with more than 8 bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Image files of one part of the data.

    Attributes:
        files: The files [n].
        labels: Their labels [n].
        groups: Their groups [n]; None without groups.
    """

    files: Sequence[Path]
    labels: IntArray
    groups: IntArray | None = None

    def chosen(self, numbers: IntArray) -> "Part":
        """Return some of the files."""
        groups = None if self.groups is None else self.groups[numbers]
        return Part(files=[self.files[number] for number in numbers], labels=self.labels[numbers], groups=groups)


def read_class_folders(name: str, path: Path, sample_format: SampleFormat) -> Dataset:
    """Read a folder of class folders.

    Args:
        name: The data set's name.
        path: The folder.
        sample_format: Agreed shape and classes, the seed of the split, and the folder for decoded images.

    Returns:
        The data set, without augmentation and recommended sizes; images are normalised to [-1, 1].

    Raises:
        DataError: If the folder has another structure, a class that was not agreed on or a class without images, or if
            an image is damaged or does not fit.
    """
    parts = class_folders(path, sample_format.classes or ())
    _check_classes(path, parts, sample_format.classes)
    classes = sample_format.classes or tuple(sorted({label for images in parts.values() for label in images}))
    labelled = _grouped(path, {part: _labelled(images, classes) for part, images in parts.items()}, sample_format)
    if "all" in labelled:
        labelled = _split(path, labelled["all"], sample_format.seed)
    # The labels come from the folders on every call; only the images, which are slow to decode, are cached.
    arrays = _decoded(path, {name: part.files for name, part in labelled.items()}, sample_format)
    train, test = (
        Split(images=arrays[f"{name}_images"], labels=part.labels, groups=part.groups)
        for name, part in sorted(labelled.items())[::-1]
    )
    _, *shape = map(int, train.images.shape)
    return Dataset(
        name=name,
        num_classes=len(classes),
        input_shape=tuple(shape),
        train=train,
        test=test,
        mean=HALF[0] * shape[0],
        std=HALF[1] * shape[0],
        augment=False,
        train_samples=None,
        test_samples=None,
        classes=classes,
        notes=_notes(path, parts) if sample_format.grouping == AUTO else (),
    )


def state_of(path: Path) -> str:
    """Return a fingerprint that changes whenever an image below a folder is replaced, added or removed.

    Raises:
        DataError: If the folder does not exist or cannot be read.
    """
    return fingerprint([file for file in _files(path) if is_image(file)])


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"{path} must be an existing folder; check the path after folder:")
    return files_below(path)


def _check_classes(path: Path, parts: Mapping[str, Images], listed: tuple[str, ...] | None) -> None:
    """Check that every class has images or, if classes were agreed on, is one of them."""
    kinds = ", ".join(sorted(SUFFIXES))
    for part, images in parts.items():
        folder = path if part == "all" else path / part
        if not any(images.values()):
            raise DataError(f"{folder} must contain images ({kinds}) in folders of their classes; add images")
        if listed is None:
            if empty := [name for name, files in images.items() if not files]:
                raise DataError(
                    f"{folder / empty[0]} must contain images ({kinds}), but has none; add some, or remove the folder, "
                    f"or list the federation's classes in data.classes if other nodes have images of {empty[0]}"
                )
        elif unknown := sorted(set(images) - set(listed)):
            raise DataError(
                f"{folder} must contain only folders of the classes in data.classes, {','.join(listed)}, but also has "
                f"{', '.join(unknown)}; rename or remove them, or add the classes for the whole federation",
                public="some of its class folders are not in data.classes, see the node's log",
            )
    if listed is None and (count := len({name for images in parts.values() for name in images})) < 2:
        raise DataError(f"{path} must contain two or more classes, got {count}; add some, or list them in data.classes")


def _labelled(images: Images, classes: Sequence[str]) -> Part:
    labels = np.repeat(np.arange(len(classes)), [len(images.get(label, ())) for label in classes])
    return Part(files=[file for label in classes for file in images.get(label, ())], labels=labels.astype(np.int64))


def _below_class(path: Path, part: str, file: Path) -> tuple[str, ...]:
    """Return the parts of an image's path below the folder of its class."""
    return file.relative_to(path if part == "all" else path / part).parts[1:]


def _grouped(path: Path, parts: Mapping[str, Part], sample_format: SampleFormat) -> dict[str, Part]:
    """Return the parts with the groups of their images, if any were asked for."""
    if sample_format.grouping in (AUTO, NONE):
        return dict(parts)
    names = [
        group_names(["/".join(_below_class(path, name, file)) for file in part.files], sample_format.grouping, name)
        for name, part in parts.items()
    ]
    groups = dict(zip(parts, numbered(*names), strict=True))
    if "train" in groups:
        refuse_shared(groups["train"], groups["test"], str(path))
    return {name: replace(part, groups=groups[name]) for name, part in parts.items()}


def _notes(path: Path, parts: Mapping[str, Images]) -> tuple[str, ...]:
    """Return a note if images lie in folders below those of the classes, which suggest groups."""
    of_part = {part: [file for files in images.values() for file in files] for part, images in parts.items()}
    below = [file for part, files in of_part.items() for file in files if len(_below_class(path, part, file)) > 1]
    if not below:
        return ()
    return (
        f"{len(below)} of {sum(map(len, of_part.values()))} images of {path} lie in folders below those of the "
        f"classes, such as {below[0].parent.name}; if each belongs to a patient or another subject, set "
        f"data.group-by=folder, so that none is on both sides of the split, which makes accuracies too high; otherwise "
        f"data.group-by=none",
    )


def _split(path: Path, whole: Part, seed: int) -> dict[str, Part]:
    """Split off a quarter of each class, or about a quarter of the groups, as test data."""
    rng = numpy_generator(seed, "folder", "split")
    if whole.groups is not None:
        if len(np.unique(whole.groups)) < 2:
            raise DataError(
                f"{path} must have images of 2 or more groups (data.group-by), one of them for the test, but all have "
                f"the same; add images of others",
                public="its data cannot be divided by groups (data.group-by)",
            )
        train, test = split_groups(whole.labels, whole.groups, TEST_FRACTION, rng)
        refuse_lost(whole.labels, train, str(path))
    elif np.bincount(whole.labels).max() < 2:
        raise DataError(f"{path} must have a class with 2 or more images, one of them for the test; add images")
    else:
        train, test = split_train_test(whole.labels, rng)
    return {"train": whole.chosen(train), "test": whole.chosen(test)}


def _decoded(path: Path, files: Mapping[str, Sequence[Path]], sample_format: SampleFormat) -> Arrays:
    """Return the images of each part, from the cache if unchanged; deletes older states of the folder from it."""
    form = repr((sample_format.input_shape, sample_format.window, [len(paths) for paths in files.values()]))
    family = f"folder-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}-"
    state = fingerprint([file for paths in files.values() for file in paths])
    return load_or_build(
        f"{family}{hashlib.sha256(form.encode()).hexdigest()[:8]}-{state}",
        lambda: _decode(path, files, sample_format),
        [f"{part}_images" for part in files],
        base=sample_format.cache,
        family=family,
    )


def _decode(path: Path, files: Mapping[str, Sequence[Path]], sample_format: SampleFormat) -> Arrays:
    """Decode the images of each part, all with the same shape."""
    arrays: dict[str, npt.NDArray[np.uint8]] = {}
    given = sample_format.input_shape
    shape = given
    for part, paths in files.items():
        images, refused = decode(path, paths, shape, convert=given is not None, window=sample_format.window)
        shape = (images.shape[1], images.shape[2], images.shape[3])  # the first part decides it for the other one
        if refused:
            problem = window_needed(path, refused, len(paths), WINDOW) or _refusal(
                path, shape, refused, len(paths), given=given is not None
            )
            raise DataError(
                problem, public="its images do not fit data.input-shape and data.window, see the node's log"
            )
        arrays[f"{part}_images"] = images
    return arrays


def _refusal(path: Path, shape: Shape, refused: Sequence[Misfit], count: int, *, given: bool) -> str:
    if given:
        return (
            f"{path}: images must be grey or in colour with 8 bits per channel to be converted; {len(refused)} of "
            f"{count} are not, the first is {refused[0].text}; convert them"
        )
    sized = f"data.input-shape={'x'.join(map(str, shape))}"
    return (
        f"{path}: all images must have the same size and channels as the first, {describe_shape(shape)}; "
        f"{len(refused)} of {count} do not, the first is {refused[0].text}; convert them, or set {sized} to convert "
        f"and resize them automatically"
    )
