"""Analysis of clients' embeddings: private state is read only on request, and clusters are compared with chance."""

import json
import shutil

import numpy as np
import pytest

from experiments.figures.curves import draw
from experiments.figures.embeddings import draw_embeddings, groups_of, read_embeddings, separation
from experiments.runner import run_cells
from experiments.study import load_study
from experiments.study_folder import StudyManifest, open_study_folder
from hyperfl_flwr.contract.folders import last_checkpoint
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.files.storage import read_arrays

BEGUN = StudyManifest(study="figure-8", quick=True, changes={})


def test_separated_groups_are_told_from_noise():
    """Three tight, distant groups are significant and noise is not; chance is (7 * 6 + 7 * 6 + 6 * 5) / (20 * 19)."""
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2], [7, 7, 6])
    vectors = rng.normal(size=(20, 8)) * 0.01 + np.eye(8)[groups]
    found = separation(vectors, groups, rng)
    assert found.silhouette > 0.9
    assert found.p_value < 0.001
    assert found.neighbours == 1.0
    assert found.neighbours_by_chance == pytest.approx((7 * 6 + 7 * 6 + 6 * 5) / (20 * 19), abs=0.02)
    noise = separation(rng.normal(size=(20, 8)), groups, rng)
    assert noise.p_value > 0.05
    assert noise.silhouette < 0.1


def test_groups_are_those_of_the_partition():
    """A client's group is the one whose dominant classes have most of its samples; classes 2, 4, 6 and 8 have two."""
    counts = np.zeros((5, 10), dtype=np.int64) + 1
    for group, classes in enumerate([(0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0)]):
        counts[group, list(classes)] += 10
    assert groups_of(counts).tolist() == [0, 1, 2, 3, 4]
    counts = np.zeros((3, 62), dtype=np.int64)
    counts[0, 3], counts[1, 12], counts[2, 61] = 5, 5, 5
    assert groups_of(counts).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_embeddings_are_drawn_only_when_asked_for(quick_study, tmp_path):
    """Without --open-private-state there is an error and no figure; with it the last stored embeddings are used."""
    study = load_study("figure-8")
    (cell,) = study.cells(quick=True, rows=["hyperfl"])
    others = [row.name for row in study.rows if row.name != "hyperfl"]
    folder = tmp_path / "copy"
    shutil.copytree(quick_study("figure-8"), folder, ignore=shutil.ignore_patterns(*others, "*.png"))
    with pytest.raises(ConfigError, match="--open-private-state"):
        draw(study, BEGUN, folder, "embeddings")
    assert not list(folder.glob("*.png"))
    (picture,) = draw(study, BEGUN, folder, "embeddings", open_private_state=True)
    assert picture.is_file()
    assert json.loads(picture.with_suffix(".json").read_text())["clients"] == 6
    run = cell.folder(folder)
    _, progress = last_checkpoint(run)
    stored = [read_arrays(run / f"clients/client-{n:05d}/round-{progress.versions[n]:06d}.npz")[0] for n in range(6)]
    vectors, rounds = read_embeddings(run)
    assert np.array_equal(vectors, np.stack([arrays["embedding/v"] for arrays in stored]))
    assert rounds == progress.round
    assert len(draw(study, BEGUN, folder, "labels")) == 1


def test_a_method_without_embeddings_is_refused(federate):
    run = federate("fedrep")
    with pytest.raises(RunDirectoryError, match="have no embeddings"):
        read_embeddings(run)


def test_embeddings_of_one_dimension_are_refused(federate, tmp_path):
    run = federate("hyperfl", 6, **{"hyperfl.embedding-dim": 1, "num-clients": 6})
    with pytest.raises(RunDirectoryError, match=r"have one dimension; two are needed \(hyperfl.embedding-dim\)"):
        draw_embeddings(run, tmp_path / "picture.png")


@pytest.mark.slow
@pytest.mark.extended
def test_rows_without_embeddings_are_left_out(tmp_path):
    """Only HyperFL's row is drawn; with FedAvg alone there is an error."""
    study, changes = load_study("ablation"), {"num-clients": 6}
    begun = StudyManifest(study="ablation", quick=True, changes=changes)
    both = study.cells(quick=True, rows=["fedavg", "hyperfl"], changes=changes)
    folder, fedavg = tmp_path / "both", tmp_path / "fedavg"
    open_study_folder(folder, begun)
    run_cells(study, both, folder, 1, lambda cell, problem: None, quick=True)
    shutil.copytree(folder, fedavg, ignore=shutil.ignore_patterns("hyperfl"))
    with pytest.raises(RunDirectoryError, match=r"no finished cell in .* private embeddings"):
        draw(study, begun, fedavg, "embeddings", open_private_state=True)
    (picture,) = draw(study, begun, folder, "embeddings", open_private_state=True)
    assert picture.name.startswith("embeddings-hyperfl-")
