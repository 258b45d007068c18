"""Show measurements as tables in Markdown, with the project's targets."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.deployed_load import Load
from benchmarks.deployed_round import PARTS, DeployedRounds
from benchmarks.first_round import ENGINES, Beginning, medians
from benchmarks.markdown import table
from benchmarks.private_steps import PrivateSteps
from benchmarks.rounds import ClientRounds, FederatedRounds, Timing
from benchmarks.secure_sums import SecureSums
from benchmarks.transport import Step
from benchmarks.workload import Workload
from hyperfl_flwr.core.plurals import counted

MEGABYTE, KILOBYTE = 1e6, 1e3

LARGE = 10_000_000
"""Least number of parameters of a hypernetwork."""

CLIENT_TARGETS = {(28, 100): "at most 1.5", (28, 50): "at most 1.75"}
"""Targets of the ratio of HyperFL's client round to FedAvg's plain loop, by image side and batch size."""

STEP_TARGETS = {("cnn", 28): "at most 2.2"}
"""Targets of the ratio of a noisy step to a plain one, by target network and image side."""

SECURE_TARGETS = {
    (20, True): ("at most 25", "at most 40", "at most 1.04"),
    (5, False): ("at most 800", "at most 1500", "at most 1.04"),
}
"""Targets of secure sums for a node, the server and the bytes, by number of nodes and whether the model is small."""

ROUND_TARGETS = {("hyperfl-frozen", 20): "at most 1.05", ("hyperfl", 5): "at most 1.25"}
"""Targets of the ratio of a secure round to a plain one, by method and number of nodes."""

DEPLOYED_TARGETS = {"hyperfl, digits": 5.0, "hyperfl, Fashion-MNIST": 10.0}
"""Targets of the seconds of a deployment's round with a worker, by name of the run."""

ONE_OF_10 = "HyperFL, ours, one of 10"
"""How the names of the variants with ten clients begin."""

Target = tuple[str, str, str]
"""What was measured, its target (`at most X`, `at least X`, or empty), and the number."""


def client_tables(rounds: Sequence[ClientRounds]) -> list[str]:
    """Return a table of one client's round for each workload."""
    parts = []
    for one in rounds:
        rows = [
            (
                timing.variant.name,
                f"{timing.cpu:.2f}",
                f"{timing.wall:.2f}",
                f"{timing.cpu_ratio:.2f}",
                _mb(timing.private),
                _loss(timing),
            )
            for timing in one.timings
        ]
        names = ["program", "CPU s", "wall s", "ratio", "memory MB", "loss"]
        parts += [f"### {title(one.work)}", table(names, rows, "lrrrrr")]
    return parts


def client_targets(rounds: Sequence[ClientRounds]) -> Iterable[Target]:
    """Yield the targets of one client's round."""
    for one in rounds:
        found = {timing.variant.name: timing for timing in one.timings}
        ours = found["HyperFL, ours"]
        target = CLIENT_TARGETS.get((one.work.shape[1], one.work.batch_size), "")
        yield f"HyperFL's client round to FedAvg's plain loop, {title(one.work)}", target, f"{ours.cpu_ratio:.2f}"
        slow = found["HyperFL, plain loop, default malloc"].cpu / ours.cpu
        yield f"HyperFL's plain loop with default malloc to ours, {title(one.work)}", "at least 4", f"{slow:.1f}"
        saved = 1e3 * (found[f"{ONE_OF_10}, one by one"].wall - found[f"{ONE_OF_10} in a cohort"].wall)
        yield f"ms less for a client in a cohort of ten, {title(one.work)}", "at least 110", f"{saved:.0f}"


def federated_tables(rounds: Sequence[FederatedRounds]) -> list[str]:
    """Return a table of a federated round for each workload."""
    names = ["program", "CPU s", "wall s", "CPU ratio", "overhead", "MB on the wire", "memory MB", "of the server"]
    parts = []
    for one in rounds:
        rows = [
            (
                timing.variant.name,
                f"{timing.cpu:.2f}",
                f"{timing.wall:.2f}",
                f"{timing.cpu_ratio:.2f}",
                "" if timing.overhead is None else f"{100 * timing.overhead:+.0f} %",
                _mb(timing.bytes) if timing.bytes else "",
                _mb(timing.private),
                _mb(timing.server_private) if timing.server_private else "",
                _loss(timing),
            )
            for timing in one.timings
        ]
        parts += [f"### {title(one.work)}, {one.work.clients} clients", table([*names, "loss"], rows, "lrrrrrrrr")]
    return parts


def federated_targets(rounds: Sequence[FederatedRounds]) -> Iterable[Target]:
    """Yield the targets of a federated round."""
    for one in rounds:
        found = {timing.variant.name: timing for timing in one.timings}
        ours, base = found["HyperFL, ours on Ray"], found["FedAvg, ours on Ray"]
        half = "HyperFL's federated round on Ray to half of the clients' summed times"
        yield f"{half}, {title(one.work)}", "at most 1.15", f"{1 + (ours.overhead or 0.0):.2f}"
        node = (ours.private - base.private) / one.size
        server = (ours.server_private - base.server_private) / one.size
        above = f"above FedAvg's at the end, in hypernetworks, {title(one.work)}"
        yield f"a node's memory {above}", "at most 9", f"{node:.1f}"
        yield f"the server's memory {above}", "at most 11", f"{server:.1f}"


def transport_tables(steps: Sequence[Step]) -> list[str]:
    """Return the table of the transport of a hypernetwork's arrays."""
    rows = [(step.name, f"{step.copies:.2f}", f"{1e3 * step.seconds:.1f}") for step in steps]
    return [table(["step", "copies", "ms"], rows, "lrr")]


def first_round_tables(beginnings: Mapping[str, Sequence[Beginning]]) -> list[str]:
    """Return a table of the first seconds of a run for each engine."""
    parts = []
    for engine, found in beginnings.items():
        parts += [ENGINES[engine], table(["program", "starts after s", "CPU s"], medians(found), "lrr")]
    return parts


def noisy_tables(steps: Sequence[PrivateSteps]) -> list[str]:
    """Return the table of noisy steps."""
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
    return [table(names, rows, "llrrrrrr")]


def secure_tables(found: SecureSums) -> list[str]:
    """Return the tables of secure sums: the cost of a step, and whole rounds."""
    costs = [
        (
            str(one.nodes),
            f"{one.parameters:,}",
            _ms(one.node),
            _ms(one.server),
            str(one.missing),
            _ms(one.server_missing),
            f"{one.up:.3f}",
            f"{one.question / KILOBYTE:.1f}",
            f"{one.answer / KILOBYTE:.1f}",
        )
        for one in found.costs
    ]
    names = ["nodes", "parameters", "node ms", "server ms", "missing", "server ms, missing", "bytes up"]
    rounds = [
        (
            one.method,
            str(one.nodes),
            f"{one.plain:.2f}",
            f"{one.secure:.2f}",
            f"{one.secure / one.plain:.2f}",
            ROUND_TARGETS.get((one.method, one.nodes), ""),
        )
        for one in found.rounds
    ]
    return [
        table([*names, "question kB", "answer kB"], costs, "rrrrrrrrr"),
        table(["method", "nodes", "plain s", "secure s", "ratio", "target"], rounds, "lrrrrr"),
    ]


def secure_targets(found: SecureSums) -> Iterable[Target]:
    """Yield the targets of secure sums."""
    for cost in found.costs:
        targets = SECURE_TARGETS.get((cost.nodes, cost.parameters < LARGE))
        if targets is not None:
            what = f"{cost.nodes} nodes with {cost.parameters:,} parameters"
            yield f"secure sums, CPU ms of a node, {what}", targets[0], _ms(cost.node)
            yield f"secure sums, CPU ms of the server, {what}", targets[1], _ms(max(cost.server, cost.server_missing))
            yield f"secure sums, bytes up to the plain reply's, {what}", targets[2], f"{cost.up:.3f}"
    for one in found.rounds:
        target = ROUND_TARGETS.get((one.method, one.nodes), "")
        yield f"secure round to a plain one, {one.method}, {one.nodes} nodes", target, f"{one.secure / one.plain:.2f}"


def deployed_targets(rounds: Sequence[DeployedRounds]) -> Iterable[Target]:
    """Yield the targets of a deployment's round."""
    for one in rounds:
        if one.name in DEPLOYED_TARGETS:
            seconds = f"{one.with_worker.round_seconds:.1f}"
            yield f"seconds of a deployment's round, {one.name}", f"at most {DEPLOYED_TARGETS[one.name]:g}", seconds


def deployed_tables(rounds: Sequence[DeployedRounds]) -> list[str]:
    """Return a table of a deployment's round for each run."""
    parts = []
    for one in rounds:
        profiles = (one.without_worker, one.with_worker)
        rows = [(text, *(f"{profile.parts[name]:.2f}" for profile in profiles)) for name, text in PARTS.items()]
        rows.append(("**round, at the server**", *(f"**{profile.round_seconds:.1f}**" for profile in profiles)))
        rows.append(("MB of a node's processes after the run", *(_mb(profile.memory) for profile in profiles)))
        parts += [f"### {one.name}", table(["seconds", "none", "worker"], rows)]
        if one.name in DEPLOYED_TARGETS:
            parts.append(f"Target: a round in at most {DEPLOYED_TARGETS[one.name]:g} s with a worker.")
    return parts


def load_tables(load: Load) -> list[str]:
    """Return the table of a SuperLink with many nodes."""
    rows = [
        ("nodes, rounds", f"{load.nodes}, {load.rounds}"),
        ("kB to and from each node in a round", f"{load.payload / KILOBYTE:.0f}"),
        ("rounds a minute", f"{60 / load.round_seconds:.1f}"),
        ("seconds of a round, median", f"{load.round_seconds:.1f}"),
        ("seconds of a round, longest", f"{load.longest_round:.1f}"),
        ("replies missing or wrong", f"{load.lost} of {load.nodes * load.rounds}"),
        ("the SuperLink's process, share of a core", f"{load.busy:.2f}"),
        ("memory of the SuperLink after round 1, MB", _mb(load.memory_start)),
        ("the same after the last round, MB", _mb(load.memory_end)),
        ("memory of a SuperNode, MB", _mb(load.node_memory)),
    ]
    return [table(["", ""], rows)]


def target_table(targets: Iterable[Target]) -> str:
    """Return the table of targets beside what was measured, those that are missed first."""
    rows = [(*target, _met(target)) for target in targets if target[1]]
    rows.sort(key=lambda row: row[-1] == "yes")
    return table(["what", "target", "measured", "met"], rows, "lrrl")


def _met(target: Target) -> str:
    """Return whether a measured number, as it is shown, meets its target."""
    _, bound, measured = target
    limit, value = float(bound.split()[-1]), float(measured)
    met = value <= limit if bound.startswith("at most") else value >= limit
    return "yes" if met else "**no**"


def title(work: Workload) -> str:
    """Return the heading of a workload."""
    shape, epochs = "x".join(map(str, work.shape)), counted(work.epochs, "epoch")
    return f"{shape}, {work.train} samples, batch {work.batch_size}, {epochs}"


def _mb(value: float) -> str:
    return f"{value / MEGABYTE:.0f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _loss(one: Timing) -> str:
    return f"{one.loss:.4f}"
