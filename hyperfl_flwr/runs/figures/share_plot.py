"""Draw estimated shares against true ones."""

from collections.abc import Mapping

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from hyperfl_flwr.runs.figures.colours import COLOURS, INK
from hyperfl_flwr.runs.figures.panels import legend_below
from hyperfl_flwr.runs.figures.plots import PANEL_INCHES, STYLE

Pairs = tuple[NDArray[np.float64], NDArray[np.float64]]
"""True and estimated shares [n]."""

MARKERS = ("o", "s", "x", "^")


@rc_context(STYLE)
def share_figure(panels: Mapping[str, Mapping[str, Pairs]], largest: float, *, titled: bool = False) -> Figure:
    """Draw a panel for each attacker, with a point for each estimate.

    Args:
        panels: True and estimated shares by label, by the title of their panel.
        largest: Largest share that the axes show, in (0, 1].
        titled: Whether the panels have their titles.
    """
    figure = Figure(figsize=(PANEL_INCHES[0] * len(panels), PANEL_INCHES[1] * 1.15), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, attacks) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw(axes, attacks, largest)
        if titled:
            axes.set_title(title, fontsize="medium")
    return figure


def _draw(axes: Axes, attacks: Mapping[str, Pairs], largest: float) -> None:
    axes.plot([0, largest], [0, largest], color=INK, linewidth=0.6)
    for number, (label, (true, estimated)) in enumerate(attacks.items()):
        marker, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
        axes.plot(true, estimated, marker, color=colour, markersize=4, mfc="none", label=label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("true share (thin line: exact)")
    axes.set_ylabel("estimated share")
    legend_below(axes)
