"""Draw ROC curves of attacks on logarithmic axes, where small rates of false positives can be read."""

from collections.abc import Mapping

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hyperfl_flwr.runs.figures.colours import COLOURS, INK
from hyperfl_flwr.runs.figures.panels import legend_below
from hyperfl_flwr.runs.figures.plots import PANEL_INCHES, STYLE

RocCurve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Rates of false and of true positives, see `hyperfl_flwr.metrics.roc.curve`."""

LINES = ("-", "--", ":", "-.")


@rc_context(STYLE)
def roc_figure(panels: Mapping[str, Mapping[str, RocCurve]], resolution: float, *, titled: bool = False) -> Figure:
    """Draw a panel with the curves of each attacker.

    Args:
        panels: Curves by label, by the title of their panel.
        resolution: Smallest rate that the axes show, in (0, 1).
        titled: Whether the panels have their titles.
    """
    figure = Figure(figsize=(PANEL_INCHES[0] * len(panels), PANEL_INCHES[1] * 1.15), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        draw_roc(axes, curves, resolution)
        if titled:
            axes.set_title(title, fontsize="medium")
    return figure


def draw_roc(axes: Axes, curves: Mapping[str, RocCurve], resolution: float) -> None:
    """Draw ROC curves, and guessing as a thin line; see `roc_figure`."""
    axes.plot([resolution, 1], [resolution, 1], color=INK, linewidth=0.6)
    for number, (label, (false, true)) in enumerate(curves.items()):
        line, colour = LINES[number % len(LINES)], COLOURS[number % len(COLOURS)]
        axes.plot(np.maximum(false, resolution), np.maximum(true, resolution), line, color=colour, label=label)
    axes.set(xscale="log", yscale="log", xlim=(resolution, 1), ylim=(resolution, 1))
    axes.set_xlabel("false positive rate (thin line: guessing)")
    axes.set_ylabel("true positive rate")
    legend_below(axes)
