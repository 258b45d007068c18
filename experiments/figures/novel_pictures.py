"""Draw the figures of novel clients, and write their numbers to CSV files."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from experiments.figures.novel import Curve, Points, curves, divergence_points, means_of_clients, quintiles
from experiments.figures.results import new_figure, save_with_numbers
from experiments.study import Cell, Study
from experiments.study_axes import Line
from experiments.study_folder import StudyManifest
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.runs.figures.colours import PALETTE
from hyperfl_flwr.runs.novel_results import Mean

MARKERS = "os^dvP"
LINES = ("-", "--", "-.", ":")

DIVERGENCE = "KL to the nearest training client in nats"


def draw_divergence(study: Study, study_manifest: StudyManifest, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw each novel client's accuracy against its divergence from the nearest training client.

    Each row has a panel with one mark per client and seed, in a style per column, and the means of fifths of the
    clients, each of which counts once, with its mean over the seeds. A last panel compares these means. The points are
    written to `figure-novel-divergence.csv`.

    Args:
        study: The study.
        study_manifest: The settings that its folder was created with.
        cells: The finished cells.
        folder: The study's folder.

    Returns:
        Path of the picture.

    Raises:
        RunDirectoryError: If no cell has assessed novel clients in the way of a row.
    """
    found: dict[str, dict[str, Points]] = {}
    clients: dict[str, list[tuple[Hashable, tuple[float, float]]]] = {}
    for row, column, cell in _cells_by_row(study, cells):
        if points := divergence_points(cell.folder(folder), row.way):
            found.setdefault(row.name, {}).setdefault(column.name, []).extend(points.values())
            clients.setdefault(row.name, []).extend(
                ((column.name, cell.config.data.seed, client), point) for client, point in points.items()
            )
    rows, columns = _lines_with_data(study, found)
    figure = new_figure(3.3 * (len(rows) + 1), 3.9)
    *panels, together = figure.subplots(1, len(rows) + 1, sharex=True, sharey=True, squeeze=False)[0]
    headings = {column.name: study.heading(column, quick=study_manifest.quick) for column in columns}
    for place, (panel, row) in enumerate(zip(panels, rows, strict=True)):
        means = quintiles(means_of_clients(clients[row.name]))
        _draw_points(panel, found[row.name], headings)
        _draw_means(panel, means, place, "mean of a fifth")
        _draw_means(together, means, place, row.label)
        panel.set_title(row.label, fontsize="medium")
    for panel in (*panels, together):
        panel.set_xlabel(DIVERGENCE, fontsize="small")
        panel.grid(alpha=0.3)
    together.set_title("means of fifths ± standard error", fontsize="medium")
    together.legend(fontsize="small")
    panels[0].set_ylabel("accuracy of a novel client")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize="small")
    lines = [(row, column, *point) for row in found for column in found[row] for point in found[row][column]]
    return save_with_numbers(figure, study, study_manifest, folder / "figure-novel-divergence.png",
                   [("row", "column", "divergence", "accuracy"), *lines])  # fmt: skip


def draw_epsilon(study: Study, study_manifest: StudyManifest, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw novel clients' mean accuracy against epsilon, a curve for each number of samples, with standard errors.

    Each row and column has a panel for its first seed; level lines show the accuracy without noise. The numbers are
    written to `figure-novel-epsilon.csv`. Arguments, result and errors are those of `draw_divergence`.
    """
    found: dict[str, dict[str, dict[int, Curve]]] = {}
    for row, column, cell in _cells_by_row(study, cells):
        if column.name not in found.get(row.name, {}) and (by_samples := curves(cell.folder(folder), row.way)):
            found.setdefault(row.name, {})[column.name] = by_samples
    rows, columns = _lines_with_data(study, found)
    figure = new_figure(max(7.0, 4.6 * len(columns)), 3.9 * len(rows))
    panels = figure.subplots(len(rows), len(columns), sharey=True, squeeze=False)
    for line, row in zip(panels, rows, strict=True):
        for panel, column in zip(line, columns, strict=True):
            heading = study.heading(column, quick=study_manifest.quick)
            panel.set_title(f"{row.label}, {heading}" if len(rows) > 1 else heading, fontsize="medium")
            for place, (number, curve) in enumerate(found[row.name].get(column.name, {}).items()):
                _draw_curve(panel, curve, place, f"{number} samples")
            panel.set(xscale="log", xlabel="epsilon (level lines: without noise)")
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
        line[0].set_ylabel("mean accuracy of novel clients")
    lines = [
        (row, column, number, "none" if epsilon is None else epsilon, level.mean, level.sem)
        for row, of_row in found.items()
        for column, of_column in of_row.items()
        for number, curve in of_column.items()
        for epsilon, level in curve.items()
    ]
    return save_with_numbers(figure, study, study_manifest, folder / "figure-novel-epsilon.png",
                   [("row", "column", "samples", "epsilon", "mean", "sem"), *lines])  # fmt: skip


def _cells_by_row(study: Study, cells: Sequence[Cell]) -> Iterator[tuple[Line, Line, Cell]]:
    """Yield each cell with its column and each row that shows it, seed by seed, as (row, column, cell)."""
    for cell in cells:
        column = next(column for column in study.columns if column.name == cell.column)
        yield from ((row, column, cell) for row in study.rows if row.run == cell.row)


def _lines_with_data(study: Study, found: Mapping[str, Mapping[str, object]]) -> tuple[list[Line], list[Line]]:
    if not found:
        raise RunDirectoryError("no finished cell has assessed novel clients in the way of its row; set novel.clients")
    names = {column for columns in found.values() for column in columns}
    return [row for row in study.rows if row.name in found], [
        column for column in study.columns if column.name in names
    ]


def _draw_points(panel: Axes, found: Mapping[str, Points], headings: Mapping[str, str]) -> None:
    for place, (name, heading) in enumerate(headings.items()):
        points = found.get(name, [])
        panel.scatter(
            [x for x, _ in points], [y for _, y in points], s=18, marker=MARKERS[place % len(MARKERS)],
            facecolors="none", edgecolors=PALETTE[place % len(PALETTE)], linewidths=0.8, label=heading,
        )  # fmt: skip


def _draw_means(panel: Axes, means: Sequence[tuple[float, Mean]], place: int, label: str) -> None:
    panel.errorbar(
        [x for x, _ in means], [level.mean for _, level in means], [level.sem or 0.0 for _, level in means],
        linestyle=LINES[place % len(LINES)], marker=MARKERS[place % len(MARKERS)], color=PALETTE[place % len(PALETTE)],
        markersize=5, capsize=2, linewidth=1.2, label=label,
    )  # fmt: skip


def _draw_curve(panel: Axes, curve: Curve, place: int, label: str) -> None:
    colour, line = PALETTE[place % len(PALETTE)], LINES[place % len(LINES)]
    noisy = sorted((epsilon, level.mean, level.sem or 0.0) for epsilon, level in curve.items() if epsilon is not None)
    epsilons, means, errors = zip(*noisy, strict=True) if noisy else ((), (), ())
    panel.errorbar(
        epsilons, means, errors, linestyle=line, marker=MARKERS[place % len(MARKERS)], color=colour, mfc="white",
        markersize=5, capsize=2, linewidth=1.2, label=label,
    )  # fmt: skip
    if None in curve:
        panel.axhline(curve[None].mean, linestyle=line, color=colour, linewidth=0.8, alpha=0.7)
