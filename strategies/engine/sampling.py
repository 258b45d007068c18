"""Draw the clients of a round and of the evaluation after the last one, and the error of a mean over drawn clients."""

import math
from collections.abc import Collection, Sequence

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.server.federation import Federation


def trained(config: RunConfig, server_round: int, present: Sequence[int]) -> Sequence[int]:
    """Return the clients that a round trains.

    Args:
        config: The run's settings.
        server_round: The federated round, from 1.
        present: Ids of the clients that are present, ascending.

    Returns:
        A share `fraction-train` of them, ascending; in the last round all of them, unless `last-round = sampled`.
    """
    count = max(1, round(config.fraction_train * len(present)))
    if config.trains_all(server_round) or count >= len(present):
        return present
    rng = numpy_generator(config.seed, "sampling", server_round)
    return [present[position] for position in sorted(rng.choice(len(present), count, replace=False).tolist())]


def evaluated(config: RunConfig, present: Sequence[int]) -> Sequence[int]:
    """Return the clients that evaluate the final global state; arguments are those of `trained`.

    Returns:
        All of them or, with `evaluate = N`, N drawn ones, ascending; the same ones whatever the number of rounds.
    """
    count = config.num_evaluated(len(present))
    if count == len(present):
        return present
    known = set(present)
    order = numpy_generator(config.seed, "evaluation").permutation(config.num_clients).tolist()
    # An order of all clients is drawn, so that a client that is away is replaced, and the other ones stay.
    return sorted([client for client in order if client in known][:count])


def standard_error(deviation: float, drawn: int, population: int) -> float | None:
    """Return the standard error of a mean over clients that were drawn without replacement.

    The variance of the mean of n of N values is (1 - n/N) s^2 / n with the sample variance s^2 (W. G. Cochran, Sampling
    Techniques, 3rd ed., 1977, theorem 2.2); the factor 1 - n/N is the finite-population correction.

    Args:
        deviation: Standard deviation of the drawn values, divided by their number (not by their number less 1).
        drawn: Number n of drawn values.
        population: Number N of values that they were drawn from, at least n.

    Returns:
        The error, 0 if all were drawn; None for a single value of several.
    """
    if drawn == population:
        return 0.0
    return deviation * math.sqrt((1 - drawn / population) / (drawn - 1)) if drawn > 1 else None


def honest_population(config: RunConfig, federation: Federation, absent: Collection[int]) -> int:
    """Return the number of clients that are present and whose numbers count: those of honest nodes.

    Args:
        config: The run's settings.
        federation: The nodes that are present.
        absent: Clients of nodes that are away.
    """
    if config.adversary.attack == "none" or not federation.nodes:
        return config.num_clients - len(absent)
    malicious = config.adversary.malicious_nodes(config.seed, federation.num_nodes)
    honest = [node for node in federation.nodes if node.partition not in malicious]
    return len({client for node in honest for client in node.clients}.difference(absent))
