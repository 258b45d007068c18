"""The figure of a run: its margins are fixed, and leave room for everything that is written."""

import itertools

import pytest

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.runs.figures.plots import run_figure

TITLES = {"mean test accuracy of the clients", "mean training loss of the clients"}


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({}, "personalized test accuracy, spread over the clients"),
        (
            {"num_clients": 24, "secagg.enabled": True, "data.train-samples": 20, "data.test-samples": 10},
            "personalized test accuracy, deviation over the clients",
        ),
    ],
    ids=["plain", "secure"],
)
def test_nothing_is_cut_off_or_hides_another(changes: dict[str, int | bool], last: str, federate: Federate) -> None:
    num_nodes = 24 if changes else 3  # with fewer, secure sums have no deviation
    figure = run_figure(federate("fedrep", num_nodes, num_rounds=2, **changes))
    figure.draw_without_rendering()
    assert figure.axes[-1].get_title(loc="left") == last
    titles = [artist for artist in figure.findobj() if getattr(artist, "get_text", str)() in TITLES | {last}]
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    boxes = [artist.get_window_extent() for artist in (*titles, *legends)]
    boxes += [axes.yaxis.get_tightbbox() for axes in figure.axes]
    assert len(boxes) == 3 + 2 + 3
    for box in (*boxes, *(axes.xaxis.get_tightbbox() for axes in figure.axes)):
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
