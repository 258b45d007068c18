"""Measure speed and memory, and write docs/results/performance.md: `make bench`, or `python -m benchmarks`."""

import argparse
import dataclasses
import sys
from pathlib import Path

from benchmarks.deployed_load import measure_load
from benchmarks.deployed_report import load_parts, round_parts
from benchmarks.deployed_round import DeployedWork, Profile, measure_deployed
from benchmarks.first_round import ENGINES, Beginning, measure_beginning
from benchmarks.measure import (
    SLOW_ROUNDS,
    Timing,
    measure_clients,
    measure_federations,
    measure_private,
    measure_secure,
    measure_secure_rounds,
    measure_transport,
)
from benchmarks.private_steps import PrivateSteps
from benchmarks.report import Results, client_parts, first_round_parts, private_parts, render, secure_parts
from benchmarks.workload import Workload
from hyperfl_flwr import ROOT
from hyperfl_flwr.core.versions import versions
from hyperfl_flwr.launch.app_bundle import commit
from hyperfl_flwr.runs import manifest

SMALL, LARGE = (1, 28, 28), (3, 32, 32)
"""Image shapes of HyperFL's experiments."""

CLIENT_WORK = (
    Workload(method="hyperfl", shape=SMALL, train=1000, batch_size=100),
    Workload(method="hyperfl", shape=SMALL),
    Workload(method="hyperfl", shape=LARGE),
)
FEDERATED_WORK = (Workload(method="hyperfl", shape=SMALL), Workload(method="hyperfl", shape=LARGE))

PRIVATE_WORK = (
    ("cnn", Workload(method="fedavg", shape=SMALL)),
    ("cnn", Workload(method="fedavg", shape=LARGE)),
    ("lenet", Workload(method="fedavg", shape=LARGE)),
)

SECURE_WORK = tuple(
    (Workload(method=method, shape=SMALL), num_nodes)
    for method, num_nodes in (("hyperfl-frozen", 5), ("hyperfl-frozen", 20), ("hyperfl-frozen", 100), ("hyperfl", 5))
)

SECURE_ROUNDS = (
    Workload(method="hyperfl-frozen", shape=SMALL, clients=20),
    Workload(method="hyperfl", shape=SMALL, clients=5),
)

DEPLOYED_WORK = (
    DeployedWork(name="hyperfl, digits", settings=(("method", "hyperfl"), ("dataset", "digits"))),
    DeployedWork(name="hyperfl, Fashion-MNIST", settings=(("method", "hyperfl"), ("dataset", "fashion-mnist"))),
)
"""Runs of a deployment; each has the sizes of HyperFL's experiments."""

DEPLOYED_ROUNDS = 6
"""Number of rounds of a deployment's run, of which the first is not counted."""

LOAD_NODES, LOAD_ROUNDS = 50, 20
"""Number of SuperNodes and of rounds in the load test of a SuperLink."""


def main() -> None:
    """Parse the command line, measure, and write and print the page."""
    options = _options()

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def quick_version(work: Workload) -> Workload:
        return dataclasses.replace(work, train=100, test=50, epochs=1, clients=4) if options.quick else work

    def noisy_steps() -> list[PrivateSteps]:
        return [
            measure_private(quick_version(work), target, options.repetitions, note) for target, work in PRIVATE_WORK
        ]

    def client_rounds() -> dict[Workload, list[Timing]]:
        return {work: measure_clients(work, options.repetitions, note) for work in map(quick_version, CLIENT_WORK)}

    def deployed() -> dict[DeployedWork, dict[bool, Profile]]:
        works = [dataclasses.replace(work, data_root=options.data_root) for work in DEPLOYED_WORK]
        return {
            work: {
                worker: measure_deployed(work, worker=worker, num_rounds=DEPLOYED_ROUNDS, note=note)
                for worker in (False, True)
            }
            for work in works
        }

    def load(num_nodes: int) -> list[str]:
        return load_parts(measure_load(num_nodes, LOAD_ROUNDS, note))

    if options.deployed_round:
        print("\n\n".join(round_parts(deployed(), DEPLOYED_ROUNDS)))
        return
    if options.deployed_load:
        print("\n\n".join(load(options.deployed_load)))
        return
    if options.private_steps:
        print("\n\n".join(private_parts(noisy_steps())))
        return
    if options.client_rounds:
        print("\n\n".join(client_parts(client_rounds(), options.repetitions)))
        return
    note("the first seconds of a run")
    beginnings: dict[str, list[Beginning]] = {engine: [] for engine in ENGINES}
    for _ in range(options.repetitions):
        for engine, found in beginnings.items():
            found.append(measure_beginning(engine))
    if options.first_round:
        print("\n\n".join(first_round_parts(beginnings)))
        return
    secure = [measure_secure(work, num_nodes, note) for work, num_nodes in SECURE_WORK]
    num_rounds = min(options.rounds, SLOW_ROUNDS)
    secure_rounds = {work: measure_secure_rounds(quick_version(work), num_rounds, note) for work in SECURE_ROUNDS}
    if options.secure_sums:
        print("\n\n".join(secure_parts(secure, secure_rounds)))
        return
    federated = [quick_version(work) for work in FEDERATED_WORK]
    results = Results(
        circumstances=_circumstances(),
        command=_command(options),
        repetitions=options.repetitions,
        rounds=options.rounds,
        clients=client_rounds(),
        federations={work: list(measure_federations(work, options.rounds, note)) for work in federated},
        transport=measure_transport(federated[0]),
        secure=secure,
        secure_rounds=secure_rounds,
        private=noisy_steps(),
        deployed=() if options.quick else [*round_parts(deployed(), DEPLOYED_ROUNDS), *load(LOAD_NODES)],
        beginnings=beginnings,
    )
    page = render(results)
    print(page)
    if options.output is not None:
        options.output.write_text(page)


def _circumstances() -> dict[str, str]:
    values: dict[str, object] = {"commit": commit() or "unknown", **manifest.hardware(), **versions()}
    return {
        name: ", ".join(value) or "none" if isinstance(value, list) else str(value) for name, value in values.items()
    }


def _command(options: argparse.Namespace) -> str:
    """Return the command that repeats the measurement, without its output file."""
    sizes = f"--rounds {options.rounds} --repetitions {options.repetitions}"
    return f'make bench ARGS="{sizes}{" --quick" if options.quick else ""}"'


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure speed and memory.")
    parser.add_argument("--rounds", type=int, help="federated rounds of each run, at least 3 (default: 11, quick: 3)")
    parser.add_argument("--repetitions", type=int, help="measurements of each client round (default: 7, quick: 2)")
    parser.add_argument("--output", type=Path, help="file to write (default: docs/results/performance.md, quick: none)")
    parser.add_argument("--quick", action="store_true", help="use small sizes (four minutes); not meaningful for speed")
    parser.add_argument("--first-round", action="store_true", help="measure only a run's first seconds, and print them")
    parser.add_argument("--client-rounds", action="store_true", help="measure only single clients' rounds, and print")
    parser.add_argument("--secure-sums", action="store_true", help="measure only secure sums, and print that section")
    parser.add_argument("--private-steps", action="store_true", help="measure only noisy steps, and print that section")
    parser.add_argument("--deployed-round", action="store_true", help="measure only a deployment's rounds, and print")
    parser.add_argument(
        "--deployed-load", type=int, nargs="?", const=LOAD_NODES, metavar="NODES",
        help="measure only a SuperLink with many nodes (default: 50), and print",
    )  # fmt: skip
    parser.add_argument("--data-root", default="", help="folder of Fashion-MNIST (default: your cache folder)")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 11)
    options.repetitions = options.repetitions or (2 if options.quick else 7)
    if options.output is None and not options.quick:
        options.output = ROOT / "docs" / "results" / "performance.md"
    if options.rounds < 3 or options.repetitions < 1:
        parser.error(f"--rounds must be at least 3 and --repetitions 1, got {options.rounds} and {options.repetitions}")
    return options


if __name__ == "__main__":
    main()
