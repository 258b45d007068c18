"""What an honest-but-curious server sees of one client in one round, and its files in a run's folder.

Under secure aggregation the observation is the clients' mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.storage import read_arrays, write_arrays

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by `group/name`."""

_OWNER_ONLY = 0o600


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """One client's part of one round, as it passes the server.

    Attributes:
        received: What the server sent to the client.
        reply: What it got back, under the same keys: parameters, or for a model of `GENERATED` its change (before minus
            after), for PRIV-HFL the change of the client's model (after minus before).
        num_examples: Number n of training samples, which the reply tells.
        client: Its id.
        round: The federated round, from 1.
        metrics: The numbers that came with the reply, for example `train-loss`.
        earlier: What the server saw of the same client in the rounds before, oldest first, where an attack follows it.
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
            ValueError: If keys or shapes differ, or there are no examples.
        """
        sent = {key: value.shape for key, value in self.received.items()}
        if not sent or sent != {key: value.shape for key, value in self.reply.items()}:
            raise ValueError(f"a reply must have the keys and shapes of what was sent: {', '.join(sent) or 'nothing'}")
        if self.num_examples < 1:
            raise ValueError(f"num_examples must be positive, got {self.num_examples}")


def mean_observation(observations: Iterable[Observation]) -> Observation:
    """Return what is left of one round's replies under secure aggregation: their mean, and all samples' number.

    Args:
        observations: Of clients with equally many samples, and so with equally many steps; each is read once, and only
            one of them is kept in memory.

    Returns:
        The mean in the precision of the replies. It is a reply of its own, with the mean of the clients' mean
        gradients, because a reply is linear in them.

    Raises:
        ValueError: If the clients received or hold unequal amounts, or there are none.
    """
    first: Observation | None = None
    totals: dict[str, NDArray[np.float64]] = {}
    number = 0
    for observation in observations:
        first, number = first or observation, number + 1
        if observation.num_examples != first.num_examples:
            raise ValueError(f"a sum needs equally many samples: {first.num_examples}, {observation.num_examples}")
        if any(not np.array_equal(value, first.received[key]) for key, value in observation.received.items()):
            raise ValueError("a sum tells nothing about parameters that every client received others of")
        for key, value in observation.reply.items():
            totals[key] = totals[key] + value if key in totals else value.astype(np.float64)
    if first is None:
        raise ValueError("the sum of no replies does not exist")
    reply = {key: (total / number).astype(first.reply[key].dtype) for key, total in totals.items()}
    return Observation(
        received=first.received, reply=reply, num_examples=number * first.num_examples, round=first.round
    )


def observation_path(run_directory: Path, server_round: int, client: int) -> Path:
    """Return where a run keeps what its server saw of a client in a round."""
    return run_directory / "observations" / f"round-{server_round:06d}-client-{client:05d}.npz"


def save_observation(path: Path, observation: Observation) -> None:
    """Write an observation to a file that only its owner may read."""
    arrays = {f"received/{key}": value for key, value in observation.received.items()}
    arrays |= {f"reply/{key}": value for key, value in observation.reply.items()}
    meta = {
        "num-examples": observation.num_examples,
        "client": observation.client,
        "round": observation.round,
        "metrics": dict(observation.metrics),
    }
    write_arrays(path, arrays, meta, mode=_OWNER_ONLY)


def load_observation(path: Path) -> Observation:
    """Read what `save_observation` wrote.

    Raises:
        StateError: If the file is missing, damaged, or holds something else.
    """
    arrays, meta = read_arrays(path)
    try:
        return Observation(
            received=_direction(arrays, "received"),
            reply=_direction(arrays, "reply"),
            num_examples=int(meta["num-examples"]),
            client=int(meta["client"]),
            round=int(meta["round"]),
            metrics={str(name): float(value) for name, value in meta["metrics"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"{path} holds no observation of this version ({type(error).__name__}: {error}); record it again"
        ) from error


def _direction(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    found = {key.partition("/")[2]: np.asarray(value) for key, value in arrays.items()
             if key.partition("/")[0] == prefix}  # fmt: skip
    if bad := [key for key, value in found.items() if value.dtype.kind != "f"]:
        raise ValueError(f"arrays must be floating point: {', '.join(bad)}")
    return found
