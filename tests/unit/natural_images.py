"""A made natural federation: 40 images of 12 users, with CSV files in both published layouts, for tests."""

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

USERS = ("Ana, B/C", *(f"user-{number:02d}" for number in range(1, 12)))
CLASSES = 4


@dataclass(frozen=True)
class Natural:
    """Files of the federation.

    Attributes:
        root: Folder with `nested`, `anywhere` and the CSV files `federated_train.csv`, `tff.csv` and `test.csv`.
        rows: Training rows (user, image, class), of which the last two have a missing and a broken image.
        test: Test rows (image, class).
    """

    root: Path
    rows: Sequence[tuple[str, str, int]]
    test: Sequence[tuple[str, int]]

    @property
    def missing(self) -> str:
        return self.rows[-2][1]

    @property
    def broken(self) -> str:
        return self.rows[-1][1]

    @property
    def usable(self) -> Sequence[tuple[str, str, int]]:
        return self.rows[:-2]


def image_id(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:16]


def picture(path: Path, label: int, number: int) -> None:
    """Write a JPEG of which class and number decide colour and size."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 60, (40 + number, 60, 3)) + 45 * np.array([label, 3 - label, label % 2])
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path, "JPEG")


def write_csv(path: Path, rows: Sequence[Sequence[object]]) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return path


def make_natural(root: Path) -> Natural:
    """Write 36 training images of 12 users, 4 test images, and rows with a missing, a broken and an unused image."""
    rows = [(USERS[number % 12], image_id(number), number // 12 % CLASSES) for number in range(36)]
    test = [(image_id(100 + number), number % CLASSES) for number in range(4)]
    rows += [(USERS[0], image_id(200), 3), (USERS[1], image_id(201), 3)]
    for number, (image, label) in enumerate([*((image, label) for _, image, label in rows), *test]):
        for path in (root / "nested" / image[0] / image[1] / image[2], root / "anywhere" / f"Plantae/species {label}"):
            file = path / f"{image}.jpg"
            if image != rows[-2][1]:
                picture(file, label, number)
            if image == rows[-1][1]:
                file.write_bytes(file.read_bytes()[:200])
    write_csv(
        root / "federated_train.csv",
        [("user_id", "image_id", "class", "label"), *((user, image, label, 9) for user, image, label in rows)],
    )
    geo = [(image, label, "4711", user) for user, image, label in rows] + [(image_id(300), 0, "4711", "NA")]
    write_csv(root / "tff.csv", [("image_id", "class", "user_120k", "geo_300"), *geo])
    write_csv(root / "test.csv", [("image_id", "class"), *test])
    return Natural(root, rows, test)
