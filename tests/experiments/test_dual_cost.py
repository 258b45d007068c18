"""Computed costs of PRIV-HFL's forms: equal to those of runs and to the study's numbers."""

import json
from dataclasses import asdict, fields

import pytest
import torch
from torchvision.models import resnet18

from experiments.collect import Collected, Entry
from experiments.dual.cost import Cost, computed_cost
from experiments.study import load_study
from experiments.study_folder import StudyManifest
from experiments.table_numbers import comma_separated
from experiments.tables import latex, markdown, with_metric
from hyperfl_flwr.models.targets import build_target

METRICS = [field.name for field in fields(Cost)]
SIZES = {"digits": 22_602, "fashion-mnist": 117_066, "cifar10": 121_182, "resnet18": 11_173_962}


@pytest.mark.parametrize("form", ["fedavg", "mean", "chain", "chain-projected"])
@pytest.mark.parametrize("num_clients", [2, 5])
def test_runs_cost_what_is_computed(form, num_clients, federate):
    """Sizes of messages, checkpoint and a client's file of a real federation equal the computed ones to the byte."""
    chain = {"priv-hfl.realisation": "chain", "priv-hfl.projection": form.endswith("projected")}
    settings = {"num_clients": num_clients, "num_rounds": 1, "priv-hfl.distill": False}
    settings |= chain if form.startswith("chain") else {}
    run = federate("fedavg" if form == "fedavg" else "priv-hfl", **settings)
    summary = json.loads((run / "summary.json").read_text())
    assert {name: summary[name] for name in METRICS} == asdict(computed_cost(form, num_clients, SIZES["digits"]))


def test_the_studys_numbers_are_the_computed_ones():
    """This holds for every row, column and metric, with models of the columns' targets."""
    study = load_study("dual-cost")
    shapes = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
    wanted = {}
    for column in study.columns:
        name, _, num_clients = column.name.rpartition("-")
        if not column.missing:
            assert (column.settings["dataset"], column.settings["num-clients"]) == (name, int(num_clients))
            target = build_target(column.settings["target"], shapes[name], 10)
            assert sum(parameter.numel() for parameter in target.parameters()) == SIZES[name]
        for row in study.rows:
            cost = computed_cost(row.name, int(num_clients), SIZES[name])
            wanted |= {(row.name, column.name, metric): value for metric, value in asdict(cost).items()}
    assert {key: expected.value for key, expected in study.expected.items()} == wanted


def test_tables_hold_computed_numbers_of_the_metric_that_is_shown():
    """Two vectors of 4 pairs with 22,602 numbers of four bytes; whole numbers keep all digits."""
    study = with_metric(load_study("dual-cost"), "server_state_bytes")
    assert study.paper["chain", "digits-5"].value == 2 * 4 * 22_602 * 4 == 723_264
    entries = {
        (row.name, column.name): Entry(
            values=[723_264.0] if (row.name, column.name) == ("chain", "digits-5") else (),
            paper=study.paper[row.name, column.name],
            missing=row.missing or column.missing,
        )
        for row in study.rows
        for column in study.columns
    }
    begun = StudyManifest(study=study.name, quick=False, changes={})
    collected = Collected(study=study, study_manifest=begun, entries=entries, commits=["abc"], rounds=[2])
    page = markdown(collected)
    assert "server_state_bytes in bytes" in page
    assert "after the slash the computed number (computed, experiments/dual/cost.py)" in page
    assert "| PRIV-HFL, chain | 723,264 (1) / 723,264 | – / 3,435,504 |" in page
    assert "| PRIV-HFL as printed | cannot be run: not offered / 1,446,528 |" in page
    assert "723,264 (1) / 723,264" in latex(collected)
    assert ",17699555808," in comma_separated(collected)
    assert with_metric(load_study("audit-table-3"), "recovered").paper == {}


def test_the_papers_example():
    """The paper's 7.82 GB per client for N = 100 and m = 11.7e6 are its 2.1e9 numbers (one vector) in GiB.

    The CIFAR form of ResNet-18 has a first convolution of 3x3 instead of 7x7, and ten classes.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in resnet18(num_classes=10).parameters())
    assert size - 64 * 3 * (7 * 7 - 3 * 3) == SIZES["resnet18"]
    numbers = computed_cost("dense", 100, 11_700_000).bytes_up_per_client_round / 4
    assert numbers == 2 * 2 * 11_700_000 * 99  # lambda and nu, each 2 m (N - 1)
    assert pytest.approx(7.82, abs=0.005) == 2.1e9 * 4 / 2**30
