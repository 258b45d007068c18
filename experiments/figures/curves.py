"""Figures of a study's cells over the rounds; readable in black and white. Nothing is trained here."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.figures.novel_pictures import draw_divergence, draw_epsilon
from experiments.runner import Begun, is_finished, seeds_in
from experiments.study import Cell, Study
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.methods.priv_hfl import PrivHFLConfig
from hyperfl_flwr.runs.plots import labels_figure, save
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics

STYLES = [(line, marker) for line in ("-", "--", ":", "-.") for marker in ("o", "s", "^", "d")]
"""Line and marker of each row; neighbours differ in the marker."""

MARKS = 8
"""Markers along a curve."""

NOVEL = {"novel-divergence": draw_divergence, "novel-epsilon": draw_epsilon}
"""Figures of novel clients."""


def draw(study: Study, begun: Begun, folder: Path, what: str, *, open_private_state: bool = False) -> list[Path]:
    """Draw a figure of a study's finished cells.

    Args:
        study: The study.
        begun: What the folder was begun with.
        folder: The study's.
        what: A number of metrics.jsonl's `train` lines; `labels`, how many samples of each class the clients have;
            `embeddings`, see `experiments.figures.embeddings`; `pseudo-data`, see `experiments.figures.pseudo_data`;
            `novel-divergence` and `novel-epsilon`, see `experiments.figures.novel_pictures`; `NUMBER@SETTING`, a number
            of summary.json against a setting of the columns. `labels` are drawn of the first seed.
        open_private_state: Allows `embeddings` to read what simulated clients keep to themselves.

    Returns:
        The pictures, in the folder.

    Raises:
        ConfigError: If `embeddings` are not allowed.
        RunDirectoryError: If no run holds what is to be drawn.
    """
    cells = study.cells(quick=begun.quick, seeds=seeds_in(folder), changes=begun.changes)
    if what not in ("labels", "embeddings", "pseudo-data", *NOVEL):
        return [_draw_curves(study, begun, folder, cells, what)]
    finished = [cell for cell in cells if is_finished(cell, folder)]
    if not finished:
        raise RunDirectoryError(f"{folder} holds no finished cell; run `hyperfl study {study.name}`")
    if what == "labels":  # which are the same for every row and seed
        of_columns = {cell.column: cell for cell in reversed(finished)}.values()
        return [picture for cell in of_columns if (picture := _draw_labels(cell, folder)) is not None]
    if what in NOVEL:
        return NOVEL[what](study, begun, finished, folder)
    if what == "pseudo-data":
        return _draw_pseudo_data(finished, folder)
    if not open_private_state:
        raise ConfigError(
            "embeddings stay with the clients; to read them from the private files of these simulated ones, "
            "add --open-private-state"
        )
    with_some = [cell for cell in finished if "embedding" in client_of(cell.config.method).private]
    if not with_some:
        raise RunDirectoryError(f"no finished cell in {folder} is of a method whose clients keep embeddings")
    from experiments.figures.embeddings import pictures_of  # deferred: only these pictures need scikit-learn, a second

    return pictures_of(
        [(f"{cell.row}-{cell.column}-seed-{cell.seed}", cell.folder(folder)) for cell in with_some], folder
    )


def _draw_pseudo_data(cells: Sequence[Cell], folder: Path) -> list[Path]:
    from experiments.figures.pseudo_data import draw_pseudo_data  # deferred, as above

    pictures = []
    for cell in cells:
        if cell.config.section(PrivHFLConfig).distill and cell.config.section(PrivHFLConfig).keep_generators:
            pictures.append(folder / f"pseudo-data-{cell.row}-{cell.column}-seed-{cell.seed}.png")
            draw_pseudo_data(cell.folder(folder), pictures[-1])
    if not pictures:
        raise RunDirectoryError(f"no finished cell in {folder} has kept generators (priv-hfl.keep-generators)")
    return pictures


def _draw_labels(cell: Cell, folder: Path) -> Path | None:
    manifest = read_manifest(cell.folder(folder))
    if "label_counts" not in manifest:
        return None
    picture = folder / f"labels-{cell.column}.png"
    save(labels_figure(manifest["label_counts"]["train"]), picture)
    return picture


def _draw_curves(study: Study, begun: Begun, folder: Path, cells: Sequence[Cell], what: str) -> Path:
    """Draw a number over the rounds: a panel for each column, a curve for each row, `figure-NUMBER.png`.

    A curve is the mean over the seeds, its band their smallest and largest value. `NUMBER@SETTING` has a panel for each
    data set, the setting below it, and the name `figure-NUMBER-against-SETTING.png`.
    """
    number, _, setting = what.partition("@")
    headings = {column.name: study.heading(column, quick=begun.quick) for column in study.columns}
    curves: dict[tuple[str, str], dict[int, dict[float, float]]] = {}
    for cell in cells:
        points = _final(cell, folder, number, setting) if setting else _curve(cell, folder, number)
        panel = title_of(cell.config.dataset) if setting else headings[cell.column]
        if points:
            curves.setdefault((cell.row, panel), {}).setdefault(cell.seed, {}).update(points)
    if not curves:
        raise RunDirectoryError(f"no run in {folder} has recorded {number}")
    titles = list(dict.fromkeys(panel for _, panel in curves))
    rows = [row for row in study.rows if any(name == row.name for name, _ in curves)]
    figure = Figure(figsize=(4.2 * len(titles) + 2.2, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
    for panel, title in zip(panels, titles, strict=True):
        for position, row in enumerate(rows):
            if found := curves.get((row.name, title)):
                _draw_row(panel, list(found.values()), row.label, position, len(rows))
        panel.set_title(title, fontsize="medium")
        panel.set_xlabel(setting or "round")
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_locator(MaxNLocator(integer=not setting))
    panels[0].set_ylabel(number.replace("_", " "))
    figure.suptitle(study.title + (", quick settings" if begun.quick else ""))
    known = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    labels = [row.label for row in rows]
    figure.legend([known[label] for label in labels], labels, loc="outside right center", fontsize="small")
    name = "-against-".join(part.replace("_", "-").replace(".", "-") for part in (number, setting) if part)
    picture = folder / f"figure-{name}.png"
    figure.savefig(picture, dpi=120)
    return picture


def _draw_row(panel: Axes, curves: Sequence[dict[float, float]], label: str, position: int, of: int) -> None:
    """Draw one row's curve and band in the style of its position among all rows."""
    rounds, means, lowest, highest = _band(curves)
    line, marker = STYLES[position % len(STYLES)]
    shade = str(0.55 * position / max(1, of - 1))
    panel.plot(
        rounds, means, line, marker=marker, color=shade, label=label,
        markersize=4, mfc="white", markevery=max(1, len(rounds) // MARKS),
    )  # fmt: skip
    panel.fill_between(rounds, lowest, highest, color=shade, alpha=0.15, linewidth=0)


def _curve(cell: Cell, folder: Path, number: str) -> dict[float, float]:
    records = read_metrics(cell.folder(folder))
    return {record["round"]: record[number] for record in records if record["kind"] == "train" and number in record}


def _final(cell: Cell, folder: Path, number: str, setting: str) -> dict[float, float]:
    """Return a finished cell's number of summary.json by its value of a setting."""
    if setting not in cell.settings:
        raise ConfigError(f"there is no setting {setting!r}{nearest(setting, cell.settings)}")
    if not is_finished(cell, folder):
        return {}
    value = json.loads((cell.folder(folder) / "summary.json").read_text()).get(number)
    return {} if value is None else {float(cell.settings[setting]): value}


def _band(curves: Sequence[dict[float, float]]) -> tuple[list[float], list[float], list[float], list[float]]:
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[number] for curve in curves] for number in rounds]
    return rounds, [statistics.fmean(each) for each in columns], list(map(min, columns)), list(map(max, columns))
