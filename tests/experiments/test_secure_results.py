"""Results, pages, tables and plans of runs with secure sums, which have no number of a single client."""

import json
import statistics
from pathlib import Path

import pytest
from federations import Call, small_settings
from html_pages import Page

from experiments.collect import collect
from experiments.runner import run_cells
from experiments.study import load_study
from experiments.study_folder import StudyManifest, open_study_folder
from experiments.tables import markdown, with_metric
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.estimate import estimate
from hyperfl_flwr.launch.planning import plan, plan_deployed
from hyperfl_flwr.launch.plans import IN_PROCESS
from hyperfl_flwr.launch.tensorboard import write_event_files
from hyperfl_flwr.launch.warnings import leak_warnings
from hyperfl_flwr.results.export import model_of_run
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.run_directory import RunDirectory, read_manifest, read_metrics
from hyperfl_flwr.runs.summary import NOT_KNOWN, summarise

SECURE: Settings = {"secagg.enabled": True, "data.train-samples": 20}
MANY: Settings = SECURE | {"num_clients": 24, "data.test-samples": 10}
"""Settings of a run that has standard deviations on 24 nodes; with few test samples, so that they are not small."""


def trainings(run: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(run) if row["kind"] == "train"]


def test_a_summary_has_the_opened_means_and_no_client(federate: Federate) -> None:
    """Ten clients on five nodes have no standard deviation; 24 nodes have one, close to that of the plain run."""
    run = federate("fedrep", 5, **SECURE, num_clients=10)
    summary, last = json.loads((run / "summary.json").read_text()), trainings(run)[-1]
    assert (summary["test_accuracy"], summary["test_accuracy_num_clients"]) == (last["personalized_accuracy"], 10)
    for name in ("worst", "worst_decile", "per_client", "std"):
        assert summary[f"test_accuracy_{name}"] is None
    assert summary["unmask_seconds_per_round"] == statistics.median(row["unmask_seconds"] for row in trainings(run))
    assert summary["saturated"] == sum(row["saturated"] for row in trainings(run))
    many, plain = (summarise(federate("fedrep", 24, **{**MANY, "secagg.enabled": value})) for value in (True, False))
    assert many["test_accuracy_std"] == pytest.approx(plain["test_accuracy_std"], abs=0.03)
    assert many["test_accuracy"] == pytest.approx(plain["test_accuracy"], abs=0.01)
    assert "saturated" not in plain


def test_a_round_that_was_not_opened_has_no_numbers(federate: Federate) -> None:
    run = federate("fedrep", 3, **SECURE)
    failed = {name: 0 for name in trainings(run)[-1] if name.startswith(("bytes", "peak"))}
    directory = RunDirectory(run)
    directory.append([{"kind": "train", "round": 3, "clients": 0, "failed": [0], "seconds": 1.0, **failed}])
    directory.close()
    summary = summarise(run)
    assert (summary["rounds"], summary["test_accuracy"], summary["test_accuracy_num_clients"]) == (3, None, 0)
    assert summary["unmask_seconds_per_round"] > 0
    assert "none" in write_report(run).read_text()


def test_the_page_says_what_is_known(federate: Federate) -> None:
    """It names threshold, nodes and seconds of UNMASK, has the deviation over 24 nodes, and draws none of them."""
    run = federate("fedrep", 24, plots=True, **MANY)
    text = write_report(run).read_text()
    page = Page(text)
    assert "With 24 nodes present, 19 had to answer to open a sum; at most 7 of them" in text
    assert "a simulation, which hides nothing" in text
    seconds = json.loads((run / "summary.json").read_text())["unmask_seconds_per_round"]
    assert f"UNMASK took {seconds:.3f} s" in text
    assert page.rows["personalized accuracy of the worst client"] == NOT_KNOWN
    assert page.rows["standard deviation of personalized accuracy over the clients"].endswith(" %")
    assert page.rows["secagg.threshold"] == "auto (19)"
    assert [name for name in page.figures if "deviation" in name]
    assert not [name for name in page.figures if "each client after" in name or "spread" in name]
    few = federate("fedrep", 3, output=str(run.parent / "few"), **SECURE)
    assert Page(write_report(few).read_text()).rows["standard deviation of personalized accuracy over the clients"] == (
        NOT_KNOWN
    )
    manifest = read_manifest(few)
    del manifest["label_counts"]
    (few / "manifest.json").write_text(json.dumps(manifest))
    assert "hides nothing" not in write_report(few).read_text()


def test_an_exported_model_has_no_accuracy(federate: Federate) -> None:
    run = federate("fedrep", 3, **SECURE)
    found = model_of_run(run, 1)
    assert found.score is None
    assert found.about()["accuracy"] is None
    assert "accuracy" not in str(found)


def test_event_files_have_means_and_no_clients(federate: Federate) -> None:
    pytest.importorskip("tensorboard")
    run = federate("fedrep", 3, **SECURE)
    assert list(write_event_files(run).glob("events.*"))
    with pytest.raises(RunDirectoryError, match="sums were secure; leave out --clients"):
        write_event_files(run, per_client=True)


@pytest.mark.slow
def test_a_table_says_what_is_not_known(tmp_path: Path) -> None:
    """A study for two nodes runs on the three that a sum needs; the worst client's accuracy is not known."""
    manifest = StudyManifest(study="table-1", quick=True, changes={"secagg.enabled": True})
    study, folder = load_study("table-1"), tmp_path / "study"
    open_study_folder(folder, manifest)
    cells = study.cells(quick=True, rows=["fedavg"], changes=manifest.changes)
    run_cells(study, cells, folder, 1, lambda cell, problem: None, quick=True)
    assert len(read_manifest(cells[0].folder(folder))["nodes"]) == 3
    assert NOT_KNOWN in markdown(collect(with_metric(study, "test_accuracy_worst"), manifest, folder))
    assert NOT_KNOWN not in markdown(collect(study, manifest, folder))


@pytest.mark.parametrize(
    ("changes", "num_nodes", "expected"),
    [
        ({}, None, 3),
        ({}, 5, 5),
        ({"secagg.min-cohort": 2}, None, 2),
        ({"secagg.colluding": 2}, None, 5),
        ({"secagg.threshold": 4, "num-clients": 20}, None, 4),
        ({"secagg.enabled": False}, None, 1),
    ],
)
def test_a_simulation_gets_enough_nodes(changes: Settings, num_nodes: int | None, expected: int) -> None:
    given: dict[str, Scalar] = {"num-clients": 6, "dataset": "digits", "secagg.enabled": True, "method": "fedrep"}
    planned = plan(given | changes, num_nodes, IN_PROCESS)
    assert planned.num_nodes == expected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--num-nodes", "2"], "--num-nodes must be 3 to 12 with secagg.enabled, got 2: a secure sum of 2 nodes"),
        (["--num-nodes", "101", "--num-clients", "150"], "got 101; host several clients on each node"),
        (["--num-clients", "2"], "secagg.enabled must be false with 2 clients in a round, or give more (num-clients"),
        (["--set", "fraction-train=0.3"], "with 2 clients in a round"),
        (["--method", "pfedhn"], "secagg.enabled must be false with pfedhn"),
        (["--method", "hyperfl"], "use hyperfl-frozen, or hyperfl.embedding=common-frozen"),
        (["--set", "audit.clients=all"], "audit.clients must be empty with secagg.enabled"),
    ],
)
def test_impossible_sums_are_refused_before_the_run(call: Call, words: list[str], problem: str, tmp_path: Path) -> None:
    base = ["run", "--engine", "in-process", "--method", "fedrep", "--dataset", "digits", "--num-clients", "6"]
    code, _, text = call(*base, "--set", "secagg.enabled=true", "--output", tmp_path / "run", *words)
    assert code == 2
    assert problem in " ".join(text.split())
    assert not (tmp_path / "run").exists()


def test_a_deployment_of_two_nodes_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Scalar] = {"secagg.enabled": True, "method": "fedrep", "output": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="a secure sum of 2 nodes, 0 of which may collude"):
        plan_deployed(2, changes)
    with pytest.raises(ConfigError, match=r"secagg\.enabled must be false with pfedhn"):
        plan_deployed(5, changes | {"method": "pfedhn"})
    assert plan_deployed(3, changes).settings["secagg.enabled"]


def test_the_estimate_is_of_masked_uploads_and_the_message_that_opens_them(federate: Federate) -> None:
    """The bytes on the wire are those of a run, less the names and settings in its messages."""
    run = federate("fedrep", 3, **SECURE)
    planned = plan(small_settings(method="fedrep", **SECURE, output=""), 3, IN_PROCESS)
    measured = json.loads((run / "summary.json").read_text())["bytes_on_wire_per_round"]
    assert 0.95 * measured < estimate(planned, 1).bytes_on_wire_per_round < measured


def test_the_whole_crowd_is_counted() -> None:
    """Single clients of few samples are hidden by the others; few samples in all are not."""

    def warned(samples: list[int], **changes: object) -> list[str]:
        return leak_warnings(RunConfig.from_flat(small_settings(method="fedavg", **changes)), samples)

    assert warned([1] * 20, num_clients=20, **SECURE) == []
    (text,) = warned([1] * 5, num_clients=5, **SECURE)
    assert "the 5 clients of a round can have 5 training samples in all" in text
    assert "--summed --method fedavg --attacks head-gradient" in text  # one that reads sums
    ten = SECURE | {"target": "mlp", "local-epochs": 1, "batch-size": 1}
    assert warned([1] * 10, num_clients=10, **ten)  # 9 of 10 images were found in a perceptron's sum
    assert warned([60] * 10, num_clients=10, **ten) == []
    assert warned([1, 1, 1, 1, 600], num_clients=5, **SECURE) == []
    assert warned([1, 1, 1, 1, 600], num_clients=5, **SECURE | {"fraction-train": 0.8})
    noise = {"privacy.clip-norm": 1.0, "privacy.noise-multiplier": 0.1}
    assert warned([1], num_clients=5, **SECURE | noise) == []
    for where, is_warned in (("sum", False), ("server", True)):
        changes = SECURE | noise | {"privacy.unit": "client", "privacy.noise": where}
        assert bool(warned([1], num_clients=5, **changes)) == is_warned


def test_the_command_reports_and_exports(call: Call, tmp_path: Path) -> None:
    """`hyperfl run` with secure sums on three nodes; then a report, and a model without an accuracy."""
    run = tmp_path / "run"
    words = ["run", "--engine", "in-process", "--method", "fedrep", "--num-clients", "6", "--num-nodes", "3"]
    settings = ["--set", "secagg.enabled=true", "--num-rounds", "2", "--dataset", "digits", "--output", run]
    code, printed, problem = call(*words, *settings)
    assert (code, printed) == (0, f"{run}\n"), problem
    assert call("report", run)[:2] == (0, f"{run / 'report.html'}\n")
    model = tmp_path / "mine" / "model.safetensors"
    assert call("export", run, "--client", "2", "-o", model)[0] == 0
    assert json.loads(model.with_suffix(".json").read_text())["accuracy"] is None
