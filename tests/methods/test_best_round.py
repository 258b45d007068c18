"""Validation data end training early (`early-stopping`) and choose the models that are kept (`keep = best`)."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import Call, small_settings

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import check_run
from hyperfl_flwr.app.node import NodeApp
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import outcome
from hyperfl_flwr.contract.grids import KilledError, KilledGrid
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.tasks import CLASSIFICATION
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.node.saved_models import KeptModel
from hyperfl_flwr.results.compare import compare
from hyperfl_flwr.results.export import Exported, model_of_run
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.checkpoint import Checkpoints, Progress
from hyperfl_flwr.runs.run_directory import read_metrics, settings_of
from hyperfl_flwr.runs.summary import summarise
from hyperfl_flwr.runs.validation import is_over, note_means
from hyperfl_flwr.server.in_process_grid import InProcessGrid

HELD_BACK = {"data.validation-fraction": 0.25}
BEST: dict[str, Any] = {**HELD_BACK, "keep": "best", "num_rounds": 5}
STILL: dict[str, Any] = {**HELD_BACK, "num_rounds": 9, "learning_rate": 1e-9}
"""Training that changes no prediction, so that the accuracy of round 0 or 1 is never exceeded."""


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["kind"] == kind]


def best_rows(run: Path) -> dict[int, dict[str, Any]]:
    """Return each client's line about the last round with its highest validation accuracy."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows(run, "client"):
        best = found.get(row["client"])
        if best is None or row["personalized_validation_accuracy"] >= best["personalized_validation_accuracy"]:
            found[row["client"]] = row
    return found


def summary_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def accuracies(run: Path, client: int, found: Exported) -> tuple[float, float]:
    """Return the accuracies of an exported model on the client's test data and on its validation data."""
    data = load_federated_data(RunConfig.from_flat(settings_of(run)).data_settings()).client(client)
    target = found.recipe.new_target()
    target.load_state_dict(dict(found.tensors), assign=True)
    target.eval()
    assert data.validation is not None
    return evaluate(target, data.test_images, data.test_labels).accuracy, evaluate(target, *data.validation).accuracy


def test_data_have_three_parts() -> None:
    """Test data stay; validation samples are those that replace the test data otherwise."""
    plain, replaced, three = (
        load_federated_data(RunConfig.from_flat(small_settings(**changes)).data_settings())
        for changes in ({}, HELD_BACK, {**HELD_BACK, "keep": "best"})
    )
    assert plain.validation_indices(0) is None
    assert plain.client(0).validation is None
    for client in range(NUM_CLIENTS):
        np.testing.assert_array_equal(three.test_indices(client), plain.test_indices(client))
        np.testing.assert_array_equal(three.train_indices(client), replaced.train_indices(client))
        np.testing.assert_array_equal(three.validation_indices(client), replaced.test_indices(client))
        validation = three.client(client).validation
        assert validation is not None
        assert torch.equal(validation[0], replaced.client(client).test_images)
        assert torch.equal(validation[1], replaced.client(client).test_labels)


@pytest.mark.parametrize("method", ["local", "fedavg", "fedrep", "hyperfl", "pfedhn", "ditto"])
def test_each_client_keeps_its_best_model(method: str, federate: Federate) -> None:
    """The summary's accuracies are those of each client's best round; exported models have them, on both kinds of data.

    One client at least has its best model before the last round, otherwise nothing is shown.
    """
    run = federate(method, **BEST)
    best, summary = best_rows(run), summary_of(run)
    assert min(row["round"] for row in best.values()) < 5
    kept = [best[client]["personalized_accuracy"] for client in range(NUM_CLIENTS)]
    assert summary["test_accuracy_per_client"] == pytest.approx(kept, rel=1e-12)
    assert summary["test_accuracy"] == pytest.approx(np.mean(kept), rel=1e-12)
    validated = [best[client]["personalized_validation_accuracy"] for client in range(NUM_CLIENTS)]
    assert summary["validation_accuracy"] == pytest.approx(np.mean(validated), rel=1e-12)
    scores = [best[client]["personalized_macro_f1"] for client in range(NUM_CLIENTS)]
    assert summary["test_macro_f1"] == pytest.approx(np.mean(scores), rel=1e-12)
    for client, row in best.items():
        found = model_of_run(run, client)
        assert (found.state, found.round, found.score) == (
            "personalized",
            row["round"],
            row["personalized_accuracy"],
        )
        expected = row["personalized_accuracy"], row["personalized_validation_accuracy"]
        assert accuracies(run, client, found) == pytest.approx(expected, rel=1e-12)


def test_the_best_global_state_is_kept(federate: Federate) -> None:
    """FedAvg with a rate that makes later rounds worse: its best state is exported, and its accuracy reported."""
    run = federate("fedavg", **BEST, learning_rate=0.6)
    measured = rows(run, "aggregate")
    best = max(measured, key=lambda row: (row["aggregate_validation_accuracy"], row["round"]))
    assert 0 < best["round"] < 3  # its checkpoint is kept beside the last two
    summary = summary_of(run)
    assert summary["best_validation_round_aggregate"] == best["round"]
    assert summary["test_accuracy_aggregate"] == best["aggregate_accuracy"]
    assert summary["validation_accuracy_aggregate"] == best["aggregate_validation_accuracy"]
    assert Checkpoints(run / "checkpoints").rounds() == [best["round"], 4, 5]
    found = model_of_run(run, None)
    assert found.round == best["round"]
    tested, validated = np.mean([accuracies(run, client, found) for client in range(NUM_CLIENTS)], axis=0)
    assert tested == pytest.approx(best["aggregate_accuracy"], rel=1e-12)
    assert validated == pytest.approx(best["aggregate_validation_accuracy"], rel=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "hyperfl"])
def test_a_killed_run_has_the_best_models_of_a_straight_one(method: str, federate: Federate) -> None:
    straight = federate(method, **BEST, fraction_train=0.5)
    killed = straight.parent / "run-997"
    with pytest.raises(KilledError):
        federate(method, grid=partial(KilledGrid, in_round=4), **BEST, fraction_train=0.5, output=str(killed))
    resumed = federate(method, **BEST, fraction_train=0.5, output=str(killed), resume=str(killed))
    assert outcome(resumed) == outcome(straight)


def test_with_secure_sums_the_means_are_known(federate: Federate) -> None:
    """Masked sums have the means that the clients' numbers have without masks."""
    clear = summary_of(federate("fedavg", **BEST))
    masked = federate("fedavg", num_nodes=5, **BEST, **{"secagg.enabled": True})
    found = summary_of(masked)
    for name in ("test_accuracy", "test_accuracy_aggregate", "test_balanced_accuracy", "validation_accuracy"):
        assert found[name] == pytest.approx(clear[name], abs=1e-3), name
    assert found["best_validation_round"] == clear["best_validation_round"]
    assert found["test_accuracy_per_client"] is None
    assert not any(row["kind"].startswith("client") for row in read_metrics(masked))


def test_training_ends_when_nothing_improves(federate: Federate) -> None:
    run = federate("fedavg", **STILL, early_stopping=2)
    best = max(row["personalized_validation_accuracy"] for row in rows(run, "train"))
    assert summary_of(run)["rounds"] == 3
    assert rows(run, "train")[0]["personalized_validation_accuracy"] == best
    log = (run / "server.log").read_text()
    assert "training ends after round 3 of 9: the mean accuracy on validation data has not risen since round 1" in log
    assert [row["clients"] for row in rows(run, "aggregate")] == [NUM_CLIENTS] * 4
    assert Checkpoints(run / "checkpoints").rounds()[-1] == 3
    assert model_of_run(run, None).notes == ()
    assert "3 of 9" in write_report(run).read_text()


def test_an_ended_run_goes_on_with_more_patience(federate: Federate) -> None:
    """It then equals a run that had it from the start; with the same patience it is refused."""
    plan = {**STILL, "num_rounds": 5}
    straight = federate("hyperfl", **plan, early_stopping=9)
    ended = federate("hyperfl", **plan, early_stopping=2)
    assert (summary_of(straight)["rounds"], summary_of(ended)["rounds"]) == (
        5,
        4,
    )  # the received models rose in round 1
    for patience, message in ((2, "raise early-stopping to continue it"), (0, "it may change, but not to or from 0")):
        with pytest.raises(RunDirectoryError, match=message):
            federate("hyperfl", **plan, early_stopping=patience, resume=str(ended))
    assert outcome(federate("hyperfl", **plan, early_stopping=9, resume=str(ended))) == outcome(straight)


def test_with_client_sampling_the_last_global_state_is_kept(federate: Federate) -> None:
    """Means over different clients cannot be compared, so the summary and the export are of the last state."""
    for changes in ({"fraction_train": 0.4}, {"evaluate": 2}):
        run = federate("fedavg", **BEST, learning_rate=0.6, **changes)
        summary, last = summary_of(run), rows(run, "aggregate")[-1]
        assert summary["test_accuracy_aggregate"] == last["aggregate_accuracy"]
        assert model_of_run(run, None).round == last["round"] == 5


def test_standard_errors_stand_beside_their_means(federate: Federate) -> None:
    """After the last round, two drawn clients evaluate the global state and their best models."""
    run = federate("fedavg", **BEST, evaluate=2)
    for kind in ("aggregate", "kept"):
        (record,) = [row for row in rows(run, kind) if "drawn_from" in row]
        errors = {name.removesuffix("_sem") for name in record if name.endswith("_sem")}
        assert f"{kind}_accuracy" in errors
        assert {name for name in record if name.endswith("accuracy")} == errors


def test_unknown_validation_accuracies_are_reported(federate: Federate) -> None:
    """Nodes with max-epsilon send no metrics, so that the server has nothing to choose a round by."""

    def limited(num_nodes: int, settings: dict[str, Any]) -> InProcessGrid:
        return InProcessGrid(app, num_nodes, settings, {"simulated": True, "max-epsilon": 4.0})

    run = federate("fedavg", grid=limited, **BEST, **{"dp.epsilon": 4.0}, early_stopping=1)
    assert "the accuracy on validation data is not known" in (run / "server.log").read_text()
    assert summary_of(run)["rounds"] == 5


def test_the_initial_state_may_be_the_best(federate: Federate) -> None:
    """A rate that ruins the model; the export is the initial model, with the accuracy that the summary has."""
    run = federate("fedavg", **BEST, seed=11, learning_rate=2.0)
    found = model_of_run(run, None)
    assert found.round == summary_of(run)["best_validation_round_aggregate"] == 0
    tested = np.mean([accuracies(run, client, found)[0] for client in range(NUM_CLIENTS)])
    assert tested == pytest.approx(summary_of(run)["test_accuracy_aggregate"], rel=1e-12)


def test_an_early_end_with_client_sampling_states_its_error(federate: Federate) -> None:
    """The last round trained two of five clients: their mean has a standard error."""
    run = federate("fedavg", **STILL, early_stopping=2, fraction_train=0.4)
    summary = summary_of(run)
    assert summary["test_accuracy_num_clients"] == 2
    known = [value for value in summary["test_accuracy_per_client"] if value is not None]
    expected = np.std(known, ddof=1) / np.sqrt(2) * np.sqrt(1 - 2 / 5)
    assert summary["test_accuracy_sem"] == pytest.approx(expected, abs=1e-12)


def test_a_run_that_has_not_ended_is_of_its_last_round(federate: Federate, make_settings: Callable[..., Any]) -> None:
    run = Path(str(make_settings("local")["output"]))
    with pytest.raises(KilledError):
        federate("local", grid=partial(KilledGrid, in_round=4), **BEST, output=str(run))
    page = write_report(run).read_text()
    assert summarise(run)["keep"] == "last"
    assert "best round by validation" not in page
    assert model_of_run(run, 0).round <= 3


def test_rounds_without_a_known_accuracy_do_not_end_a_run() -> None:
    progress = Progress(round=7)
    note_means(progress, CLASSIFICATION, {"personalized-accuracy": 0.5}, 7)
    note_means(progress, CLASSIFICATION, {"personalized-validation-mse": 0.1}, 7)  # of another task
    assert not is_over(progress, 1)
    assert progress.best_round == {}
    note_means(
        progress, CLASSIFICATION, {"personalized-validation-accuracy": 0.5, "aggregate-validation-accuracy": 0.4}, 7
    )
    assert progress.best_round == {"personalized": 7, "aggregate": 6}
    assert not is_over(progress, 2)
    note_means(
        progress, CLASSIFICATION, {"personalized-validation-accuracy": 0.4, "aggregate-validation-accuracy": 0.4}, 8
    )
    note_means(
        progress, CLASSIFICATION, {"personalized-validation-accuracy": 0.5, "aggregate-validation-accuracy": 0.41}, 9
    )
    assert progress.best_round == {"personalized": 9, "aggregate": 8}  # the later one of equal accuracies
    assert not is_over(progress, 2)
    for server_round in (10, 11):
        note_means(
            progress,
            CLASSIFICATION,
            {"personalized-validation-accuracy": 0.5, "aggregate-validation-accuracy": 0.41},
            server_round,
        )
    assert progress.best_round == {"personalized": 11, "aggregate": 10}
    assert is_over(progress, 2)  # an equal accuracy is no rise
    assert not is_over(progress, 0)
    progress.failed_rounds = 1  # no client has finished the last round
    assert not is_over(progress, 2)


def test_a_node_keeps_the_best_model_for_its_owner(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that `hyperfl export STATE_DIR` reads has the best model, its round and its accuracy."""
    before = NodeApp.__init__

    def keeping(node: NodeApp, *arguments: Any) -> None:
        before(node, *arguments)
        node.keeps_model = True

    monkeypatch.setattr(NodeApp, "__init__", keeping)
    run = federate("fedrep", **BEST)
    for client, row in best_rows(run).items():
        kept = KeptModel.read(run / "clients" / f"client-{client:05d}")
        assert (kept.round, kept.score) == (row["round"], row["personalized_accuracy"])
        assert kept.score == pytest.approx(accuracies(run, client, model_of_run(run, client))[0], rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": "best"}, "data.validation-fraction must be above 0 with keep = best"),
        ({"early-stopping": 3}, "data.validation-fraction must be above 0 with early-stopping"),
        ({"keep": "best", **HELD_BACK, "data.global-test": True}, "data.global-test must be false with keep = best"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat(small_settings(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "knn-per", "keep": "best"}, "keep must be last with knn-per"),
        ({"method": "it-pfl", "early-stopping": 2}, "early-stopping must be 0 and keep must be last with it-pfl"),
        ({"method": "it-pfl", "keep": "best"}, "early-stopping must be 0 and keep must be last with it-pfl"),
    ],
)
def test_methods_that_cannot_choose_rounds_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(RunConfig.from_flat(small_settings(**HELD_BACK, **changes)), (1, 8, 8), 10)


def test_runs_with_other_patience_are_not_merged(federate: Federate) -> None:
    """Validation data replace the test data with `early-stopping = 0`, so that such runs are no seeds of one group."""
    runs = [federate("fedavg", **HELD_BACK, early_stopping=patience) for patience in (0, 1, 9)]
    assert [len(group.runs) for group in compare(runs).groups] == [1, 1, 1]
    assert summary_of(runs[0])["test_examples_per_client"] == [10] * NUM_CLIENTS
    assert summary_of(runs[1])["test_examples_per_client"] == [20] * NUM_CLIENTS


def test_the_command_shows_why_training_has_ended(call: Call) -> None:
    settings = {"learning-rate": 1e-9, "early-stopping": 1, "data.train-samples": 40, "local-epochs": 1, **HELD_BACK}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    code, _, err = call("run", "--method", "fedavg", "--num-clients", "3", "--num-rounds", "9", *words)
    assert code == 0, err
    assert "training ends after round 2 of 9" in err
