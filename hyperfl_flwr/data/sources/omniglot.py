"""Omniglot's two small background sets, where the client is the drawer and the class the alphabet.

Lake, Salakhutdinov, Tenenbaum: "Human-level concept learning through probabilistic program induction", Science 350,
2015. Every character was drawn once by each of twenty people; the number after `_` in a file's name is the drawer. The
sets hold five alphabets each, of which Greek and Latin are the same images in both and are read once: 242 characters of
eight alphabets, 4,840 images.

- Images are averaged down from 105x105 to 28x28 pixels and inverted: ink is bright on black, as MNIST's.
- A quarter of each drawer's characters of each alphabet, drawn with a fixed seed, independently of the other drawers,
  is its test data. A client has hence never seen the characters it is tested on, while most of the other clients have.
- Drawers are numbered anew in each alphabet, so that a client's alphabets are each in one hand, but not all in the same
  hand (docs/reference/data-sets.md says how that was found).

torchvision's class reads the large sets alone, and this project does not download the small ones.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from hyperfl_flwr.core.checked_files import MalformedFileError, check_members, open_archive, read_member
from hyperfl_flwr.core.errors import DataError
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
"""How many characters each alphabet has; the classes, in this order."""

DRAWERS = tuple(f"{number:02d}" for number in range(1, 21))
"""The drawers as the files' names have them; the clients, in this order."""

FOLDER = "omniglot-py"
SETS = ("images_background_small1", "images_background_small2")
_NAME = re.compile(r"(?P<alphabet>[^/]+)/[^/]+/\d+_(?P<drawer>\d\d)\.png")
_DRAWN_SIDE, _SIDE = 105, 28
_SPLIT_SEED = 0


def sources(root: Path) -> list[Path]:
    """Return what is read below a data root: of each set its archive or, without one, the folders of its characters."""
    found: list[Path] = []
    for name in SETS:
        archive, folder = _places(root, name)
        found += [archive] if archive.is_file() or not folder.is_dir() else sorted(folder.glob("*/*"))
    return found


def load_omniglot(root: Path) -> Arrays:
    """Load Omniglot; the first time decodes 4,840 files, later ones map the decoded arrays.

    Args:
        root: Data root, absolute.

    Returns:
        ``train_images`` and ``test_images`` uint8 [n, 1, 28, 28]; ``train_labels``, ``test_labels``, ``train_clients``
        and ``test_clients`` int64 [n], positions in `CHARACTERS` and in `DRAWERS`.

    Raises:
        DataError: Archives are missing, damaged or incomplete.
    """
    missing = [name for name in SETS if not any(path.exists() for path in _places(root, name))]
    if missing:
        raise DataError(
            f"data set omniglot must lie in {root / FOLDER} as {' and '.join(f'{name}.zip' for name in SETS)}, packed "
            f"or unpacked; missing: {', '.join(f'{FOLDER}/{name}.zip' for name in missing)}; download them from the "
            f"folder python of its authors' github.com/brendenlake/omniglot, or choose the folder that holds {FOLDER} "
            "as data-root"
        )
    return load_or_build(f"omniglot-{fingerprint(sources(root))}", lambda: _decode(root), (*ARRAYS, *CLIENTS))


def _places(root: Path, name: str) -> tuple[Path, Path]:
    return root / FOLDER / f"{name}.zip", root / FOLDER / name


def _decode(root: Path) -> Arrays:
    files: dict[str, bytes] = {}
    for name in SETS:
        archive, folder = _places(root, name)
        try:
            files |= _in_archive(archive, name) if archive.is_file() else _in_folder(folder)
        except (OSError, MalformedFileError) as error:
            raise DataError(f"reading {name} below {root / FOLDER} failed: {error}; copy its archive anew") from error
    names = sorted(files)
    labels, clients = _labels_and_clients(names, root)
    images = np.stack([_read(files[name], name, root) for name in names])
    groups = clients * len(CHARACTERS) + labels
    arrays: dict[str, npt.NDArray[np.uint8] | npt.NDArray[np.int64]] = {}
    chosen = split_train_test(groups, numpy_generator(_SPLIT_SEED, "omniglot", "split"))
    for part, indices in zip(("train", "test"), chosen, strict=True):
        arrays[f"{part}_images"] = images[indices]
        arrays[f"{part}_labels"], arrays[f"{part}_clients"] = labels[indices], clients[indices]
    return arrays


def _in_archive(path: Path, name: str) -> dict[str, bytes]:
    """Return the images of a set by `alphabet/character/file`, which names the same image in both sets."""
    with open_archive(path) as archive:
        inside = {entry.removeprefix(f"{name}/"): entry for entry in archive.namelist()}
        images = {short: inside[short] for short in _images(inside)}
        check_members(archive, images.values())
        return {short: read_member(archive, member) for short, member in images.items()}


def _in_folder(folder: Path) -> dict[str, bytes]:
    inside = {path.relative_to(folder).as_posix(): path for path in folder.glob("*/*/*.png")}
    return {short: inside[short].read_bytes() for short in _images(inside)}


def _images(names: dict[str, str] | dict[str, Path]) -> Iterator[str]:
    """Yield the names of drawings, leaving out folders and what operating systems put beside files."""
    return (name for name in names if _NAME.fullmatch(name))


def _labels_and_clients(names: list[str], root: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return whose drawing of which alphabet each file is, and see that none is missing."""
    counts = {(alphabet, drawer): 0 for alphabet in CHARACTERS for drawer in DRAWERS}
    pairs = [(match["alphabet"], match["drawer"]) for match in map(_NAME.fullmatch, names) if match]
    for pair in pairs:
        counts[pair] = counts.get(pair, 0) + 1
    for (alphabet, drawer), count in counts.items():
        if count != (expected := CHARACTERS.get(alphabet, 0) if drawer in DRAWERS else 0):
            raise DataError(
                f"{root / FOLDER} must hold {expected} drawings of {alphabet} by drawer {drawer}, got {count}; "
                f"copy the archives of {' and '.join(SETS)} anew"
            )
    order = list(CHARACTERS)
    labels = np.array([order.index(alphabet) for alphabet, _ in pairs], dtype=np.int64)
    return labels, np.array([DRAWERS.index(drawer) for _, drawer in pairs], dtype=np.int64)


def _read(content: bytes, name: str, root: Path) -> npt.NDArray[np.uint8]:
    """Return an image [1, 28, 28]; a pixel is the mean of those of the drawing that it covers."""
    with open_image(io.BytesIO(content), f"{name} in {root / FOLDER}") as image:
        drawing = ImageOps.invert(image.convert("L"))
    if drawing.size != (_DRAWN_SIDE, _DRAWN_SIDE):
        raise DataError(
            f"{name} in {root / FOLDER} must have {_DRAWN_SIDE}x{_DRAWN_SIDE} pixels, "
            f"got {drawing.size[0]}x{drawing.size[1]}; copy its archive anew"
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
