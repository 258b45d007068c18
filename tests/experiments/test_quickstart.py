"""The quickstart: documented accuracies agree with runs, and the figure shows all of them."""

import json
import re
from pathlib import Path

import pytest

from hyperfl_flwr import ROOT
from hyperfl_flwr.app import server as server_app
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.grids import plain_grid
from hyperfl_flwr.launch.quickstart import METHODS, SEEDS, Spread, quickstart_settings
from hyperfl_flwr.methods import METHODS as RECOMMENDED
from hyperfl_flwr.runs.figures.plots import comparison_panels, plot_comparison

PAGE = ROOT / "docs" / "results" / "index.md"


def documented() -> dict[tuple[str, int], tuple[float, float]]:
    """Return personalized and aggregate accuracy in % by method and seed, from the page's table."""
    section = PAGE.read_text().split("\n## Quickstart\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    rows = [row for row in cells if row[0] in METHODS and len(row) == 5]  # method, rate, seed, accuracies
    assert all(float(row[1]) == RECOMMENDED[row[0]].learning_rate for row in rows)
    return {(row[0], int(row[2])): (float(row[3]), float(row[4])) for row in rows}


def tolerance() -> float:
    """Return the allowed difference in points, as the page gives it."""
    (text,) = re.findall(r"allows ([\d.]+) points", PAGE.read_text())
    return float(text)


def test_the_page_has_every_run() -> None:
    assert set(documented()) == {(method, seed) for method in METHODS for seed in SEEDS}
    assert 0 < tolerance() <= 1.0  # points of 100; a larger tolerance would prove nothing


@pytest.mark.slow
@pytest.mark.parametrize(("method", "seed"), [("hyperfl", 0)])
def test_a_run_gives_the_documented_accuracies(method: str, seed: int, tmp_path: Path) -> None:
    """They agree on any processor and with any number of nodes; one image is 0.3 points."""
    settings = default_settings() | quickstart_settings(method, seed)
    settings |= {"device": "cpu", "threads": 1, "checkpoint-every": 10, "output": str(tmp_path / "run")}
    run = server_app.run(plain_grid(1, settings), RunConfig.from_flat(settings))
    summary = json.loads((run / "summary.json").read_text())
    found = [100 * summary[key] for key in ("test_accuracy", "test_accuracy_aggregate")]
    assert found == pytest.approx(documented()[method, seed], rel=0, abs=tolerance() + 0.05)


def test_each_seed_divides_the_data_anew() -> None:
    """The seed also seeds the partition, and each method trains at its own rate."""
    for seed in SEEDS:
        assert quickstart_settings("fedavg", seed).items() >= {"seed": seed, "data.seed": seed}.items()
    assert quickstart_settings("fedavg", 0)["learning-rate"] == "auto"


def test_a_spread_has_mean_least_and_largest() -> None:
    assert Spread.of([0.5, 0.75]) == Spread(mean=0.625, least=0.5, largest=0.75)


def test_the_picture_shows_all_runs(federate: Federate, tmp_path: Path) -> None:
    """The file with a second run of a method is larger than the one with one run."""
    runs = [federate("fedavg", seed=seed) for seed in (0, 5)]
    sizes = []
    for paths in (runs[:1], runs):
        plot_comparison({"fedavg": paths}, tmp_path / "picture.png")
        sizes.append((tmp_path / "picture.png").stat().st_size)
    assert sizes[0] < sizes[1]


def test_labels_are_no_formulas(federate: Federate, tmp_path: Path) -> None:
    """A file's name may contain dollar signs, and begin with an underscore."""
    run = federate("fedavg", num_rounds=1)
    names = ["dataset=npz:d$_$x.npz", "_base", "5 $"]
    for figure in comparison_panels({name: [run] for name in names}).values():
        shown = [text.get_text().replace(r"\$", "$") for text in figure.axes[0].get_legend().get_texts()]
        assert [text.strip() for text in shown] == names
        figure.savefig(tmp_path / "picture.png")
