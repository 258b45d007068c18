"""Draw how well attackers recognise members: the area below the ROC curve of each row, with its interval."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from experiments.figures.results import mean_of, new_figure, save_with_numbers, summaries_of
from experiments.runner import StudyManifest
from experiments.study import Cell, Study
from hyperfl_flwr.core.errors import RunDirectoryError

VIEWS = {"server": "the server, from uploads", "client": "another client", "model": "the exported model"}
"""Titles of the panels, by attacker."""

ATTACKS = {"lira": ("o", "0", "likelihood ratio"), "loss": ("s", "0.45", "loss threshold"),
           "control": ("x", "0.65", "control, samples of nobody")}  # fmt: skip
"""Marker, shade and title of each attack."""

Line = tuple[str, str, str, float, float, float]
"""Row, attacker, attack, the area, and the ends of its interval."""


def draw_membership(study: Study, study_manifest: StudyManifest, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw a panel for each attacker, with a line for each row of the study and a mark for each attack.

    Numbers are means over the seeds, and are written to `figure-membership.csv`.

    Args:
        study: The study.
        study_manifest: The settings that the folder was created with.
        cells: The finished cells.
        folder: The study's folder.

    Returns:
        The path of the picture, in a list.

    Raises:
        RunDirectoryError: If no finished cell is a membership game.
    """
    found = _lines(cells, folder)
    if not found:
        raise RunDirectoryError(f"no finished cell in {folder} is a membership game; set attack.name=membership")
    labels = {row.name: row.label for row in study.rows if row.name in {line[0] for line in found}}
    figure = new_figure(10.5, 1.4 + 0.5 * len(labels))
    panels = figure.subplots(1, len(VIEWS), sharey=True)
    for panel, (view, title) in zip(panels, VIEWS.items(), strict=True):
        _draw_panel(panel, [line for line in found if line[1] == view], list(labels))
        panel.set_title(title, fontsize="medium")
    panels[0].set_yticks(range(len(labels)), labels.values(), fontsize="small")
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    handles = dict(zip(*reversed(panels[-1].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small")
    names = ("row", "attacker", "attack", "auc", "low", "high")
    return save_with_numbers(figure, study, study_manifest, folder / "figure-membership.png", [names, *found])


def _lines(cells: Sequence[Cell], folder: Path) -> list[Line]:
    found = []
    for (row, _), summaries in summaries_of(cells, folder).items():
        for view in VIEWS:
            for attack in ATTACKS:
                name = f"{view}_{attack}_auc"
                value, low, high = (mean_of(summaries, name + end) for end in ("", "_low", "_high"))
                if value is not None and low is not None and high is not None:
                    found.append((row, view, attack, value, low, high))
    return found


def _draw_panel(panel: Axes, lines: Sequence[Line], rows: Sequence[str]) -> None:
    for number, (attack, (marker, shade, title)) in enumerate(ATTACKS.items()):
        chosen = [line for line in lines if line[2] == attack]
        places = [rows.index(line[0]) + 0.22 * (number - 1) for line in chosen]
        values = [line[3] for line in chosen]
        ends = [[value - line[4] for value, line in zip(values, chosen, strict=True)],
                [line[5] - value for value, line in zip(values, chosen, strict=True)]]  # fmt: skip
        panel.errorbar(values, places, xerr=ends, fmt=marker, color=shade, markersize=4, linewidth=1, label=title)
    panel.axvline(0.5, color="0", linewidth=0.6)
    panel.set_xlabel("area (0.5: guessing)", fontsize="small")
    panel.grid(alpha=0.3, axis="x")
