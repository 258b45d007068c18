"""Read Omniglot's two small background sets, with drawers as clients and alphabets as classes.

Lake, Salakhutdinov, Tenenbaum: "Human-level concept learning through probabilistic program induction", Science 350,
2015. Each of twenty people drew every character once; the number after `_` in a file name is the drawer. Each set has
five alphabets. The Greek and Latin images are the same in both sets and are read once. This gives 242 characters of
eight alphabets, 4,840 images.

- Images are averaged down from 105x105 to 28x28 pixels and inverted: ink is bright on black, as in MNIST.
- The test data are a quarter of each drawer's characters of each alphabet, drawn with a fixed seed, independently of
  the other drawers. So a client has never seen the characters of its test data, but most other clients have.
- Drawers are numbered separately in each alphabet: each alphabet of a client is written by one person, but not all of
  them by the same person (docs/reference/data-sets.md describes how that was found).

torchvision's class reads only the large sets, and this project does not download the small ones.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.files.checked_files import MalformedFileError, check_members, open_archive, read_member
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.cache import ARRAYS, CLIENTS, Arrays, fingerprint, load_or_build
from hyperfl_flwr.data.dataset import split_train_test
from hyperfl_flwr.data.dataset_spec import DatasetSpec
from hyperfl_flwr.data.sources.image_files import open_image

CHARACTERS = {
    "Balinese": 24,
    "Early_Aramaic": 22,
    "Greek": 24,
    "Japanese_(katakana)": 47,
    "Korean": 40,
    "Latin": 26,
    "Sanskrit": 42,
    "Tagalog": 17,
}
"""Number of characters of each alphabet; the alphabets are the classes, in this order."""

DRAWERS = tuple(f"{number:02d}" for number in range(1, 21))
"""The drawers as in the file names; they are the clients, in this order."""

FOLDER = "omniglot-py"
SETS = ("images_background_small1", "images_background_small2")
_NAME = re.compile(r"(?P<alphabet>[^/]+)/[^/]+/\d+_(?P<drawer>\d\d)\.png")
_DRAWN_SIDE, _SIDE = 105, 28
_SPLIT_SEED = 0


def sources(root: Path) -> list[Path]:
    """Return the paths that are read below a data root: of each set its archive or else its character folders."""
    found: list[Path] = []
    for name in SETS:
        archive, folder = _places(root, name)
        found += [archive] if archive.is_file() or not folder.is_dir() else sorted(folder.glob("*/*"))
    return found


def load_omniglot(root: Path) -> Arrays:
    """Load Omniglot; the first call decodes 4,840 files, later calls map the decoded arrays from the cache.

    Args:
        root: Data root, absolute.

    Returns:
        ``train_images`` and ``test_images`` uint8 [n, 1, 28, 28]; ``train_labels``, ``test_labels``, ``train_clients``
        and ``test_clients`` int64 [n], positions in `CHARACTERS` and in `DRAWERS`.

    Raises:
        DataError: If archives are missing, damaged or incomplete.
    """
    missing = [name for name in SETS if not any(path.exists() for path in _places(root, name))]
    if missing:
        raise DataError(
            f"data set omniglot must lie in {root / FOLDER} as {' and '.join(f'{name}.zip' for name in SETS)}, packed "
            f"or unpacked; missing: {', '.join(f'{FOLDER}/{name}.zip' for name in missing)}; download them from the "
            f"folder python of its authors' github.com/brendenlake/omniglot, or set data-root to the folder that "
            f"contains {FOLDER}"
        )
    return load_or_build(f"omniglot-{fingerprint(sources(root))}", lambda: _decode(root), (*ARRAYS, *CLIENTS))


def _places(root: Path, name: str) -> tuple[Path, Path]:
    return root / FOLDER / f"{name}.zip", root / FOLDER / name


def _decode(root: Path) -> Arrays:
    files: dict[str, bytes] = {}
    for name in SETS:
        archive, folder = _places(root, name)
        try:
            # Greek and Latin are in both sets under the same names, so the union keeps one copy of them.
            files |= _in_archive(archive, name) if archive.is_file() else _in_folder(folder)
        except (OSError, MalformedFileError) as error:
            raise DataError(f"reading {name} below {root / FOLDER} failed: {error}; copy its archive again") from error
    names = sorted(files)
    labels, clients = _labels_and_clients(names, root)
    images = np.stack([_read(files[name], name, root) for name in names])
    groups = clients * len(CHARACTERS) + labels  # one group for each drawer and alphabet
    arrays: dict[str, npt.NDArray[np.uint8] | npt.NDArray[np.int64]] = {}
    chosen = split_train_test(groups, numpy_generator(_SPLIT_SEED, "omniglot", "split"))
    for part, indices in zip(("train", "test"), chosen, strict=True):
        arrays[f"{part}_images"] = images[indices]
        arrays[f"{part}_labels"], arrays[f"{part}_clients"] = labels[indices], clients[indices]
    return arrays


def _in_archive(path: Path, name: str) -> dict[str, bytes]:
    """Return the images of a set by `alphabet/character/file`; equal names mean equal images in both sets."""
    with open_archive(path) as archive:
        inside = {entry.removeprefix(f"{name}/"): entry for entry in archive.namelist()}
        images = {short: inside[short] for short in _images(inside)}
        check_members(archive, images.values())
        return {short: read_member(archive, member) for short, member in images.items()}


def _in_folder(folder: Path) -> dict[str, bytes]:
    inside = {path.relative_to(folder).as_posix(): path for path in folder.glob("*/*/*.png")}
    return {short: inside[short].read_bytes() for short in _images(inside)}


def _images(names: dict[str, str] | dict[str, Path]) -> Iterator[str]:
    """Yield the names of drawings, without folders and additional files of operating systems."""
    return (name for name in names if _NAME.fullmatch(name))


def _labels_and_clients(names: list[str], root: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the alphabet (label) and the drawer (client) of each file, and check that none is missing."""
    counts = {(alphabet, drawer): 0 for alphabet in CHARACTERS for drawer in DRAWERS}
    pairs = [(match["alphabet"], match["drawer"]) for match in map(_NAME.fullmatch, names) if match]
    for pair in pairs:
        counts[pair] = counts.get(pair, 0) + 1
    for (alphabet, drawer), count in counts.items():
        if count != (expected := CHARACTERS.get(alphabet, 0) if drawer in DRAWERS else 0):
            raise DataError(
                f"{root / FOLDER} must contain {expected} drawings of {alphabet} by drawer {drawer}, got {count}; "
                f"copy the archives of {' and '.join(SETS)} again"
            )
    order = list(CHARACTERS)
    labels = np.array([order.index(alphabet) for alphabet, _ in pairs], dtype=np.int64)
    return labels, np.array([DRAWERS.index(drawer) for _, drawer in pairs], dtype=np.int64)


def _read(content: bytes, name: str, root: Path) -> npt.NDArray[np.uint8]:
    """Return an image [1, 28, 28]; each pixel is the mean of the pixels of the drawing that it covers."""
    with open_image(io.BytesIO(content), f"{name} in {root / FOLDER}") as image:
        drawing = ImageOps.invert(image.convert("L"))
    if drawing.size != (_DRAWN_SIDE, _DRAWN_SIDE):
        raise DataError(
            f"{name} in {root / FOLDER} must have {_DRAWN_SIDE}x{_DRAWN_SIDE} pixels, "
            f"got {drawing.size[0]}x{drawing.size[1]}; copy its archive again"
        )
    return np.asarray(drawing.resize((_SIDE, _SIDE), Image.Resampling.BOX), dtype=np.uint8)[None]


OMNIGLOT = DatasetSpec(
    title="4,840 handwritten characters of 8 alphabets (the classes) by 20 drawers, who are the clients",
    source="Lake, Salakhutdinov and Tenenbaum, Science 350, 2015; MIT; not downloaded here",
    num_classes=len(CHARACTERS),
    input_shape=(1, _SIDE, _SIDE),
    train_size=3640,
    test_size=1200,
    classes=tuple(CHARACTERS),
    client_ids=DRAWERS,
    load=load_omniglot,
    files=sources,
)
