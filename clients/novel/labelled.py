"""Read the labelled samples of a client that joins a finished run."""

import numpy as np

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.data.dataset import Dataset
from hyperfl_flwr.data.federated_data import ClientData, labels_tensor, normalised
from hyperfl_flwr.data.grouped_split import AUTO
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_format import SampleFormat, window_of
from hyperfl_flwr.data.sample_weights import EQUAL, Weighting
from hyperfl_flwr.data.sources.csv_header import require_features
from hyperfl_flwr.models.model_spec import TargetRecipe


def labelled_dataset(name: str, recipe: TargetRecipe, grouping: str = AUTO) -> Dataset:
    """Return all samples of a file or folder, with shape, classes and normalisation of a run; see `labelled_data`."""
    shape = recipe.input_shape
    sample_format = SampleFormat(
        input_shape=(shape[0], shape[1], shape[2]) if len(shape) == 3 else None,
        classes=recipe.classes,
        normalisation=(recipe.mean, recipe.std),
        window=window_of(recipe.window),
        grouping=grouping,
        has_owner=True,
        task=TASKS[recipe.task],
        target_scale=(recipe.target_mean, recipe.target_std) if recipe.target_std else None,
    )
    dataset = load_dataset(name, None, sample_format)
    require_features(dataset.features, recipe.features, name)
    if dataset.input_shape != shape:
        raise StateError(
            f"samples of {name} must have the shape {shape}, as those of the run, got {dataset.input_shape}"
        )
    return dataset


def labelled_data(name: str, recipe: TargetRecipe, grouping: str = AUTO, weighting: Weighting = EQUAL) -> ClientData:
    """Return all samples of a file or folder as the data of one client.

    Args:
        name: `npz:FILE`, `csv:FILE` or `folder:PATH`; the client trains on all training samples, and is tested on
            the others.
        recipe: Input and classes of the run's models.
        grouping: What keeps samples together in one part, see `data.group-by`.
        weighting: How training samples are weighted.

    Raises:
        HyperFLError: If the samples cannot be read, or do not fit the run.
    """
    dataset = labelled_dataset(name, recipe, grouping)
    weighting.check(dataset.train, dataset.num_classes)
    everything, tested = np.arange(len(dataset.train)), np.arange(len(dataset.test))
    train = normalised(dataset.train.scaled(everything), dataset.mean, dataset.std)
    test = normalised(dataset.test.scaled(tested), dataset.mean, dataset.std)
    return ClientData(
        train_images=train, train_labels=labels_tensor(dataset.train, everything, dataset),
        test_images=test, test_labels=labels_tensor(dataset.test, tested, dataset),
        augmentation=None, num_classes=dataset.num_classes,
        train_weights=weighting.of_client(dataset.train, everything, dataset.num_classes),
    )  # fmt: skip
