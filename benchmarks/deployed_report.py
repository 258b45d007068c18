"""The sections of docs/results/performance.md on deployments."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.deployed_load import Load
from benchmarks.deployed_round import PARTS, DeployedWork, Profile
from benchmarks.markdown import table
from benchmarks.markdown import text as paragraph

TARGETS = {"hyperfl, digits": 5.0, "hyperfl, Fashion-MNIST": 10.0}
"""Targets of the seconds of a round with a worker, by name of the run."""

NAMES = {False: "without a worker", True: "with one"}
"""Names of nodes by whether they have a worker."""


def round_parts(profiles: Mapping[DeployedWork, Mapping[bool, Profile]], num_rounds: int) -> list[str]:
    """Return the section on rounds of a deployment, by whether the nodes have a worker."""
    text = f"""Two nodes of one client each, the SuperLink and the nodes as separate programs on this machine, with TLS
        and authentication; {num_rounds} rounds, medians without the first. *Worker* is `worker = "auto"` in node.toml,
        the default; *none* is `"off"`, with which each message starts a new interpreter. The parts are those of a
        training message on its node, from one reply to the next, found in the time at which Flower's programs log their
        steps; the nodes are not equally fast, so the parts do not add up to the round."""
    parts = ["## A deployment's round", paragraph(text)]
    for work, found in profiles.items():
        memory = " and ".join(f"{found[worker].memory / 1e6:.0f} MB {name}" for worker, name in NAMES.items())
        parts += [
            f"### {work.name}",
            f"Target: a round in at most {TARGETS[work.name]:g} s with a worker.",
            table(["seconds", "none", "worker"], _rows(found)),
            f"When the run is over, all processes of a node take {memory}, shared pages divided.",
        ]
    return parts


def _rows(found: Mapping[bool, Profile]) -> Iterable[tuple[Any, ...]]:
    for name, text in PARTS.items():
        yield (text, *(f"{found[worker].parts[name]:.2f}" for worker in (False, True)))
    yield ("**round, at the server**", *(f"**{found[worker].round_seconds:.1f}**" for worker in (False, True)))


def load_parts(load: Load) -> list[str]:
    """Return the section on a SuperLink with many nodes."""
    text = f"""A SuperLink and {load.nodes} SuperNodes on this machine, with TLS and authentication. In each of
        {load.rounds} rounds every node receives {load.payload / 1e3:.0f} kB, its client sleeps {load.sleep:g} s, and it
        sends as much back. The processes of all nodes' messages share the machine's cores with the SuperLink, so that
        it could serve faster than these figures say."""
    rows = [
        ("rounds a minute", f"{60 / load.round_seconds:.1f}"),
        ("seconds of a round, median", f"{load.round_seconds:.1f}"),
        ("seconds of a round, longest", f"{load.longest_round:.1f}"),
        ("replies missing or wrong", f"{load.lost} of {load.nodes * load.rounds}"),
        ("the SuperLink's process, share of a core", f"{load.busy:.2f}"),
        ("memory of the SuperLink after round 1, MB", f"{load.memory_start / 1e6:.0f}"),
        ("the same after the last round, MB", f"{load.memory_end / 1e6:.0f}"),
        ("memory of a SuperNode, MB", f"{load.node_memory / 1e6:.0f}"),
    ]
    return ["## A SuperLink with many nodes", paragraph(text), table(["", ""], rows)]
