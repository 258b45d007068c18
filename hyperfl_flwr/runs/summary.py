"""Summarise the result of a run in a few numbers, computed from its records."""

import statistics
from pathlib import Path
from typing import Any

from hyperfl_flwr.node.private_state import largest_state
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.novel_results import flat_means, read_novel
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import Record, is_simulation, read_manifest, read_metrics


def summarise(path: Path) -> dict[str, Any]:
    """Summarise a run folder; `docs/reference/files.md` defines each number.

    Args:
        path: A run folder with at least one recorded round.

    Returns:
        The content of summary.json. Accuracies are shares in [0, 1], over the clients' own test data; `test_accuracy`
        is the mean over all clients after their local training in the last round, `test_accuracy_aggregate` that of the
        final global state with the clients' private parts. A client without a number (it failed in the last round) is
        None in the list and left out of the mean; `test_accuracy_num_clients` is the number of clients with one. With
        secure sums only the mean and, of ten clients or more, the standard deviation are known.

    Raises:
        RunDirectoryError: If the folder is not a run folder.
        StateError: If one of its files is damaged.
        ValueError: If no round was recorded.
    """
    manifest, records = read_manifest(path), list(read_metrics(path))
    rounds = [record for record in records if record["kind"] == "train"]
    if not rounds:
        raise ValueError(f"{path} has no finished round")
    last = rounds[-1]["round"]
    settings = manifest["settings"]
    own = _per_client(records, "client", last, "personalized_accuracy", settings["num-clients"])
    aggregate = [record for record in records if record["kind"] == "aggregate" and record["round"] == last]
    checkpoints = Checkpoints(path / "checkpoints")
    stored = checkpoints.rounds()
    return {
        "method": settings["method"],
        "dataset": RunData.read(manifest).title,
        "num_clients": settings["num-clients"],
        "num_nodes": len(manifest["nodes"]),
        "rounds": last,
        **(_of_sum(rounds[-1]) if settings.get("secagg.enabled") else _of_clients(own)),
        "test_accuracy_aggregate": aggregate[-1].get("aggregate_accuracy") if aggregate else None,
        "global_test_accuracy": rounds[-1].get("personalized_global_accuracy"),
        "global_test_accuracy_aggregate": aggregate[-1].get("aggregate_global_accuracy") if aggregate else None,
        "seconds_per_round": _median(rounds, "seconds"),
        "bytes_up_per_client_round": int(_median(rounds, "bytes_up_per_client")),
        "bytes_down_per_client_round": int(_median(rounds, "bytes_down_per_client")),
        "bytes_on_wire_per_round": int(_median(rounds, "bytes_on_wire")),
        "server_state_bytes": checkpoints.server_state_bytes(stored[-1]) if stored else None,
        "client_state_bytes": _client_state_bytes(path, is_simulated=is_simulation(manifest)),
        "peak_memory_mb": max(record["peak_memory_mb"] for record in rounds),
        **flat_means(read_novel(path)),
    }


def _of_clients(own: list[float | None]) -> dict[str, Any]:
    """Return the numbers of summary.json that follow from each client's personalized accuracy in the last round."""
    known = [accuracy for accuracy in own if accuracy is not None]
    return {
        "test_accuracy": statistics.fmean(known) if known else None,
        "test_accuracy_worst": min(known, default=None),
        # Minus the floor of the negated quotient is the ceiling: the lowest tenth has at least one client.
        "test_accuracy_worst_decile": statistics.fmean(sorted(known)[: -(-len(known) // 10)]) if known else None,
        "test_accuracy_std": statistics.pstdev(known) if known else None,
        "test_accuracy_per_client": own,
        "test_accuracy_num_clients": len(known),
    }


def _of_sum(last: Record) -> dict[str, Any]:
    """Return the same numbers of a run with secure sums, of which no client's accuracy is known."""
    return {
        "test_accuracy": last.get("personalized_accuracy"),
        "test_accuracy_worst": None,
        "test_accuracy_worst_decile": None,
        "test_accuracy_std": last.get("personalized_accuracy_std"),
        "test_accuracy_per_client": None,
        "test_accuracy_num_clients": last["clients"],
    }


def _client_state_bytes(path: Path, *, is_simulated: bool) -> int | None:
    """Return the size in bytes of a simulated client's private state; None in a deployment, where it is elsewhere."""
    found = largest_state(path / "clients")
    return 0 if found is None and is_simulated else found


def _median(rounds: list[Record], name: str) -> float:
    return float(statistics.median(record[name] for record in rounds))


def _per_client(records: list[Record], kind: str, number: int, name: str, num_clients: int) -> list[float | None]:
    found = {
        record["client"]: record[name]
        for record in records
        if record["kind"] == kind and record["round"] == number and name in record
    }
    return [found.get(client) for client in range(num_clients)]
