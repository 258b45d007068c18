"""What a curious server observes in one round, and its files in a run's folder.

Without secure sums it observes each client's reply, and with them an opening: the mean over all clients in the sum.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.storage import read_arrays, write_arrays

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by `group/name`."""

_OWNER_ONLY = 0o600


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """Arrays and numbers that the server exchanges with one client in one round.

    Attributes:
        received: Arrays that the server sent to the client.
        reply: Arrays that the client sent back, under the same keys, in the form that the method's row declares
            (`hyperfl_flwr.core.method.Form`): parameters, their increase or decrease, or a gradient.
        num_examples: Number n of training samples, as reported in the reply.
        client: The client's id.
        round: The federated round, from 1.
        metrics: Metrics in the reply, for example `train-loss`.
        earlier: Observations of the same client in earlier rounds, oldest first, for attacks that use several rounds.
    """

    received: Arrays
    reply: Arrays
    num_examples: int
    client: int = 0
    round: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    earlier: Sequence["Observation"] = ()

    def __post_init__(self) -> None:
        """Check that both directions have the same layout.

        Raises:
            ValueError: If keys or shapes differ, if there are no arrays, or if `num_examples` is not positive.
        """
        sent = {key: value.shape for key, value in self.received.items()}
        if not sent or sent != {key: value.shape for key, value in self.reply.items()}:
            raise ValueError(f"a reply must have the keys and shapes of the sent arrays: {', '.join(sent) or 'none'}")
        if self.num_examples < 1:
            raise ValueError(f"num_examples must be positive, got {self.num_examples}")


def mean_observation(observations: Iterable[Observation]) -> Observation:
    """Return the server's observation of one round under secure aggregation: the mean reply, and the number of samples.

    Args:
        observations: Observations of clients with equally many samples, and therefore equally many steps; each is read
            once, and only one is kept in memory.

    Returns:
        The mean in the precision of the replies, with the total number of samples. It has the form of a reply, with the
        mean of the clients' mean gradients, because a reply is linear in them.

    Raises:
        ValueError: If the clients received different arrays or have different numbers of samples, or if there are none.
    """
    first: Observation | None = None
    totals: dict[str, NDArray[np.float64]] = {}
    number = 0
    for observation in observations:
        first, number = first or observation, number + 1
        if observation.num_examples != first.num_examples:
            raise ValueError(
                f"all clients of a sum must have equally many samples, got {first.num_examples} and "
                f"{observation.num_examples}"
            )
        if any(not np.array_equal(value, first.received[key]) for key, value in observation.received.items()):
            raise ValueError("all clients of a sum must have received the same parameters, got different ones")
        for key, value in observation.reply.items():
            # Sums in float64, so that the mean is rounded to the type of the replies only once.
            totals[key] = totals[key] + value if key in totals else value.astype(np.float64)
    if first is None:
        raise ValueError("a sum needs at least one reply, got none")
    reply = {key: (total / number).astype(first.reply[key].dtype) for key, total in totals.items()}
    return Observation(
        received=first.received, reply=reply, num_examples=number * first.num_examples, round=first.round
    )


def observation_path(run_directory: Path, server_round: int, client: int) -> Path:
    """Return the path of a client's observation in a round of a run."""
    return run_directory / "observations" / f"round-{server_round:06d}-client-{client:05d}.npz"


def save_observation(path: Path, observation: Observation) -> None:
    """Write an observation to a file that only its owner can read."""
    _write(path, observation, {"client": observation.client})


def load_observation(path: Path) -> Observation:
    """Read an observation that `save_observation` has written.

    Raises:
        StateError: If the file is missing or damaged, or does not contain an observation.
    """
    arrays, meta = read_arrays(path)
    with _checked(path, "an observation"):
        return _observation(arrays, meta, client=int(meta["client"]))


def opening_path(run_directory: Path, server_round: int) -> Path:
    """Return the path of what the server opened in a round of a run with secure sums."""
    return run_directory / "openings" / f"round-{server_round:06d}.npz"


def save_opening(run_directory: Path, opening: Observation, clients: Sequence[int]) -> None:
    """Store what the server opened in a round, in a file and folder that only their owner can read.

    Args:
        run_directory: Folder of the run.
        opening: The opened sum as an observation: `reply` is the mean over the clients, in the form that the method's
            row declares, `num_examples` the total number of samples, and `metrics` are means; `client` is not used.
        clients: Ids of the clients in the sum, which are public.

    Raises:
        ValueError: If `clients` is empty or names a client twice.
    """
    if not clients or len(set(clients)) != len(clients):
        raise ValueError(f"the clients in a sum must be distinct, and at least one, got {list(clients)}")
    path = opening_path(run_directory, opening.round)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _write(path, opening, {"clients": sorted(clients)})


def load_opening(path: Path) -> tuple[Observation, list[int]]:
    """Read an opening that `save_opening` has written, and the ids of the clients in the sum.

    Raises:
        StateError: If the file is missing or damaged, or does not contain an opening.
    """
    arrays, meta = read_arrays(path)
    with _checked(path, "an opening"):
        return _observation(arrays, meta), [int(client) for client in meta["clients"]]


def _write(path: Path, observation: Observation, of_clients: Mapping[str, Any]) -> None:
    arrays = {f"received/{key}": value for key, value in observation.received.items()}
    arrays |= {f"reply/{key}": value for key, value in observation.reply.items()}
    meta = {
        "num-examples": observation.num_examples,
        "round": observation.round,
        "metrics": dict(observation.metrics),
        **of_clients,
    }
    write_arrays(path, arrays, meta, mode=_OWNER_ONLY)


def _observation(arrays: Arrays, meta: Mapping[str, Any], client: int = 0) -> Observation:
    return Observation(
        received=_direction(arrays, "received"),
        reply=_direction(arrays, "reply"),
        num_examples=int(meta["num-examples"]),
        client=client,
        round=int(meta["round"]),
        metrics={str(name): float(value) for name, value in meta["metrics"].items()},
    )


@contextlib.contextmanager
def _checked(path: Path, what: str) -> Iterator[None]:
    """Convert the errors of reading a file's content to a `StateError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"{path} is not {what} of this version ({type(error).__name__}: {error}); record it again"
        ) from error


def _direction(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    found = {key.partition("/")[2]: np.asarray(value) for key, value in arrays.items()
             if key.partition("/")[0] == prefix}  # fmt: skip
    if bad := [key for key, value in found.items() if value.dtype.kind != "f"]:
        raise ValueError(f"all arrays must be floating point; these are not: {', '.join(bad)}")
    return found
