"""What PRIV-HFL's dual averaging sends and keeps, in closed form: the computed numbers of the study `dual-cost`.

Numbers travel in float32. The printed algorithm cannot be run here (docs/methods/priv-hfl.md explains why it is not
offered), so that its costs are computed only; those of the compact forms are compared with what runs have measured.
"""

from dataclasses import dataclass
from typing import Literal

Form = Literal["fedavg", "mean", "chain", "chain-projected", "dense"]

FLOAT32, FLOAT64 = 4, 8


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes; the fields are called as in summary.json.

    Attributes:
        bytes_up_per_client_round: What a client sends in a round.
        bytes_down_per_client_round: What it gets.
        server_state_bytes: What the server keeps between rounds besides what it sends to all.
        client_state_bytes: What a client keeps between rounds.
    """

    bytes_up_per_client_round: int
    bytes_down_per_client_round: int
    server_state_bytes: int
    client_state_bytes: int


def computed_cost(form: Form, num_clients: int, size: int) -> Cost:
    """Return what a form costs, without a generator.

    Args:
        form: A row of the study. `dense` is the algorithm as printed: lambda and nu of 2 (N - 1) m numbers each, which
            every client keeps beside its model, sends and gets, and which the server averages. Averaging one after the
            other is assumed; a server that holds all clients' needs N times as much.
        num_clients: N, at least 1.
        size: m, the parameters of a model.
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
