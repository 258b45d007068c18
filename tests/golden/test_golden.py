"""Golden numbers: they change only on purpose (see regenerate.py), and records of studies refer to them."""

import itertools
import json

import fill_in
import pytest
from runs import LONG, RUNS, agree, numbers_of

from experiments.golden import FILE, fingerprints
from experiments.records import find_records, read_records
from experiments.study import load_study, study_names
from hyperfl_flwr.methods import METHODS

STORED = json.loads(FILE.read_text())
OF_RUNS = {name: run["numbers"] for name, run in STORED["runs"].items()}

WITHOUT = {"membership", "property", "ig-prior"}
"""Attacks of the studies without a golden run, see experiments/golden.py."""


def test_every_run_is_stored():
    """The stored names are those in runs.py: a run that is not stored would not be compared."""
    assert list(STORED["runs"]) == list(RUNS)
    assert {name: run["where"] for name, run in STORED["runs"].items()} == {
        name: run.where for name, run in RUNS.items()
    }


def test_every_method_and_attack_of_a_study_has_a_run():
    """Every cell of the project's studies has the run of its method, of its attack and of its noise."""
    assert {run.where.get("method") for run in RUNS.values()} >= set(METHODS)
    names = [name for name in study_names() if name != "it-pfl-table-2"]
    for cell in itertools.chain.from_iterable(load_study(name).cells(seeds=1) for name in names):
        found = fingerprints(cell.settings)
        assert str(cell.settings["method"]) in found
        attacks = set(str(cell.attack.get("attack.name", "")).split(",")) - {""}
        assert attacks - set(found) == attacks & WITHOUT


def test_records_get_fingerprints_of_commits_that_agree(tmp_path):
    """Only where all commits of a cell compute the current numbers; also in the place of those of other numbers."""
    file, text = tmp_path / "records.jsonl", find_records("table-4").read_text()
    file.write_text(text.replace(fingerprints({"method": "hyperfl"})["hyperfl"], "0" * 12))
    records = read_records(file)
    (commit,) = fill_in.lacking(records)
    assert set(fill_in.lacking(records)[commit]) == {"hyperfl"}
    fill_in.write_filled(file, records, {commit: {"hyperfl": False}})
    assert fill_in.lacking(read_records(file))[commit]
    fill_in.write_filled(file, records, {commit: {"hyperfl": True}})
    assert file.read_text() == text
    recorded = next(iter(records.cells.values()))
    code = recorded["manifest"]["code"]
    for change, found in (
        ({"commit": "1" * 40}, {commit, "1" * 40}),
        ({"dirty": True}, set()),
        ({"commit": None}, set()),
    ):
        resumed = [{"code": {**code, **change}}]
        assert fill_in.commits({"manifest": {**recorded["manifest"], "resumed": resumed}}) == found


def test_no_two_runs_have_the_same_numbers():
    """What a run stands for changes its numbers by more than the tolerance."""
    for one, other in itertools.combinations(OF_RUNS, 2):
        assert not agree(OF_RUNS[one], OF_RUNS[other]), (one, other)


@pytest.mark.parametrize("name", list(RUNS))
def test_the_numbers_are_the_stored_ones(name, tmp_path):
    """Numbers of an earlier state of this code agree, also on other processors and versions of torch."""
    assert agree(numbers_of(name, tmp_path, defaults=STORED["defaults"]), OF_RUNS[name])


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(LONG))
def test_losses_and_accuracies_on_cuda_are_near_the_stored_ones(name, tmp_path):
    """Losses agree to one per cent, accuracies to three images of 120: training amplifies the rounding."""
    found, stored = numbers_of(name, tmp_path, device="cuda", defaults=STORED["defaults"]), OF_RUNS[name]
    assert found["train_loss"] == pytest.approx(stored["train_loss"], rel=1e-2)
    assert found["personalized_accuracy"] == pytest.approx(stored["personalized_accuracy"], rel=0, abs=3.01 / 120)
