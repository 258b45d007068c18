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
from hyperfl_flwr.core.tasks import class_name
from hyperfl_flwr.launch.console import err, out

if TYPE_CHECKING:
    from hyperfl_flwr.data.digests import Digests
    from hyperfl_flwr.metrics.classification import ClassScores
    from hyperfl_flwr.metrics.predictions import Predictions
    from hyperfl_flwr.metrics.scores import Scores
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
    """Predict the classes or values of samples with a model; prints the CSV file's path.

    It also prints the accuracy, or R², if labels are known.
    """
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.core.files.atomic_files import write_atomically
    from hyperfl_flwr.data.sample_format import samples_path
    from hyperfl_flwr.metrics.predictions import predict
    from hyperfl_flwr.models.provenance import use_weights
    from hyperfl_flwr.models.standalone import read_model

    path = output.absolute()
    if path.exists():
        raise RunDirectoryError(f"{path} exists; choose another --output")
    if file := _exported_file(source.absolute()):
        choices = {"--client": client, "--state": state, "--run": run, "--data-root": data_root}
        if given := [option for option, value in choices.items() if value is not None]:
            raise ConfigError(f"{file} is one exported model, so there is no choice; leave out {', '.join(given)}")
        recipe, tensors = read_model(file)
        trained_on = None
    else:
        found = model_of(source.absolute(), client, state, run, data_root)
        recipe, tensors = found.recipe, dict(found.tensors)
        trained_on = _trained_on(found, source.absolute(), changes_of(data_root))
        err.print(str(found), markup=False)
    if weights is not None:
        use_weights(str(changes_of(None, weights)["lpm.weights"]))
    place = resolve_device(device)
    found_classes = predict(tensors, recipe, samples_path(data), place, convert=convert, trained_on=trained_on)
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
    scores, name = found.scores(), found.task.score_title
    if scores is None:
        return
    if found.trained_on is None:
        out.print(f"{name} {_worth(scores)}", markup=False)
        err.print(
            f"note: it is not known which of these samples the model was trained on; the {name} on such samples says "
            f"little about others"
        )
        _print_outputs(scores, found)
        return
    other, train = found.scores(trained_on=False), found.scores(trained_on=True)
    if other is not None:
        out.print(f"{name} {_worth(other)}, none of them {of_training}", markup=False)
    if train is not None:
        share = f"{found.task.text(train.score)} of {train.total} samples"
        out.print(f"{name} {share}, all {of_training}, which says little about others", markup=False)
    _print_outputs(other or scores, found)


def _worth(scores: Scores) -> str:
    task = scores.task
    titles = (title.partition(" (")[0] for title in task.score_titles)
    numbers = {title: scores.value(name) for title, name in zip(titles, task.all_scores, strict=True)}
    parts = [", ".join(f"{name} {task.text(value)}" for name, value in numbers.items() if not math.isnan(value))]
    if task.has_shares:
        low, high = scores.interval or (0.0, 1.0)
        parts.insert(0, f"95 % interval {100 * low:.1f} to {100 * high:.1f} %")
        usual = "the most common class has" if task.name == "classification" else "constant answers have"
        parts.append(f"{usual} {task.text(scores.value('majority_share'))}")
    else:
        parts[0] += ", both in the unit of data.target-scale"
    return f"{task.text(scores.score)} of {scores.total} samples ({'; '.join(parts)})"


def _print_outputs(scores: Scores, found: Predictions) -> None:
    """Print a row for each class that has samples, each label or each target."""
    from hyperfl_flwr.metrics.classification import ClassScores

    if isinstance(scores, ClassScores):
        _print_classes(scores, found.classes)
        return
    is_share = scores.task.has_shares
    headers = ("samples with it", "sensitivity", "specificity", "AUC") if is_share else ("R²", "RMSE", "MAE")
    table = Table("label" if is_share else "target", *headers)
    for name, numbers in zip(found.classes, scores.details(found.target_std), strict=True):
        shown = [f"{numbers[0]:.0f}", *map(_percent, numbers[1:])] if is_share else [f"{one:.4g}" for one in numbers]
        table.add_row(Text(name), *shown)
    out.print(table)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.2f} %"


def _print_classes(scores: ClassScores, classes: tuple[str, ...]) -> None:
    """Print a row for each class that has samples: how many are recognised, and what the others are taken for."""
    table = Table("class", "samples", "recall", "most often taken for")
    cells = scores.confusion.tolist()
    for number in sorted({true for true, _, _ in cells}):
        row = [(count, predicted) for true, predicted, count in cells if true == number]
        wrong = [cell for cell in row if cell[1] != number]
        mistaken = f"{class_name(max(wrong)[1], classes)} ({max(wrong)[0]})" if wrong else "none"
        samples = sum(count for count, _ in row)
        table.add_row(Text(classes[number]), str(samples), _percent(scores.recalls[number]), Text(mistaken))
    out.print(table)
