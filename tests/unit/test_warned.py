"""Warnings where the models are no better than always saying the most common class, and where training got worse."""

import json
import shutil
import statistics
from pathlib import Path

import pytest
from flwr.app import Message, MessageType, RecordDict

from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.grids import round_of
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.protocol.messages import CLIENTS, Failure, Report, Request
from hyperfl_flwr.results.compare import compare
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.failures import nobody_text
from hyperfl_flwr.runs.run_directory import read_metrics
from hyperfl_flwr.runs.summary import summarise
from hyperfl_flwr.runs.summary_texts import fall_text, majority_text
from hyperfl_flwr.server.in_process_grid import InProcessGrid

TEXT = "the personalized accuracy, 90.00 %, is not above 91.00 %, that of always saying each client's most common class"


def test_a_model_that_does_not_beat_the_most_frequent_class_is_warned_of() -> None:
    assert majority_text({"test_accuracy": 0.9, "test_majority_share": 0.91}) == TEXT
    assert majority_text({"test_accuracy": 0.91, "test_majority_share": 0.91}) != ""
    assert majority_text({"test_accuracy": 0.92, "test_majority_share": 0.91}) == ""
    assert majority_text({"test_accuracy": 0.9, "test_majority_share": None}) == ""
    assert majority_text({"test_accuracy": None, "test_majority_share": 0.91}) == ""


def test_the_warning_is_in_the_log_the_report_and_comparisons(federate: Federate) -> None:
    """A model that has not learned is warned of in the log, the report and comparisons; another is not."""
    idle, trained = (federate("fedavg", learning_rate=rate) for rate in (1e-9, 0.1))
    for run, warned in ((idle, True), (trained, False)):
        text = majority_text(json.loads((run / "summary.json").read_text()))
        assert bool(text) == warned
        assert ("most common class" in (run / "server.log").read_text()) == warned
        assert ("No better than the most common class" in write_report(run).read_text()) == warned
    assert any(note.startswith(f"{idle.name}: the personalized accuracy") for note in compare([idle, trained]).notes)


class FailingGrid(InProcessGrid):
    """A grid whose clients fail in the last of three rounds."""

    def __init__(self, num_nodes: int, settings: dict[str, Scalar]) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})

    def answer(self, message: Message) -> Message:
        if message.metadata.message_type == MessageType.TRAIN and round_of(message) == 3:
            failures = [Failure(client=client, reason="gone") for client in Request.of(message.content).versions]
            return Message(RecordDict({CLIENTS: Report(failures=failures).to_record()}), reply_to=message)
        return super().answer(message)


def test_a_last_round_without_a_client_is_named(federate: Federate) -> None:
    """The run is complete, and has no personalized accuracy: its log, its page and comparisons say so."""
    run = federate("fedavg", num_rounds=3, grid=FailingGrid, failure_budget=0.5)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["test_accuracy"] is None
    text = nobody_text(run)
    assert text.startswith("no client finished the last round, so that the run has no personalized accuracy; see the ")
    assert f"WARNING {text}" in (run / "server.log").read_text()
    assert "No client finished the last round" in write_report(run).read_text()
    whole = federate("fedavg", num_rounds=3)
    assert nobody_text(whole) == ""
    notes = compare([run, whole]).notes
    assert [note for note in notes if "no client finished" in note] == [f"{run.name}: {text}."]


def test_a_fall_is_told_with_its_round() -> None:
    """The report says which round was best, from one point on."""
    summary = {
        "best_accuracy": 0.717, "best_round": 6, "best_num_clients": 5, "test_accuracy": 0.678, "keep": "last",
        "test_accuracy_num_clients": 5, "test_accuracy_sem": None,
    }  # fmt: skip
    assert fall_text(summary).startswith(
        "the mean personalized accuracy was highest after round 6, 71.70 %, and has fallen to 67.80 %; "
    )
    assert fall_text({**summary, "test_accuracy": 0.71}) == ""
    assert fall_text({**summary, "best_accuracy": None}) == ""


def test_rounds_of_other_clients_are_no_fall(federate: Federate) -> None:
    """Single clients are drawn, but the last round has all: the mean of one of them says nothing about that of all."""
    run = federate("local", num_rounds=4, fraction_train=0.2)
    lines = [
        {**row, "personalized_accuracy": 0.99} if (row["kind"], row["round"]) == ("train", 2) else row
        for row in read_metrics(run)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarise(run)
    assert (summary["best_round"], summary["best_num_clients"]) == (2, 1)
    assert summary["test_accuracy_num_clients"] > 1
    assert fall_text(summary) == ""
    alone = {**summary, "test_accuracy_num_clients": 1}
    assert "has fallen to" in fall_text(alone)
    assert fall_text({**alone, "test_accuracy_sem": 0.1}) == ""


def test_the_best_round_is_that_of_the_highest_mean(federate: Federate) -> None:
    """A run of three rounds, of which the second is made the best, by more than a point."""
    run = federate("fedavg", num_rounds=3)
    assert summarise(run)["best_accuracy"] == max(
        row["personalized_accuracy"] for row in read_metrics(run) if row["kind"] == "train"
    )
    lines = [
        {**row, "personalized_accuracy": 0.99} if (row["kind"], row["round"]) == ("train", 2) else row
        for row in read_metrics(run)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarise(run)
    assert (summary["best_round"], summary["best_accuracy"]) == (2, 0.99)
    assert "Training has got worse" in write_report(run).read_text()
    assert any("was highest after round 2, 99.00 %" in note for note in compare([run, federate("local")]).notes)


@pytest.mark.parametrize(
    ("reason", "lacking", "best"), [("failed", {2}, {1, 3}), ("away", {2}, {1, 3}), ("failed", {1, 2, 3}, {2})]
)
def test_a_round_without_some_clients_is_best_only_if_all_are(
    reason: str, lacking: set[int], best: set[int], federate: Federate
) -> None:
    """Its mean is over other clients: the second round has the highest mean, and the most of those that lack some."""
    run = federate("fedavg", num_rounds=3)
    lines = []
    for row in read_metrics(run):
        if row["kind"] == "train" and row["round"] in lacking:
            row |= {reason: [0], "clients": 4 if row["round"] == 2 else 3}
        if (row["kind"], row["round"]) == ("train", 2):
            row |= {"personalized_accuracy": 0.99}
        lines.append(json.dumps(row) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    assert summarise(run)["best_round"] in best


def test_what_an_accuracy_is_worth_is_of_the_clients_that_it_is_of(federate: Federate) -> None:
    """With keep = best these are the kept models', and not those of the last round."""
    run = federate("fedavg", num_rounds=3)
    lines = [
        {key: value for key, value in row.items() if key != "personalized_auc"} | {"majority_share": 0.25}
        if (row["kind"], row["round"], row.get("client")) == ("client", 3, 0)
        else row
        for row in read_metrics(run)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    clients = [row for row in lines if (row["kind"], row["round"]) == ("client", 3)]
    summary = summarise(run)
    assert summary["test_majority_share"] == statistics.fmean(row["majority_share"] for row in clients)
    assert summary["test_auc_num_clients"] == len(clients) - 1
    assert "test_auc_aggregate_num_clients" not in summary


def test_runs_with_the_same_name_are_told_apart(federate: Federate, tmp_path: Path) -> None:
    """As in a sweep, where each run's folder is called seed-N."""
    for method in ("local", "fedavg"):
        shutil.copytree(federate(method, learning_rate=1e-9), tmp_path / method / "digits" / "seed-0")
    notes = compare([tmp_path / method / "digits" / "seed-0" for method in ("local", "fedavg")]).notes
    for method in ("local", "fedavg"):
        assert any(note.startswith(f"{method}/digits/seed-0: the personalized accuracy") for note in notes)
