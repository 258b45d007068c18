"""Write the HTML report of a run: results, curves, traffic, settings and failures."""

from collections.abc import Iterable, Mapping
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
from hyperfl_flwr.metrics.intervals import of_share
from hyperfl_flwr.pages.figures import captioned, svg
from hyperfl_flwr.pages.render import (
    NOTHING,
    Settings,
    interval_text,
    megabytes,
    percent,
    plain,
    score_interval_text,
    write_page,
)
from hyperfl_flwr.runs.cross_site import CrossSite
from hyperfl_flwr.runs.failures import away_text, nobody_text, read_failures
from hyperfl_flwr.runs.kept_models import KeptModels
from hyperfl_flwr.runs.listed_clients import clients_per_node, is_listed, label_rows
from hyperfl_flwr.runs.matrix_plot import matrix_figure
from hyperfl_flwr.runs.novel_results import means, read_novel
from hyperfl_flwr.runs.plots import clients_figure, labels_figure, run_panels
from hyperfl_flwr.runs.privacy_statement import statement_text
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import (
    has_secure_sums,
    is_simulation,
    read_manifest,
    read_metrics,
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
from hyperfl_flwr.runs.target_accuracy import reached
from hyperfl_flwr.runs.validation import chooses_state, replaces_test_data

MOST_FAILURES = 100
"""Largest number of failures that the report lists; a long run may have thousands, and all are in its folder."""

MOST_CLIENTS = 1000
"""Largest number of clients of which the report lists each."""

SPREAD = {
    "test_accuracy_std": "standard deviation of personalized {} over the clients",
    "test_accuracy_worst_decile": "personalized {} of the worst tenth of the clients",
    "test_accuracy_worst": "personalized {} of the worst client",
}
"""Numbers of summary.json about single clients, with `{}` for the main score."""

GLOBAL_SCORES = {
    "global_test_accuracy": "personalized {} on all test data of the data set",
    "global_test_accuracy_aggregate": "aggregate {} on all test data of the data set",
}


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
    file, client, data = output or path / "report.html", client_of(method_of(path)), RunData.read(manifest)
    config = RunConfig.from_flat(settings_of(path))
    matrix, task = CrossSite.read(path), task_of(summary)
    reductions = client.weighted(equal=manifest["settings"].get("privacy.unit") == "client")
    write_page(
        file,
        "report.html",
        manifest=manifest,
        summary=summary,
        method=METHODS[summary["method"]],
        task=task,
        personalized=_score_card(summary, "test_accuracy"),
        aggregate=_score_card(summary, "test_accuracy_aggregate"),
        state=_state(manifest, summary),
        nobody=nobody_text(path),
        majority=majority_text(summary),
        fall=fall_text(summary),
        malicious=malicious_text(manifest),
        least_shares=shares_text(summary),
        secure_sums=secure_sums_text(manifest, summary) if has_secure_sums(manifest) else "",
        privacy=statement_text(summary["privacy"]),
        data=_described(data, task),
        networks=_networks(config),
        figures=_figures(path, summary),
        labels_figure=_labels(manifest),
        matrix=matrix,
        matrix_figure=_matrix(matrix),
        simulated=is_simulation(manifest),
        scores=list(_scores(path, summary, unknown=NOT_KNOWN if has_secure_sums(manifest) else "none")),
        client_headers=_client_headers(task),
        each_client=list(_each_client(path, summary)),
        samples="validation" if replaces_test_data(manifest["settings"]) else "test",
        chooses_state=summary["keep"] == "best" and chooses_state(manifest["settings"]),
        shared=", ".join(f"{name} ({reduction.value.replace('_', ' ')})" for name, reduction in reductions.items()),
        private=", ".join(client.kept_groups(config)),
        costs=list(_costs(summary)),
        found=Settings.of(
            data.named_in(manifest["settings"]),
            default_settings(summary["method"]),
            trained_settings(manifest) | manifest.get("resolved", {}),
        ),
        left_out=[(failure.round, failure.phase, failure.client, failure.reason) for failure in read_failures(path)],
        most_failures=MOST_FAILURES,
        away=away_text(path),
        left_out_nodes=list(_left_out_nodes(manifest)),
        nodes=list(_nodes(manifest)),
        circumstances_rows=[(name, plain(value)) for name, value in _circumstances(manifest)],
    )
    return file


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


def _client_headers(task: Task) -> list[str]:
    """Return the headers of the rows of `_each_client`."""
    names = [title.partition(" (")[0] for title in task.score_titles]
    interval, usual = (["interval"], ["most common class"]) if task is CLASSIFICATION else ([], [])
    return ["client", "test samples", task.score_title, *interval, *names, *usual]


def _each_client(path: Path, summary: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    """Yield a row for each client with a score; none with secure sums, or of very many clients."""
    task = task_of(summary)
    if summary[task.key("test_accuracy_per_client")] is None or summary["num_clients"] > MOST_CLIENTS:
        return
    kept = KeptModels.of({"keep": summary["keep"]}, list(read_metrics(path)), summary["rounds"])
    clients = kept.clients(summary["num_clients"])
    of_model = [clients.numbers(name) for name in (task.score, *task.all_scores)]
    of_data = [clients.numbers(name, of_kind=False) for name in ("test_examples", "majority_share")]
    for client, (number, share, score, *scores) in enumerate(zip(*of_data, *of_model, strict=True)):
        if score is not None:
            total = int(number or 0)
            interval, usual = [], []
            if task is CLASSIFICATION:
                interval, usual = [interval_text(of_share(round(score * total), total))], [share]
            shown = (NOTHING if value is None else task.text(value) for value in (*scores, *usual))
            yield str(client), str(total), task.text(score), *interval, *shown


def _scores(path: Path, summary: Mapping[str, Any], unknown: str) -> Iterable[tuple[str, str]]:
    task = task_of(summary)
    for key, name in SPREAD.items():
        value = summary[task.key(key)]
        yield name.format(task.score_title), unknown if value is None else task.text(value)
    for key, name in zip(task.all_scores, task.score_titles, strict=True):
        for kind, part in (("personalized", ""), ("aggregate", "_aggregate")):
            if summary[f"test_{key}{part}"] is not None:
                yield f"{name}, {kind}", task.text(summary[f"test_{key}{part}"])
    if summary["test_majority_share"] is not None:
        share = "share of the most common class" if task is CLASSIFICATION else "share of the most common values"
        yield f"{share}, which says what an accuracy is worth", percent(summary["test_majority_share"])
    for key, name in GLOBAL_SCORES.items():
        if (value := summary[task.key(key)]) is not None:
            yield name.format(task.score_title), task.text(value)
    for accuracy, target, number in reached(read_manifest(path)["settings"], summary):
        yield f"first round with a mean {accuracy} of {target}", "none" if number is None else str(number)
    for (way, corruption), found in means(read_novel(path)).items():
        name = f"novel clients, {way}" + ("" if corruption == "none" else f", {corruption}")
        yield name, f"{found} %".replace("+-", "±")


def _costs(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield "a client's payload to the server", megabytes(summary["bytes_up_per_client_round"])
    yield "a client's payload from the server", megabytes(summary["bytes_down_per_client_round"])
    yield "on the wire between server and nodes, both directions", megabytes(summary["bytes_on_wire_per_round"])
    yield "seconds", f"{summary['seconds_per_round']:.2f}"
    if summary.get("unmask_seconds_per_round") is not None:
        yield "seconds of UNMASK, in which sums are opened", f"{summary['unmask_seconds_per_round']:.3f}"
    yield "peak memory", f"{summary['peak_memory_mb']:.0f} MB"


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


def _left_out_nodes(manifest: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    for refused in manifest.get("refused", ()):
        yield plain(refused["node"]), "refused", refused["reason"]
    for excluded in manifest.get("excluded", ()):
        until = "the end" if excluded["until"] is None else f"round {excluded['until']}"
        yield str(excluded["node"]), f"excluded after round {excluded['round']} until {until}", excluded["reason"]


def _nodes(manifest: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    devices = manifest.get("devices", [None] * len(manifest["nodes"]))
    for number, (clients, device) in enumerate(zip(clients_per_node(manifest), devices, strict=True)):
        joined = "after the start" if number in manifest.get("joined", ()) else "at the start"
        yield str(number), str(clients), device or "never connected", joined if device else ""


def _circumstances(manifest: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    yield "experiment", manifest["experiment"]
    yield "resumed", counted(len(manifest["resumed"]), "time")
    yield from manifest["code"].items()
    yield from manifest["hardware"].items()
    yield from manifest["versions"].items()
