"""Thresholds of secure sums, and the smallest crowd that a malicious server can reduce a sum to.

Of n nodes in a step, c may collude with the server. The secrets of an upload are shared among all n nodes, and t shares
determine one. With 2t > n + c, no two disjoint groups of honest nodes can complete t shares, so the server cannot open
both secrets of one upload, whatever it says to whom. It can still tell some nodes that others have dropped out. To cut
an honest node out of the sum, it must tell this to at least t - c honest nodes, and each of these accepts at most n - t
such nodes. So an opened sum covers at least

    G = n - c - floor((n - c) (n - t) / (t - c))

honest nodes. `tests/unit/test_secure_views.py` enumerates all that a server can say to few nodes.
"""

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.plurals import counted

MOST_NODES = 100
"""Largest number of nodes of a step: every node shares its secrets with all others.

Graphs in which a node has fewer neighbours (Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead", CCS 2020) need a server that follows the protocol: a malicious one says that all neighbours of a node are
gone, and opens its upload."""

USUAL_CROWD = 3
"""Default of the least number of honest nodes in an opened sum."""


def usual_colluding(num_nodes: int) -> int:
    """Return the number of nodes that may collude with the server if nobody has chosen it: below a third.

    Args:
        num_nodes: Number of all nodes of the federation, also of absent ones.
    """
    return (num_nodes - 1) // 3


def crowd(num_nodes: int, threshold: int, colluding: int) -> int:
    """Return the least number G of honest nodes in a sum that a malicious server can open; 0 if it can open an upload.

    Args:
        num_nodes: Number n of nodes in the step.
        threshold: Number t of shares that determine a secret.
        colluding: Number c of nodes that collude with the server.
    """
    if not colluding < threshold <= num_nodes or 2 * threshold <= num_nodes + colluding:
        return 0
    honest = num_nodes - colluding
    return max(0, honest - honest * (num_nodes - threshold) // (threshold - colluding))


def unknown_nodes(num_nodes: int, threshold: int, colluding: int) -> int:
    """Return how many nodes' parts in an opened sum an attacker does not know at least; 0 if it can know all.

    A malicious server and the nodes that collude with it know all but those of the `crowd`. Any other node that sees an
    honest server's sum, of t nodes at least, knows its own.

    Args:
        num_nodes: Number n of nodes in the step.
        threshold: Number t of shares that determine a secret.
        colluding: Number c of nodes that collude with the server.
    """
    return min(crowd(num_nodes, threshold, colluding), threshold - 1)


def smallest_threshold(num_nodes: int, colluding: int, min_cohort: int = USUAL_CROWD) -> int:
    """Return the least threshold t that leaves a crowd of `min_cohort` honest nodes, and of half of the honest ones.

    The smaller t is, the more nodes may drop out in a step: n - t.

    Args:
        num_nodes: Number n of nodes in the step.
        colluding: Number c of nodes that may collude with the server.
        min_cohort: Least number of honest nodes in an opened sum.

    Raises:
        ConfigError: If no threshold does.
    """
    wanted = max(min_cohort, -(-(num_nodes - colluding) // 2))
    for threshold in range(colluding + 1, num_nodes + 1):
        if crowd(num_nodes, threshold, colluding) >= wanted:
            return threshold
    raise ConfigError(
        f"a secure sum of {counted(num_nodes, 'node')}, {colluding} of which may collude with the server, cannot cover "
        f"{min_cohort} honest nodes; start more nodes (in a simulation: --num-nodes), or lower secagg.min-cohort, to 2 "
        f"at least, or secagg.colluding"
    )


def check_threshold(num_nodes: int, threshold: int, colluding: int, min_cohort: int = USUAL_CROWD) -> None:
    """Check a threshold that somebody has chosen; arguments as for `crowd` and `smallest_threshold`.

    Raises:
        ConfigError: If a sum that a malicious server can open has fewer than `min_cohort` honest nodes.
    """
    if (covered := crowd(num_nodes, threshold, colluding)) < min_cohort:
        raise ConfigError(
            f"a secure sum of {counted(num_nodes, 'node')} with the threshold {threshold}, {colluding} of which may "
            f"collude with the server, covers {covered} honest nodes at least, but {min_cohort} are required; choose "
            f"another secagg.threshold (auto takes the least possible one), or start more nodes"
        )


def fewest_nodes(colluding: int, min_cohort: int = USUAL_CROWD) -> int:
    """Return the least number of nodes for which there is a threshold; arguments as for `smallest_threshold`."""
    # With all n shares needed, no view can be split, and the crowd is all n - c honest nodes.
    return max(2, colluding + min_cohort)
