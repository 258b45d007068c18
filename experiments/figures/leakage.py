"""Draw what attackers find against the accuracy, a point for each method and defence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.figures.results import Summary, new_figure, save_with_numbers, summaries_of
from experiments.matrix import control_area, strongest_membership
from experiments.study import Cell, Study
from experiments.study_folder import StudyManifest
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.figures.colours import INK, PALETTE

MARKERS = ("o", "s", "^", "d", "v", "p", "*", "X")
"""Marker of each method."""

COLOURS_OF_DEFENCES = (INK, *(colour for colour in PALETTE if colour != INK))
"""Colour of each defence, in the order of the study's rows."""

ACCURACY = "accuracy"
"""Column of the study with the runs without an attack."""


def _decibels(summary: Summary) -> float | None:
    if summary.get("psnr") is None:  # another attack
        return None
    return float(summary["psnr"] - summary["control_psnr"])


def _area(summary: Summary) -> float | None:
    if "server_control_auc" not in summary:  # the row's server sees nothing that the attack could use
        return None
    best = strongest_membership(summary, "server")
    return float(summary[f"server_{best}_auc"]) - control_area(summary, "server", best)


PANELS: Mapping[str, tuple[str, str, Callable[[Summary], float | None]]] = {
    "image": ("curious server: one image", "PSNR above the control, dB", _decibels),
    "round": ("curious server: a round", "PSNR above the control, dB", _decibels),
    "malicious-server": ("malicious server: a round", "PSNR above the control, dB", _decibels),
    "membership": ("curious server: members", "area above the control", _area),
}
"""Title, axis and number of each column with an attack: what the strongest attack finds more than its control."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row under one attack.

    Attributes:
        column: The attack's column.
        row: The row.
        method: The row's method.
        defence: The row's defence, see `defence_of`.
        accuracy: Personalized accuracy without an attack.
        found: What the strongest attack finds more than its control.
    """

    column: str
    row: str
    method: str
    defence: str
    accuracy: float
    found: float


def draw_leakage_accuracy(
    study: Study, study_manifest: StudyManifest, cells: Sequence[Cell], folder: Path
) -> list[Path]:
    """Draw a panel for each column with an attack, with a marker for each method and a colour for each defence.

    The accuracy of training alone is a dotted line. Numbers are of the first seed, and are written to
    `figure-leakage-accuracy.csv`.

    Args:
        study: The study, with a column `accuracy`.
        study_manifest: The settings that the folder was created with.
        cells: The finished cells.
        folder: The study's folder.

    Returns:
        The path of the picture, in a list.

    Raises:
        RunDirectoryError: If no row has both an accuracy and an attack.
    """
    summaries = {place: found[0] for place, found in summaries_of(cells, folder).items()}
    points = _points(cells, summaries)
    if not points:
        raise RunDirectoryError(
            f"no row in {folder} has finished both the column {ACCURACY} and one of {', '.join(PANELS)}; run "
            f"`hyperfl study what-to-choose`, which has them"
        )
    alone = next(
        (summaries[cell.row, cell.column]["test_accuracy"] for cell in cells
         if (cell.config.method, cell.column) == ("local", ACCURACY)), None,
    )  # fmt: skip
    shown = [column for column in PANELS if any(point.column == column for point in points)]
    methods = list(dict.fromkeys(point.method for point in points))
    defences = list(dict.fromkeys(point.defence for point in points))
    lines = -(-len(shown) // 2)
    figure = new_figure(8.4, 1.2 + 3.1 * lines)
    panels = figure.subplots(lines, 2, squeeze=False, sharex=True).flatten()
    for panel in panels[len(shown) :]:
        panel.remove()
    for panel, column in zip(panels, shown, strict=False):
        for point in points:
            if point.column == column:
                panel.plot(100 * point.accuracy, point.found, _marker(methods, point.method), markersize=7, mfc="none",
                           color=_colour(defences, point.defence), markeredgewidth=1.6)  # fmt: skip
        _label_panel(panel, column, alone)
    handles = _handles(study, points, methods, defences, has_line=alone is not None)
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
    numbers = [(each.column, each.row, each.defence, each.accuracy, each.found) for each in points]
    return save_with_numbers(figure, study, study_manifest, folder / "figure-leakage-accuracy.png",
                             [("column", "row", "defence", "accuracy", "found"), *numbers])  # fmt: skip


def defence_of(settings: Mapping[str, Scalar]) -> str:
    """Return the name of what a cell's settings defend with, such as `secure sums, noise on clients`."""
    has = {
        "secure sums": settings["secagg.enabled"],
        "noise on records": settings["dp.epsilon"],
        "noise on clients": settings["privacy.unit"] == "client",
    }
    return ", ".join(name for name, value in has.items() if value) or "no defence"


def _points(cells: Sequence[Cell], summaries: Mapping[tuple[str, str], Summary]) -> list[Point]:
    found = []
    for cell in cells:
        before = summaries.get((cell.row, ACCURACY))
        if cell.column not in PANELS or cell.seed or before is None:
            continue
        *_, number_of = PANELS[cell.column]
        number = number_of(summaries[cell.row, cell.column])
        if number is not None:
            found.append(
                Point(
                    column=cell.column, row=cell.row, method=cell.config.method, defence=defence_of(cell.settings),
                    accuracy=before["test_accuracy"], found=number,
                )
            )  # fmt: skip
    return found


def _handles(
    study: Study, points: Sequence[Point], methods: Sequence[str], defences: Sequence[str], *, has_line: bool
) -> list[Line2D]:
    """Return the entries of the legend; a method has the label of its row without a defence."""
    labels = {row.name: row.label for row in study.rows}
    undefended = {point.method: labels[point.row] for point in points if point.defence == "no defence"}
    return [
        *(Line2D([], [], color=INK, marker=_marker(methods, method), linestyle="",
                 label=undefended.get(method, method)) for method in methods),
        *(Line2D([], [], color=_colour(defences, name), linewidth=4, label=name) for name in defences),
        *([Line2D([], [], color="0", linestyle=":", label=METHODS["local"].title)] if has_line else []),
    ]  # fmt: skip


def _marker(methods: Sequence[str], method: str) -> str:
    return MARKERS[methods.index(method) % len(MARKERS)]


def _colour(defences: Sequence[str], defence: str) -> str:
    return COLOURS_OF_DEFENCES[defences.index(defence) % len(COLOURS_OF_DEFENCES)]


def _label_panel(panel: Axes, column: str, alone: float | None) -> None:
    title, axis, _ = PANELS[column]
    panel.axhline(0.0, color="0", linewidth=0.6)
    if alone is not None:
        panel.axvline(100 * alone, color="0", linestyle=":", linewidth=1.2)
    panel.set_title(title, fontsize="medium")
    panel.set_ylabel(axis, fontsize="small")
    panel.set_xlabel("personalized accuracy, %", fontsize="small")
    panel.margins(0.08)
    panel.grid(alpha=0.3)
