"""Read CINIC-10 as its authors distribute it: a folder of PNG files for each class, below train, valid and test.

Darlow, Crowley, Antoniou, Storkey: "CINIC-10 is not ImageNet or CIFAR-10", arXiv:1810.03505, 2018. Training uses the
90,000 images of `train`, testing the 90,000 of `test`; `valid` is not used. torchvision has no class for CINIC-10, and
this project does not download it.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.cache import Arrays, fingerprint, load_or_build
from hyperfl_flwr.data.dataset_spec import DatasetSpec
from hyperfl_flwr.data.sources.image_files import open_image
from hyperfl_flwr.data.sources.torchvision import CIFAR10_CLASSES

FOLDER = "CINIC-10"
_SIDE = 32


def folders(root: Path) -> list[Path]:
    """Return the class folders that are read, below a data root."""
    return [root / FOLDER / part / name for part in ("train", "test") for name in CIFAR10_CLASSES]


def load_cinic(root: Path) -> Arrays:
    """Load CINIC-10; the first call decodes 180,000 files, later calls map the decoded arrays from the cache.

    Args:
        root: Data root, absolute.

    Returns:
        ``train_images`` and ``test_images`` uint8 [n, 3, 32, 32], ``train_labels`` and ``test_labels`` int64 [n].

    Raises:
        DataError: If folders are missing or empty, or a file is not an image of 32x32 pixels.
    """
    if missing := [str(path.relative_to(root)) for path in folders(root) if not path.is_dir()]:
        raise DataError(
            f"data set cinic10 must lie in {root / FOLDER} as train/CLASS/*.png and test/CLASS/*.png; missing: "
            f"{', '.join(missing)}; download CINIC-10.tar.gz from its authors (doi:10.7488/ds/2448), unpack it there, "
            f"or set data-root to the folder that contains {FOLDER}"
        )
    return load_or_build(f"cinic10-{fingerprint(folders(root))}", lambda: _decode(root))


def _decode(root: Path) -> Arrays:
    arrays: dict[str, npt.NDArray[np.uint8] | npt.NDArray[np.int64]] = {}
    for part in ("train", "test"):
        files = [sorted((root / FOLDER / part / name).glob("*.png")) for name in CIFAR10_CLASSES]
        if empty := [name for name, paths in zip(CIFAR10_CLASSES, files, strict=True) if not paths]:
            raise DataError(
                f"{root / FOLDER / part} must contain images of every class, but has none of {', '.join(empty)}; "
                f"unpack CINIC-10.tar.gz again"
            )
        labels = np.repeat(np.arange(len(CIFAR10_CLASSES)), [len(paths) for paths in files])
        images = np.empty((len(labels), 3, _SIDE, _SIDE), dtype=np.uint8)
        for number, file in enumerate(file for paths in files for file in paths):
            images[number] = _read(file)
        arrays |= {f"{part}_images": images, f"{part}_labels": labels.astype(np.int64)}
    return arrays


def _read(file: Path) -> npt.NDArray[np.uint8]:
    """Return an image [3, 32, 32]; the few grey images get three equal channels."""
    with open_image(file, str(file)) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.uint8)
    if pixels.shape != (_SIDE, _SIDE, 3):
        raise DataError(f"{file} must have {_SIDE}x{_SIDE} pixels, got {pixels.shape[1]}x{pixels.shape[0]}; replace it")
    return pixels.transpose(2, 0, 1)


CINIC10 = DatasetSpec(
    title="270,000 photographs of CIFAR-10's kinds of things, from CIFAR-10 and ImageNet",
    source="Darlow, Crowley, Antoniou and Storkey, arXiv:1810.03505, 2018; not downloaded here",
    num_classes=len(CIFAR10_CLASSES),
    input_shape=(3, _SIDE, _SIDE),
    train_size=90_000,
    test_size=90_000,
    normalisation=((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
    augment=True,
    train_samples=600,
    test_samples=300,
    learning_rate=0.02,
    classes=CIFAR10_CLASSES,
    load=load_cinic,
    files=folders,
)
