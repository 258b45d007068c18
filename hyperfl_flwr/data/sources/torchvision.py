"""Read MNIST, Fashion-MNIST, EMNIST, CIFAR-10 and CIFAR-100 from the folders that torchvision uses.

torchvision finds, downloads, checks and decodes the files. This module adds three features that it lacks: a download
leaves either all files or none, it fails soon without a network, and further processes map the decoded arrays from the
cache.
"""

import http.client
import shutil
import socket
import string
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.cache import Arrays, fingerprint, load_or_build
from hyperfl_flwr.data.dataset_spec import DatasetSpec

_NETWORK_TIMEOUT = 10.0
_IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
wolf woman worm"""


@dataclass(frozen=True, kw_only=True)
class TorchvisionFiles:
    """Location of a data set's files in torchvision's layout.

    Attributes:
        name: Name of the data set in the registry.
        class_name: The class in `torchvision.datasets`.
        folder: Folder below the data root.
        names: Names of the files in the folder.
        arguments: Additional arguments of the class.
        transposed: True if the files have rows and columns swapped; images are then transposed.
    """

    name: str
    class_name: str
    folder: str
    names: tuple[str, ...] = _IDX_FILES
    arguments: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False

    def paths(self, root: Path) -> list[Path]:
        """Return the files below a data root."""
        return [root / self.folder / name for name in self.names]

    def load(self, root: Path) -> Arrays:
        """Load the data set, downloading it where it is missing; see `DatasetSpec.load`.

        Raises:
            DataError: The files are missing and cannot be downloaded, or they are damaged.
        """
        if not all(path.is_file() for path in self.paths(root)):
            _download(self, root)
        key = f"{self.name}-{fingerprint(self.paths(root))}"
        return load_or_build(key, lambda: _decode(self, root))


def grey_images(
    files: TorchvisionFiles, title: str, source: str, download_mb: int, classes: tuple[str, ...] = ()
) -> DatasetSpec:
    """Return the row of a data set like MNIST: 60,000 and 10,000 grey images of 28x28 pixels in ten classes.

    Args:
        files: torchvision's files of the data set.
        title: Description of the data set, see `DatasetSpec`.
        source: Citation and licence.
        download_mb: Size of the download.
        classes: Names of the classes.
    """
    return DatasetSpec(
        title=title,
        source=source,
        num_classes=10,
        input_shape=(1, 28, 28),
        train_size=60_000,
        test_size=10_000,
        download_mb=download_mb,
        normalisation=((0.1307,), (0.3081,)),
        train_samples=600,
        test_samples=600,
        classes=classes,
        load=files.load,
        files=files.paths,
    )


def _cifar(files: TorchvisionFiles, title: str, download_mb: int, classes: tuple[str, ...]) -> DatasetSpec:
    return DatasetSpec(
        title=title,
        source="Krizhevsky, Learning multiple layers of features from tiny images, 2009; no formal licence",
        num_classes=len(classes),
        input_shape=(3, 32, 32),
        train_size=50_000,
        test_size=10_000,
        download_mb=download_mb,
        normalisation=((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        augment=True,
        train_samples=600,
        test_samples=300,
        learning_rate=0.02,
        classes=classes,
        load=files.load,
        files=files.paths,
    )


MNIST = grey_images(
    TorchvisionFiles(name="mnist", class_name="MNIST", folder="MNIST/raw"),
    "70,000 handwritten digits",
    "LeCun, Cortes and Burges, The MNIST database, 1998; CC BY-SA 3.0",
    12,
)

FASHION_MNIST = grey_images(
    TorchvisionFiles(name="fashion-mnist", class_name="FashionMNIST", folder="FashionMNIST/raw"),
    "70,000 pieces of clothing",
    "Xiao, Rasul and Vollgraf, arXiv:1708.07747, 2017; MIT",
    31,
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
)  # fmt: skip

EMNIST = replace(
    grey_images(
        TorchvisionFiles(
            name="emnist",
            class_name="EMNIST",
            folder="EMNIST/raw",
            names=tuple(
                f"emnist-byclass-{part}-{kind}-ubyte"
                for part in ("train", "test")
                for kind in ("images-idx3", "labels-idx1")
            ),
            arguments={"split": "byclass"},
            transposed=True,
        ),
        "814,255 handwritten digits and letters (byclass: 0-9, A-Z, a-z)",
        "Cohen, Afshar, Tapson and van Schaik, EMNIST, IJCNN 2017, from NIST Special Database 19",
        562,
        tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    ),
    num_classes=62,
    train_size=697_932,
    test_size=116_323,
    train_samples=1000,
)

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR10 = _cifar(
    TorchvisionFiles(
        name="cifar10",
        class_name="CIFAR10",
        folder="cifar-10-batches-py",
        names=("batches.meta", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    ),
    "60,000 colour photographs of 10 kinds of things",
    171,
    CIFAR10_CLASSES,
)

CIFAR100 = _cifar(
    TorchvisionFiles(
        name="cifar100", class_name="CIFAR100", folder="cifar-100-python", names=("meta", "train", "test")
    ),
    "60,000 colour photographs of 100 kinds of things",
    170,
    tuple(_CIFAR100_CLASSES.split()),
)


def _decode(source: TorchvisionFiles, root: Path) -> Arrays:
    """Read the source files; torchvision compares CIFAR's with their checksums before it unpickles them."""
    import torchvision  # deferred: costs a second that a process with a warm cache need not spend

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
            f"the files of {source.name} must be those that torchvision downloads, but reading "
            f"{root / source.folder} failed: {error}; delete that folder and load the data set again"
        ) from error
    return arrays


def _download(source: TorchvisionFiles, root: Path) -> None:
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
        raise DataError(_missing(source, root, error)) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if created and root.exists() and not any(root.iterdir()):
            root.rmdir()


def _missing(source: TorchvisionFiles, root: Path, error: Exception) -> str:
    absent = [path.name for path in source.paths(root) if not path.is_file()]
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return (
        f"data set {source.name} must lie in {root / source.folder} as the files {', '.join(source.names)}; "
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
