"""Entries of a manifest about clients: lists of a run with few clients, and summaries of them above `MOST_LISTED`.

`label_counts` lists the numbers of samples of each client and class, `nodes` the clients of each node. With many
clients there are instead, for each split, the number of clients with each number of samples and the samples of each
class, and for each node the range of its clients.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hyperfl_flwr.core.errors import RunDirectoryError

MOST_LISTED = 1000
"""Largest number of clients that a manifest lists."""

Rows = Sequence[Sequence[int]]
"""Numbers of samples of each client and class, [N, K]."""


def nodes_entry(clients: Rows) -> list[Any]:
    """Return the entry `nodes`.

    Args:
        clients: Ids of the clients of each node, ascending.

    Returns:
        The lists; above `MOST_LISTED` clients in all a range (`first`, `step`, `number`) for each node that has one.
    """
    if sum(map(len, clients)) <= MOST_LISTED:
        return [list(some) for some in clients]
    return [_range_of(some) or list(some) for some in clients]


def _range_of(clients: Sequence[int]) -> dict[str, int] | None:
    """Return ids as a range; None if they are no range."""
    step = clients[1] - clients[0] if len(clients) > 1 else 1
    if not clients or list(clients) != list(range(clients[0], clients[0] + step * len(clients), step)):
        return None
    return {"first": clients[0], "step": step, "number": len(clients)}


def clients_per_node(manifest: Mapping[str, Any]) -> list[int]:
    """Return the number of clients of each node."""
    return [entry["number"] if isinstance(entry, dict) else len(entry) for entry in manifest["nodes"]]


def labels_entry(counts: Mapping[str, Rows], num_clients: int) -> dict[str, Any]:
    """Return the entry `label_counts`.

    Args:
        counts: The rows of each split, `train` and `test`.
        num_clients: Number of trained clients, which come first; above `MOST_LISTED`, the summaries are of them.
    """
    if all(len(rows) <= MOST_LISTED for rows in counts.values()):
        return dict(counts)
    return {split: _summary(rows[:num_clients]) for split, rows in counts.items()}


def _summary(rows: Rows) -> dict[str, Any]:
    sizes = Counter(map(sum, rows))
    return {
        "clients_by_samples": {str(size): sizes[size] for size in sorted(sizes)},
        "per_class": [sum(column) for column in zip(*rows, strict=True)],
    }


def label_rows(manifest: Mapping[str, Any], split: str = "train") -> Rows:
    """Return the numbers of samples of each client and class of a simulation.

    Raises:
        RunDirectoryError: If the run has so many clients that its manifest does not list them.
    """
    rows: Any = manifest["label_counts"][split]
    if isinstance(rows, dict):
        raise RunDirectoryError(
            f"the run {manifest['experiment']} has {manifest['settings']['num-clients']} clients, and manifest.json "
            f"lists the label counts of at most {MOST_LISTED}; choose a run with fewer clients"
        )
    found: Rows = rows
    return found


def is_listed(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest has the label counts of each client, which a deployment's does not have either."""
    return isinstance(manifest.get("label_counts", {}).get("train"), list)


def known_sizes(manifest: Mapping[str, Any], reported: Mapping[int, int]) -> dict[int, int]:
    """Return all known numbers of training samples of the trained clients, by client.

    Args:
        manifest: The run's manifest.
        reported: The numbers that clients have reported.

    Returns:
        The numbers. Clients that have not reported have negative ids if the manifest does not list them.
    """
    found = manifest.get("label_counts", {}).get("train", [])
    if isinstance(found, list):
        return dict(enumerate(map(sum, found[: int(manifest["settings"]["num-clients"])]))) | dict(reported)
    sizes = Counter({int(size): number for size, number in found["clients_by_samples"].items()})
    others = sorted((sizes - Counter(reported.values())).elements())
    return dict(reported) | {-number: size for number, size in enumerate(others, start=1)}
