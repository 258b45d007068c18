"""Read MNIST, Fashion-MNIST, EMNIST, CIFAR-10 and CIFAR-100 from the folders that torchvision uses.

torchvision finds, downloads, checks and decodes the files. This module adds three features that it lacks: a download
leaves either all files or none, it fails soon without a network, and further processes map the decoded arrays from the
cache.
"""

import http.client
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.cache import Arrays, fingerprint, load_or_build

_NETWORK_TIMEOUT = 10.0
_IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True, kw_only=True)
class TorchvisionFiles:
    """Location of a data set's files in torchvision's layout.

    Attributes:
        class_name: The class in `torchvision.datasets`.
        folder: Folder below the data root.
        files: Names of the files in the folder.
        arguments: Additional arguments of the class.
        transposed: True if the files have rows and columns swapped; images are then transposed.
    """

    class_name: str
    folder: str
    files: tuple[str, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False

    def paths(self, root: Path) -> list[Path]:
        """Return the paths of the files below a data root."""
        return [root / self.folder / name for name in self.files]


TORCHVISION_FILES = {
    "mnist": TorchvisionFiles(class_name="MNIST", folder="MNIST/raw", files=_IDX_FILES),
    "fashion-mnist": TorchvisionFiles(class_name="FashionMNIST", folder="FashionMNIST/raw", files=_IDX_FILES),
    "emnist": TorchvisionFiles(
        class_name="EMNIST",
        folder="EMNIST/raw",
        files=tuple(
            f"emnist-byclass-{part}-{kind}-ubyte"
            for part in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        ),
        arguments={"split": "byclass"},
        transposed=True,
    ),
    "cifar10": TorchvisionFiles(
        class_name="CIFAR10",
        folder="cifar-10-batches-py",
        files=("batches.meta", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    ),
    "cifar100": TorchvisionFiles(class_name="CIFAR100", folder="cifar-100-python", files=("meta", "train", "test")),
}


def load_arrays(name: str, root: Path) -> Arrays:
    """Load one data set; downloads it if files are missing.

    Args:
        name: A key of `TORCHVISION_FILES`.
        root: Data root, absolute.

    Returns:
        ``train_images`` and ``test_images`` uint8 [n, C, H, W], ``train_labels`` and ``test_labels`` int64 [n].

    Raises:
        DataError: If the files are missing and cannot be downloaded, or if they are damaged.
    """
    source = TORCHVISION_FILES[name]
    if not all(path.is_file() for path in source.paths(root)):
        _download(name, source, root)
    key = f"{name}-{fingerprint(source.paths(root))}"
    return load_or_build(key, lambda: _decode(name, source, root))


def _decode(name: str, source: TorchvisionFiles, root: Path) -> Arrays:
    """Read the source files; torchvision verifies the checksums of CIFAR's files before it unpickles them."""
    import torchvision  # deferred: the import takes a second, and a process with a warm cache does not need it

    dataset_class = getattr(torchvision.datasets, source.class_name)
    arrays = {}
    try:
        for part in ("train", "test"):
            dataset = dataset_class(root, train=part == "train", download=False, **source.arguments)
            images = np.asarray(dataset.data, dtype=np.uint8)
            images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
            images = images.swapaxes(2, 3) if source.transposed else images
            arrays[f"{part}_images"] = np.ascontiguousarray(images)
            arrays[f"{part}_labels"] = np.asarray(dataset.targets, dtype=np.int64)
            if len(images) != len(arrays[f"{part}_labels"]) or len(images) == 0:
                raise ValueError(f"{len(images)} images with {len(arrays[f'{part}_labels'])} labels")
    except Exception as error:  # torchvision does not document which exceptions damaged files raise
        raise DataError(
            f"the files of {name} must be those that torchvision downloads, but reading {root / source.folder} failed: "
            f"{error}; delete that folder and load the data set again"
        ) from error
    return arrays


def _download(name: str, source: TorchvisionFiles, root: Path) -> None:
    """Download into a temporary folder of the data root, then move the complete files into place."""
    import torchvision

    created = not root.exists()
    temporary: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".download-", dir=root))
        with _network_timeout(_NETWORK_TIMEOUT):
            getattr(torchvision.datasets, source.class_name)(temporary, download=True, **source.arguments)
        (root / source.folder).mkdir(parents=True, exist_ok=True)
        for before, after in zip(source.paths(temporary), source.paths(root), strict=True):
            before.replace(after)
    except (OSError, RuntimeError, EOFError, tarfile.TarError, http.client.HTTPException) as error:
        raise DataError(_missing(name, source, root, error)) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if created and root.exists() and not any(root.iterdir()):
            root.rmdir()


def _missing(name: str, source: TorchvisionFiles, root: Path, error: Exception) -> str:
    absent = [path.name for path in source.paths(root) if not path.is_file()]
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return (
        f"data set {name} must lie in {root / source.folder} as the files {', '.join(source.files)}; "
        f"missing: {', '.join(absent)}; downloading them failed: {reason}; "
        f"copy the files there (the layout of torchvision.datasets.{source.class_name}), set data-root to the folder "
        f"that contains {source.folder}, or use the data set digits, which needs no download"
    )


@contextmanager
def _network_timeout(seconds: float) -> Iterator[None]:
    """Limit the time of every network operation; torchvision sets no limit, and a firewall may block for minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
