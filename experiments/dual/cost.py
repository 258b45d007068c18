"""Communication and memory costs of PRIV-HFL's dual averaging in closed form, for the study `dual-cost`.

Numbers are sent in float32. The printed algorithm is not implemented (docs/methods/priv-hfl.md explains why), so that
its costs are only computed. Those of the compact forms are compared with measurements of runs.
"""

from dataclasses import dataclass
from typing import Literal

Form = Literal["fedavg", "mean", "chain", "chain-projected", "dense"]

FLOAT32, FLOAT64 = 4, 8


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs in bytes; the fields have the names of summary.json.

    Attributes:
        bytes_up_per_client_round: Bytes that a client sends in a round.
        bytes_down_per_client_round: Bytes that a client receives in a round.
        server_state_bytes: Bytes that the server keeps between rounds, without the arrays that it sends to all.
        client_state_bytes: Bytes that a client keeps between rounds.
    """

    bytes_up_per_client_round: int
    bytes_down_per_client_round: int
    server_state_bytes: int
    client_state_bytes: int


def computed_cost(form: Form, num_clients: int, size: int) -> Cost:
    """Return the costs of a form, without a generator.

    Args:
        form: A row of the study. `dense` is the algorithm as printed: every client keeps, sends and receives lambda and
            nu of 2 (N - 1) m numbers each, in addition to its model, and the server averages them. It is assumed to
            average one reply after the other; a server that holds the replies of all clients needs N times as much.
        num_clients: Number of clients N, at least 1.
        size: Number of a model's parameters m.
    """
    model, pairs = size * FLOAT32, (num_clients - 1) * size * FLOAT32
    both = 2 * 2 * pairs
    server, client = {
        "fedavg": (0, 0),
        "mean": (2 * size * FLOAT64, model + size * FLOAT64),
        "chain": (2 * pairs, model),
        "chain-projected": (3 * pairs, model),
        "dense": (both, model + both),
    }[form]
    each_way = both if form == "dense" else model
    return Cost(
        bytes_up_per_client_round=each_way,
        bytes_down_per_client_round=each_way,
        server_state_bytes=server,
        client_state_bytes=client,
    )
