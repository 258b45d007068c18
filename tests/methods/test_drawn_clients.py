"""Runs that train or evaluate drawn clients at their end: who is drawn, what is recorded, and the means' errors."""

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from federations import of_representatives

from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import last_checkpoint, metrics, outcome
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.results.export import model_of_run
from hyperfl_flwr.results.report import write_report
from strategies.engine.sampling import standard_error

SAMPLED: Settings = {"fraction_train": 0.6, "last_round": "sampled"}
"""Settings of runs that train three of five clients in every round."""


def rows(run: Path, kind: str, number: int) -> list[dict[str, Any]]:
    return [row for row in metrics(run) if (row["kind"], row["round"]) == (kind, number)]


def evaluators(run: Path, number: int) -> list[int]:
    return [row["client"] for row in rows(run, "client-aggregate", number)]


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def error_by_hand(values: list[float], population: int) -> float:
    """Return the standard error with the sample's deviation and the finite-population correction."""
    number = len(values)
    return statistics.stdev(values) / math.sqrt(number) * math.sqrt(1 - number / population)


@pytest.mark.parametrize("drawn", [2, 3, 5])
def test_the_squared_error_is_the_variance_of_the_mean(drawn: int) -> None:
    """Over all samples of a population, the squared errors have the variance of the samples' means as their mean."""
    values = [0.1, 0.2, 0.2, 0.5, 0.9, 1.0]
    samples = list(itertools.combinations(values, drawn))
    squares = []
    for sample in samples:
        error = standard_error(statistics.pstdev(sample), drawn, len(values))
        assert error == pytest.approx(error_by_hand(list(sample), len(values)))
        squares.append(error**2)
    exact = statistics.pvariance([statistics.fmean(sample) for sample in samples])
    assert statistics.fmean(squares) == pytest.approx(exact)


def test_all_values_have_no_error_and_a_single_one_has_none_that_is_known() -> None:
    assert standard_error(0.3, 6, 6) == standard_error(0.0, 1, 1) == 0
    assert standard_error(0.0, 1, 6) is None


@of_representatives
def test_a_sampled_last_round_is_as_any_round(method: str, federate: Federate) -> None:
    """It trains a share of the clients, and a shorter run that is prolonged equals a straight one."""
    straight = federate(method, num_rounds=3, **SAMPLED)
    trained = [[row["client"] for row in rows(straight, "client", number)] for number in (1, 2, 3)]
    assert [len(clients) for clients in trained] == [3, 3, 3]
    summary = summary_of(straight)
    assert summary["test_accuracy_num_clients"] == 3
    known = [client for client, value in enumerate(summary["test_accuracy_per_client"]) if value is not None]
    assert known == trained[2]
    assert summary["test_accuracy_aggregate_num_clients"] == NUM_CLIENTS
    short = federate(method, num_rounds=2, **SAMPLED)
    assert outcome(federate(method, num_rounds=3, resume=str(short), **SAMPLED)) == outcome(straight)


def test_the_mean_of_a_sampled_round_has_an_error(federate: Federate) -> None:
    run = federate("fedavg", **SAMPLED)
    (line,) = rows(run, "train", 2)
    accuracies = [row["personalized_accuracy"] for row in rows(run, "client", 2)]
    assert line["drawn_from"] == NUM_CLIENTS
    assert line["personalized_accuracy_sem"] == pytest.approx(error_by_hand(accuracies, NUM_CLIENTS))
    summary = summary_of(run)
    assert summary["test_accuracy_sem"] == line["personalized_accuracy_sem"] > 0
    assert summary["test_accuracy_aggregate_sem"] is None
    mean, error = line["personalized_accuracy"], line["personalized_accuracy_sem"]
    log = (run / "server.log").read_text()
    assert f"round 2/2: personalized accuracy {mean:.4f} ± {error:.4f}, 3 of 3 clients drawn from 5, " in log
    page = write_report(run).read_text()
    assert f"after local training; mean of 3 clients drawn from 5, with a standard error of {100 * error:.2f} %" in page


@of_representatives
def test_the_same_clients_evaluate_whatever_the_rounds_and_nodes(method: str, federate: Federate) -> None:
    """Also after a resume; what is trained is the same as in a run that all clients evaluate."""
    runs = [
        federate(method, nodes, num_rounds=rounds, evaluate=3) for nodes, rounds in ((1, 2), (2, 2), (5, 2), (2, 1))
    ]
    resumed = federate(method, num_rounds=2, evaluate=3, resume=str(runs[3]))
    drawn = evaluators(runs[0], 2)
    assert len(drawn) == 3
    assert [evaluators(run, 2) for run in (*runs[1:3], resumed)] == [drawn] * 3
    everyone = federate(method, evaluate="all")
    assert last_checkpoint(everyone)[1] == last_checkpoint(runs[1])[1]
    expected = [row for row in rows(everyone, "client-aggregate", 2) if row["client"] in drawn]
    # A server generates the models of all drawn clients in one product, whose rounding depends on their number.
    found = rows(runs[1], "client-aggregate", 2)
    losses = [[row.pop("aggregate_loss") for row in each] for each in (found, expected)]
    assert found == expected
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert evaluators(federate(method, evaluate=3, seed=1), 2) != drawn


def test_the_mean_of_drawn_clients_has_an_error(federate: Federate) -> None:
    run = federate("fedavg", evaluate=3, **{"data.global-test": True})
    (line,) = rows(run, "aggregate", 2)
    accuracies = [row["aggregate_accuracy"] for row in rows(run, "client-aggregate", 2)]
    assert (line["clients"], line["drawn_from"]) == (3, NUM_CLIENTS)
    assert line["aggregate_accuracy"] == pytest.approx(statistics.fmean(accuracies))
    assert line["aggregate_accuracy_sem"] == pytest.approx(error_by_hand(accuracies, NUM_CLIENTS))
    assert line["aggregate_global_accuracy_sem"] == 0  # all clients measure the same on the same samples
    summary, error = summary_of(run), line["aggregate_accuracy_sem"]
    assert summary["test_accuracy_aggregate_num_clients"] == 3
    assert summary["test_accuracy_aggregate_sem"] == error > 0
    assert summary["test_accuracy_sem"] is None
    log = (run / "server.log").read_text()
    assert f"evaluation: aggregate accuracy {line['aggregate_accuracy']:.4f} ± {error:.4f}, 3 of 3 clients drawn" in log
    page = write_report(run).read_text()
    assert f"as received; mean of 3 clients drawn from 5, with a standard error of {100 * error:.2f} %" in page


@pytest.mark.parametrize(
    ("evaluate", "number", "is_drawn"), [("all", 5, False), (9, 5, False), (5, 5, False), (1, 1, True)]
)
def test_an_error_is_stated_only_of_several_drawn_clients(
    evaluate: int | str, number: int, is_drawn: bool, federate: Federate
) -> None:
    run = federate("fedavg", evaluate=evaluate)
    (line,) = rows(run, "aggregate", 2)
    assert (line["clients"], "drawn_from" in line) == (number, is_drawn)
    assert "aggregate_accuracy_sem" not in line
    assert summary_of(run)["test_accuracy_aggregate_sem"] is None
    assert ("evaluation: " in (run / "server.log").read_text()) == is_drawn


SECURE: Settings = {"secagg.enabled": True, "target": "mlp", "num_clients": 12, "data.train-samples": 20}


def test_drawn_clients_of_secure_sums(federate: Federate) -> None:
    """28 of 30 clients have an error, of metrics that are rounded to 2^-12; of eight, no deviation is known."""
    many = SECURE | {"num_clients": 30, "evaluate": 28}
    secure, plain = (federate("fedavg", 30, **many | {"secagg.enabled": on}) for on in (True, False))
    lines = [rows(run, "aggregate", 2)[0] for run in (secure, plain)]
    assert {line["drawn_from"] for line in lines} == {30}
    assert lines[0]["aggregate_accuracy"] == pytest.approx(lines[1]["aggregate_accuracy"], abs=2**-12)
    # Squares are summed in units of 2^-8, so that the variance is known to about 2^-9.
    expected = lines[1]["aggregate_accuracy_sem"]
    assert lines[0]["aggregate_accuracy_sem"] == pytest.approx(expected, abs=math.sqrt(2**-9 * (1 - 28 / 30) / 27))
    (few,) = rows(federate("fedavg", 4, evaluate=8, **SECURE), "aggregate", 2)
    assert (few["clients"], few["drawn_from"], "aggregate_accuracy_sem" in few) == (8, 12, False)


def test_an_evaluation_on_too_few_nodes_is_refused_before_the_run(federate: Federate, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate = 2 draws clients of \d of 4 nodes.*raise evaluate, or set it to"):
        federate("fedavg", 4, evaluate=2, output=str(tmp_path / "none"), **SECURE)
    assert not (tmp_path / "none" / "manifest.json").exists()


def test_a_client_that_was_never_drawn_has_no_model_to_export(federate: Federate) -> None:
    run = federate("hyperfl", fraction_train=0.2, last_round="sampled", num_rounds=1)
    (trained,) = [row["client"] for row in rows(run, "client", 1)]
    assert model_of_run(run, trained).state == "personalized"
    with pytest.raises(Exception, match="has not been trained up to round 1; resume the run, with more rounds if"):
        model_of_run(run, (trained + 1) % NUM_CLIENTS)
