"""Draw figures of a run's metrics in one style.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish. Lines and markers differ, too, so
that the figures are readable in black and white.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import Record, has_secure_sums, read_manifest, read_metrics

INK, RULES = "#1b1f24", "#c9ced4"
"""Colours of text and axes, and of the grid."""

BLUE, VERMILLION = "#0072b2", "#d55e00"
COLOURS = (BLUE, VERMILLION, "#009e73", "#cc79a7")
"""Colours of data: M. Okabe and K. Ito, Color Universal Design, 2008."""

RUN_STYLES = [(style, COLOURS[number % len(COLOURS)]) for number, style in enumerate(
    ("-o", "--s", ":^", "-.d", "--o", "-s", "-.^", ":d")
)]  # fmt: skip
"""Line, marker and colour of each run in a figure of several."""

COMPARED = {
    "personalized accuracy (after local training)": ("train", "personalized_accuracy"),
    "aggregate accuracy (as received)": ("aggregate", "aggregate_accuracy"),
}
"""Kind and name of the curves of a comparison, by caption."""

STYLE: dict[Any, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": RULES, "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": "small",
}  # fmt: skip
"""Matplotlib's settings for drawing and saving figures."""

PANEL_INCHES = (4.6, 3.2)
"""Width and height of a figure with one panel; its 10-point text is legible on a phone, 330 pixels wide."""

MOST_LABELS = 24
"""Maximum number of clients with labels below their bars; with more clients there are no labels."""

LARGEST_DOT, DOT_SIZES = 9.0, 8
"""Diameter of the largest dot of `labels_figure` in points, and the number of different dot sizes."""

DEVIATION = "personalized_accuracy_std"
"""Name of the standard deviation over the clients in metrics.jsonl; only with secure sums of enough clients."""

Curve = tuple[list[int], list[float]]
"""Rounds and values of a curve."""


def plot_run(path: Path) -> Path:
    """Draw accuracy, training loss and the spread of the clients' accuracies of a run over its rounds.

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
    panels = _panels_of(manifest, records)
    figure = _figure(10 * len(panels) / 3, 3.6)
    settings = manifest["settings"]
    title = f"{settings['method']} on {RunData.read(manifest).title}, {settings['num-clients']} clients"
    figure.suptitle(title, parse_math=False)  # a file name may contain dollar signs
    for axes, (caption, draw) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        draw(axes, records)
        axes.set_title(caption, fontsize="medium")
    return figure


@rc_context(STYLE)
def run_panels(path: Path) -> dict[str, Figure]:
    """Return each panel of `plot_run` as a separate figure, by caption."""
    records, figures = list(read_metrics(path)), {}
    for caption, draw in _panels_of(read_manifest(path), records).items():
        figures[caption] = _figure(*PANEL_INCHES)
        draw(figures[caption].subplots(), records)
    return figures


@rc_context(STYLE)
def accuracy_figure(personalized: Curve, aggregate: Curve) -> Figure:
    """Draw the accuracies of one client over the rounds."""
    figure = _figure(*PANEL_INCHES)
    _draw_curves(figure.subplots(), personalized, aggregate)
    return figure


@rc_context(STYLE)
def clients_figure(accuracies: Sequence[float | None]) -> Figure:
    """Draw the clients' accuracies as bars in ascending order; clients without an accuracy are omitted."""
    known = sorted((accuracy, client) for client, accuracy in enumerate(accuracies) if accuracy is not None)
    figure = _figure(*PANEL_INCHES)
    axes = figure.subplots()
    # One path for all bars, with gaps of height 0: a page with a thousand clients stays small.
    heights = [height for accuracy, _ in known for height in (accuracy, 0.0)][:-1]
    edges = [edge for position in range(len(known)) for edge in (position - 0.4, position + 0.4)]
    axes.stairs(heights, edges or [0.0], fill=True, color=BLUE)
    named = known if len(known) <= MOST_LABELS else []
    axes.set_xticks(range(len(named)), [str(client) for _, client in named], fontsize="small")
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("client, from the lowest to the highest" if named else "clients, from the lowest to the highest")
    axes.set_ylim(bottom=0)
    _in_percent(axes)
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
    """Draw the personalized and the aggregate accuracy of several runs over the rounds.

    Args:
        paths: Run folders by name; runs with the same name have the same colour and line style.
        picture: Path of the PNG file to write.
    """
    figure = _figure(8, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (caption, curve) in zip(panels, COMPARED.items(), strict=True):
        _draw_runs(panel, paths, curve)
        panel.set_title(caption, fontsize="medium")
    panels[0].legend(loc="lower right")
    save(figure, picture)


@rc_context(STYLE)
def comparison_panels(paths: Mapping[str, Sequence[Path]]) -> dict[str, Figure]:
    """Return each panel of `plot_comparison` as a separate figure, by caption."""
    figures = {}
    for caption, curve in COMPARED.items():
        figures[caption] = _figure(PANEL_INCHES[0], PANEL_INCHES[1] + 0.18 * len(paths))
        axes = figures[caption].subplots()
        _draw_runs(axes, paths, curve)
        axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.17), ncols=1, handlelength=2.2)
    return figures


def _draw_runs(axes: Axes, paths: Mapping[str, Sequence[Path]], curve: tuple[str, str]) -> None:
    """Draw a curve of every run; those with more names than there are styles share them."""
    for (name, runs), (style, colour) in zip(paths.items(), itertools.cycle(RUN_STYLES), strict=False):
        for number, run in enumerate(runs):
            label = None if number else name  # one entry of the legend for each name
            points = _curve(list(read_metrics(run)), *curve)
            axes.plot(*points, style, color=colour, markersize=3, linewidth=1, mfc="none", label=label)
    _over_rounds(axes)
    _in_percent(axes)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_accuracy(axes: Axes, records: Sequence[Record]) -> None:
    validation = _curve(records, "train", "personalized_validation_accuracy")
    if validation[0]:
        axes.plot(*validation, ":^", color=COLOURS[2], markersize=3, label="personalized, on validation data")
    _draw_curves(
        axes, _curve(records, "train", "personalized_accuracy"), _curve(records, "aggregate", "aggregate_accuracy")
    )


def _draw_curves(axes: Axes, personalized: Curve, aggregate: Curve) -> None:
    axes.plot(*personalized, "-o", color=BLUE, markersize=3, label="personalized")
    axes.plot(*aggregate, "--s", color=VERMILLION, markersize=3, mfc="none", label="aggregate")
    _over_rounds(axes)
    _in_percent(axes)
    _legend_below(axes)


def _draw_loss(axes: Axes, records: Sequence[Record]) -> None:
    axes.plot(*_curve(records, "train", "train_loss"), "-o", color=BLUE, markersize=3)
    axes.set_ylabel("nats")
    _over_rounds(axes)


def _draw_spread(axes: Axes, records: Sequence[Record]) -> None:
    """Draw median, 10th to 90th percentile and range; the size of the figure does not grow with the clients."""
    by_round: dict[int, list[float]] = {}
    for number, accuracy in zip(*_curve(records, "client", "personalized_accuracy"), strict=True):
        by_round.setdefault(number, []).append(accuracy)
    rounds = list(by_round)
    if rounds:
        lowest, low, median, high, highest = np.transpose(
            [np.percentile(accuracies, (0, 10, 50, 90, 100)) for accuracies in by_round.values()]
        )
        axes.fill_between(rounds, lowest, low, color=BLUE, alpha=0.2, linewidth=0, label="range")
        axes.fill_between(rounds, high, highest, color=BLUE, alpha=0.2, linewidth=0)
        axes.fill_between(rounds, low, high, color=BLUE, alpha=0.4, linewidth=0, label="80 % of clients")
        axes.plot(rounds, median, "-o", color=BLUE, markersize=3, label="median")
        _legend_below(axes)
    _over_rounds(axes)
    _in_percent(axes)


def _draw_deviation(axes: Axes, records: Sequence[Record]) -> None:
    """Draw mean and standard deviation, where no accuracy of a single client is known."""
    known = [record for record in records if record["kind"] == "train" and DEVIATION in record]
    (rounds, means), (_, deviations) = (_curve(known, "train", name) for name in ("personalized_accuracy", DEVIATION))
    low, high = np.subtract(means, deviations), np.add(means, deviations)
    axes.fill_between(rounds, low, high, color=BLUE, alpha=0.3, linewidth=0, label="± standard deviation")
    axes.plot(rounds, means, "-o", color=BLUE, markersize=3, label="mean")
    _legend_below(axes)
    _over_rounds(axes)
    _in_percent(axes)


Panels = Mapping[str, Callable[[Axes, Sequence[Record]], None]]
"""Functions that draw the panels of a run's figure, by caption."""

_MEANS: Panels = {
    "mean test accuracy of the clients": _draw_accuracy,
    "mean training loss of the clients": _draw_loss,
}


def _panels_of(manifest: Mapping[str, Any], records: Sequence[Record]) -> Panels:
    """Return the panels of a run; with secure sums of few clients no spread over the clients is known."""
    if not has_secure_sums(manifest):
        return {**_MEANS, "personalized test accuracy, spread over the clients": _draw_spread}
    if not any(DEVIATION in record for record in records):
        return _MEANS
    return {**_MEANS, "personalized test accuracy, deviation over the clients": _draw_deviation}


def _curve(records: Sequence[Record], kind: str, name: str) -> Curve:
    rows = [record for record in records if record["kind"] == kind and name in record]
    return [row["round"] for row in rows], [row[name] for row in rows]


def _over_rounds(axes: Axes) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _legend_below(axes: Axes) -> None:
    """Show the legend below the axes, where it hides no curve."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3, handlelength=1.5, columnspacing=1.2)


def _in_percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
