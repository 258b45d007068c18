"""Measure the robust rules on parameters of HyperFL's size: `python -m benchmarks.robust_rules --nodes 20`."""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.markdown import table
from benchmarks.workload import Workload, initial_arrays
from hyperfl_flwr.training.robust_rules import robust_mean

RULES = ("norm-bound", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median")

Arrays = Mapping[str, NDArray[Any]]


def drawn_nodes(sent: Arrays, number: int) -> list[Arrays]:
    """Return nodes of which each parameter has changed by a normal number of standard deviation 0.01."""
    rng = np.random.default_rng(0)
    return [
        {key: value + np.float32(0.01) * rng.standard_normal(value.shape, np.float32) for key, value in sent.items()}
        for _ in range(number)
    ]


def measured(rule: str, sent: Arrays, nodes: Sequence[Arrays]) -> tuple[float, int]:
    """Return the CPU seconds of a rule, and the peak in bytes of what it allocates, measured in a second call."""
    byzantine, began = len(nodes) // 5, time.process_time()
    robust_mean(rule, sent, nodes, byzantine)
    seconds = time.process_time() - began
    tracemalloc.start()
    try:
        robust_mean(rule, sent, nodes, byzantine)
        return seconds, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main(words: Sequence[str]) -> None:
    """Print a table of all rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--method", default="hyperfl")
    given = parser.parse_args(words)
    sent = initial_arrays(Workload(method=given.method, shape=(1, 28, 28)))
    nodes = drawn_nodes(sent, given.nodes)
    size = sum(value.size for value in sent.values())
    rows = [(rule, *measured(rule, sent, nodes)) for rule in RULES]
    shown = [(rule, f"{seconds:.1f}", f"{memory / 1e6:,.0f}") for rule, seconds, memory in rows]
    sys.stdout.write(f"{given.nodes} nodes with {size:,} parameters, {4e-6 * given.nodes * size:,.0f} MB\n\n")
    sys.stdout.write(table(["rule", "CPU seconds", "further MB"], shown) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
