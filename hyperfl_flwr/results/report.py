"""Write the HTML report of a run: results, curves, traffic, settings and failures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.tasks import CLASSIFICATION, Task, task_of
from hyperfl_flwr.data.sample_format import shape_text
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.pages.figures import captioned, svg
from hyperfl_flwr.pages.render import (
    Settings,
    plain,
    score_interval_text,
    write_page,
)
from hyperfl_flwr.results.report_rows import (
    circumstances,
    client_headers,
    client_rows,
    cost_rows,
    left_out_rows,
    node_rows,
    score_rows,
)
from hyperfl_flwr.runs.cross_site import CrossSite
from hyperfl_flwr.runs.failures import away_text, nobody_text, read_failures
from hyperfl_flwr.runs.figures.matrix_plot import matrix_figure
from hyperfl_flwr.runs.figures.plots import clients_figure, labels_figure, run_panels
from hyperfl_flwr.runs.listed_clients import is_listed, label_rows
from hyperfl_flwr.runs.privacy_statement import statement_text
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import (
    has_secure_sums,
    is_simulation,
    read_manifest,
    settings_of,
    trained_settings,
)
from hyperfl_flwr.runs.run_sources import method_of
from hyperfl_flwr.runs.summary import NOT_KNOWN, is_record, summarise
from hyperfl_flwr.runs.summary_texts import (
    fall_text,
    majority_text,
    malicious_text,
    secure_sums_text,
    shares_text,
)
from hyperfl_flwr.runs.validation import chooses_state, replaces_test_data

MOST_FAILURES = 100
"""Largest number of failures that the report lists; a long run may have thousands, and all are in its folder."""


def write_report(path: Path, output: Path | None = None) -> Path:
    """Write the report of a run.

    Args:
        path: Folder of a run with at least one recorded round.
        output: File to write; None for `report.html` in the run's folder.

    Returns:
        The file.

    Raises:
        RunDirectoryError: If the folder is not a run's, no round was recorded, or the file cannot be written.
    """
    manifest = read_manifest(path)
    if is_record(manifest):
        raise RunDirectoryError(
            f"{path} was restored from a record, which lacks what a report shows of single clients and nodes; give the "
            f"folder of the original run, or use `hyperfl compare` or `hyperfl table`, which accept records"
        )
    try:
        summary = summarise(path)
    except ValueError as error:
        raise RunDirectoryError(f"{error}; wait for the first round before writing a report") from None
    method = METHODS[method_of(path)]  # refuses those that this version lacks, before the settings are read
    data, matrix = RunData.read(manifest), CrossSite.read(path)
    config, task = RunConfig.from_flat(settings_of(path)), task_of(summary)
    write_page(
        file := output or path / "report.html",
        "report.html",
        manifest=manifest,
        summary=summary,
        method=method,
        task=task,
        **_result(path, manifest, summary),
        data=_described(data, task),
        networks=_networks(config),
        figures=_figures(path, summary),
        **_clients(path, manifest, summary, task),
        matrix=matrix,
        matrix_figure=_matrix(matrix),
        **_communication(path, manifest, summary, config),
        found=Settings.of(
            data.named_in(manifest["settings"]),
            default_settings(summary["method"]),
            trained_settings(manifest) | manifest.get("resolved", {}),
        ),
        left_out=[(failure.round, failure.phase, failure.client, failure.reason) for failure in read_failures(path)],
        most_failures=MOST_FAILURES,
        left_out_nodes=list(left_out_rows(manifest)),
        nodes=list(node_rows(manifest)),
        circumstances_rows=[(name, plain(value)) for name, value in circumstances(manifest)],
    )
    return file


def _result(path: Path, manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page says first: the run's state and its notices, the mean scores, and facts about them."""
    return {
        "state": _state(manifest, summary),
        "nobody": nobody_text(path),
        "majority": majority_text(summary),
        "fall": fall_text(summary),
        "secure_sums": secure_sums_text(manifest, summary) if has_secure_sums(manifest) else "",
        "personalized": _score_card(summary, "test_accuracy"),
        "aggregate": _score_card(summary, "test_accuracy_aggregate"),
        "chooses_state": summary["keep"] == "best" and chooses_state(manifest["settings"]),
        "malicious": malicious_text(manifest),
        "least_shares": shares_text(summary),
        "privacy": statement_text(summary["privacy"]),
        "away": away_text(path),
    }


def _clients(path: Path, manifest: Mapping[str, Any], summary: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Return what the page says about the clients: on which samples, scores over them, labels, and a row for each."""
    return {
        "samples": "validation" if replaces_test_data(manifest["settings"]) else "test",
        "scores": list(score_rows(path, summary, unknown=NOT_KNOWN if has_secure_sums(manifest) else "none")),
        "labels_figure": _labels(manifest),
        "simulated": is_simulation(manifest),
        "client_headers": client_headers(task),
        "each_client": list(client_rows(path, summary)),
    }


def _communication(
    path: Path, manifest: Mapping[str, Any], summary: Mapping[str, Any], config: RunConfig
) -> dict[str, Any]:
    """Return which groups of parameters are shared and which are private, and what a round costs."""
    client = client_of(method_of(path))
    reductions = client.weighted(equal=manifest["settings"].get("privacy.unit") == "client")
    return {
        "shared": ", ".join(f"{name} ({reduction.value.replace('_', ' ')})" for name, reduction in reductions.items()),
        "private": ", ".join(client.kept_groups(config)),
        "costs": list(cost_rows(summary)),
    }


def _state(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    known = {"completed": "is complete", "running": "is still running", "stopped": "was stopped"}
    state = known.get(manifest["status"], f"has {manifest['status']}")
    clients, nodes = counted(summary["num_clients"], "client"), counted(summary["num_nodes"], "node")
    return f"The run {state}: {counted(summary['rounds'], 'round')}, {clients} on {nodes}."


def _score_card(summary: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return a mean score, over how many clients it is, and its standard error if they were drawn."""
    task = task_of(summary)
    name = task.key(name)
    number, error = summary[f"{name}_num_clients"], summary[f"{name}_sem"]
    drawn = (
        "" if error is None else f" drawn from {summary['num_clients']:,}, with a standard error of {task.text(error)}"
    )
    known = summary.get(f"{name}_interval")
    interval = f"; 95 % interval over clients: {score_interval_text(known, task)}" if known else ""
    value = summary[name]
    return "none" if value is None else task.text(value), f"mean of {counted(number, 'client')}{drawn}{interval}"


def _described(data: RunData, task: Task) -> str:
    if data.num_classes is None or data.input_shape is None or str(data.num_classes) in data.title:
        return data.title
    return f"{data.title}, {task.counted(data.num_classes)}, {shape_text(data.input_shape)}"


def _networks(config: RunConfig) -> str:
    """Return which clients train which target network; empty if all train the same."""
    clients: dict[str, list[int]] = {}
    for client in range(config.num_clients):
        clients.setdefault(config.of_client(client).target, []).append(client)
    if len(clients) == 1:
        return ""
    return "; ".join(f"{name}: clients {', '.join(map(str, some))}" for name, some in clients.items())


def _figures(path: Path, summary: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Draw the run's main score and loss; returns (caption, figure) pairs."""
    drawn, task = run_panels(path), task_of(summary)
    if (of_clients := summary[task.key("test_accuracy_per_client")]) is not None:
        settings = read_manifest(path)["settings"]
        samples = "validation" if replaces_test_data(settings) else "test"
        of = "with the best model by validation data" if summary["keep"] == "best" else "after the last round"
        drawn[f"personalized {samples} {task.score_title} of each client {of}"] = clients_figure(of_clients, task)
    return captioned(drawn)


def _labels(manifest: Mapping[str, Any]) -> Markup | None:
    """Draw the label distribution; None without classes, in a deployment, or with too many clients for the manifest."""
    if not is_listed(manifest) or task_of(manifest["settings"]) is not CLASSIFICATION:
        return None
    figure = labels_figure(label_rows(manifest))
    return svg(figure, "labels", "number of training samples of each client and class")


def _matrix(found: CrossSite | None) -> Markup | None:
    """Draw the cross-site matrix; None without one."""
    if found is None:
        return None
    return svg(matrix_figure(found), "cross-site", "accuracy of each client's model on each client's data")
