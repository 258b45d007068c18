"""Contract tests for privacy: private parameters appear nowhere outside the clients' folders."""

from pathlib import Path

import numpy as np
import pytest
from federations import Federate, RecordingGrid, Settings, files_below, last_checkpoint, private_arrays

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.runs.checkpoint import SERVER
from hyperfl_flwr.runs.run_directory import read_metrics

WINDOW, BLOCK, HASH_BITS = 16, 8, 24

SENT_AT_FIRST = ("scaffold", "ditto")
"""Methods of which private numbers are in the first upload. c_i is 0 at first, so that its first change is c_i. Ditto's
models have one start and the same batches: where the gradient of all steps but the last is 0, they are equal."""


def blocks_at_every_offset(data: bytes) -> np.ndarray:
    """Return the 8 bytes that start at each position, as integers."""
    if len(data) < BLOCK:
        return np.empty(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), BLOCK)
    return np.ascontiguousarray(windows).view(np.uint64)[:, 0]


def aligned_blocks(data: bytes) -> np.ndarray:
    """Return the 8 bytes that start at each multiple of 8, as integers."""
    return np.frombuffer(data[: len(data) // BLOCK * BLOCK], np.uint64)


def common_window(needle: bytes, haystack: bytes) -> bytes | None:
    """Return 16 bytes, not all equal, that occur in both, at any offsets; None if there are none.

    Any 16 bytes of the needle hold a whole block of 8 that starts at a multiple of 8; where such a block is found, the
    windows around it are compared.
    """
    blocks = aligned_blocks(needle)
    positions = np.flatnonzero(np.isin(blocks_at_every_offset(haystack), blocks))
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


def hashes(blocks: np.ndarray) -> np.ndarray:
    """Return the upper bits of the products with a large odd number (Knuth's multiplicative hashing)."""
    return (blocks * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - HASH_BITS)


def leaks(arrays: dict[str, bytes], places: dict[str, bytes]) -> list[str]:
    """Return "array in place" for each array that shares a window with a place."""
    blocks = np.unique(np.concatenate([aligned_blocks(value) for value in arrays.values()] or [np.zeros(1, np.uint64)]))
    found, may_occur = [], np.zeros(1 << HASH_BITS, dtype=bool)
    may_occur[hashes(blocks)] = True
    for place, data in places.items():
        candidates = blocks_at_every_offset(data)
        candidates = candidates[may_occur[hashes(candidates)]]  # few are left to be searched, which takes much longer
        nearest = blocks[np.searchsorted(blocks, candidates).clip(max=len(blocks) - 1)]
        if (nearest == candidates).any():
            found += [f"{name} in {place}" for name, value in arrays.items() if common_window(value, data)]
    return found


def occurs(value: bytes, places: dict[str, bytes]) -> bool:
    """Return whether any place contains a window of an array."""
    return any(common_window(value, data) for data in places.values())


def test_the_search_finds_what_is_there() -> None:
    """A window planted at any offset of either side is found; 14 bytes and constant bytes are not."""
    rng = np.random.default_rng(0)
    needle, noise = rng.bytes(100), rng.bytes(1000)
    for start in range(20):
        assert common_window(needle, noise[: 30 + start] + needle[start : start + 16] + noise[60:])
        # Not 15 bytes, since a neighbour may be equal by chance.
        assert not common_window(needle, noise[: 30 + start] + needle[start : start + 14] + noise[60:])
    assert not common_window(bytes(64), bytes(64))
    assert not common_window(needle, noise)
    assert common_window(needle[:16], needle[:16])


@pytest.mark.parametrize("method", METHODS)
def test_private_parameters_are_in_no_message_log_or_checkpoint(method: str, federate: Federate) -> None:
    """No 16 bytes of a private array occur in a message, a reply or a file outside clients/; shared arrays do.

    Copies of uploads are left out: the reply of a node with one sampled client holds the same numbers.
    One client fails in every round, so that error texts and failure files are searched as well.
    """
    grids: list[RecordingGrid] = []

    def make(num_nodes: int, settings: Settings) -> RecordingGrid:
        grids.append(RecordingGrid(num_nodes, settings))
        return grids[-1]

    client_class = client_of(method)
    train = client_class.train

    def flaky(self: object, rng: np.random.Generator) -> dict[str, float]:
        numbers = train(self, rng)  # type: ignore[arg-type]
        if self.context.client == 1:  # type: ignore[attr-defined]
            raise RuntimeError("broken after training")
        return numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_class, "train", flaky)
        run = federate(method, grid=make, plots=True)
    stored = {name: data for name, data in files_below(run).items() if name.startswith("clients/client-")}
    private: dict[str, bytes] = {}
    for file, arrays in private_arrays(run).items():
        if method in SENT_AT_FIRST and file.endswith("round-000001.npz"):
            continue
        for key, value in arrays.items():
            if value.nbytes < WINDOW:  # a single number
                continue
            assert common_window(value.tobytes(), stored[f"clients/{file}"])  # the search finds it in its own file
            private[f"{file}:{key}"] = value.tobytes()
    assert bool(private) == bool(stored) == bool(client_class.private)
    groups = {group_of(key) for arrays in private_arrays(run).values() for key in arrays}
    copies = client_class.copies_of_uploads
    assert groups == set(client_class.private) >= set(copies)
    unsent = {key: value for key, value in private.items() if group_of(key.split(":")[1]) not in copies}
    messages = {f"message {number}": data for number, data in enumerate(grids[0].sent)}
    files = {name: data for name, data in files_below(run).items() if name not in stored}
    assert {Path(name).parts[0] for name in files} >= {
        "manifest.json", "metrics.jsonl", "server.log", "summary.json", "checkpoints", "failures", "plots",
    }  # fmt: skip
    assert leaks(unsent, messages) == []
    assert leaks(private, files) == []
    kept = [value for arrays in private_arrays(run).values() for value in arrays.values() if value.nbytes >= WINDOW]
    secrets = {number for value in kept for number in value.flat} - {0.0, 1.0}  # bounds of weights and of accuracies
    told = {number for record in read_metrics(run) for number in record.values() if isinstance(number, float)}
    assert told
    assert not told & secrets  # no parameter travels as a metric
    large = {key: value for key, value in last_checkpoint(run)[0].items() if value.nbytes >= WINDOW and value.any()}
    for key, value in large.items():
        # After the last round PRIV-HFL's clients are sent the mean change instead of S.
        sent = large[f"{SERVER}consensus"].astype(np.float32) if key == "changes/theta" else value
        assert occurs(sent.tobytes(), messages) != key.startswith(SERVER), key
        assert occurs(value.tobytes(), files), key
