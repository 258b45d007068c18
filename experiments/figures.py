"""Figures of a study's cells over the rounds; readable in black and white. Nothing is trained here."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.cells import Begun, seeds_in
from experiments.studies import Cell, Study
from hyperfl_flwr.errors import RunDirectoryError
from hyperfl_flwr.recording import read_metrics

STYLES = [(line, marker) for line in ("-", "--", ":", "-.") for marker in ("o", "s", "^", "d")]
"""Line and marker of each row; neighbours differ in the marker."""

MARKS = 8
"""Markers along a curve."""


def draw(study: Study, begun: Begun, folder: Path, number: str = "own_accuracy", kind: str = "train") -> Path:
    """Draw a number of metrics.jsonl over the rounds: a panel for each column, a curve for each row.

    A curve is the mean over the seeds, its band their smallest and largest value.

    Args:
        study: The study.
        begun: What the folder was begun with.
        folder: The study's.
        number: Which.
        kind: Of the lines that hold it.

    Returns:
        The picture, `figure-NUMBER.png` in the folder.

    Raises:
        RunDirectoryError: If no run holds the number.
    """
    curves: dict[tuple[str, str], list[dict[int, float]]] = {}
    for cell in study.cells(quick=begun.quick, seeds=seeds_in(folder), changes=begun.changes):
        if curve := _curve(cell, folder, number, kind):
            curves.setdefault((cell.row, cell.column), []).append(curve)
    if not curves:
        raise RunDirectoryError(f"no run in {folder} has recorded {number}")
    columns = [column for column in study.columns if any(name == column.name for _, name in curves)]
    rows = [row for row in study.rows if any(name == row.name for name, _ in curves)]
    figure = Figure(figsize=(4.2 * len(columns) + 2.2, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for panel, column in zip(panels, columns, strict=True):
        for position, row in enumerate(rows):
            if found := curves.get((row.name, column.name)):
                _draw_row(panel, found, row.label, position, len(rows))
        panel.set_title(study.heading(column, quick=begun.quick), fontsize="medium")
        panel.set_xlabel("round")
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel(number.replace("_", " "))
    figure.suptitle(study.title + (", quick settings" if begun.quick else ""))
    known = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    labels = [row.label for row in rows]
    figure.legend([known[label] for label in labels], labels, loc="outside right center", fontsize="small")
    picture = folder / f"figure-{number.replace('_', '-')}.png"
    figure.savefig(picture, dpi=120)
    return picture


def _draw_row(panel: Axes, curves: Sequence[dict[int, float]], label: str, position: int, of: int) -> None:
    """Draw one row's curve and band in the style of its position among all rows."""
    rounds, means, lowest, highest = _band(curves)
    line, marker = STYLES[position % len(STYLES)]
    shade = str(0.55 * position / max(1, of - 1))
    panel.plot(
        rounds, means, line, marker=marker, color=shade, label=label,
        markersize=4, mfc="white", markevery=max(1, len(rounds) // MARKS),
    )  # fmt: skip
    panel.fill_between(rounds, lowest, highest, color=shade, alpha=0.15, linewidth=0)


def _curve(cell: Cell, folder: Path, number: str, kind: str) -> dict[int, float]:
    records = read_metrics(cell.folder(folder))
    return {record["round"]: record[number] for record in records if record["kind"] == kind and number in record}


def _band(curves: Sequence[dict[int, float]]) -> tuple[list[int], list[float], list[float], list[float]]:
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[number] for curve in curves] for number in rounds]
    return rounds, [statistics.fmean(each) for each in columns], list(map(min, columns)), list(map(max, columns))
