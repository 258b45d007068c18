"""Tables of the learning rates of the study `tuning`."""

from collections.abc import Sequence

from scripts.page_tables import GridTable

RATES_ON_DIGITS = {
    "apfl": ("apfl", "fedavg", "local"),
    "ditto": ("ditto", "ditto-1", "fedavg"),
    "fedakd": ("fedakd", "local"),
    "fedala": ("fedala", "fedavg"),
    "feddf": ("feddf", "fedavg"),
    "feddyn": ("feddyn", "fedavg"),
    "fedftg": ("fedftg", "fedavg"),
    "fedgen": ("fedgen", "fedavg"),
    "fedper": ("fedper", "fedrep"),
    "fedprox": ("fedprox", "fedavg"),
    "fedrod": ("fedrod", "fedavg"),
    "knn-per": ("knn-per", "knn-per-neighbours", "knn-per-chosen", "fedavg"),
    "lg-fedavg": ("lg-fedavg", "local"),
    "moon": ("moon", "fedavg"),
    "per-fedavg": ("per-fedavg", "per-fedavg-alpha", "per-fedavg-hf", "fedavg"),
    "pfedme": ("pfedme", "fedavg"),
    "prifedsync": ("prifedsync", "fedavg"),
    "scaffold": ("scaffold", "fedavg"),
    "srr-fl": ("srr-fl", "fedavg"),
}
"""Rows of the study `tuning` on the pages of methods."""


def rates_on(column: str, rows: Sequence[str] = ()) -> GridTable:
    """Return the table of accuracies at each learning rate in a column of `tuning`; without rows, of all methods."""
    return GridTable(
        records="tuning", column=column, setting="learning-rate", number="test_accuracy",
        second="test_accuracy_aggregate", rows=rows,
    )  # fmt: skip
