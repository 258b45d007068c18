"""The `hyperfl predict` command: use a model on other samples, and measure it where their labels are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from hyperfl_flwr.cli.export import Client, Experiment, Root, StateOption, Weights, changes_of, model_of
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.console import err, out

if TYPE_CHECKING:
    from hyperfl_flwr.data.digests import Digests
    from hyperfl_flwr.metrics.classification import Scores
    from hyperfl_flwr.metrics.predictions import Predictions
    from hyperfl_flwr.results.export import Exported

predictions = typer.Typer()


@predictions.command("predict")
def run_predict(
    source: Annotated[
        Path, typer.Argument(help="An exported model (file or folder), the folder of a run, or a node's state-dir.")
    ],
    data: Annotated[
        str,
        typer.Option(
            help="Folder of images, an .npz or a .csv file; the prefixes folder:, npz: and csv: are optional."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="CSV file to write.")] = Path("predictions.csv"),
    client: Client = None,
    state: StateOption = None,
    run: Experiment = None,
    data_root: Root = None,
    convert: Annotated[
        bool, typer.Option("--convert", help="Convert and resize images to the format that the model takes.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:NUMBER.")] = "auto",
    weights: Weights = None,
) -> None:
    """Predict the classes of samples; prints the accuracy if labels are known, and the CSV file's path."""
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.core.storage import write_atomically
    from hyperfl_flwr.metrics.predictions import predict
    from hyperfl_flwr.models.provenance import use_weights
    from hyperfl_flwr.models.standalone import read_model

    path = output.absolute()
    if path.exists():
        raise RunDirectoryError(f"{path} exists; choose another --output")
    if file := _exported_file(source.absolute()):
        recipe, tensors = read_model(file)
        trained_on = None
    else:
        found = model_of(source.absolute(), client, state, run, data_root)
        recipe, tensors = found.recipe, dict(found.tensors)
        trained_on = _trained_on(found, source.absolute(), changes_of(data_root))
        err.print(str(found), markup=False)
    if weights is not None:
        use_weights(str(changes_of(None, weights)["lpm.weights"]))
    samples = Path(data.removeprefix("npz:").removeprefix("csv:").removeprefix("folder:")).expanduser().absolute()
    found_classes = predict(tensors, recipe, samples, resolve_device(device), convert=convert, trained_on=trained_on)
    for note in found_classes.notes:
        err.print(f"note: {note}", markup=False)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, found_classes.table().encode(), mode=0o600)  # names and labels of private samples
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error}; choose another --output") from None
    of_training = "of the run's training samples"
    if not file and found.trained_on is not None:
        of_training = f"of client {found.client}'s training samples (those of others are not known here)"
    _print_scores(found_classes, of_training)
    out.print(str(path), markup=False)


def _exported_file(source: Path) -> Path | None:
    """Return the parameter file of an exported model; None if the source is not an exported model.

    Raises:
        ConfigError: If the folder holds several parameter files.
    """
    if source.suffix == ".safetensors":
        return source
    found = [] if (source / "manifest.json").is_file() else sorted(source.glob("*.safetensors"))
    if len(found) > 1:
        raise ConfigError(f"{source} holds several models ({', '.join(path.name for path in found)}); name one of them")
    return found[0] if found else None


def _trained_on(found: Exported, source: Path, changes: Mapping[str, Scalar]) -> Digests | None:
    """Return the digests of the samples that a model was trained on; None if they are not known."""
    from hyperfl_flwr.results.training_samples import training_digests

    of_run = found.trained_on is None and (source / "manifest.json").is_file()
    return training_digests(source, changes) if of_run else found.trained_on


def _print_scores(found: Predictions, of_training: str) -> None:
    """Print what the predictions are worth, if the labels are known.

    Args:
        found: The predictions.
        of_training: Description of the samples that are known to have been trained on.
    """
    scores = found.scores()
    if scores is None:
        return
    if found.trained_on is None:
        out.print(f"accuracy {_worth(scores)}", markup=False)
        err.print(
            "note: it is not known which of these samples the model was trained on; the accuracy on such samples says "
            "little about others"
        )
        _print_classes(scores, found.classes)
        return
    other, train = found.scores(trained_on=False), found.scores(trained_on=True)
    if other is not None:
        out.print(f"accuracy {_worth(other)}, none of them {of_training}", markup=False)
    if train is not None:
        share = f"{100 * train.accuracy:.2f} % of {train.total} samples"
        out.print(f"accuracy {share}, all {of_training}, which says little about others", markup=False)
    _print_classes(other or scores, found.classes)


def _worth(scores: Scores) -> str:
    numbers = {"balanced accuracy": scores.balanced_accuracy, "macro F1": scores.macro_f1, "AUC": scores.auc}
    others = ", ".join(f"{name} {_percent(value)}" for name, value in numbers.items() if not math.isnan(value))
    low, high = scores.accuracy_interval or (0.0, 1.0)
    return (
        f"{_percent(scores.accuracy)} of {scores.total} samples (95 % interval {100 * low:.1f} to {100 * high:.1f} %; "
        f"{others}; the most common class has {_percent(scores.majority_share)})"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _print_classes(scores: Scores, classes: tuple[str, ...]) -> None:
    """Print a row for each class that has samples: how many are recognised, and what the others are taken for."""
    table = Table("class", "samples", "recall", "most often taken for")
    cells = scores.confusion.tolist()
    for number in sorted({true for true, _, _ in cells}):
        row = [(count, predicted) for true, predicted, count in cells if true == number]
        wrong = [cell for cell in row if cell[1] != number]
        mistaken = f"{classes[max(wrong)[1]]} ({max(wrong)[0]})" if wrong else "none"
        samples = sum(count for count, _ in row)
        table.add_row(Text(classes[number]), str(samples), _percent(scores.recalls[number]), Text(mistaken))
    out.print(table)
