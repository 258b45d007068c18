"""Draw what privacy of whole clients costs: the accuracy against epsilon, with training alone as the line to beat."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from experiments.figures.results import mean_of, new_figure, save_with_numbers, summaries_of
from experiments.study import Cell, Study
from experiments.study_file import Settings
from experiments.study_folder import StudyManifest
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.runs.figures.colours import PALETTE

NUMBERS = {"test_accuracy": "-", "test_accuracy_aggregate": "--"}
"""Numbers of summary.json that are drawn, with the line of each."""

MARKERS = ("o", "s", "^", "d", "v")
"""Marker of each method."""

NOISE = frozenset({"privacy.noise-multiplier", "privacy.unit", "privacy.noise"})
"""Settings in which the points of a curve differ."""

Point = tuple[float | None, float]
"""Epsilon, None without noise, and a number of summary.json."""

Curves = dict[tuple[str, str], list[Point]]
"""Points by method and number."""


def draw_privacy_cost(study: Study, study_manifest: StudyManifest, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw a panel for each column in which a run has an epsilon.

    It has two curves for each method with noise, and a level line for each method without. The curves are the accuracy
    after local training and that of the aggregate; a run without noise, or with too little for an epsilon, is a level
    line, too. Numbers are means over the seeds, and are written to `figure-privacy-cost.csv`.

    Args:
        study: The study.
        study_manifest: The settings that the folder was created with.
        cells: The finished cells.
        folder: The study's folder.

    Returns:
        The path of the picture, in a list.

    Raises:
        RunDirectoryError: If no finished cell has noise with a stated epsilon.
    """
    found = {column: curves for column, curves in _curves(cells, folder).items() if _has_epsilon(curves)}
    if not found:
        raise RunDirectoryError(
            f"no finished cell in {folder} has noise with a stated epsilon; set privacy.unit=client"
        )
    columns = [column for column in study.columns if column.name in found]
    figure, panels = _figure_of(len(columns))
    names, methods = _names(study, cells), sorted({method for curves in found.values() for method, _ in curves})
    for panel, column in zip(panels, columns, strict=True):
        _draw_panel(panel, found[column.name], methods, names)
        panel.set_title(study.heading(column, quick=study_manifest.quick), fontsize="medium")
    handles = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize="small")
    rows = [
        (place, method, number, "none" if epsilon is None else epsilon, value)
        for place, curves in found.items()
        for (method, number), points in curves.items()
        for epsilon, value in points
    ]
    return save_with_numbers(figure, study, study_manifest, folder / "figure-privacy-cost.png",
                             [("column", "method", "number", "epsilon", "value"), *rows])  # fmt: skip


def _figure_of(number: int) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with some panels, two beside each other: more would be too small on a phone."""
    across = min(2, number)
    lines = -(-number // across)
    figure = new_figure(4.0 * across + 0.6, 3.4 * lines + 1.0)
    places = figure.subplots(lines, across, sharey=True, squeeze=False)
    for panel in places[:, 0]:
        panel.set_ylabel("accuracy")
    panels = places.flatten()
    for panel in panels[number:]:
        panel.set_axis_off()
    return figure, list(panels[:number])


def _curves(cells: Sequence[Cell], folder: Path) -> dict[str, Curves]:
    """Return the curves of each column."""
    methods = {cell.row: cell.config.method for cell in cells}
    _refuse_several(cells, methods)
    found: dict[str, Curves] = {}
    for (row, column), summaries in summaries_of(cells, folder).items():
        for number in NUMBERS:
            mean = mean_of(summaries, number)
            if mean is not None:
                point = (summaries[0]["privacy"]["epsilon"], mean)
                found.setdefault(column, {}).setdefault((methods[row], number), []).append(point)
    return found


def _refuse_several(cells: Sequence[Cell], methods: Mapping[str, str]) -> None:
    """Refuse rows of one method that differ in more than the noise: they would be one curve."""
    others: dict[tuple[str, str], dict[str, Settings]] = {}
    for cell in cells:
        kept = {key: value for key, value in cell.config.flat().items() if key not in NOISE | {"seed"}}
        others.setdefault((methods[cell.row], cell.column), {})[cell.row] = kept
    for (method, _), rows in others.items():
        (first, before), *rest = rows.items()
        for row, settings in rest:
            if keys := [key for key, value in settings.items() if before.get(key) != value]:
                raise RunDirectoryError(
                    f"the rows {first} and {row} of {method} are no points of one curve, since they differ in "
                    f"{', '.join(keys)}; draw a study without one of them"
                )


def _has_epsilon(curves: Curves) -> bool:
    return any(epsilon for points in curves.values() for epsilon, _ in points)


def _names(study: Study, cells: Sequence[Cell]) -> dict[str, str]:
    """Return the name of each method: the parts, between commas, with which the labels of all of its rows begin."""
    parts = {row.name: row.label.split(", ") for row in study.rows}
    of_methods: dict[str, list[Sequence[str]]] = {}
    for cell in cells:
        of_methods.setdefault(cell.config.method, []).append(parts[cell.row])
    common = {
        method: [each[0] for each in takewhile(lambda part: len(set(part)) == 1, zip(*several, strict=False))]
        for method, several in of_methods.items()
    }
    return {method: ", ".join(begin) or method for method, begin in common.items()}


def _draw_panel(panel: Axes, curves: Curves, methods: Sequence[str], names: Mapping[str, str]) -> None:
    """Draw a column's curves; the methods of all columns decide about the colour and marker of each."""
    methods = [method for method in methods if method != "local"]
    for (method, number), points in curves.items():
        what = number.removeprefix("test_accuracy_") if number != "test_accuracy" else "personalized"
        noisy = sorted((epsilon, value) for epsilon, value in points if epsilon is not None)
        level = [value for epsilon, value in points if epsilon is None]
        if method == "local":
            if number == "test_accuracy" and level:
                panel.axhline(level[0], color="0", linestyle=":", linewidth=1.4, label=names[method])
            continue
        place = methods.index(method)
        colour, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
        if noisy:
            epsilons, values = zip(*noisy, strict=True)
            panel.plot(epsilons, values, NUMBERS[number], marker=marker, color=colour, mfc="white",
                       label=f"{names[method]}, {what}")  # fmt: skip
        for value in level:
            panel.axhline(value, color=colour, linestyle=NUMBERS[number], linewidth=0.7, alpha=0.7)
    panel.set(xscale="log", xlabel="epsilon of a client (thin level lines: no epsilon)")
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(alpha=0.3)
