"""Draw what accuracy costs: that of each row against the bytes of a client and round."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from scipy.optimize import isotonic_regression

from experiments.figures.results import mean_of, new_figure, save_with_numbers, summaries_of
from experiments.study import Cell, Study
from experiments.study_folder import StudyManifest
from hyperfl_flwr.core.errors import RunDirectoryError

NUMBERS = {"test_accuracy": "personalized accuracy", "test_accuracy_aggregate": "aggregate accuracy"}
"""Numbers of summary.json that are drawn, each in a line of panels, and the labels of their axes."""

MB = 1e6

LABEL_HEIGHT = 0.045
"""Least distance between the numbers of two points, as a share of a panel's height."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Numbers of a row in a column, means over its seeds.

    Attributes:
        bytes: Bytes of a client and round, up and down together.
        accuracies: The share of each of `NUMBERS`, None where no run has it.
    """

    bytes: float
    accuracies: tuple[float | None, ...]


def draw_accuracy_bytes(study: Study, study_manifest: StudyManifest, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw two panels for each column: the personalized and the aggregate accuracy, with a point for each row.

    Points have the numbers of their rows in the legend. They are written to `figure-accuracy-bytes.csv`.

    Args:
        study: The study.
        study_manifest: The settings that the folder was created with.
        cells: The finished cells.
        folder: The study's folder.

    Returns:
        The path of the picture, in a list.

    Raises:
        RunDirectoryError: If no finished cell has an accuracy, as those of attacks.
    """
    found = _points(cells, folder)
    if not found:
        raise RunDirectoryError(f"no finished cell in {folder} has an accuracy; run a study without attacks")
    columns = [column for column in study.columns if any(place == column.name for _, place in found)]
    rows = [row for row in study.rows if any(name == row.name for name, _ in found)]
    figure = new_figure(max(8.0, 4.0 * len(columns) + 0.6), 7.4 + 0.11 * len(rows))
    panels = figure.subplots(len(NUMBERS), len(columns), sharex="col", squeeze=False)
    for which, (number, across) in enumerate(zip(NUMBERS, panels, strict=True)):
        across[0].set_ylabel(NUMBERS[number])
        for panel, column in zip(across, columns, strict=True):
            draw_panel(panel, [
                (position, point.bytes, accuracy)
                for position, row in enumerate(rows, start=1)
                if (point := found.get((row.name, column.name))) and (accuracy := point.accuracies[which]) is not None
            ])  # fmt: skip
    for column, top, bottom in zip(columns, panels[0], panels[-1], strict=True):
        top.set_title(study.heading(column, quick=study_manifest.quick), fontsize="medium")
        bottom.set_xlabel("MB of a client and round, up and down")
    labels = [f"{position}  {row.label}" for position, row in enumerate(rows, start=1)]
    figure.legend([Line2D([], []) for _ in labels], labels, loc="outside lower center", ncols=2,
                  fontsize="small", handlelength=0)  # fmt: skip
    lines = [(place, row, point.bytes, *point.accuracies) for (row, place), point in found.items()]
    return save_with_numbers(figure, study, study_manifest, folder / "figure-accuracy-bytes.png",
                             [("column", "row", "bytes", *NUMBERS), *lines])  # fmt: skip


def _points(cells: Sequence[Cell], folder: Path) -> dict[tuple[str, str], Point]:
    """Return the numbers of each row and column that has an accuracy."""
    return {
        line: Point(
            bytes=sum(mean_of(seeds, f"bytes_{way}_per_client_round") or 0.0 for way in ("up", "down")),
            accuracies=tuple(mean_of(seeds, number) for number in NUMBERS),
        )
        for line, seeds in summaries_of(cells, folder).items()
        if mean_of(seeds, "test_accuracy") is not None
    }


def draw_panel(panel: Axes, points: Sequence[tuple[int, float, float]]) -> None:
    """Draw points of a row's number, bytes and accuracy, each with its number."""
    for _, sent, accuracy in points:
        panel.plot(sent / MB, accuracy, "o", color="0", markersize=4)
    # Linear up to the bytes of the smallest message, so that methods that send nothing have a place.
    smallest = min((sent for _, sent, _ in points if sent), default=MB) / MB
    panel.set_xscale("symlog", linthresh=smallest)
    panel.margins(0.08)
    panel.grid(alpha=0.3)
    # Most methods send about the same bytes: by accuracy, their numbers stand left and right in turn.
    for near in _neighbours(points):
        for side in (0, 1):
            _write_numbers(panel, near[side::2], is_left=side == 1)


def _neighbours(points: Sequence[tuple[int, float, float]]) -> list[list[tuple[int, float, float]]]:
    """Return the points in groups with about the same bytes, by accuracy."""
    found: list[list[tuple[int, float, float]]] = []
    for point in sorted(points, key=lambda point: point[1]):
        if not found or point[1] > 1.5 * found[-1][0][1]:
            found.append([])
        found[-1].append(point)
    return [sorted(group, key=lambda point: point[2]) for group in found]


def _write_numbers(panel: Axes, points: Sequence[tuple[int, float, float]], *, is_left: bool) -> None:
    """Write the numbers of points beside them, so far apart that they can be read, with lines to their points."""
    if not points:
        return
    low, high = panel.get_ylim()
    steps = LABEL_HEIGHT * np.arange(len(points))
    heights = np.array([(accuracy - low) / (high - low) for *_, accuracy in points])
    places = isotonic_regression(heights - steps).x + steps
    for (number, sent, accuracy), place in zip(points, places, strict=True):
        panel.annotate(str(number), (sent / MB, accuracy), xytext=(-14 if is_left else 14, place), va="center",
                       ha="right" if is_left else "left", textcoords=("offset points", "axes fraction"),
                       fontsize="x-small", arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.5,
                                                       "shrinkA": 0, "shrinkB": 3})  # fmt: skip
