"""Search messages and files for the bytes of private arrays, at any offset."""

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from hyperfl_flwr.flower.messages import content_as_sent
from hyperfl_flwr.protocol.packing import unpack_arrays

WINDOW, BLOCK, HASH_BITS = 16, 8, 24


def blocks_at_every_offset(data: bytes) -> np.ndarray:
    """Return the 8 bytes that start at each position, as integers."""
    if len(data) < BLOCK:
        return np.empty(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), BLOCK)
    return np.ascontiguousarray(windows).view(np.uint64)[:, 0]


def aligned_blocks(data: bytes) -> np.ndarray:
    """Return the 8 bytes that start at each multiple of 8, as integers."""
    return np.frombuffer(data[: len(data) // BLOCK * BLOCK], np.uint64)


def hashes(blocks: np.ndarray) -> np.ndarray:
    """Return the upper bits of the products with a large odd number (Knuth's multiplicative hashing)."""
    return (blocks * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - HASH_BITS)


def places_of(blocks: np.ndarray, searched: np.ndarray) -> np.ndarray:
    """Return the positions at which an array has one of some blocks, in ascending order.

    Args:
        blocks: The blocks, ascending.
        searched: The array.
    """
    if not len(blocks):
        return np.empty(0, np.int64)
    may_occur = np.zeros(1 << HASH_BITS, dtype=bool)
    may_occur[hashes(blocks)] = True
    positions = np.flatnonzero(may_occur[hashes(searched)])  # few are left to be searched, which takes much longer
    candidates = searched[positions]
    nearest = blocks[np.searchsorted(blocks, candidates).clip(max=len(blocks) - 1)]
    found: np.ndarray = positions[nearest == candidates]
    return found


def common_window(needle: bytes, haystack: bytes) -> bytes | None:
    """Return 16 bytes, not all equal, that occur in both, at any offsets; None if there are none.

    Any 16 bytes of the needle hold a whole block of 8 that starts at a multiple of 8; where such a block is found, the
    windows around it are compared.
    """
    blocks = aligned_blocks(needle)
    positions = places_of(np.sort(blocks), blocks_at_every_offset(haystack))
    starts: dict[int, list[int]] = {}
    for number, block in enumerate(blocks.tolist() if len(positions) else ()):
        starts.setdefault(block, []).append(number * BLOCK)
    for position in positions.tolist():
        block = int.from_bytes(haystack[position : position + BLOCK], "little")
        for start in starts[block]:
            for shift in range(WINDOW - BLOCK + 1):
                window = needle[max(start - shift, 0) : max(start - shift, 0) + WINDOW]
                found = haystack[max(position - shift, 0) : max(position - shift, 0) + WINDOW]
                if len(window) == WINDOW and window == found and len(set(window)) > 1:
                    return window
    return None


def sent_bytes(content: RecordDict) -> bytes:
    """Return the bytes in which an array would be found: names and elements of a message's arrays, and other records.

    Not those in which Flower sends the arrays: between them are zeros, and windows of zeros and a few other bytes occur
    in many arrays.
    """
    arrays = {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}
    parts = [content_as_sent(RecordDict({name: content[name] for name in content if name not in arrays}))]
    for record, packed in arrays.items():
        parts.append(record.encode())
        parts += [part for name, array in unpack_arrays(packed).items() for part in (name.encode(), array.tobytes())]
    return b"".join(parts)


def leaks(arrays: Mapping[str, bytes], places: Mapping[str, bytes]) -> list[str]:
    """Return "array in place" for each array that shares a window with a place."""
    blocks = np.sort(np.concatenate([aligned_blocks(value) for value in arrays.values()] or [np.zeros(1, np.uint64)]))
    found = []
    for place, data in places.items():
        if len(places_of(blocks, blocks_at_every_offset(data))):
            found += [f"{name} in {place}" for name, value in arrays.items() if common_window(value, data)]
    return found


def occurs(value: bytes, places: Mapping[str, bytes]) -> bool:
    """Return whether any place contains a window of an array."""
    return any(common_window(value, data) for data in places.values())
