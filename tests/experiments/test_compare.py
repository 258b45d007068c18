"""Comparisons of runs: groups, paired clients, and the answer to whether federation helped."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from federations import Call, repeated
from html_pages import Page
from scipy.stats import ttest_rel

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.metrics.intervals import of_crossed_means
from hyperfl_flwr.results.compare import Comparison, compare
from hyperfl_flwr.results.comparison_page import row_headers, rows_of, score_headers, score_rows, write_comparison
from hyperfl_flwr.results.differences import Difference


def accuracies(*runs: Path) -> np.ndarray:
    """Return the personalized accuracies of the runs' clients, [runs, N]."""
    return np.array([json.loads((run / "summary.json").read_text())["test_accuracy_per_client"] for run in runs])


def test_groups_differ_in_settings_and_not_in_seeds(federate: Federate) -> None:
    """The clients are paired with each seed; with one seed the interval is that of a paired t-test over the clients."""
    alone = [federate("local", seed=seed) for seed in (0, 1)]
    shared = [federate("fedavg", seed=seed) for seed in (0, 1)]
    found = compare([alone[0], shared[0], shared[1], alone[1]])
    assert [group.label for group in found.groups] == ["local", "fedavg"]
    assert [[run.path for run in group.runs] for group in found.groups] == [alone, shared]
    assert found.references == ["local"]
    ours, reference = accuracies(*shared), accuracies(*alone)
    spread = found.groups[1].numbers["test_accuracy"]
    assert spread.mean == pytest.approx(ours.mean())
    assert spread.deviation == pytest.approx(ours.mean(1).std(ddof=1))
    difference = found.groups[1].difference
    assert difference is not None
    low, high = map(float, of_crossed_means(ours - reference))
    assert difference.mean == pytest.approx(ours.mean() - reference.mean())
    assert (difference.low, difference.high) == (pytest.approx(low), pytest.approx(high))
    assert (difference.clients, difference.seeds) == (5, 2)
    assert difference.better == (ours.mean(0) > reference.mean(0)).sum()
    assert difference.worse == (ours.mean(0) < reference.mean(0)).sum()
    assert list(found.differing) == ["method", "learning-rate"]  # each method has its own rate
    assert "seed" not in found.differing
    assert not any("one seed" in note for note in found.notes)
    # Without common seeds, each client's means over the seeds are paired.
    for runs, ours, reference in (
        ([alone[0], shared[0]], accuracies(shared[0]), accuracies(alone[0])),
        ([alone[0], *shared], accuracies(*shared), accuracies(alone[0])),
    ):
        found = compare(runs)
        difference = found.groups[1].difference
        assert difference is not None
        test = ttest_rel(ours.mean(0), reference.mean(0)).confidence_interval(0.95)
        assert (difference.low, difference.high) == (pytest.approx(test.low), pytest.approx(test.high))
        assert (difference.clients, difference.seeds) == (5, 1)
        assert any("one seed" in note for note in found.notes)


def test_a_label_has_the_settings_that_distinguish_groups_of_a_method(federate: Federate) -> None:
    """The line to beat is local training at its best rate."""
    runs = [federate("local", learning_rate=rate) for rate in (1e-6, 0.1)]
    found = compare([federate("fedavg", learning_rate=0.1), *runs])
    assert [group.label for group in found.groups] == [
        "fedavg",
        "local, learning-rate=1e-06",
        "local, learning-rate=0.1",
    ]
    assert found.references == ["local, learning-rate=0.1"]
    assert found.answers[0].startswith("fedavg: ")
    assert found.groups[1].difference is not None
    assert found.groups[1].difference.mean < 0


def test_num_nodes_make_groups_where_they_change_results(federate: Federate) -> None:
    """With a robust rule or malicious nodes, runs of other numbers of nodes are no seeds of each other."""
    plain = [federate("fedavg", num_nodes=number) for number in (1, 3)]
    assert [group.label for group in compare(plain).groups] == ["fedavg"]
    for changes in ({"robust.reduction": "median"}, {"adversary.attack": "sign-flip", "adversary.nodes": "1"}):
        robust = [federate("fedavg", num_nodes=number, **changes) for number in (3, 5)]  # type: ignore[arg-type]
        found = compare(robust)
        assert [group.label for group in found.groups] == ["fedavg, num-nodes=3", "fedavg, num-nodes=5"]
        assert found.differing["num-nodes"] == [3, 5]
        # It is no difference from runs of which it changes no result, and does not divide these.
        found = compare([*plain, robust[0]])
        assert [len(group.runs) for group in found.groups] == [2, 1]
        assert "num-nodes" not in found.differing
        labels = [group.label.split(", ")[1] for group in compare([*plain, *robust]).groups]
        assert labels == ["num-nodes=any number", "num-nodes=3", "num-nodes=5"]


def test_copies_of_a_run_are_refused_and_repeated_seeds_named(federate: Federate, tmp_path: Path) -> None:
    """A copy would be another run without deviation; runs with equal seeds can differ (noise is not repeatable)."""
    run, other = federate("fedavg"), federate("local")
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    with pytest.raises(RunDirectoryError, match=rf"{copy} is a copy of {run}, .* leave one of them out"):
        compare([run, other, copy])
    found = compare([run, other, repeated(run, tmp_path / "repeated")])
    assert [len(group.runs) for group in found.groups] == [2, 1]
    (note,) = (note for note in found.notes if "same seeds" in note)
    assert "fedavg" in note
    assert "local" not in note


def test_means_over_different_clients_are_named(federate: Federate, tmp_path: Path) -> None:
    """A client that has failed in the last round has no line in it, and is in no mean.

    Also if each run misses as many clients: they need not be the same.
    """
    runs = [Path(shutil.copytree(federate(name), tmp_path / name)) for name in ("local", "fedavg")]
    assert not any("not over all clients" in note for note in compare(runs).notes)
    clients = json.loads((runs[0] / "summary.json").read_text())["num_clients"]
    both = f"{clients - 1} of {clients}"
    for missing, (run, counts) in enumerate(
        [(runs[1], f"local {clients} of {clients}, fedavg {both}"), (runs[0], f"local {both}, fedavg {both}")]
    ):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = max(record["round"] for record in records)
        kept = [row for row in records if (row["kind"], row["round"], row.get("client")) != ("client", last, missing)]
        assert len(kept) == len(records) - 1
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
        (note,) = (note for note in compare(runs).notes if "not over all clients" in note)
        assert f": {counts}. " in note
    difference = compare(runs).groups[1].difference
    assert difference is not None
    assert difference.clients == clients - 2


def test_secure_sums_hide_the_clients(federate: Federate) -> None:
    found = compare([federate("local"), federate("fedavg", num_nodes=3, **{"secagg.enabled": True})])
    assert found.groups[1].difference is None
    assert found.groups[1].numbers["test_accuracy"].mean is not None
    assert found.groups[1].numbers["test_accuracy_worst"].mean is None
    assert any("secure sums" in note for note in found.notes)


def answer(difference: Difference | None, found: Comparison) -> str:
    """Return the answer of a comparison, of which a group is given another difference."""
    other = dataclasses.replace(found.groups[1], difference=difference)
    return dataclasses.replace(found, groups=[found.groups[0], other]).answers[0]


def test_the_answer_depends_on_the_interval(federate: Federate) -> None:
    """It is yes or no only if the interval is on one side of zero; a single client allows none."""
    found = compare([federate("local"), federate("fedavg")])
    reference = {(0, (0, client)): 0.5 for client in range(4)}

    def difference(*accuracies: float) -> Difference | None:
        return Difference.of({(0, (0, client)): value for client, value in enumerate(accuracies)}, reference)

    assert answer(difference(0.6, 0.62, 0.6, 0.58), found) == (
        "fedavg: yes, 10.0 points above training alone "
        "(95 % interval +7.4 to +12.6; of 4 clients, 4 better and 0 worse)."
    )
    assert answer(difference(0.4, 0.42, 0.4, 0.38), found).startswith("fedavg: no, 10.0 points below training alone")
    assert answer(difference(0.4, 0.6, 0.5, 0.5), found) == (
        "fedavg: not measurably, 0.0 points above training alone "
        "(95 % interval -13.0 to +13.0; of 4 clients, 1 better and 1 worse)."
    )
    assert "a single client, which allows no conclusion" in answer(difference(0.6), found)
    assert "cannot be paired" in answer(difference(), found)
    assert compare([federate("fedavg"), federate("fedrep")]).answers == []


def test_the_command_and_the_page(federate: Federate, tmp_path: Path, call: Call) -> None:
    """Terminal, JSON and page have the same numbers; the page begins with the answer."""
    runs = [federate("local"), federate("hyperfl"), federate("fedavg")]
    file = tmp_path / "comparison.html"
    code, text, _ = call("compare", *runs, "--output", file)
    found = compare(runs)
    assert code == 0
    assert text.startswith("\n  ".join(["Did federation help?", *found.answers]))
    page = Page(file.read_text())
    for row in rows_of(found):
        assert len(row) == len(row_headers(found.task))
        assert list(row) in page.table_rows
        assert all(cell in text for cell in row)
    for group, row in zip(found.groups, score_rows(found), strict=True):
        assert len(row) == len(score_headers(found.task))
        assert list(row) in page.table_rows
        assert row[1].startswith(f"{100 * (group.numbers['test_balanced_accuracy'].mean or 0):.1f}")
    assert page.headings[:3] == ["local and hyperfl and fedavg", "Did federation help?", "Result"]
    assert all(f"<li>{answer}</li>" in file.read_text() for answer in found.answers)
    assert len(page.figures) == 2
    code, _, problem = call("compare", *runs, "--output", tmp_path)
    assert (code, problem) == (2, f"error: {tmp_path} cannot be written: Is a directory; choose another output\n")
    assert "<script" not in file.read_text()
    code, text, _ = call("compare", *runs, "--json")
    assert json.loads(text) == json.loads(json.dumps(found.entry()))
    assert write_comparison(found, tmp_path / "again.html").read_bytes() == file.read_bytes()


def test_what_cannot_be_compared_is_refused(federate: Federate, tmp_path: Path) -> None:
    run = federate("local")
    for paths, text in (
        ([run], "the folders of at least two different runs"),
        ([run, run], "the folders of at least two different runs"),
        ([run, tmp_path / "nothing"], "nothing does not exist"),
    ):
        with pytest.raises(RunDirectoryError, match=text):
            compare(paths)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(RunDirectoryError, match="wait for the first round"):
        compare([run, federate("fedavg")])
