"""Measure what the robust rules cost the server, on parameters of HyperFL's size."""

import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.markdown import table
from benchmarks.measure import Note
from benchmarks.workload import Workload, initial_arrays
from hyperfl_flwr.training.robust_rules import robust_mean

RULES = ("norm-bound", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median")

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class RuleCost:
    """What a rule costs in a round.

    Attributes:
        rule: Its name, see the setting `robust.reduction`.
        seconds: CPU seconds on one core, the median.
        memory: Bytes that it allocates at most, besides the parameters of all nodes.
    """

    rule: str
    seconds: float
    memory: int


@dataclass(frozen=True, kw_only=True)
class RobustRules:
    """The costs of all rules.

    Attributes:
        nodes: Number of nodes, of which a fifth may be malicious.
        parameters: Number of parameters of a node.
        costs: The rules' costs.
    """

    nodes: int
    parameters: int
    costs: Sequence[RuleCost]


def measure_rules(work: Workload, num_nodes: int, repetitions: int, note: Note = print) -> RobustRules:
    """Measure all rules on the parameters of a method, of which each has changed by a normal number.

    Args:
        work: The method and the shape of an image.
        num_nodes: Number of nodes.
        repetitions: Number of measurements of the time.
        note: Receives a line for each rule.
    """
    sent = initial_arrays(work)
    nodes = drawn_nodes(sent, num_nodes)
    costs = []
    for rule in RULES:
        note(f"robust rules: {rule}")
        costs.append(measure_rule(rule, sent, nodes, repetitions))
    return RobustRules(nodes=num_nodes, parameters=sum(value.size for value in sent.values()), costs=costs)


def drawn_nodes(sent: Arrays, number: int) -> list[Arrays]:
    """Return nodes of which each parameter has changed by a normal number of standard deviation 0.01."""
    rng = np.random.default_rng(0)
    return [
        {key: value + np.float32(0.01) * rng.standard_normal(value.shape, np.float32) for key, value in sent.items()}
        for _ in range(number)
    ]


def measure_rule(rule: str, sent: Arrays, nodes: Sequence[Arrays], repetitions: int) -> RuleCost:
    """Measure one rule; its memory is that of a further call."""
    byzantine, times = len(nodes) // 5, []
    for _ in range(repetitions):
        began = time.process_time()
        robust_mean(rule, sent, nodes, byzantine)
        times.append(time.process_time() - began)
    tracemalloc.start()
    try:
        robust_mean(rule, sent, nodes, byzantine)
        return RuleCost(rule=rule, seconds=float(np.median(times)), memory=tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def rule_tables(found: RobustRules) -> list[str]:
    """Return the table of the rules' costs."""
    size = 4e-6 * found.nodes * found.parameters
    rows = [(f"`{one.rule}`", f"{one.seconds:.1f}", f"{one.memory / 1e6:,.0f}") for one in found.costs]
    return [
        f"{found.nodes} nodes with {found.parameters:,} parameters, {size:,.0f} MB:",
        table(["rule", "CPU seconds", "further MB"], rows),
    ]
