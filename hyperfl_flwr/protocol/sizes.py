"""Compute the size of a message's content in bytes, as Flower counts them."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict


def content_bytes(contents: Iterable[RecordDict]) -> int:
    """Return the total serialised size of message contents, in bytes."""
    return sum(record_bytes(record) for content in contents for record in content.values())


def record_bytes(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    """Return the size of a record in bytes, as Flower's `count_bytes` does.

    `count_bytes` raises an exception for empty lists and texts; a node may send such values, so they count here as 0.
    """
    if not isinstance(record, ConfigRecord):
        return record.count_bytes()
    return sum(
        len(key) + sum(_value_bytes(element) for element in (value if isinstance(value, list) else [value]))
        for key, value in record.items()
    )


def _value_bytes(value: bool | float | str | bytes) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return 1 if isinstance(value, bool) else 8
