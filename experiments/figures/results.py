"""Read the results of a study's finished cells for a figure, and write the figure with its numbers."""

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.study import Cell, Study
from experiments.study_folder import StudyManifest

Summary = dict[str, Any]
"""The contents of a run's summary.json."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of some inches, which needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def summaries_of(cells: Sequence[Cell], folder: Path) -> dict[tuple[str, str], list[Summary]]:
    """Return the summaries of the runs by row and column, a summary for each seed.

    Args:
        cells: Finished cells.
        folder: The study's folder.
    """
    found: dict[tuple[str, str], list[Summary]] = {}
    for cell in cells:
        summary = json.loads((cell.folder(folder) / "summary.json").read_text())
        found.setdefault((cell.row, cell.column), []).append(summary)
    return found


def mean_of(summaries: Sequence[Summary], number: str) -> float | None:
    """Return the mean of a number over the runs that have it; None if none has."""
    known = [value for summary in summaries if (value := summary.get(number)) is not None]
    return statistics.fmean(known) if known else None


def save_with_numbers(
    figure: Figure, study: Study, study_manifest: StudyManifest, picture: Path, rows: Iterable[Sequence[object]]
) -> list[Path]:
    """Write a figure under the study's title, and its numbers to a CSV file of the same name.

    Args:
        figure: The figure.
        study: The study.
        study_manifest: The settings that the folder was created with.
        picture: Path of the picture.
        rows: The rows of the CSV file, of which the first has the names.

    Returns:
        The path of the picture, in a list.
    """
    figure.suptitle(study.title + (", quick settings" if study_manifest.quick else ""), fontsize="medium")
    figure.savefig(picture, dpi=120)
    with picture.with_suffix(".csv").open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)
    return [picture]
