"""Summarise the result of a run in a few numbers, computed from its records."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import RunDirectoryError, StateError
from hyperfl_flwr.core.tasks import Task, task_of
from hyperfl_flwr.metrics.intervals import Interval
from hyperfl_flwr.node.private_state import largest_state
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.cross_site import CrossSite
from hyperfl_flwr.runs.failures import has_diverged
from hyperfl_flwr.runs.kept_models import ClientNumbers, KeptModels
from hyperfl_flwr.runs.novel_results import flat_means, read_novel
from hyperfl_flwr.runs.privacy_statement import PrivacyStatement
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import Record, has_secure_sums, is_simulation, read_manifest, read_metrics
from hyperfl_flwr.runs.score_spread import Spread
from hyperfl_flwr.runs.target_accuracy import rounds_to_targets
from hyperfl_flwr.runs.validation import best_record, measures_state

NOT_KNOWN = "not known: sums are secure"
"""Text in the place of a number that needs single clients, in a run with secure sums."""

OF_SINGLE_CLIENTS = frozenset(
    {
        "test_accuracy_worst", "test_accuracy_worst_decile", "test_accuracy_std", "test_accuracy_interval",
        "test_accuracy_per_client", "test_accuracy_aggregate_per_client", "test_examples_per_client",
        "test_majority_share", "test_auc", "test_auc_aggregate",
    }
)  # fmt: skip
"""Numbers of a summary that are None in a run with secure sums; deviation and interval only in one of few clients."""


def is_record(manifest: Mapping[str, Any]) -> bool:
    """Return whether a folder is a study's cell from a record, without the run's nodes and lines of single clients."""
    return "nodes" not in manifest


def _recorded(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise StateError(f"{file} is damaged ({problem}); restore the study's cell from its record again") from None


def summarise(path: Path) -> dict[str, Any]:
    """Summarise a run folder; `docs/reference/files.md` defines each number.

    Of a study's cell that was restored from a record, it returns the summary in the record.

    Args:
        path: A run folder with at least one recorded round.

    Returns:
        The content of summary.json. With `task = regression`, R² is in the place of the accuracy, in names, too
        (`test_r2`). Accuracies are shares in [0, 1], over the clients' own test data; `test_accuracy`
        is the mean over all clients after their local training in the last round, `test_accuracy_aggregate` that of the
        final global state with the clients' private parts. With `keep = best` both are of the best models by validation
        data. A client without a number (it failed in the last round, or was not drawn) is None in the list and left out
        of the mean; `test_accuracy_num_clients` is the number of clients with one. `*_sem` is the standard error of a
        mean over drawn clients, None over all; `test_accuracy_interval` is the 95 % interval over clients of the same
        kind. With secure sums, the lists and the numbers of `OF_SINGLE_CLIENTS` are None.

    Raises:
        RunDirectoryError: If the folder is not a run folder.
        StateError: If one of its files is damaged.
        ValueError: If no round was recorded.
    """
    manifest, records = read_manifest(path), list(read_metrics(path))
    if is_record(manifest):
        if has_diverged(manifest):
            raise RunDirectoryError(f"{path} was restored from the record of a run that has diverged; leave it out")
        return _recorded(path / "summary.json")
    rounds = [record for record in records if record["kind"] == "train"]
    if not rounds:
        raise ValueError(f"{path} has no finished round")
    settings, task = manifest["settings"], task_of(manifest["settings"])
    kept = KeptModels.of(settings, records, rounds[-1]["round"])
    is_secure = has_secure_sums(manifest)
    clients = None if is_secure else kept.clients(settings["num-clients"])
    with_state = kept.clients_with_state(settings["num-clients"]) if kept.aggregate_rows else None
    states = [record for record in records if record["kind"] == "aggregate" and measures_state(settings)]
    summary = {
        "method": settings["method"],
        "dataset": RunData.read(manifest).title,
        "num_clients": settings["num-clients"],
        "num_nodes": len(manifest["nodes"]),
        "rounds": rounds[-1]["round"],
        "task": task.name,
        **_main_score(records, kept, clients, with_state, task),
        **_other_scores(rounds[-1], kept, clients, with_state, task),
        **_backdoor(kept),
        "keep": "best" if kept.kind == "kept" else "last",
        **_validation([*rounds, *states], kept, task),
        **_best(rounds, f"personalized_{task.score}", ""),
        **_best(states, f"aggregate_{task.score}", "_aggregate"),
        **rounds_to_targets(settings, records, task),
        **_costs(path, manifest, rounds),
        "privacy": PrivacyStatement.of(path, manifest).entry(),
        **(_opening_costs(rounds) if is_secure else {}),
        **_node_shares(rounds),
        **flat_means(read_novel(path)),
        **(matrix.entries() if (matrix := CrossSite.read(path)) else {}),
    }
    return {name if task.has_shares else task.key(name): value for name, value in summary.items()}


def _main_score(
    records: Sequence[Record],
    kept: KeptModels,
    clients: ClientNumbers | None,
    with_state: ClientNumbers | None,
    task: Task,
) -> dict[str, Any]:
    """Return the main score on test data: its means and their errors, its spread over the clients, and each client's.

    Args:
        records: Lines of metrics.jsonl.
        kept: Which models the score is of.
        clients: Numbers of each client's model; None if they are not known.
        with_state: Numbers of each client with the global state; None if they are not known.
        task: The run's task.
    """
    personalized, aggregate = f"{kept.kind}_{task.score}", f"aggregate_{task.score}"
    own = Spread.of(clients.numbers(task.score)) if clients else Spread.opened(kept.means, personalized)
    return {
        "test_accuracy": own.mean,
        "test_accuracy_sem": _error(kept.means, personalized),
        "test_accuracy_aggregate": kept.aggregate.get(aggregate),
        "test_accuracy_aggregate_sem": _error(kept.aggregate, aggregate),
        "test_accuracy_aggregate_num_clients": _num_clients(records, kept.aggregate, aggregate),
        "test_accuracy_worst": own.worst,
        "test_accuracy_worst_decile": own.worst_decile,
        "test_accuracy_std": own.std,
        "test_accuracy_interval": _clipped(own.interval) if task.has_shares else own.interval,
        "test_accuracy_per_client": own.per_client,
        "test_accuracy_aggregate_per_client": with_state.numbers(task.score) if with_state else None,
        "test_examples_per_client": clients.numbers("test_examples", of_kind=False) if clients else None,
        "test_accuracy_num_clients": own.num_clients,
        "test_majority_share": _majority_share(clients, task),
    }


def _other_scores(
    last: Record, kept: KeptModels, clients: ClientNumbers | None, with_state: ClientNumbers | None, task: Task
) -> dict[str, Any]:
    """Return the means of the other scores, and those on all test data; `last` is the last round's line of means."""
    return {
        **{f"test_{name}": kept.means.get(f"{kept.kind}_{name}") for name in task.all_scores},
        **{f"test_{name}_aggregate": kept.aggregate.get(f"aggregate_{name}") for name in task.all_scores},
        **_fewer(clients, task, ""),
        **_fewer(with_state, task, "_aggregate"),
        "global_test_accuracy": last.get(f"personalized_global_{task.score}"),
        "global_test_accuracy_aggregate": kept.aggregate.get(f"aggregate_global_{task.score}"),
    }


def _validation(records: Sequence[Record], kept: KeptModels, task: Task) -> dict[str, Any]:
    """Return the means on validation data that decide about rounds, and the best rounds by them."""
    name = f"validation_{task.deciding}"
    return {
        name: kept.means.get(f"{kept.kind}_{name}"),
        f"{name}_aggregate": kept.aggregate.get(f"aggregate_{name}"),
        "best_validation_round": best_record(records, task, "personalized").get("round"),
        "best_validation_round_aggregate": best_record(records, task, "aggregate").get("round"),
    }


def _costs(path: Path, manifest: Mapping[str, Any], rounds: Sequence[Record]) -> dict[str, Any]:
    """Return what the run takes: seconds and bytes of a round, bytes that are kept, and memory."""
    checkpoints = Checkpoints(path / "checkpoints")
    stored = checkpoints.rounds()
    return {
        "seconds_per_round": _median(rounds, "seconds"),
        "bytes_up_per_client_round": int(_median(rounds, "bytes_up_per_client")),
        "bytes_down_per_client_round": int(_median(rounds, "bytes_down_per_client")),
        "bytes_on_wire_per_round": int(_median(rounds, "bytes_on_wire")),
        "server_state_bytes": checkpoints.server_state_bytes(stored[-1]) if stored else None,
        "client_state_bytes": _client_state_bytes(path, is_simulated=is_simulation(manifest)),
        "peak_memory_mb": max(record["peak_memory_mb"] for record in rounds),
    }


def _backdoor(kept: KeptModels) -> dict[str, float]:
    """Return the success of a backdoor, of the clients' models and of the global state, where it was measured."""
    found = {
        "backdoor_success": kept.means.get(f"{kept.kind}_backdoor_success"),
        "backdoor_success_aggregate": kept.aggregate.get("aggregate_backdoor_success"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _majority_share(clients: ClientNumbers | None, task: Task) -> float | None:
    """Return the mean share of the most common class, over the clients that have a score; None if it is not known."""
    if clients is None:
        return None
    pairs = zip(clients.numbers(task.score), clients.numbers("majority_share", of_kind=False), strict=True)
    known = [share for score, share in pairs if score is not None and share is not None]
    return statistics.fmean(known) if known else None


def _fewer(clients: ClientNumbers | None, task: Task, part: str) -> dict[str, int]:
    """Return over how many clients the mean of a score is, if not all that have the main score have this one, too."""
    if clients is None:
        return {}
    of_all, *others = (
        sum(value is not None for value in clients.numbers(name)) for name in (task.score, *task.all_scores)
    )
    found = zip(task.all_scores, others, strict=True)
    return {f"test_{name}{part}_num_clients": number for name, number in found if number < of_all}


def _num_clients(records: Sequence[Record], evaluation: Record, name: str) -> int:
    """Return over how many clients the mean of an evaluation is; of all in the sum if single ones are not known."""
    rows = [row for row in records if row["kind"] == "client-aggregate" and row["round"] == evaluation.get("round")]
    if rows:
        return len({row["client"] for row in rows if name in row})
    return int(evaluation["measured"] if "measured" in evaluation else evaluation.get("clients", 0))


def _error(record: Record, name: str) -> float | None:
    """Return the standard error of a record's mean over drawn clients; None if it has none."""
    error: float | None = record.get(f"{name}_sem")
    return error


def _opening_costs(rounds: Sequence[Record]) -> dict[str, Any]:
    """Return the median seconds of opening a round's sum, and the number of saturated values of all rounds."""
    opened = [record for record in rounds if "unmask_seconds" in record]
    return {
        "unmask_seconds_per_round": _median(opened, "unmask_seconds") if opened else None,
        "saturated": sum(record["saturated"] for record in opened),
    }


def _node_shares(rounds: Sequence[Record]) -> dict[str, Any]:
    """Return how much each node counted in a robust reduction, its mean over the rounds; nothing if none says so."""
    found: dict[str, list[float]] = {}
    for record in rounds:
        for node, share in record.get("node_shares", {}).items():
            found.setdefault(node, []).append(share)
    means = {node: statistics.fmean(shares) for node, shares in sorted(found.items(), key=lambda item: int(item[0]))}
    return {"node_shares": means} if means else {}


def _client_state_bytes(path: Path, *, is_simulated: bool) -> int | None:
    """Return the size in bytes of a simulated client's private state; None in a deployment, where it is elsewhere."""
    found = largest_state(path / "clients")
    return 0 if found is None and is_simulated else found


def _median(rounds: Sequence[Record], name: str) -> float:
    return float(statistics.median(record[name] for record in rounds))


def _clipped(interval: Interval | None) -> Interval | None:
    """Return the part of an interval in which a share can be."""
    return None if interval is None else (max(interval[0], 0.0), min(interval[1], 1.0))


def _best(records: Sequence[Record], name: str, part: str) -> dict[str, Any]:
    """Return the round with the highest mean accuracy, the first of several, and that accuracy.

    A mean without clients that failed or were away is of other clients, and can be higher for that reason: such rounds
    count only if there are no others, and of these those with the most clients. Lines of aggregates do not say who
    failed, and all count.
    """
    known = [record for record in records if name in record]
    complete = [record for record in known if not record.get("failed") and not record.get("away")]
    most = max((int(record["clients"]) for record in known), default=0)
    chosen = complete or [record for record in known if record["clients"] == most]
    best: Record = max(chosen, key=lambda record: float(record[name]), default={})
    return {
        f"best_round{part}": best.get("round"),
        f"best_accuracy{part}": best.get(name),
        f"best_num_clients{part}": best.get("measured", best.get("clients")),
    }
