"""The toy problems' curves and growth rates against predictions, and their figures."""

import json
import math
import sys

import pytest

from experiments.dual import convergence
from experiments.dual.measures import CURVATURES, curves, rates


@pytest.fixture(scope="module")
def found():
    return list(curves(500))


def test_curves_end_where_they_must(found):
    """The distance tends to 0, infinity, or that of min sum f_i + kappa / (2 sigma beta) |C theta|^2 (Newton)."""
    assert {(each.problem, each.realisation, each.projection) for each in found} == {
        (problem, *form)
        for problem in ("least squares", "logistic regression")
        for form in (("mean", False), ("chain", False), ("chain", True))
    }
    for each in found:
        early, late = max(each.distances[100:200], default=math.inf), max(each.distances[-100:])
        if each.sigma:
            assert each.distances[-1] == pytest.approx(each.predicted, rel=1e-3)
            assert each.predicted > 0.01
        elif each.predicted == 0:
            assert late < early * (1e-2 if each.order == "alternating" else 0.7)
        elif each.predicted == math.inf:
            assert each.order == "published" or len(each.distances) < 200
            assert late > each.distances[0] or late > 1.5 * early
        else:
            assert (each.predicted, each.projection, each.share > 1) == (None, True, True)


def test_growth_rates_are_the_predicted_ones():
    """They equal numpy's eigenvalues; the limit is h / kappa (published) or, at h = 0, 4 / (kappa alpha K)."""
    growths = list(rates())
    assert {each.curvature for each in growths} == set(CURVATURES)
    for each in growths:
        if each.order == "published":
            assert each.limit == pytest.approx(each.curvature / 2, rel=1e-6)
        elif each.curvature == 0:
            assert each.limit == pytest.approx(4 / (2 * 0.05 * each.local_steps), rel=1e-6)
        if abs(each.share - 1) < 0.01:
            continue  # the derivative is infinite there
        assert each.measured == pytest.approx(each.predicted, rel=1e-6, abs=1e-9)
        if each.order == "alternating" and each.curvature == 0 and each.share < 1:
            assert abs(each.measured) < 1e-9
        else:
            assert (each.measured > 0) == (each.share > 1 or each.limit == 0)


def test_pictures_and_numbers_are_written(tmp_path, monkeypatch, capsys):
    """Figures and valid JSON are written; above the limit no finite end is predicted."""
    monkeypatch.setattr(sys, "argv", ["dual_convergence", "--output", str(tmp_path / "new"), "--rounds", "20"])
    convergence.main()
    paths = capsys.readouterr().out.split()
    assert [path.rpartition("/")[2] for path in paths] == [
        "dual-convergence.png", "dual-convergence.json", "dual-rates.png", "dual-rates.json",
    ]  # fmt: skip
    assert all((tmp_path / "new" / path).stat().st_size > 5000 for path in paths)
    rows = json.loads((tmp_path / "new" / "dual-convergence.json").read_text())
    assert {row["predicted"] for row in rows if row["share"] > 1} == {None, "infinity"}
    assert all(list(row["distances"])[-1] == "20" for row in rows if row["share"] < 1)
