"""Draw how much attackers find out in games with shadow federations: a number of each row, with its interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

from experiments.figures.results import new_figure, save_with_numbers, summaries_of
from experiments.study import Cell, Study
from experiments.study_folder import StudyManifest
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.runs.figures.colours import BLUE, CONTROL, VERMILLION

BETWEEN_ATTACKS = 0.22
"""Distance of the marks of two attacks, where that of two lines of the picture is 1; seeds stand closer together."""


class Mark(NamedTuple):
    """A mark: an attack's number in one game, with the ends of its interval.

    The fields are the columns of `figure-KIND.csv`, where `value` has the name of the number.
    """

    row: str
    column: str
    seed: int
    attacker: str
    attack: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class GameFigure:
    """What a game's figure shows.

    Attributes:
        kind: The game, as in `attack.name`.
        views: Titles of the panels, by attacker.
        attacks: Marker, colour and title of each attack.
        number: The number, the last part of its name in summary.json.
        axis: Title of its axis.
        guessing: Value of guessing, a thin line.
        lowest: Smallest value that the axis shows; None for all.
    """

    kind: str
    views: Mapping[str, str]
    attacks: Mapping[str, tuple[str, str, str]]
    number: str
    axis: str
    guessing: float
    lowest: float | None = None


MEMBERSHIP = GameFigure(
    kind="membership",
    views={"server": "the server, from uploads", "client": "another client", "model": "the exported model"},
    attacks={"lira": ("o", BLUE, "likelihood ratio"), "loss": ("s", VERMILLION, "loss threshold"),
             "control": ("x", CONTROL, "control, samples of nobody")},
    number="auc",
    axis="area (0.5: guessing)",
    guessing=0.5,
)  # fmt: skip

PROPERTY = GameFigure(
    kind="property",
    views={"upload": "the first upload", "server": "all uploads", "sum": "the sums", "model": "the exported model"},
    attacks={"regression": ("o", BLUE, "regression on shadows"), "bias": ("s", VERMILLION, "bias gradient"),
             "permuted": ("x", CONTROL, "control, permuted shares")},
    number="r2",
    axis="R² (1: exact, 0: guessing)",
    guessing=0.0,
    lowest=-0.6,
)  # fmt: skip


def draw_membership(study: Study, study_manifest: StudyManifest, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw the area below the ROC curve of membership inference, see `draw_game`."""
    return draw_game(MEMBERSHIP, study, study_manifest, cells, folder)


def draw_property(study: Study, study_manifest: StudyManifest, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw R² of the estimated share of a class, see `draw_game`."""
    return draw_game(PROPERTY, study, study_manifest, cells, folder)


def draw_game(
    shown: GameFigure, study: Study, study_manifest: StudyManifest, cells: Sequence[Cell], folder: Path
) -> list[Path]:
    """Draw a panel for each attacker, with a line for each row and column that has games, and a mark for each attack.

    Each seed has its own mark: an interval is of one game, and the mean of several has none. The numbers are written to
    `figure-KIND.csv`.

    Args:
        shown: What the figure shows.
        study: The study.
        study_manifest: The settings that the folder was created with.
        cells: The finished cells.
        folder: The study's folder.

    Returns:
        The path of the picture, in a list.

    Raises:
        RunDirectoryError: If no finished cell is a game of this kind.
    """
    found = _marks(shown, cells, folder)
    if not found:
        raise RunDirectoryError(f"no finished cell in {folder} is a {shown.kind} game; set attack.name={shown.kind}")
    labels, seeds = _labels(study, study_manifest, found), sorted({mark.seed for mark in found})
    figure = new_figure(1.5 + 3.0 * len(shown.views), 1.4 + (0.3 + 0.2 * len(seeds)) * len(labels))
    panels = figure.subplots(1, len(shown.views), sharey=True)
    for panel, (view, title) in zip(panels, shown.views.items(), strict=True):
        _draw_panel(shown, panel, [mark for mark in found if mark.attacker == view], list(labels), seeds)
        panel.set_title(title, fontsize="medium")
    panels[0].set_yticks(range(len(labels)), labels.values(), fontsize="small")
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    handles = {label: mark for panel in panels for mark, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small")
    names = tuple(shown.number if field == "value" else field for field in Mark._fields)
    return save_with_numbers(figure, study, study_manifest, folder / f"figure-{shown.kind}.png", [names, *found])


def _marks(shown: GameFigure, cells: Sequence[Cell], folder: Path) -> list[Mark]:
    found = []
    for cell in cells:
        ((summary,),) = summaries_of([cell], folder).values()
        for view in shown.views:
            for attack in shown.attacks:
                name = f"{view}_{attack}_{shown.number}"
                value, low, high = (summary.get(name + end) for end in ("", "_low", "_high"))
                if value is not None and low is not None and high is not None:
                    found.append(Mark(cell.row, cell.column, cell.seed, view, attack, value, low, high))
    return found


def _labels(study: Study, study_manifest: StudyManifest, found: Sequence[Mark]) -> dict[tuple[str, str], str]:
    """Return the label of each row and column that has games; columns are named only if there are several."""
    lines, columns = {(mark.row, mark.column) for mark in found}, {mark.column for mark in found}
    return {
        (row.name, column.name): row.label
        if len(columns) == 1
        else f"{row.label}, {study.heading(column, quick=study_manifest.quick)}"
        for row in study.rows
        for column in study.columns
        if (row.name, column.name) in lines
    }


def _draw_panel(
    shown: GameFigure, panel: Axes, marks: Sequence[Mark], lines: Sequence[tuple[str, str]], seeds: Sequence[int]
) -> None:
    for number, (attack, (marker, colour, title)) in enumerate(shown.attacks.items()):
        chosen = [mark for mark in marks if mark.attack == attack]
        places = [
            lines.index((mark.row, mark.column))
            + BETWEEN_ATTACKS * (number - 1 + (seeds.index(mark.seed) - (len(seeds) - 1) / 2) / len(seeds))
            for mark in chosen
        ]
        values = [mark.value for mark in chosen]
        ends = [[mark.value - mark.low for mark in chosen], [mark.high - mark.value for mark in chosen]]
        panel.errorbar(values, places, xerr=ends, fmt=marker, color=colour, markersize=4, linewidth=1, label=title)
    panel.axvline(shown.guessing, color="0", linewidth=0.6)
    if shown.lowest is not None:
        panel.set_xlim(left=shown.lowest)
    panel.set_xlabel(shown.axis, fontsize="small")
    panel.grid(alpha=0.3, axis="x")
