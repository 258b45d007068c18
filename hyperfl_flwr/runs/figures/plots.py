"""Draw figures of a run's metrics in one style."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hyperfl_flwr.core.tasks import Task, task_of
from hyperfl_flwr.runs.figures.colours import BLUE, COLOURS, INK, RULES
from hyperfl_flwr.runs.figures.labels import literal
from hyperfl_flwr.runs.figures.panels import Curve, RunPanels, curve_of, draw_curves, in_units, over_rounds
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics

RUN_STYLES = [(style, COLOURS[number % len(COLOURS)]) for number, style in enumerate(
    ("-o", "--s", ":^", "-.d", "--o", "-s", "-.^", ":d")
)]  # fmt: skip
"""Line, marker and colour of each run in a figure of several."""

STYLE: dict[Any, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": RULES, "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": "small",
}  # fmt: skip
"""Matplotlib's settings for drawing and saving figures."""

PANEL_INCHES = (4.6, 3.2)
"""Width and height of a figure with one panel; its 10-point text is legible on a phone, 330 pixels wide."""

RUN_INCHES, RUN_MARGINS = (4.5, 3.8), (0.7, 0.3, 0.85, 0.6)
"""Width and height of a panel of `run_figure`, and its left, right, lower and upper margin. They are fixed: every run
draws this figure, and fitting them would take half of its time."""

MOST_LABELS = 24
"""Maximum number of clients with labels below their bars; with more clients there are no labels."""

LARGEST_DOT, DOT_SIZES = 9.0, 8
"""Diameter of the largest dot of `labels_figure` in points, and the number of different dot sizes."""


def plot_run(path: Path) -> Path:
    """Draw main score, training loss and the spread of the clients' scores of a run over its rounds.

    Args:
        path: The run folder.

    Returns:
        Path of the picture, `plots/run.png` in the folder.
    """
    picture = path / "plots" / "run.png"
    picture.parent.mkdir(exist_ok=True)
    save(run_figure(path), picture)
    return picture


@rc_context(STYLE)
def save(figure: Figure, picture: Path) -> None:
    """Write a figure to a PNG file."""
    figure.savefig(picture, dpi=120, facecolor="white")


@rc_context(STYLE)
def run_figure(path: Path) -> Figure:
    """Return the figure of `plot_run`."""
    records, manifest = list(read_metrics(path)), read_manifest(path)
    panels = RunPanels(manifest).of(records)
    (width, height), (left, right, bottom, top) = RUN_INCHES, RUN_MARGINS
    figure = Figure(figsize=(width * len(panels), height))
    FigureCanvasAgg(figure)
    settings = manifest["settings"]
    title = f"{settings['method']} on {RunData.read(manifest).title}, {settings['num-clients']} clients"
    figure.suptitle(literal(title))
    for number, (caption, draw) in enumerate(panels.items()):
        x, across = (number * width + left) / (len(panels) * width), (width - left - right) / (len(panels) * width)
        axes = figure.add_axes((x, bottom / height, across, (height - bottom - top) / height))
        draw(axes, records)
        axes.set_title(caption, fontsize="medium", loc="left")
    return figure


@rc_context(STYLE)
def run_panels(path: Path) -> dict[str, Figure]:
    """Return each panel of `plot_run` as a separate figure, by caption."""
    records, figures = list(read_metrics(path)), {}
    for caption, draw in RunPanels(read_manifest(path)).of(records).items():
        figures[caption] = _figure(*PANEL_INCHES)
        draw(figures[caption].subplots(), records)
    return figures


@rc_context(STYLE)
def score_figure(personalized: Curve, aggregate: Curve, task: Task) -> Figure:
    """Draw the main scores of one client over the rounds."""
    figure = _figure(*PANEL_INCHES)
    draw_curves(figure.subplots(), personalized, aggregate, task)
    return figure


@rc_context(STYLE)
def clients_figure(scores: Sequence[float | None], task: Task) -> Figure:
    """Draw the clients' main scores as bars in ascending order; clients without a score are omitted."""
    known = sorted((score, client) for client, score in enumerate(scores) if score is not None)
    figure = _figure(*PANEL_INCHES)
    axes = figure.subplots()
    # One path for all bars, with gaps of height 0: a page with a thousand clients stays small.
    heights = [height for score, _ in known for height in (score, 0.0)][:-1]
    edges = [edge for position in range(len(known)) for edge in (position - 0.4, position + 0.4)]
    axes.stairs(heights, edges or [0.0], fill=True, color=BLUE)
    named = known if len(known) <= MOST_LABELS else []
    axes.set_xticks(range(len(named)), [str(client) for _, client in named], fontsize="small")
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("client, from the lowest to the highest" if named else "clients, from the lowest to the highest")
    axes.set_ylim(bottom=min(0.0, *(score for score, _ in known)) if known else 0.0)
    in_units(axes, task)
    return figure


@rc_context(STYLE)
def labels_figure(counts: Sequence[Sequence[int]]) -> Figure:
    """Draw the numbers of training samples by client and class, counts [N, K], as dots with proportional areas."""
    table = np.asarray(counts)
    width, height = PANEL_INCHES[0], min(8.0, max(PANEL_INCHES[1], 1.0 + 0.16 * table.shape[1]))
    figure = _figure(width, height)
    axes = figure.subplots()
    room = 72 * min(0.85 * width / table.shape[0], (height - 0.8) / table.shape[1])
    levels = np.ceil(DOT_SIZES * np.sqrt(table / max(1, table.max()))).astype(int)  # diameter: the root of the area
    for level in range(1, DOT_SIZES + 1):
        clients, labels = np.nonzero(levels == level)
        size = min(LARGEST_DOT, room) * level / DOT_SIZES
        axes.plot(clients, labels, "o", color=BLUE, markersize=size, markeredgewidth=0)
    axes.margins(0.5 / table.shape[0], 0.5 / table.shape[1])
    axes.set_xlabel(f"client (the largest dot: {table.max()} samples)")
    axes.set_ylabel("class")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return figure


@rc_context(STYLE)
def plot_comparison(paths: Mapping[str, Sequence[Path]], picture: Path) -> None:
    """Draw the personalized and the aggregate score of several runs over the rounds.

    Args:
        paths: Run folders by name; runs with the same name have the same colour and line style.
        picture: Path of the PNG file to write.
    """
    figure = _figure(8, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    task = _task(paths)
    for panel, (caption, curve) in zip(panels, _compared(task).items(), strict=True):
        _draw_runs(panel, paths, curve, task)
        panel.set_title(caption, fontsize="medium")
    panels[0].legend(loc="lower right")
    save(figure, picture)


@rc_context(STYLE)
def comparison_panels(paths: Mapping[str, Sequence[Path]]) -> dict[str, Figure]:
    """Return each panel of `plot_comparison` as a separate figure, by caption."""
    figures, task = {}, _task(paths)
    for caption, curve in _compared(task).items():
        figures[caption] = _figure(PANEL_INCHES[0], PANEL_INCHES[1] + 0.18 * len(paths))
        axes = figures[caption].subplots()
        _draw_runs(axes, paths, curve, task)
        axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.17), ncols=1, handlelength=2.2)
    return figures


def _task(paths: Mapping[str, Sequence[Path]]) -> Task:
    """Return the task of runs, of which there is at least one; all have the same."""
    return task_of(read_manifest(next(run for runs in paths.values() for run in runs))["settings"])


def _compared(task: Task) -> dict[str, tuple[str, str]]:
    """Return kind and name of the curves of a comparison, by caption."""
    return {
        f"personalized {task.score_title} (after local training)": ("train", f"personalized_{task.score}"),
        f"aggregate {task.score_title} (as received)": ("aggregate", f"aggregate_{task.score}"),
    }


def _draw_runs(axes: Axes, paths: Mapping[str, Sequence[Path]], curve: tuple[str, str], task: Task) -> None:
    """Draw a curve of every run; those with more names than there are styles share them."""
    for (name, runs), (style, colour) in zip(paths.items(), itertools.cycle(RUN_STYLES), strict=False):
        for number, run in enumerate(runs):
            label = None if number else literal(name)  # one entry of the legend for each name
            points = curve_of(list(read_metrics(run)), *curve)
            axes.plot(*points, style, color=colour, markersize=3, linewidth=1, mfc="none", label=label)
    over_rounds(axes)
    in_units(axes, task)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
