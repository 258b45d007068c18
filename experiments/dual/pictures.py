"""Draw the pictures of `experiments.dual.convergence`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.dual.measures import Curve, Growth
from hyperfl_flwr.runs.figures.colours import BLUE, COLOURS, VERMILLION

LineStyle = Literal["-", "--", "-."]

LOWEST, HIGHEST = 1e-8, 1e4
"""Range of the distances that are shown."""

ORDER_STYLES: dict[str, tuple[str, LineStyle, str]] = {
    "alternating": (BLUE, "-", "o"),
    "published": (VERMILLION, "--", "s"),
}
"""Colour, line and marker of each order."""

CURVATURE_STYLES = dict(zip((1.0, 0.1, 0.01, 0.0), zip(COLOURS, "os^d", strict=True), strict=True))
"""Colour and marker of each curvature."""

SMALLEST_RATE = 1e-5
"""Growth rates below this are on the linear part of the axis."""


def draw_curves(curves: Sequence[Curve], picture: Path) -> Path:
    """Draw the distances from the optimum over the rounds: a row for each problem, a column for each form."""
    longest = max(len(curve.distances) for curve in curves) - 1
    problems = list(dict.fromkeys(curve.problem for curve in curves))
    forms = list(dict.fromkeys((curve.realisation, curve.projection) for curve in curves))
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(problems), len(forms), sharex=True, sharey=True, squeeze=False)
    for line, problem in zip(panels, problems, strict=True):
        for panel, (realisation, projection) in zip(line, forms, strict=True):
            here = [curve for curve in curves if (curve.problem, curve.realisation, curve.projection) ==
                    (problem, realisation, projection)]  # fmt: skip
            for curve in here:
                _draw_curve(panel, curve)
            panel.set_title(f"{problem}, {realisation}{', projected' if projection else ''}", fontsize="medium")
            panel.set(xscale="log", yscale="log", ylim=(LOWEST, HIGHEST), xlim=(1, longest))
            panel.grid(alpha=0.3)
        line[0].set_ylabel("largest distance from the optimum")
    for panel in panels[-1]:
        panel.set_xlabel("round")
    figure.legend(handles=_curve_legend(curves), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(picture, dpi=120)
    return picture


def _draw_curve(panel: Axes, curve: Curve) -> None:
    colour, line, marker = _style(curve)
    envelope = curve.envelope
    panel.plot(
        list(envelope), list(envelope.values()), line, color=colour, marker=marker, markersize=4.5,
        markevery=3, mfc=colour if curve.share > 1 else "white", linewidth=1.1,
    )  # fmt: skip
    if curve.predicted and curve.sigma:
        panel.axhline(curve.predicted, color="k", linestyle=(0, (1, 1)), linewidth=0.9)


def _style(curve: Curve) -> tuple[str, LineStyle, str]:
    return (COLOURS[2], "-.", "^") if curve.sigma else ORDER_STYLES[curve.order]


def _curve_legend(curves: Sequence[Curve]) -> list[Line2D]:
    known: dict[str, Line2D] = {}
    for curve in curves:
        colour, line, marker = _style(curve)
        where = f"{curve.share:g} of the limit"
        label = f"{curve.order}, sigma > 0, {where}" if curve.sigma else f"{curve.order}, {where}"
        face = colour if curve.share > 1 else "white"
        known[label] = Line2D([], [], color=colour, linestyle=line, marker=marker, mfc=face, markersize=5, label=label)
    predicted = Line2D([], [], color="k", linestyle=(0, (1, 1)), label="predicted end with sigma > 0")
    return [*known.values(), predicted]


def draw_rates(growths: Sequence[Growth], picture: Path) -> Path:
    """Draw growth rates against the dual step: a row for each order, a column for each number of local steps."""
    orders = list(dict.fromkeys(growth.order for growth in growths))
    numbers = list(dict.fromkeys(growth.local_steps for growth in growths))
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(orders), len(numbers), sharex=True, sharey=True, squeeze=False)
    for line, order in zip(panels, orders, strict=True):
        for panel, number in zip(line, numbers, strict=True):
            _draw_panel(panel, [growth for growth in growths if (growth.order, growth.local_steps) == (order, number)])
            panel.set_title(f"{order}, {number} local step{'s' * (number > 1)}", fontsize="medium")
        line[0].set_ylabel("growth of an error per round (logarithm)")
    for panel in panels[-1]:
        panel.set_xlabel("dual step / predicted limit")
    handles = [
        Line2D([], [], color=colour, marker=marker, mfc="white", label=f"curvature {curvature:g}", linewidth=1)
        for curvature, (colour, marker) in CURVATURE_STYLES.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small",
                  title="lines: spectral radius, predicted; markers: measured")  # fmt: skip
    figure.savefig(picture, dpi=120)
    return picture


def _draw_panel(panel: Axes, growths: Sequence[Growth]) -> None:
    for curvature, (colour, marker) in CURVATURE_STYLES.items():
        here = [growth for growth in growths if growth.curvature == curvature]
        shares = [growth.share for growth in here]
        panel.plot(shares, [growth.predicted for growth in here], "-", color=colour, linewidth=1)
        panel.plot(
            shares, [growth.measured for growth in here], marker, color=colour, mfc="white", markersize=5, markevery=2
        )
        if here and not here[0].limit:
            panel.annotate(
                "curvature 0, relative to the alternating order's limit",
                (shares[0], here[-1].predicted),
                xytext=(0, 8), textcoords="offset points", fontsize="small",
            )  # fmt: skip
    panel.axvline(1, color="k", linestyle=":", linewidth=1)
    panel.axhline(0, color="k", linewidth=0.6)
    panel.set_yscale("symlog", linthresh=SMALLEST_RATE)
    panel.set_ylim(-3, 30)
    panel.grid(alpha=0.3)
