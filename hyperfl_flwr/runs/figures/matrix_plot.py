"""Draw a cross-site matrix."""

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from hyperfl_flwr.runs.cross_site import CrossSite
from hyperfl_flwr.runs.figures.plots import PANEL_INCHES, STYLE

MOST_NUMBERS = 12
"""Largest number of clients of which the cells have their numbers, which must be legible on a phone."""

MOST_NAMES = 24
"""Largest number of clients whose ids are at the axes."""


@rc_context(STYLE)
def matrix_figure(found: CrossSite) -> Figure:
    """Draw the accuracies as a map of colours, the models from top to bottom and the data from left to right.

    The colours are those of cividis, which differ in lightness and can be told apart by colour-blind readers.
    """
    values, number = np.asarray(found.accuracy), len(found.clients)
    figure = Figure(figsize=(PANEL_INCHES[0], PANEL_INCHES[0] * 0.86), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="cividis", interpolation="nearest")
    axes.grid(visible=False)
    if number <= MOST_NUMBERS:
        middle = (values.min() + values.max()) / 2
        for row, column in np.ndindex(number, number):
            colour = "black" if values[row, column] > middle else "white"
            text = f"{100 * values[row, column]:.0f}"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize="small")
    named = range(number) if number <= MOST_NAMES else []
    for ticks in (axes.set_xticks, axes.set_yticks):
        ticks(list(named), [str(found.clients[each]) for each in named], fontsize="small")
    axes.set_xlabel("client whose test data are used")
    axes.set_ylabel("client whose model is used")
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1.0, decimals=0))
    bar.outline.set_visible(False)
    return figure
