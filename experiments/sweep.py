"""Make the study of a sweep: methods, data sets and values of settings, all combined, as `hyperfl sweep` runs it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.study import Study, parse_study
from experiments.study_folder import StudyManifest, is_finished, open_study_folder
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.files.toml_files import toml_value
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import task_of
from hyperfl_flwr.launch.console import parse_value
from hyperfl_flwr.launch.settings import without_effect

NAME = "sweep"
"""Name of the study."""


def make_sweep(
    folder: Path,
    methods: Sequence[str],
    datasets: Mapping[str, str],
    seeds: int,
    settings: Mapping[str, Scalar],
    grid: Mapping[str, Sequence[Scalar]],
) -> Study:
    """Write the study of a sweep to its folder, and return it; see `sweep_text` for the arguments.

    An earlier sweep in the folder is continued if the settings of its runs are the same.

    Raises:
        ConfigError: If a method or data set is given twice, or a setting is wrong.
        RunDirectoryError: If the folder is neither empty nor of a sweep, or a cell was run with other settings.
    """
    file = folder / f"{NAME}.toml"
    text = sweep_text(methods, datasets, seeds, settings, grid)
    study = parse_study(text, file)
    for cell in study.cells():  # refuses wrong settings, and other settings than before, before anything is written
        is_finished(cell, folder)
    open_study_folder(folder, StudyManifest(study=NAME, quick=False, changes={}))
    write_atomically(file, text.encode())
    return study


def sweep_text(
    methods: Sequence[str],
    datasets: Mapping[str, str],
    seeds: int,
    settings: Mapping[str, Scalar],
    grid: Mapping[str, Sequence[Scalar]],
) -> str:
    """Return the text of a study's file.

    Args:
        methods: The methods, one row each.
        datasets: The data sets by the names that the table gives them, each with a column of personalized and one of
            aggregate accuracy.
        seeds: Number of seeds, counted from 0.
        settings: Settings of all runs.
        grid: The values of each setting that every row is run with.

    Raises:
        ConfigError: If a method is given twice.
    """
    refuse_twice("method", methods)
    lines = [
        "# Made by `hyperfl sweep`. A copy with another name can be changed and run with `hyperfl study COPY.toml`.",
        'title = "Sweep"',
        f"seeds = {seeds}",
        "",
        "[settings]",
        *(f"{key} = {toml_value(value)}" for key, value in settings.items()),
    ]
    for method in methods:
        row, label = toml_value(method.replace(":", ".")), toml_value(method)  # folders have the row's name
        lines += ["", f"[rows.{row}]", *([f"label = {label}"] if row != label else []), f"method = {label}"]
    task = task_of(settings)
    for number, (title, dataset) in enumerate(datasets.items()):
        # A path cannot be the name of a folder.
        name = f"data-{number}" if "/" in dataset or ":" in dataset else dataset
        for column, metric, label in (
            (name, task.key("test_accuracy"), "personalized"),
            (f"{name}-aggregate", task.key("test_accuracy_aggregate"), "aggregate"),
        ):
            own = f"dataset = {toml_value(dataset)}" if column == name else f"run = {toml_value(name)}"
            lines += ["", f"[columns.{toml_value(column)}]", f"label = {toml_value(f'{title}, {label}')}"]
            lines += [f'metric = "{metric}"', own]
    if grid:
        lines += ["", "[grid]"]
        lines += [f"{key} = [{', '.join(map(toml_value, values))}]" for key, values in grid.items()]
    return "\n".join(lines) + "\n"


def refuse_twice(kind: str, names: Sequence[str]) -> None:
    """Refuse methods or data sets of which one is given twice.

    Raises:
        ConfigError: If there is one.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the {kind} {', '.join(twice)} is given twice; give each once")


def refuse_chosen(settings: Mapping[str, Scalar], grid: Mapping[str, Sequence[Scalar]]) -> None:
    """Refuse settings of all runs that rows, columns, seeds or the grid choose, and that would have no effect.

    Raises:
        ConfigError: If there is one.
    """
    options = {"method": "--methods", "dataset": "--datasets", "seed": "--seeds", "output": "--output"}
    options |= dict.fromkeys(grid, "--grid")
    if given := [key for key in settings if key in options]:
        raise ConfigError(f"a sweep takes {given[0]} from {options[given[0]]}; leave it out of the other options")


def without_effect_on_some(
    methods: Sequence[str], settings: Mapping[str, Scalar], grid: Mapping[str, Sequence[Scalar]]
) -> list[str]:
    """Return a warning for each setting of a sweep, of all runs or of its grid, that belongs to other methods only."""
    firsts = {key: values[0] for key, values in grid.items()}
    return [
        f"{text}{'; its cells with several values of it train the same model' if text.split()[0] in grid else ''}"
        for method in methods
        for text in without_effect({**settings, **firsts}, method)
    ]


def parse_grid(texts: Sequence[str]) -> dict[str, list[Scalar]]:
    """Return the values of each setting from texts of the form KEY=VALUE,VALUE; a repeated key has those of all.

    Raises:
        ConfigError: If a text has another form.
    """
    grid: dict[str, list[Scalar]] = {}
    for text in texts:
        key, mark, values = text.partition("=")
        if not mark or not key or not all(value.strip() for value in values.split(",")):
            raise ConfigError(f"--grid {text!r} must have the form KEY=VALUE,VALUE, such as learning-rate=0.01,0.1")
        grid.setdefault(key, []).extend(parse_value(value.strip()) for value in values.split(","))
    return grid
