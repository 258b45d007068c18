"""Read the objects that Flower divides a message into for transport: records, arrays and chunks of arrays.

Wraps `flwr.supercore.inflatable.inflatable_object`. An object is a header, which begins with its kind, and a body; an
array's body lists its chunks. The public grid returns a message only when it has fetched and joined all of them,
whatever their size.
"""

import json
from collections.abc import Iterator

from flwr.app import Array
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_children_ids_from_object_content

__all__ = ["chunk_ids", "is_array", "is_array_chunk"]


def is_array(content: bytes) -> bool:
    """Return whether an object is an array: its type, shape, and list of chunks."""
    return content.startswith(b"Array ")


def is_array_chunk(content: bytes) -> bool:
    """Return whether an object is a chunk of an array's bytes."""
    return content.startswith(b"ArrayChunk ")


def chunk_ids(content: bytes) -> Iterator[str]:
    """Yield the ids of an array's chunks, in the order in which Flower joins them; one chunk may occur several times.

    Args:
        content: The array's object (untrusted input: it may come from another machine).

    Raises:
        ValueError, LookupError, TypeError: If the object is damaged.
    """
    children = get_object_children_ids_from_object_content(content)
    for number in json.loads(get_object_body(content, Array))["arraychunk_ids"]:
        yield children[number]
