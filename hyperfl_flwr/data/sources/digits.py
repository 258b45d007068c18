"""scikit-learn's handwritten digits, which need no download: 1,797 images of 8x8 pixels."""

import importlib.util
from pathlib import Path

import numpy as np

from hyperfl_flwr.core.errors import InstallationError
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.cache import Arrays
from hyperfl_flwr.data.dataset import split_train_test
from hyperfl_flwr.data.dataset_spec import DatasetSpec

_SPLIT_SEED = 0


def load_digits(root: Path) -> Arrays:
    """Return the digits, 0..16 scaled to 0..255, in a fixed split that keeps the class proportions.

    Args:
        root: Data root, which is not used: the file comes with scikit-learn.

    Raises:
        InstallationError: If scikit-learn is missing.
    """
    package = importlib.util.find_spec("sklearn")  # its file is read: to import it takes a second of every process
    if package is None or package.origin is None:
        raise InstallationError("the data set digits needs the package scikit-learn; install it")
    rows = np.loadtxt(Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    images = np.rint(rows[:, :-1].reshape(-1, 1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)
    labels = rows[:, -1].astype(np.int64)
    train, test = split_train_test(labels, numpy_generator(_SPLIT_SEED, "digits", "split"))
    return {
        "train_images": images[train],
        "train_labels": labels[train],
        "test_images": images[test],
        "test_labels": labels[test],
    }


DIGITS = DatasetSpec(
    title="1,797 handwritten digits, part of scikit-learn",
    source="Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI 1998; CC BY 4.0",
    num_classes=10,
    input_shape=(1, 8, 8),
    train_size=1347,
    test_size=450,
    load=load_digits,
)
