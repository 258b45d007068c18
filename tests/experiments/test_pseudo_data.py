"""Divergence of pseudo-data from private data, and figures against a setting: closed forms and a small study."""

import csv
import shutil

import numpy as np
import pytest
from matplotlib.image import imread

from experiments.figures.curves import draw
from experiments.figures.pseudo_data import DIMENSIONS, PseudoStudy, gaussian_divergence
from experiments.study import load_study
from experiments.study_folder import read_study_manifest
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError

NUM_POINTS = 200_000


def test_the_divergence_of_gaussians_is_the_closed_form():
    """It is sum of (s_p/s_q + (m_q - m_p)^2 / s_q - 1 + ln(s_q / s_p)) / 2 for diagonal covariances."""
    rng = np.random.default_rng(0)
    of_p, of_q, shift = np.array([1.0, 4.0, 0.5]), np.array([2.0, 1.0, 0.5]), np.array([0.0, 1.0, -2.0])
    p = rng.standard_normal((NUM_POINTS, 3)) * np.sqrt(of_p)
    q = rng.standard_normal((NUM_POINTS, 3)) * np.sqrt(of_q) + shift
    expected = float((of_p / of_q + shift**2 / of_q - 1 + np.log(of_q / of_p)).sum() / 2)
    assert gaussian_divergence(p, q) == pytest.approx(expected, rel=0.02)
    other = float((of_q / of_p + shift**2 / of_p - 1 + np.log(of_p / of_q)).sum() / 2)
    assert gaussian_divergence(q, p) == pytest.approx(other, rel=0.02)
    assert gaussian_divergence(q, q) == pytest.approx(0, abs=1e-9)


@pytest.fixture(scope="module")
def studied(quick_study):
    """Return the quick form of figure 7's study: the study, its manifest and its folder."""
    folder = quick_study("priv-hfl-figure-7")
    return load_study("priv-hfl-figure-7"), read_study_manifest(folder), folder


@pytest.mark.slow
def test_the_figure_holds_what_the_generators_make(studied):
    """The CSV has the divergence for each kept generator, of two rounds, and for all ten classes."""
    *_, folder = studied
    (picture,) = draw(*studied, "pseudo-data")
    assert picture == folder / "pseudo-data-faster-mnist-seed-0.png"
    assert imread(picture).size > 0
    with picture.with_suffix(".csv").open() as stream:
        rows = [[float(value) for value in row] for row in list(csv.reader(stream))[1:]]
    assert [row[0] for row in rows] == [1, 2]
    values = np.array([row[1:] for row in rows])
    assert values.shape == (2, 10)
    study = PseudoStudy(folder / "faster" / "mnist" / "seed-0")
    private, labels = study.private()
    assert len(private) == len(labels) == 400
    enough = np.bincount(labels, minlength=10) > DIMENSIONS  # with fewer images there is no divergence
    assert np.array_equal(np.isfinite(values), [enough, enough])
    assert (values[:, enough] > 1).all()  # two rounds are too few to learn to generate digits
    made = study.images(2, per_class=50)
    assert made.shape == (10, 50, 1, 8, 8)
    assert np.array_equal(made, study.images(2, per_class=50))
    assert not np.allclose(made, study.images(1, per_class=50), atol=1e-3)
    assert abs(made.mean()) < 0.05
    assert made.std() == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_a_number_is_drawn_against_a_setting(studied):
    """One column gives one point; for an unknown setting the nearest is named, an unknown number is refused."""
    assert imread(draw(*studied, "test_accuracy@data.dirichlet-alpha")[0]).size > 0
    with pytest.raises(ConfigError, match=r"did you mean data\.dirichlet-alpha"):
        draw(*studied, "test_accuracy@data.dirichlet-alfa")
    with pytest.raises(RunDirectoryError, match="recorded nothing_of_this_kind"):
        draw(*studied, "nothing_of_this_kind@data.dirichlet-alpha")


@pytest.mark.slow
def test_a_run_without_generators_is_refused(studied, tmp_path):
    """The error names the setting that keeps generators."""
    *_, folder = studied
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "faster" / "mnist" / "seed-0" / "generators")
    with pytest.raises(RunDirectoryError, match=r"priv-hfl\.keep-generators"):
        PseudoStudy(tmp_path / "copy" / "faster" / "mnist" / "seed-0")
