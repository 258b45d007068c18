"""Apply the federation's agreement on samples to the data that were read."""

from dataclasses import replace

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.tasks import CLASSIFICATION, REGRESSION
from hyperfl_flwr.data.dataset import Dataset
from hyperfl_flwr.data.sample_format import HALF, SampleFormat, is_local_data, shape_text


def agreed(dataset: Dataset, sample_format: SampleFormat) -> Dataset:
    """Return a data set with the agreed classes and normalisation.

    Raises:
        DataError: If it does not match the agreement.
    """
    if sample_format.input_shape not in (None, dataset.input_shape):
        expected, given = shape_text(sample_format.input_shape or ()), shape_text(dataset.input_shape)
        raise DataError(
            f"samples of {dataset.name} must have the shape {expected} (data.input-shape), got {given}; convert them "
            f"(only images of folder: data are converted automatically)",
            public=f"its samples have the shape {given}, not that of data.input-shape",
        )
    if sample_format.classes is not None:
        dataset = _named(dataset, sample_format.classes)
    elif dataset.task is CLASSIFICATION and dataset.num_classes < 2:
        raise DataError(
            f"{dataset.name} must have two or more classes, but all labels are 0; correct the labels, or name the "
            f"classes that other clients have in data.classes",
            public="its data have a single class, and data.classes names no others",
        )
    if dataset.task is REGRESSION:
        dataset = _scaled(dataset, sample_format)
    mean_and_std = sample_format.normalisation
    # A client's statistics must not decide the normalisation, which has to be the same for all clients.
    if mean_and_std is None and sample_format.has_owner and len(dataset.input_shape) == 3:
        mean_and_std = HALF
    if mean_and_std is None:
        return replace(dataset, own_statistics=sample_format.has_owner)
    count = dataset.input_shape[0]
    if len(mean_and_std[0]) not in (1, count):
        raise DataError(
            f"data.normalisation must have 1 or {count} numbers for each of MEAN and STD, got {len(mean_and_std[0])}"
        )
    mean, std = (values * count if len(values) == 1 else values for values in mean_and_std)
    return replace(dataset, mean=mean, std=std)


def _named(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    """Return a data set with the agreed classes; it need not have samples of all of them."""
    if dataset.classes not in (None, classes):
        raise DataError(
            f"data.classes must be {','.join(dataset.classes or ())}, the classes of {dataset.name}, got "
            f"{','.join(classes)}",
            public="its data have other classes than data.classes",
        )
    may_lack = dataset.task is CLASSIFICATION and is_local_data(dataset.name)
    if dataset.num_classes > len(classes) or (dataset.num_classes < len(classes) and not may_lack):
        outputs = dataset.task.outputs
        raise DataError(
            f"data.classes must name the {dataset.num_classes} {outputs} of {dataset.name}, got {len(classes)} names",
            public=f"its data have {dataset.num_classes} {outputs}, data.classes has {len(classes)}",
        )
    return replace(dataset, classes=classes, num_classes=len(classes))


def _scaled(dataset: Dataset, sample_format: SampleFormat) -> Dataset:
    """Return a data set of regression with the agreed scale of its targets."""
    scale = sample_format.target_scale
    if scale is None and sample_format.has_owner:
        text = (
            "data.target-scale must be MEAN/STD for the task regression where nodes have data of their own, since all "
            "must use the same; set it to numbers near the mean and the standard deviation of the targets, or to 0/1"
        )
        raise DataError(text, public=text)
    if scale is None:
        return dataset
    count = dataset.num_classes
    if len(scale[0]) not in (1, count):
        raise DataError(
            f"data.target-scale must have 1 or {count} numbers for each of MEAN and STD, got {len(scale[0])}"
        )
    mean, std = (values * count if len(values) == 1 else values for values in scale)
    return replace(dataset, target_mean=mean, target_std=std)
