"""Write the images of one class of a data set to a file that `--dataset npz:FILE` reads.

`python -m experiments.one_class fashion-mnist 0 shirts.npz --data-root DIR` makes the data of clients that have one
class only, for the study `fishing`.
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.registry import load_dataset


def one_class(dataset: str, label: int, data_root: Path | None) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays of the file: the images of a class of both parts of a data set, and their labels.

    Args:
        dataset: Name of the data set.
        label: The class, counted from 0.
        data_root: Folder of the data sets; None for the cache folder.

    Raises:
        DataError: If the data set cannot be read, or has no such class.
    """
    found = load_dataset(dataset, data_root)
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for prefix, split in {"": found.train, "test_": found.test}.items():
        chosen = split.chosen(np.flatnonzero(split.labels == label))
        if not len(chosen):
            raise DataError(f"{dataset} has no images of class {label}; its classes are 0 to {found.num_classes - 1}")
        arrays |= {f"{prefix}images": chosen.images, f"{prefix}labels": chosen.labels}
    return arrays


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="name of the data set")
    parser.add_argument("label", type=int, help="the class, counted from 0")
    parser.add_argument("file", type=Path, help="the .npz file to write")
    parser.add_argument("--data-root", type=Path, help="folder of the data sets; default: your cache folder")
    arguments = parser.parse_args()
    try:
        arrays = one_class(arguments.dataset, arguments.label, arguments.data_root)
    except DataError as error:
        parser.exit(2, f"error: {error}\n")
    np.savez(arguments.file, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
