"""The page about a run: complete, self-contained and consistent with the run."""

import json

import pytest
from html_pages import Page

from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.run_directory import RunDirectory, read_metrics


@pytest.mark.parametrize("method", ["hyperfl", "pfedhn", "local"])
def test_the_page_says_what_the_run_recorded(federate, method):
    """Numbers are the summary's; it has five figures, the result comes first, and changed settings before others."""
    run = federate(method, learning_rate=0.125)
    summary = json.loads((run / "summary.json").read_text())
    file = write_report(run)
    assert file == run / "report.html"
    text = file.read_text()
    page = Page(text)
    assert page.headings[:3] == [f"{method} on digits", "Result", "Accuracy and loss"]
    assert len(page.figures) == 5
    assert page.sources == []
    assert f'<dd class="value">{100 * summary["test_accuracy"]:.2f} %</dd>' in text
    assert page.rows["personalized accuracy of the worst client"] == f"{100 * summary['test_accuracy_worst']:.2f} %"
    sent = f"{summary['bytes_up_per_client_round'] / 1e6:.3f} MB"
    assert page.rows["a client's payload to the server"] == sent
    assert f'<dd class="value">{sent}</dd>' in text
    assert page.rows["learning-rate"] == ["0.125", "auto"]
    assert {"learning-rate", "num-clients", "output"} <= set(page.changed)
    assert "momentum" not in page.changed
    assert page.rows["momentum"] == "0.5"
    assert list(page.rows).index("learning-rate") < list(page.rows).index("momentum")
    assert "The run is complete: 2 rounds, 5 clients on 2 nodes." in text
    assert "No client failed." in text
    groups = {
        "hyperfl": "never leave the node: embedding, classifier",
        "pfedhn": "model (per client)",
        "local": "none.",
    }
    assert groups[method] in text.replace("\n", " ")


def test_the_page_states_the_privacy(federate):
    """An epsilon with all that belongs to it; equal weights; and without noise, that there is none."""
    noise = {"privacy.unit": "client", "privacy.clip-norm": 1.0, "privacy.noise-multiplier": 4.0}
    run = federate("fedavg", **noise, **{"privacy.noise": "server"})
    entry = json.loads((run / "summary.json").read_text())["privacy"]
    text = write_report(run).read_text()
    assert f"epsilon {entry['epsilon']:.2f} at delta 1e-05 of clients over 2 releases" in text
    assert "model (mean)" in text.replace("\n", " ")
    plain = write_report(federate("fedavg")).read_text()
    assert "no noise is added: no differential privacy" in plain
    assert "model (mean by examples)" in plain.replace("\n", " ")


def test_the_page_says_who_was_away(federate):
    """In how many rounds, the most frequent first; in a run where nobody was, nothing."""
    run = federate("fedavg", num_rounds=3)
    assert "Clients away" not in write_report(run).read_text()
    away = {1: [3], 2: [1, 3], 3: list(range(20, 32))}
    lines = [
        record | {"away": away[record["round"]]} if record["kind"] == "train" else record
        for record in read_metrics(run)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report(run).read_text()
    assert "<dt>Clients away</dt><dd>client 3 in 2, client 1 in 1, client 20 in 1, " in text
    assert "client 27 in 1 and 4 others of 3 rounds</dd>" in text
    assert "No client failed; some were away." in text


def test_equal_runs_give_equal_pages(federate, tmp_path):
    run = federate("fedavg")
    assert write_report(run, tmp_path / "a.html").read_bytes() == write_report(run, tmp_path / "b.html").read_bytes()


def test_failures_come_with_their_reasons(federate):
    """Failures are listed as the server wrote them, two in training and one in evaluation; at most 100 are listed."""
    run = federate("fedavg")
    directory = RunDirectory(run)
    for client in (3, 4):
        directory.write_failures("round-000001", [Failure(client=client, reason=f"full disk {client}", details="x")])
    directory.write_failures("round-000002-evaluation", [Failure(client=0, reason="gone", details="")])
    text = write_report(run).read_text()
    failed = [["1", "training", "4", "full disk 4"], ["2", "evaluation", "0", "gone"]]
    assert [cells for cells in Page(text).table_rows if cells in failed] == failed
    assert "<dt>Clients that failed</dt><dd>3 times</dd>" in text
    failures = [Failure(client=client, reason="many", details="") for client in range(99)]
    directory.write_failures("round-000002", failures)
    directory.close()
    text = write_report(run).read_text()
    assert text.count("<td>many</td>") == 98
    assert "2 more are in the folder" in text


def test_a_deployment_has_no_label_counts_and_nodes_that_were_not_asked(federate):
    run = federate("fedavg")
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["label_counts"]
    excluded = {"node": 1, "round": 1, "until": None, "times": 1, "reason": "no report"}
    manifest |= {"status": "failed", "problem": "too many failed", "devices": ["cpu", None], "excluded": [excluded]}
    (run / "manifest.json").write_text(json.dumps(manifest | {"refused": [{"node": None, "reason": "old Flower"}]}))
    text = write_report(run).read_text()
    page = Page(text)
    assert len(page.figures) == 4
    assert "do not report how many samples" in text
    assert "The run has failed: 2 rounds, 5 clients on 2 nodes." in text
    assert "too many failed" in text
    assert page.rows["–"] == ["refused", "old Flower"]
    assert ["1", "excluded after round 1 until the end", "no report"] in page.table_rows
    assert ["1", "2", "never connected", ""] in page.table_rows


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RunDirectoryError):
        write_report(tmp_path)


def test_the_global_test_set_is_told_where_it_was_asked_for(federate):
    summary = json.loads(((run := federate("fedavg", **{"data.global-test": True})) / "summary.json").read_text())
    rows = Page(write_report(run).read_text()).rows
    assert (
        rows["personalized accuracy on all test data of the data set"]
        == f"{100 * summary['global_test_accuracy']:.2f} %"
    )
    plain = Page(write_report(federate("fedavg")).read_text()).rows
    assert "personalized accuracy on all test data of the data set" not in plain
