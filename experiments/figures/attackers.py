"""Draw how much attackers find out in games with shadow federations: a number of each row, with its interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from experiments.figures.results import mean_of, new_figure, save_with_numbers, summaries_of
from experiments.runner import StudyManifest
from experiments.study import Cell, Study
from hyperfl_flwr.core.errors import RunDirectoryError

Line = tuple[str, str, str, float, float, float]
"""Row, attacker, attack, the number, and the ends of its interval."""


@dataclass(frozen=True, kw_only=True)
class GameFigure:
    """What a game's figure shows.

    Attributes:
        kind: The game, as in `attack.name`.
        views: Titles of the panels, by attacker.
        attacks: Marker, shade and title of each attack.
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
    attacks={"lira": ("o", "0", "likelihood ratio"), "loss": ("s", "0.45", "loss threshold"),
             "control": ("x", "0.65", "control, samples of nobody")},
    number="auc",
    axis="area (0.5: guessing)",
    guessing=0.5,
)  # fmt: skip

PROPERTY = GameFigure(
    kind="property",
    views={"upload": "the first upload", "server": "all uploads", "sum": "the sums", "model": "the exported model"},
    attacks={"regression": ("o", "0", "regression on shadows"), "bias": ("s", "0.45", "bias gradient"),
             "permuted": ("x", "0.65", "control, permuted shares")},
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
    """Draw a panel for each attacker, with a line for each row of the study and a mark for each attack.

    Numbers are means over the seeds, and are written to `figure-KIND.csv`.

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
    found = _lines(shown, cells, folder)
    if not found:
        raise RunDirectoryError(f"no finished cell in {folder} is a {shown.kind} game; set attack.name={shown.kind}")
    labels = {row.name: row.label for row in study.rows if row.name in {line[0] for line in found}}
    figure = new_figure(1.5 + 3.0 * len(shown.views), 1.4 + 0.5 * len(labels))
    panels = figure.subplots(1, len(shown.views), sharey=True)
    for panel, (view, title) in zip(panels, shown.views.items(), strict=True):
        _draw_panel(shown, panel, [line for line in found if line[1] == view], list(labels))
        panel.set_title(title, fontsize="medium")
    panels[0].set_yticks(range(len(labels)), labels.values(), fontsize="small")
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    handles = {label: mark for panel in panels for mark, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small")
    names = ("row", "attacker", "attack", shown.number, "low", "high")
    return save_with_numbers(figure, study, study_manifest, folder / f"figure-{shown.kind}.png", [names, *found])


def _lines(shown: GameFigure, cells: Sequence[Cell], folder: Path) -> list[Line]:
    found = []
    for (row, _), summaries in summaries_of(cells, folder).items():
        for view in shown.views:
            for attack in shown.attacks:
                name = f"{view}_{attack}_{shown.number}"
                value, low, high = (mean_of(summaries, name + end) for end in ("", "_low", "_high"))
                if value is not None and low is not None and high is not None:
                    found.append((row, view, attack, value, low, high))
    return found


def _draw_panel(shown: GameFigure, panel: Axes, lines: Sequence[Line], rows: Sequence[str]) -> None:
    for number, (attack, (marker, shade, title)) in enumerate(shown.attacks.items()):
        chosen = [line for line in lines if line[2] == attack]
        places = [rows.index(line[0]) + 0.22 * (number - 1) for line in chosen]
        values = [line[3] for line in chosen]
        ends = [[value - line[4] for value, line in zip(values, chosen, strict=True)],
                [line[5] - value for value, line in zip(values, chosen, strict=True)]]  # fmt: skip
        panel.errorbar(values, places, xerr=ends, fmt=marker, color=shade, markersize=4, linewidth=1, label=title)
    panel.axvline(shown.guessing, color="0", linewidth=0.6)
    if shown.lowest is not None:
        panel.set_xlim(left=shown.lowest)
    panel.set_xlabel(shown.axis, fontsize="small")
    panel.grid(alpha=0.3, axis="x")
