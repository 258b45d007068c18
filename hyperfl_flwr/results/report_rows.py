"""Rows of the tables in the report of a run: scores, costs, clients, nodes and circumstances."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.tasks import CLASSIFICATION, Task, task_of
from hyperfl_flwr.metrics.intervals import of_share
from hyperfl_flwr.pages.render import NOTHING, interval_text, megabytes, percent, plain
from hyperfl_flwr.runs.kept_models import KeptModels
from hyperfl_flwr.runs.listed_clients import clients_per_node
from hyperfl_flwr.runs.novel_results import means, read_novel
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics
from hyperfl_flwr.runs.target_accuracy import reached

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


def client_headers(task: Task) -> list[str]:
    """Return the headers of the rows of `client_rows`."""
    names = [title.partition(" (")[0] for title in task.score_titles]
    interval, usual = (["interval"], ["most common class"]) if task is CLASSIFICATION else ([], [])
    return ["client", "test samples", task.score_title, *interval, *names, *usual]


def client_rows(path: Path, summary: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    """Yield a row for each client with a score; none with secure sums, or of very many clients."""
    task = task_of(summary)
    if summary[task.key("test_accuracy_per_client")] is None or summary["num_clients"] > MOST_CLIENTS:
        return
    kept = KeptModels.of({"keep": summary["keep"]}, list(read_metrics(path)), summary["rounds"])
    clients = kept.clients(summary["num_clients"])
    of_model = [clients.numbers(name) for name in (task.score, *task.all_scores)]
    of_data = [clients.numbers(name, of_kind=False) for name in ("test_examples", "majority_share")]
    for client, (number, share, score, *others) in enumerate(zip(*of_data, *of_model, strict=True)):
        if score is not None:
            total = int(number or 0)
            interval, usual = [], []
            if task is CLASSIFICATION:
                interval, usual = [interval_text(of_share(round(score * total), total))], [share]
            shown = (NOTHING if value is None else task.text(value) for value in (*others, *usual))
            yield str(client), str(total), task.text(score), *interval, *shown


def score_rows(path: Path, summary: Mapping[str, Any], unknown: str) -> Iterable[tuple[str, str]]:
    """Yield each score with its name: spread, other scores, those on all test data, targets and novel clients.

    `unknown` stands for what is not known of single clients.
    """
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


def cost_rows(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the bytes, seconds and memory of a round."""
    yield "a client's payload to the server", megabytes(summary["bytes_up_per_client_round"])
    yield "a client's payload from the server", megabytes(summary["bytes_down_per_client_round"])
    yield "on the wire between server and nodes, both directions", megabytes(summary["bytes_on_wire_per_round"])
    yield "seconds", f"{summary['seconds_per_round']:.2f}"
    if summary.get("unmask_seconds_per_round") is not None:
        yield "seconds of UNMASK, in which sums are opened", f"{summary['unmask_seconds_per_round']:.3f}"
    yield "peak memory", f"{summary['peak_memory_mb']:.0f} MB"


def left_out_rows(manifest: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Yield each node that was refused or excluded, since when, and why."""
    for refused in manifest.get("refused", ()):
        yield plain(refused["node"]), "refused", refused["reason"]
    for excluded in manifest.get("excluded", ()):
        until = "the end" if excluded["until"] is None else f"round {excluded['until']}"
        yield str(excluded["node"]), f"excluded after round {excluded['round']} until {until}", excluded["reason"]


def node_rows(manifest: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    """Yield each node's number, number of clients and device, and whether it joined after the start."""
    devices = manifest.get("devices", [None] * len(manifest["nodes"]))
    for number, (clients, device) in enumerate(zip(clients_per_node(manifest), devices, strict=True)):
        joined = "after the start" if number in manifest.get("joined", ()) else "at the start"
        yield str(number), str(clients), device or "never connected", joined if device else ""


def circumstances(manifest: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield under which conditions the run was made, by name: code, hardware and versions."""
    yield "experiment", manifest["experiment"]
    yield "resumed", counted(len(manifest["resumed"]), "time")
    yield from manifest["code"].items()
    yield from manifest["hardware"].items()
    yield from manifest["versions"].items()
