"""Measures speed and prints tables: `make bench`, or `python -m benchmarks`; `--help` lists the options."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.clients import ClientTiming, measure_clients
from benchmarks.rounds import RoundTiming, measure_rounds
from experiments.flower import flower_environment
from hyperfl_flwr import manifest
from hyperfl_flwr.config import Scalar

CHILD = "HYPERFL_BENCHMARK_CHILD"
"""Set where this process has the environment of a simulation's processes already."""


def main() -> None:
    """Parse the command line, measure, print."""
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 110)
    for name, value in (manifest.hardware() | manifest.versions()).items():
        console.print(f"{name}: {value}", highlight=False)
    repetitions, epochs, samples = (2, 1, 200) if options.quick else (options.repetitions, 5, 600)
    table = _client_table(repetitions, epochs, samples)
    for timing in measure_clients(repetitions=repetitions, epochs=epochs, num_train=samples):
        _add_client(table, timing)
    console.print(table)
    changes = _federation(options)
    table = _round_table(changes)
    with tempfile.TemporaryDirectory() as folder:
        for method in ("fedavg", "hyperfl"):
            _add_round(table, measure_rounds(method, changes, Path(folder) / method, console.print))
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure speed; takes a few minutes.")
    parser.add_argument("--rounds", type=int, help="federated rounds of each run, at least 2 (default: 4, quick: 3)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each client round (default: 5, quick: 2)")
    parser.add_argument("--data-root", type=Path, help="folder with Fashion-MNIST; without it, digits")
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute; says little about speed")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 3 if options.quick else 4
    if options.rounds < 2 or options.repetitions < 1:
        parser.error(f"--rounds must be at least 2 and --repetitions 1, got {options.rounds} and {options.repetitions}")
    return options


def _federation(options: argparse.Namespace) -> dict[str, Scalar]:
    changes: dict[str, Scalar] = {"num-rounds": options.rounds, "num-clients": 20, "checkpoint-every": options.rounds}
    if options.data_root:
        changes |= {"dataset": "fashion-mnist", "data-root": str(options.data_root.absolute())}
        changes |= {"data.train-samples": 600, "data.test-samples": 600}
    if options.quick:
        changes |= {"num-clients": 4, "local-epochs": 1}
    return changes


def _client_table(repetitions: int, epochs: int, samples: int) -> Table:
    table = Table(title=f"One client's round: {samples} samples, batch 50, {epochs} epoch(s), medians of {repetitions}")
    for name in ("method", "images", "ours CPU s", "plain CPU s", "ratio", "ours wall s", "plain wall s", "ratio"):
        table.add_column(name, justify="left" if name in ("method", "images") else "right")
    table.add_column("loss differs", justify="right")
    return table


def _add_client(table: Table, timing: ClientTiming) -> None:
    numbers = (timing.ours_cpu, timing.plain_cpu, timing.cpu_ratio, timing.ours_wall, timing.plain_wall)
    cells = [f"{number:.2f}" for number in (*numbers, timing.wall_ratio)]
    shape = "x".join(str(size) for size in timing.shape)
    table.add_row(timing.method, shape, *cells, f"{timing.loss_difference:.0e}")


def _round_table(changes: dict[str, Scalar]) -> Table:
    shown = ", ".join(
        f"{key} {value}" for key, value in changes.items() if key not in ("data-root", "checkpoint-every")
    )
    table = Table(title=f"A federated round on Flower's engine: {shown}; medians after the first round")
    table.add_column("method")
    for name in ("actors", "first round s", "round s", "clients' sum s", "sum / actors s", "overhead"):
        table.add_column(name, justify="right")
    return table


def _add_round(table: Table, timing: RoundTiming) -> None:
    numbers = (timing.first_seconds, timing.seconds, timing.client_seconds, timing.client_seconds / timing.actors)
    cells = [f"{number:.2f}" for number in numbers]
    table.add_row(timing.method, str(timing.actors), *cells, f"{timing.overhead:+.0%}")


def _in_the_environment_of_a_run() -> None:
    """Start this command again with the environment of a simulation's processes: threads and memory allocator.

    The C library reads the allocator's settings once, when a process starts.
    """
    temporary = Path(tempfile.gettempdir())
    wanted = flower_environment(temporary, temporary)
    names = [name for name in wanted if name.startswith("MALLOC_") or name.endswith("_NUM_THREADS")]
    environment = {**os.environ, **{name: wanted[name] for name in names}, CHILD: "1"}
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], environment)  # noqa: S606


if __name__ == "__main__":
    if CHILD not in os.environ:
        _in_the_environment_of_a_run()
    main()
