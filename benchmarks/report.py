"""Render the measurements as docs/results/performance.md."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.first_round import ENGINES, SECTION, Beginning, medians
from benchmarks.markdown import table, text
from benchmarks.measure import SLOW_ROUNDS, Timing
from benchmarks.private_steps import PrivateSteps
from benchmarks.secure_rounds import SecureRound
from benchmarks.secure_sums import SecureCost
from benchmarks.transport import Step
from benchmarks.workload import Workload, initial_arrays

MEGABYTE, KILOBYTE = 1e6, 1e3

LARGE = 10_000_000
"""Least number of parameters of a hypernetwork."""

SECURE_TARGETS = {
    (20, True): ("at most 25", "at most 40", "at most 1.04"),
    (5, False): ("at most 800", "at most 1500", "at most 1.04"),
}
"""Targets of secure sums for a node, the server and the bytes, by number of nodes and whether the model is small."""

STEP_TARGETS = {("cnn", 28): "at most 2.2"}
"""Targets of the ratio of a noisy step to a plain one, by target network and image side."""

ROUND_TARGETS = {("hyperfl-frozen", 20): "at most 1.05", ("hyperfl", 5): "at most 1.25"}
"""Targets of the ratio of a secure round to a plain one, by method and number of nodes."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """All measurements, with the circumstances in which they were made.

    Attributes:
        circumstances: Hardware and versions by name.
        command: Command that repeats the measurements.
        repetitions: Number of measurements of each client round.
        rounds: Number of rounds of each federation, including the first.
        clients: Timings of one client's round, by workload.
        federations: Timings of a federated round, by workload.
        transport: Steps of the transport of HyperFL's arrays, at the shape of the first workload.
        secure: Costs of secure sums, by number of nodes and of parameters.
        secure_rounds: Rounds with secure sums and plain ones, by workload; each node hosts one client.
        private: Noisy steps and plain ones.
        deployed: The sections on deployments.
        beginnings: First seconds of some runs with each engine.
    """

    circumstances: Mapping[str, str]
    command: str
    repetitions: int
    rounds: int
    clients: Mapping[Workload, Sequence[Timing]]
    federations: Mapping[Workload, Sequence[Timing]]
    transport: Sequence[Step]
    secure: Sequence[SecureCost]
    secure_rounds: Mapping[Workload, SecureRound]
    private: Sequence[PrivateSteps]
    deployed: Sequence[str] = ()
    beginnings: Mapping[str, Sequence[Beginning]] = field(default_factory=dict)


def render(results: Results) -> str:
    """Return the page in Markdown."""
    parts = [
        "# Performance",
        text(
            f"""Written by `{results.command}`: medians and ratios of one run, every process on one thread. *Plain loop*
            is the same training in plain PyTorch, as one would write it without this project (benchmarks/plain.py).
            *Default malloc* is glibc's own behaviour: freed blocks of 60 MB go back to the system, which zeroes them
            page by page at the next use; all other programs keep them, as `hyperfl run` does. Equal losses show that
            the programs did the same work."""
        ),
        table(["", ""], results.circumstances.items(), "ll"),
        "## Targets",
        table(["what", "target", "measured"], _targets(results), "lrr"),
        *client_parts(results.clients, results.repetitions),
    ]
    parts += [
        "## A federated round",
        text(
            f"""All clients trained and averaged, {results.rounds} rounds (plain loops {SLOW_ROUNDS} at most), medians
            without the first. *Ours* is the project with two nodes in one process (the in-process grid), *ours on Ray*
            is `hyperfl run --num-nodes 2`: two processes train, a third is the server; its CPU time is the mean of the
            rounds and has all of Flower's and Ray's processes in it. *Overhead* is the wall time above half of the
            clients' summed times. Memory: private, on Ray of a node's whole process, which keeps what its busiest
            moment needed: the target network's activations and the hypernetwork's matrices take turns in it. The loss
            is that of round {min(results.rounds, SLOW_ROUNDS)}."""
        ),
    ]
    for work, timings in results.federations.items():
        parts += [f"### {_title(work)}, {work.clients} clients", _federation_table(timings)]
    parts += [
        "## Transport",
        text(
            """Steps in the transport of a hypernetwork's arrays: peak memory beyond the arrays themselves, in copies of
            them, and time. Replies are fetched one by one in the order of the nodes
            and added in place, so that the server holds the sum, in float64, and the reply in hand, however many nodes
            there are. A reply of several clients is a sum, too, and one of a single client its arrays in float32.
            (Replies that have come before their turn wait with Flower: in a simulation in the server's process too.)"""
        ),
        table(
            ["step", "copies", "ms"],
            [(step.name, f"{step.copies:.2f}", f"{1e3 * step.seconds:.1f}") for step in results.transport],
            "lrr",
        ),
        *first_round_parts(results.beginnings),
        *private_parts(results.private),
        *secure_parts(results.secure, results.secure_rounds),
        *results.deployed,
    ]
    return "\n\n".join(parts) + "\n"


def client_parts(clients: Mapping[Workload, Sequence[Timing]], repetitions: int) -> list[str]:
    """Return the section on one client's round, from `repetitions` measurements of each program."""
    parts = [
        "## One client's round",
        text(
            f"""Load what was received, evaluate, train, evaluate, and (ours) store the private parameters. Medians of
            {repetitions}, the programs taking turns; *ratio* is the CPU time to that of FedAvg's plain loop in the same
            turn. Memory: private, after the rounds, above that of a process that has imported torch and the project.
            *One of 10 in a cohort* is a tenth of the time in which a node trains ten clients together and sums their
            uploads, and the memory and mean loss of all ten; *one by one* is the same with `cohort = one-by-one`."""
        ),
    ]
    for work, timings in clients.items():
        parts += [f"### {_title(work)}", _client_table(timings)]
    return parts


def first_round_parts(beginnings: Mapping[str, Sequence[Beginning]]) -> list[str]:
    """Return the section on the first seconds of a run with each engine; nothing if none was measured."""
    if not beginnings:
        return []
    parts = ["## The first seconds of a run", text(SECTION.format(number=len(next(iter(beginnings.values())))))]
    for engine, found in beginnings.items():
        parts += [ENGINES[engine], table(["program", "starts after s", "CPU s"], medians(found), "lrr")]
    return parts


def private_parts(steps: Sequence[PrivateSteps]) -> list[str]:
    """Return the section on noisy steps."""
    rows = [
        (
            one.target,
            "x".join(map(str, one.shape)),
            f"{one.parameters:,}",
            _ms(one.plain),
            _ms(one.noisy),
            f"{one.ratio:.2f}",
            f"{one.vmap_ratio:.2f}",
            STEP_TARGETS.get((one.target, one.shape[1]), ""),
        )
        for one in steps
    ]
    names = ["target", "image", "parameters", "plain ms", "noisy ms", "ratio", "ratio, vmap", "target ratio"]
    return [
        "## Noisy steps",
        text(
            """CPU time of a step of local training with differential privacy for single records (`dp.epsilon`) and of a
            plain one, over rounds of 60 steps with 50 samples on average that take turns; *ratio* is the median over
            pairs of rounds. A noisy step draws a Poisson batch, clips the gradient of every sample, and adds noise.
            *vmap*: the same network with one more parameter that has no closed form."""
        ),
        table(names, rows, "llrrrrrr"),
    ]


def secure_parts(costs: Sequence[SecureCost], rounds: Mapping[Workload, SecureRound]) -> list[str]:
    """Return the section on secure sums."""
    return [
        "## Secure sums",
        text(
            """CPU time that secure sums take in a training step besides training, with one client on each node: medians
            over the nodes, and over five openings by the server. A node checks the header and the arrays, encodes,
            masks, and answers the question for shares. The server reads all replies and opens the sum. *Missing*: the
            largest number of nodes that may drop out, of which the server removes the masks. *Bytes up*: all that a
            node sends, relative to its parameters in a plain reply."""
        ),
        _secure_table(costs),
        text(
            """Whole rounds of one client on each node, all in one process, against the same rounds without secure sums;
            three runs of each take turns, medians of the wall seconds without the first rounds:"""
        ),
        table(
            ["method", "nodes", "plain s", "secure s", "ratio", "target"],
            [
                (
                    work.method,
                    str(work.clients),
                    f"{one.plain:.2f}",
                    f"{one.secure:.2f}",
                    f"{one.secure / one.plain:.2f}",
                    ROUND_TARGETS.get((work.method, work.clients), ""),
                )
                for work, one in rounds.items()
            ],
            "lrrrrr",
        ),
    ]


def _client_table(timings: Sequence[Timing]) -> str:
    rows = [
        (one.variant.name, f"{one.cpu:.2f}", f"{one.wall:.2f}", f"{one.cpu_ratio:.2f}", _mb(one.private), _loss(one))
        for one in timings
    ]
    return table(["program", "CPU s", "wall s", "ratio", "memory MB", "loss"], rows, "lrrrrr")


def _federation_table(timings: Sequence[Timing]) -> str:
    rows = [
        (
            one.variant.name,
            f"{one.cpu:.2f}",
            f"{one.wall:.2f}",
            f"{one.cpu_ratio:.2f}",
            "" if math.isnan(one.overhead) else f"{100 * one.overhead:+.0f} %",
            _mb(one.bytes) if one.bytes else "",
            _mb(one.private),
            _mb(one.server_private) if one.server_private else "",
            _loss(one),
        )
        for one in timings
    ]
    names = ["program", "CPU s", "wall s", "CPU ratio", "overhead", "MB on the wire", "memory MB", "of the server"]
    return table([*names, "loss"], rows, "lrrrrrrrr")


def _secure_table(costs: Sequence[SecureCost]) -> str:
    rows = [
        (
            str(one.nodes),
            f"{one.parameters:,}",
            _ms(one.node),
            _ms(one.server),
            str(one.missing),
            _ms(one.server_missing),
            f"{one.up:.4f}",
            f"{one.question / KILOBYTE:.1f}",
            f"{one.answer / KILOBYTE:.1f}",
        )
        for one in costs
    ]
    names = ["nodes", "parameters", "node ms", "server ms", "missing", "server ms, missing", "bytes up"]
    return table([*names, "question kB", "answer kB"], rows, "rrrrrrrrr")


def _targets(results: Results) -> Iterable[tuple[str, str, str]]:
    for work, timings in results.clients.items():
        found = {one.variant.name: one for one in timings}
        ours = found["HyperFL, ours"]
        target = {(28, 100): "at most 1.5", (28, 50): "at most 1.75"}.get((work.shape[1], work.batch_size), "")
        yield f"HyperFL's client round to FedAvg's plain loop, {_title(work)}", target, f"{ours.cpu_ratio:.2f}"
        slow = found["HyperFL, plain loop, default malloc"].cpu / ours.cpu
        yield f"HyperFL's plain loop with default malloc to ours, {_title(work)}", "at least 4", f"{slow:.1f}"
    for work, timings in results.federations.items():
        found = {one.variant.name: one for one in timings}
        ours, base = found["HyperFL, ours on Ray"], found["FedAvg, ours on Ray"]
        size = sum(value.nbytes for value in initial_arrays(work).values())
        half = "HyperFL's federated round on Ray to half of the clients' summed times"
        yield f"{half}, {_title(work)}", "at most 1.15", f"{1 + ours.overhead:.2f}"
        node, server = (ours.private - base.private) / size, (ours.server_private - base.server_private) / size
        above = f"above FedAvg's after {results.rounds} rounds, in hypernetworks, {_title(work)}"
        yield f"a node's memory {above}", "at most 9", f"{node:.1f}"
        yield f"the server's memory {above}", "at most 11", f"{server:.1f}"
    for step in results.private:
        what = f"a noisy step to a plain one, {step.target}, {'x'.join(map(str, step.shape))}"
        yield what, STEP_TARGETS.get((step.target, step.shape[1]), ""), f"{step.ratio:.2f}"
    for cost in results.secure:
        what = f"{cost.nodes} nodes with {cost.parameters:,} parameters"
        targets = SECURE_TARGETS.get((cost.nodes, cost.parameters < LARGE), ("", "", ""))
        yield f"secure sums, CPU ms of a node, {what}", targets[0], _ms(cost.node)
        yield f"secure sums, CPU ms of the server, {what}", targets[1], _ms(max(cost.server, cost.server_missing))
        yield f"secure sums, bytes up to the plain reply's, {what}", targets[2], f"{cost.up:.4f}"


def _title(work: Workload) -> str:
    return f"{'x'.join(map(str, work.shape))}, {work.train} samples, batch {work.batch_size}, {work.epochs} epoch(s)"


def _mb(value: float) -> str:
    return f"{value / MEGABYTE:.0f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _loss(one: Timing) -> str:
    return f"{one.loss:.4f}"
