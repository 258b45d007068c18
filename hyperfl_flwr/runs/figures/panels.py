"""Draw the panels of a run's figure: curves of scores and losses over the rounds, and their spread over the clients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hyperfl_flwr.core.tasks import Task, task_of
from hyperfl_flwr.runs.figures.colours import BLUE, COLOURS, VERMILLION
from hyperfl_flwr.runs.run_directory import Record, has_secure_sums
from hyperfl_flwr.runs.validation import replaces_test_data

Curve = tuple[list[int], list[float]]
"""Rounds and values of a curve."""


def draw_curves(axes: Axes, personalized: Curve, aggregate: Curve, task: Task) -> None:
    """Draw the main scores of personalized and received models over the rounds."""
    axes.plot(*personalized, "-o", color=BLUE, markersize=3, label="personalized")
    axes.plot(*aggregate, "--s", color=VERMILLION, markersize=3, mfc="none", label="aggregate")
    over_rounds(axes)
    in_units(axes, task)
    legend_below(axes)


Draw = Callable[[Axes, Sequence[Record]], None]


class RunPanels:
    """The panels of a run's figure.

    Args:
        manifest: The run's manifest.
    """

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self._task, self._is_secure = task_of(manifest["settings"]), has_secure_sums(manifest)
        self._name = f"personalized_{self._task.score}"
        self._samples = "validation" if replaces_test_data(manifest["settings"]) else "test"

    def of(self, records: Sequence[Record]) -> dict[str, Draw]:
        """Return the functions that draw the panels, by caption.

        With secure sums of few clients, no spread over the clients is known.
        """
        found: dict[str, Draw] = {
            f"mean {self._samples} {self._task.score_title} of the clients": self._draw_score,
            "mean training loss of the clients": self._draw_loss,
        }
        spread = f"personalized {self._samples} {self._task.score_title}"
        if not self._is_secure:
            found[f"{spread}, spread over the clients"] = self._draw_spread
        elif any(self._deviation in record for record in records):
            found[f"{spread}, deviation over the clients"] = self._draw_deviation
        return found

    @property
    def _deviation(self) -> str:
        """Name of the standard deviation over the clients in metrics.jsonl; only with sums of enough clients."""
        return f"{self._name}_std"

    def _draw_score(self, axes: Axes, records: Sequence[Record]) -> None:
        validation = curve_of(records, "train", f"personalized_validation_{self._task.score}")  # if it is what decides
        if validation[0]:
            axes.plot(*validation, ":^", color=COLOURS[2], markersize=3, label="personalized, on validation data")
        aggregate = curve_of(records, "aggregate", f"aggregate_{self._task.score}")
        draw_curves(axes, curve_of(records, "train", self._name), aggregate, self._task)

    def _draw_loss(self, axes: Axes, records: Sequence[Record]) -> None:
        axes.plot(*curve_of(records, "train", "train_loss"), "-o", color=BLUE, markersize=3)
        axes.set_ylabel(self._task.loss_unit)
        over_rounds(axes)

    def _draw_spread(self, axes: Axes, records: Sequence[Record]) -> None:
        """Draw median, 10th to 90th percentile and range; the size of the figure does not grow with the clients."""
        by_round: dict[int, list[float]] = {}
        for number, score in zip(*curve_of(records, "client", self._name), strict=True):
            by_round.setdefault(number, []).append(score)
        rounds = list(by_round)
        if rounds:
            lowest, low, median, high, highest = np.transpose(
                [np.percentile(scores, (0, 10, 50, 90, 100)) for scores in by_round.values()]
            )
            axes.fill_between(rounds, lowest, low, color=BLUE, alpha=0.2, linewidth=0, label="range")
            axes.fill_between(rounds, high, highest, color=BLUE, alpha=0.2, linewidth=0)
            axes.fill_between(rounds, low, high, color=BLUE, alpha=0.4, linewidth=0, label="80 % of clients")
            axes.plot(rounds, median, "-o", color=BLUE, markersize=3, label="median")
            legend_below(axes)
        over_rounds(axes)
        in_units(axes, self._task)

    def _draw_deviation(self, axes: Axes, records: Sequence[Record]) -> None:
        """Draw mean and standard deviation, where no score of a single client is known."""
        known = [record for record in records if record["kind"] == "train" and self._deviation in record]
        (rounds, means), (_, deviations) = (curve_of(known, "train", name) for name in (self._name, self._deviation))
        low, high = np.subtract(means, deviations), np.add(means, deviations)
        axes.fill_between(rounds, low, high, color=BLUE, alpha=0.3, linewidth=0, label="± standard deviation")
        axes.plot(rounds, means, "-o", color=BLUE, markersize=3, label="mean")
        legend_below(axes)
        over_rounds(axes)
        in_units(axes, self._task)


def curve_of(records: Sequence[Record], kind: str, name: str) -> Curve:
    """Return the values of a number in the lines of a kind."""
    rows = [record for record in records if record["kind"] == kind and name in record]
    return [row["round"] for row in rows], [row[name] for row in rows]


def over_rounds(axes: Axes) -> None:
    """Label the horizontal axis with rounds."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def legend_below(axes: Axes) -> None:
    """Show the legend below the axes, where it hides no curve."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3, handlelength=1.5, columnspacing=1.2)


def in_units(axes: Axes, task: Task) -> None:
    """Show main scores on the vertical axis in percent, if they are shares."""
    if task.has_shares:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
