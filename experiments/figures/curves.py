"""Draw the figures of a study's finished cells."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from experiments.alike import require_alike
from experiments.figures.accuracy_bytes import draw_accuracy_bytes
from experiments.figures.attackers import draw_membership, draw_property
from experiments.figures.leakage import draw_leakage_accuracy
from experiments.figures.novel_pictures import draw_divergence, draw_epsilon
from experiments.figures.privacy_cost import draw_privacy_cost
from experiments.figures.results import new_figure
from experiments.study import Cell, Study
from experiments.study_axes import Line
from experiments.study_folder import StudyManifest, is_finished, seeds_in
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.methods.priv_hfl import PrivHFLConfig
from hyperfl_flwr.runs.figures.colours import PALETTE
from hyperfl_flwr.runs.figures.labels import literal
from hyperfl_flwr.runs.figures.plots import labels_figure, save
from hyperfl_flwr.runs.listed_clients import is_listed, label_rows
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics

STYLES = [(line, marker) for line in ("-", "--", ":", "-.") for marker in ("o", "s", "^", "d")]
"""Line and marker of each row; neighbours differ in the marker."""

Curves = dict[tuple[str, str], dict[int, dict[float, float]]]
"""For each row and panel, by their names, the points of each seed: round or value of a setting -> number."""

MARKS = 8
"""Number of markers along a curve."""

OF_SUMMARIES = {
    "accuracy-bytes": draw_accuracy_bytes, "leakage-accuracy": draw_leakage_accuracy, "membership": draw_membership,
    "novel-divergence": draw_divergence, "novel-epsilon": draw_epsilon, "privacy-cost": draw_privacy_cost,
    "property": draw_property,
}  # fmt: skip
"""Functions that draw figures of the finished cells' results, by name."""


def draw(
    study: Study,
    study_manifest: StudyManifest,
    folder: Path,
    kind: str,
    *,
    open_private_state: bool = False,
    mix: bool = False,
) -> list[Path]:
    """Draw a figure of a study's finished cells.

    Args:
        study: The study.
        study_manifest: The settings that the folder was created with.
        folder: The study's folder.
        kind: A number of metrics.jsonl's `train` lines; `labels`, the clients' number of samples of each class, for the
            first seed; `embeddings`, see `experiments.figures.embeddings`; `pseudo-data`, see
            `experiments.figures.pseudo_data`; `novel-divergence` and `novel-epsilon`, see
            `experiments.figures.novel_pictures`; `privacy-cost`, see `experiments.figures.privacy_cost`;
            `accuracy-bytes`, see `experiments.figures.accuracy_bytes`; `leakage-accuracy`, see
            `experiments.figures.leakage`; `membership` and `property`, see `experiments.figures.attackers`;
            `NUMBER@SETTING`, a number of summary.json against a setting of the columns.
        open_private_state: Whether `embeddings` may be read from the private files of simulated clients.
        mix: Whether to draw cells of other settings than the study's, and those that `require_alike` refuses.

    Returns:
        Paths of the pictures, in the folder.

    Raises:
        ConfigError: If `embeddings` are not allowed, or a setting is unknown.
        RunDirectoryError: If no cell is finished, they must not be mixed, or no run has recorded the data of the
            figure.
    """
    study = _with_literal_texts(study)
    cells = study.cells(quick=study_manifest.quick, seeds=seeds_in(folder), changes=study_manifest.changes)
    finished = [cell for cell in cells if _is_finished(cell, folder, mix=mix)]
    if not finished:
        raise RunDirectoryError(f"{folder} holds no finished cell; run `hyperfl study {study.name}`")
    if not mix:
        require_alike(finished, folder)
    if kind not in ("labels", "embeddings", "pseudo-data", *OF_SUMMARIES):
        return [_draw_curves(study, study_manifest, folder, finished, kind)]
    if kind == "labels":  # the same for every row and seed
        of_columns = {cell.column: cell for cell in reversed(finished)}.values()
        return [picture for cell in of_columns if (picture := _draw_labels(cell, folder)) is not None]
    if kind in OF_SUMMARIES:
        return OF_SUMMARIES[kind](study, study_manifest, finished, folder)
    if kind == "pseudo-data":
        return _draw_pseudo_data(finished, folder)
    if not open_private_state:
        raise ConfigError(
            "embeddings are private to the clients; add --open-private-state to read them from the files of these "
            "simulated clients"
        )
    with_some = [cell for cell in finished if "embedding" in client_of(cell.config.method).private]
    if not with_some:
        raise RunDirectoryError(f"no finished cell in {folder} is of a method with private embeddings, as hyperfl")
    from experiments.figures.embeddings import pictures_of  # deferred: importing scikit-learn takes a second

    return pictures_of(
        [(f"{cell.row}-{cell.column}-seed-{cell.seed}", cell.folder(folder)) for cell in with_some], folder
    )


def _is_finished(cell: Cell, folder: Path, *, mix: bool) -> bool:
    """Return whether a cell has results; `is_finished` refuses those of other settings."""
    return (cell.folder(folder) / "summary.json").is_file() if mix else is_finished(cell, folder)


def _draw_pseudo_data(cells: Sequence[Cell], folder: Path) -> list[Path]:
    from experiments.figures.pseudo_data import draw_pseudo_data  # deferred, as above

    pictures = []
    for cell in cells:
        if cell.config.section(PrivHFLConfig).distill and cell.config.section(PrivHFLConfig).keep_generators:
            pictures.append(folder / f"pseudo-data-{cell.row}-{cell.column}-seed-{cell.seed}.png")
            draw_pseudo_data(cell.folder(folder), pictures[-1])
    if not pictures:
        raise RunDirectoryError(
            f"no finished cell in {folder} has kept generators; run the study with priv-hfl.keep-generators"
        )
    return pictures


def _with_literal_texts(study: Study) -> Study:
    def renamed(lines: Sequence[Line]) -> list[Line]:
        return [replace(line, label=literal(line.label)) for line in lines]

    return replace(study, title=literal(study.title), rows=renamed(study.rows), columns=renamed(study.columns))


def _draw_labels(cell: Cell, folder: Path) -> Path | None:
    manifest = read_manifest(cell.folder(folder))
    if not is_listed(manifest):
        return None
    picture = folder / f"labels-{cell.column}.png"
    save(labels_figure(label_rows(manifest)), picture)
    return picture


def _draw_curves(
    study: Study,
    study_manifest: StudyManifest,
    folder: Path,
    cells: Sequence[Cell],
    kind: str,
) -> Path:
    """Draw a number over the rounds to `figure-NUMBER.png`: a panel for each column, a curve for each row.

    A curve shows the mean over the seeds, with a band from the smallest to the largest value. `NUMBER@SETTING` is drawn
    to `figure-NUMBER-against-SETTING.png`, with a panel for each data set and the setting on the horizontal axis.
    """
    number, _, setting = kind.partition("@")
    curves = _curves(study, study_manifest, folder, cells, number, setting)
    if not curves:
        raise RunDirectoryError(
            f"no run in {folder} has recorded {number}; choose a key of the `train` lines of metrics.jsonl"
        )
    titles = list(dict.fromkeys(panel for _, panel in curves))
    rows = [row for row in study.rows if any(name == row.name for name, _ in curves)]
    figure = new_figure(4.2 * len(titles) + 2.2, 3.8)
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
    for panel, title in zip(panels, titles, strict=True):
        _draw_panel(panel, title, rows, curves, setting)
    panels[0].set_ylabel(number.replace("_", " "))
    figure.suptitle(study.title + (", quick settings" if study_manifest.quick else ""))
    known = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    labels = [row.label for row in rows]
    figure.legend([known[label] for label in labels], labels, loc="outside right center", fontsize="small")
    name = "-against-".join(part.replace("_", "-").replace(".", "-") for part in (number, setting) if part)
    picture = folder / f"figure-{name}.png"
    figure.savefig(picture, dpi=120)
    return picture


def _curves(
    study: Study,
    study_manifest: StudyManifest,
    folder: Path,
    cells: Sequence[Cell],
    number: str,
    setting: str,
) -> Curves:
    """Return the points of each row in each panel; an empty `setting` is for points over the rounds."""
    headings = {column.name: study.heading(column, quick=study_manifest.quick) for column in study.columns}
    curves: Curves = {}
    for cell in cells:
        points = _final(cell, folder, number, setting) if setting else _curve(cell, folder, number)
        panel = literal(title_of(cell.config.dataset)) if setting else headings[cell.column]
        if points:
            of_seed = curves.setdefault((cell.row, panel), {}).setdefault(cell.seed, {})
            if setting and (twice := of_seed.keys() & points):
                raise RunDirectoryError(
                    f"several columns of {panel} have {setting} {min(twice):g}: one point would replace another; "
                    f"draw {number} without @{setting}, or a study with one of these columns"
                )
            of_seed.update(points)
    return curves


def _draw_panel(panel: Axes, title: str, rows: Sequence[Line], curves: Curves, setting: str) -> None:
    """Draw the curves of all rows in one panel, and note below it which of their points are left out."""
    for position, row in enumerate(rows):
        if found := curves.get((row.name, title)):
            _draw_row(panel, list(found.values()), row.label, position)
    panel.set_title(title, fontsize="medium")
    axis = setting or "round"
    notes = [_left_out(list(curves.get((row.name, title), {}).values()), f"{row.label}: {axis}") for row in rows]
    panel.set_xlabel("\n".join([axis, *filter(None, notes)]))
    panel.grid(alpha=0.3)
    panel.xaxis.set_major_locator(MaxNLocator(integer=not setting))


def _draw_row(panel: Axes, curves: Sequence[dict[float, float]], label: str, position: int) -> None:
    """Draw one row's curve and band, in a style that depends on its position among all rows."""
    rounds, means, lowest, highest = _band(curves)
    line, marker = STYLES[position % len(STYLES)]
    colour = PALETTE[position % len(PALETTE)]
    panel.plot(
        rounds, means, line, marker=marker, color=colour, label=label,
        markersize=4, mfc="white", markevery=max(1, len(rounds) // MARKS),
    )  # fmt: skip
    panel.fill_between(rounds, lowest, highest, color=colour, alpha=0.15, linewidth=0)


def _curve(cell: Cell, folder: Path, number: str) -> dict[float, float]:
    records = read_metrics(cell.folder(folder))
    return {record["round"]: record[number] for record in records if record["kind"] == "train" and number in record}


def _final(cell: Cell, folder: Path, number: str, setting: str) -> dict[float, float]:
    """Return a finished cell's number of summary.json, keyed by the cell's value of a setting."""
    if setting not in cell.settings:
        raise ConfigError(f"there is no setting {setting!r}{nearest(setting, cell.settings)}")
    value = json.loads((cell.folder(folder) / "summary.json").read_text()).get(number)
    return {} if value is None else {float(cell.settings[setting]): value}


def _left_out(curves: Sequence[dict[float, float]], of_what: str) -> str:
    """Return which points of a row are not drawn, since not all of its seeds have them; empty if there are none."""
    left_out = sorted({number for curve in curves for number in curve} - set(_band(curves)[0])) if curves else []
    if not left_out:
        return ""
    which = f"{left_out[0]:g}" if len(left_out) == 1 else f"{left_out[0]:g} to {left_out[-1]:g}, {len(left_out)} points"
    return f"{of_what} {which} left out, as not all seeds have it"


def _band(curves: Sequence[dict[float, float]]) -> tuple[list[float], list[float], list[float], list[float]]:
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[number] for curve in curves] for number in rounds]
    return rounds, [statistics.fmean(column) for column in columns], list(map(min, columns)), list(map(max, columns))
