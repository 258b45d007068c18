"""List the images of a natural federation, with class and user: from published CSV files, or from folders.

Hsu, Qi and Brown ("Federated Visual Classification with Real-World Data Distribution", ECCV 2020) divide iNaturalist
2017 and Google Landmarks v2 among users. There are two layouts of their files:

- the authors': a file for each split, with the columns `user_id`, `image_id` and `class`;
- TensorFlow Federated's: one file, with `image_id`, `class`, and the user in a column for each split (`geo_300`, ...).

In both, the test file has `image_id` and `class` only: test images have no user.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import IntArray
from hyperfl_flwr.data.sources.class_folders import Images, class_folders

UNUSED = "NA"
"""User of an image that a split does not use."""

USER, IMAGE, LABEL = "user_id", "image_id", "class"
"""Columns of the authors' files."""

LARGEST_CLASS = 999_999
"""Largest number of a class in a CSV file."""

CLIENT_FOLDER = "client-"
"""Beginning of the names of clients' folders, as `hyperfl image-folders` writes them."""


_LONGEST_QUOTE = 50
"""Number of characters of a field that an error quotes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ListedPart:
    """Images of the training or of the test data.

    Attributes:
        images: Their ids, or their paths below the folder of the images, [n].
        labels: Their classes [n], in 0..K-1.
        clients: Their users [n]; None if they have none.
    """

    images: Sequence[str]
    labels: IntArray
    clients: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, kw_only=True, eq=False)
class Listing:
    """The images of a data set.

    Attributes:
        train: The training images.
        test: The test images; None without test data.
        has_paths: Whether images are given by their paths, and not by their ids.
        unused: Number of rows that the split does not use.
        classes: Names of the classes 0..K-1; None if they are unknown.
    """

    train: ListedPart
    test: ListedPart | None
    has_paths: bool
    unused: int = 0
    classes: Sequence[str] | None = None

    @property
    def images(self) -> list[str]:
        """All images, those of the test data after those of the training data."""
        return [*self.train.images, *(self.test.images if self.test else ())]

    @property
    def in_both(self) -> int:
        """Number of images that are in the training data and in the test data."""
        return len(set(self.train.images) & set(self.test.images)) if self.test else 0


def read_split(split: Path, test: Path | None, column: str = USER) -> Listing:
    """Read a split in either of the published layouts.

    Args:
        split: CSV file with the columns image_id, class and `column`.
        test: CSV file of the test data with the columns image_id and class; None for none.
        column: Column with the user of an image; rows with `UNUSED` in it are left out.

    Raises:
        DataError: If a file cannot be read, lacks a column, or has an empty field or a class that is no number up to
            `LARGEST_CLASS`.
    """
    rows = list(_rows(split, (IMAGE, LABEL, column)))
    used = [row for row in rows if row[2] != UNUSED]
    if not used:
        raise DataError(
            f"{split} must have images with a user in the column {column}, but has none; choose another one"
        )
    train = ListedPart(images=[row[0] for row in used], labels=_labels(used), clients=[row[2] for row in used])
    tested = None
    if test is not None:
        found = list(_rows(test, (IMAGE, LABEL)))
        if not found:
            raise DataError(f"{test} must list images, but has none; leave out --test for data without test images")
        tested = ListedPart(images=[row[0] for row in found], labels=_labels(found))
    return Listing(train=train, test=tested, has_paths=False, unused=len(rows) - len(used))


def read_folder(folder: Path) -> Listing:
    """List the images of class folders, or of a folder `client-...` for each client, with class folders in it.

    Class folders may lie in the folders `train` and `test`, as for `folder:` data sets.

    Raises:
        DataError: If the folder has another structure, or a class has no images.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} must be an existing folder of images; check --images")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    clients = names if names and all(name.startswith(CLIENT_FOLDER) for name in names) else [""]
    found = {client: class_folders(folder / client) for client in clients}
    parts = sorted(next(iter(found.values())))
    if others := [client for client in clients if sorted(found[client]) != parts]:
        raise DataError(
            f"{folder} must have folders train and test for all clients, or for none, but {others[0]} differs from "
            f"{clients[0]}; divide the images of all clients in one way"
        )
    classes = sorted({name for of_client in found.values() for images in of_client.values() for name in images})
    listed = {part: _listed(folder, {client: found[client][part] for client in clients}, classes) for part in parts}
    filled = {name for of_client in found.values() for images in of_client.values() for name in images if images[name]}
    for part, images in listed.items():
        if not len(images):
            raise DataError(f"{folder if part == 'all' else folder / part} must contain images, but has none; add some")
    if empty := [name for name in classes if name not in filled]:
        raise DataError(
            f"{folder}: the class {empty[0]} must have images, but has none; add some, or remove its folders"
        )
    train = listed["train" if "train" in parts else "all"]
    return Listing(train=train, test=listed.get("test"), has_paths=True, classes=classes)


def _listed(folder: Path, clients: Mapping[str, Images], classes: Sequence[str]) -> ListedPart:
    numbers = {name: number for number, name in enumerate(classes)}
    rows = [
        (str(path.relative_to(folder)), numbers[name], client)
        for client, images in clients.items()
        for name, paths in images.items()
        for path in paths
    ]
    return ListedPart(
        images=[row[0] for row in rows],
        labels=np.array([row[1] for row in rows], dtype=np.int64),
        clients=None if "" in clients else [row[2] for row in rows],
    )


def _rows(file: Path, columns: Sequence[str]) -> Iterator[list[str]]:
    """Yield the chosen columns of the rows of a CSV file; the second one is a class."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            known = reader.fieldnames or ()
            if missing := [name for name in columns if name not in known]:
                raise DataError(
                    f"{file} must have the columns {', '.join(columns)}, but lacks {', '.join(missing)}; it has "
                    f"{', '.join(known) or 'none'}; choose the column of the users with --column"
                )
            for row in reader:
                fields = [row[name] or "" for name in columns]
                if not all(map(str.strip, fields)) or not _is_class(fields[1]):
                    raise DataError(
                        f"{file}, line {reader.line_num}: {', '.join(columns)} must be given, and {LABEL} must be a "
                        f"number from 0 to {LARGEST_CLASS}; got {', '.join(map(_quoted, fields))}; correct the line"
                    )
                yield fields
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; check the path") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} must be a CSV file in UTF-8: {error}; convert it") from None


def _is_class(text: str) -> bool:
    # The length first: Python refuses to convert thousands of digits.
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_QUOTE and int(text) <= LARGEST_CLASS


def _quoted(field: str) -> str:
    return repr(field if len(field) <= _LONGEST_QUOTE else f"{field[:_LONGEST_QUOTE]}...")


def _labels(rows: Sequence[Sequence[str]]) -> IntArray:
    return np.array([int(row[1]) for row in rows], dtype=np.int64)
