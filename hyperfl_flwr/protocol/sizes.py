"""How many bytes a message's content is, as Flower counts them."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict


def content_bytes(contents: Iterable[RecordDict]) -> int:
    """Return the serialised size of messages' contents, in bytes."""
    return sum(record_bytes(record) for content in contents for record in content.values())


def record_bytes(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    """Return what Flower's `count_bytes` does, of empty lists and texts, too, which it refuses and a node may send."""
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
