"""The sections of the benchmark: what each measures, and the tables that show it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from benchmarks import tables
from benchmarks.deployed_load import Load, measure_load
from benchmarks.deployed_round import DeployedRounds, DeployedWork, measure_deployed
from benchmarks.first_round import ENGINES, Beginning, measure_beginning
from benchmarks.measure import Note, measure_private, measure_secure, measure_secure_rounds, measure_transport
from benchmarks.method_rounds import MethodRounds, measure_methods, method_tables
from benchmarks.node_checks import CheckedNetworks, check_tables, measure_checks
from benchmarks.private_steps import PrivateSteps
from benchmarks.quickstart import QuickstartRun, measure_quickstart, quickstart_tables
from benchmarks.robust_rules import RobustRules, measure_rules, rule_tables
from benchmarks.rounds import SLOW_ROUNDS, ClientRounds, FederatedRounds, measure_clients, measure_federations
from benchmarks.secure_sums import SecureSums
from benchmarks.tables import Target
from benchmarks.transport import Step
from benchmarks.workload import Workload
from hyperfl_flwr.methods import METHODS

SMALL, LARGE = (1, 28, 28), (3, 32, 32)
"""Image shapes of HyperFL's experiments."""

CLIENT_WORK = (
    Workload(method="hyperfl", shape=SMALL, train=1000, batch_size=100),
    Workload(method="hyperfl", shape=SMALL),
    Workload(method="hyperfl", shape=LARGE),
)
FEDERATED_WORK = (Workload(method="hyperfl", shape=SMALL), Workload(method="hyperfl", shape=LARGE))

METHOD_WORK = Workload(method="fedavg", shape=SMALL, clients=2)

OTHER_TARGETS = frozenset({"fedbn"})
"""Methods that need another target network than the workload's."""

QUICK_METHODS = ("fedavg", "hyperfl", "pfedhn")
"""Methods whose rounds are measured with small workloads."""

ROBUST_WORK, ROBUST_NODES = Workload(method="hyperfl", shape=SMALL), 20

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
    DeployedWork(name="hyperfl, digits", settings={"method": "hyperfl", "dataset": "digits"}),
    DeployedWork(name="hyperfl, Fashion-MNIST", settings={"method": "hyperfl", "dataset": "fashion-mnist"}),
    DeployedWork(
        name="fedavg, a network of 64 small arrays, digits", settings={"method": "fedavg", "dataset": "digits"},
        model="many_arrays:build",
    ),
)  # fmt: skip
"""Runs of a deployment; those of HyperFL have the sizes of its experiments."""

DEPLOYED_ROUNDS = 6
"""Number of rounds of a deployment's run, of which the first is not counted."""

LOAD_ROUNDS = 20
"""Number of rounds in the load test of a SuperLink."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        rounds: Number of rounds of each federation, including the first, which is not counted.
        repetitions: Number of measurements that a median is taken of.
        nodes: Number of SuperNodes in the load test.
        data_root: Folder of Fashion-MNIST; empty for the user's.
        is_quick: True for small workloads, of which the speed means nothing.
    """

    rounds: int = 11
    repetitions: int = 7
    nodes: int = 50
    data_root: str = ""
    is_quick: bool = False

    def of(self, work: Workload) -> Workload:
        """Return a workload, or its small version."""
        return dataclasses.replace(work, train=100, test=50, epochs=1, clients=4) if self.is_quick else work


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the benchmark that is measured by itself.

    Attributes:
        kind: Type of what is measured, for its form in the record.
        measure: Measures, and notes what it is about to measure.
        tables: Returns tables, and their headings, in Markdown.
        targets: Returns the project's targets with the numbers.
        options: Names of the `Sizes` that it depends on.
        has_quick: Whether it has a quick version.
    """

    kind: TypeAdapter[Any]
    measure: Callable[[Sizes, Note], Any]
    tables: Callable[[Any], list[str]]
    targets: Callable[[Any], Iterable[Target]] = field(default=lambda _: ())
    options: Sequence[str] = ()
    has_quick: bool = True


def _clients(sizes: Sizes, note: Note) -> list[ClientRounds]:
    return [measure_clients(sizes.of(work), sizes.repetitions, note) for work in CLIENT_WORK]


def _federations(sizes: Sizes, note: Note) -> list[FederatedRounds]:
    return [measure_federations(sizes.of(work), sizes.rounds, note) for work in FEDERATED_WORK]


def _methods(sizes: Sizes, note: Note) -> MethodRounds:
    methods = QUICK_METHODS if sizes.is_quick else tuple(name for name in METHODS if name not in OTHER_TARGETS)
    return measure_methods(sizes.of(METHOD_WORK), methods, note)


def _robust_rules(sizes: Sizes, note: Note) -> RobustRules:
    work, nodes = (METHOD_WORK, 5) if sizes.is_quick else (ROBUST_WORK, ROBUST_NODES)
    return measure_rules(work, nodes, sizes.repetitions, note)


def _node_checks(sizes: Sizes, note: Note) -> CheckedNetworks:
    return measure_checks(QUICK_METHODS if sizes.is_quick else tuple(METHODS.built_in), note)


def _transport(sizes: Sizes, note: Note) -> list[Step]:
    note("transport")
    return measure_transport(sizes.of(FEDERATED_WORK[0]))


def _first_rounds(sizes: Sizes, note: Note) -> dict[str, list[Beginning]]:
    found: dict[str, list[Beginning]] = {engine: [] for engine in ENGINES}
    for number in range(sizes.repetitions):
        note(f"the first seconds of a run, {number + 1} of {sizes.repetitions}")
        for engine, beginnings in found.items():
            beginnings.append(measure_beginning(engine))
    return found


def _noisy_steps(sizes: Sizes, note: Note) -> list[PrivateSteps]:
    return [measure_private(sizes.of(work), target, sizes.repetitions, note) for target, work in PRIVATE_WORK]


def _secure_sums(sizes: Sizes, note: Note) -> SecureSums:
    num_rounds = min(sizes.rounds, SLOW_ROUNDS)
    return SecureSums(
        costs=[measure_secure(work, num_nodes, note) for work, num_nodes in SECURE_WORK],
        rounds=[measure_secure_rounds(sizes.of(work), num_rounds, note) for work in SECURE_ROUNDS],
    )


def _deployed_rounds(sizes: Sizes, note: Note) -> list[DeployedRounds]:
    return [measure_deployed(work, DEPLOYED_ROUNDS, sizes.data_root, note) for work in DEPLOYED_WORK]


def _deployed_load(sizes: Sizes, note: Note) -> Load:
    return measure_load(sizes.nodes, LOAD_ROUNDS, note)


def _quickstart(_: Sizes, note: Note) -> list[QuickstartRun]:
    return measure_quickstart(note)


SECTIONS: Mapping[str, Section] = {
    "quickstart": Section(
        kind=TypeAdapter(list[QuickstartRun]),
        measure=_quickstart,
        tables=quickstart_tables,
        has_quick=False,
    ),
    "first-round": Section(
        kind=TypeAdapter(dict[str, list[Beginning]]),
        measure=_first_rounds,
        tables=tables.first_round_tables,
        options=("repetitions",),
    ),
    "transport": Section(kind=TypeAdapter(list[Step]), measure=_transport, tables=tables.transport_tables),
    "noisy-steps": Section(
        kind=TypeAdapter(list[PrivateSteps]),
        measure=_noisy_steps,
        tables=tables.noisy_tables,
        options=("repetitions",),
    ),
    "secure-sums": Section(
        kind=TypeAdapter(SecureSums),
        measure=_secure_sums,
        tables=tables.secure_tables,
        targets=tables.secure_targets,
        options=("rounds",),
    ),
    "client-rounds": Section(
        kind=TypeAdapter(list[ClientRounds]),
        measure=_clients,
        tables=tables.client_tables,
        targets=tables.client_targets,
        options=("repetitions",),
    ),
    "federated-rounds": Section(
        kind=TypeAdapter(list[FederatedRounds]),
        measure=_federations,
        tables=tables.federated_tables,
        targets=tables.federated_targets,
        options=("rounds",),
    ),
    "method-rounds": Section(kind=TypeAdapter(MethodRounds), measure=_methods, tables=method_tables),
    "robust-rules": Section(
        kind=TypeAdapter(RobustRules), measure=_robust_rules, tables=rule_tables, options=("repetitions",)
    ),
    "node-checks": Section(kind=TypeAdapter(CheckedNetworks), measure=_node_checks, tables=check_tables),
    "deployed-rounds": Section(
        kind=TypeAdapter(list[DeployedRounds]),
        measure=_deployed_rounds,
        tables=tables.deployed_tables,
        targets=tables.deployed_targets,
        has_quick=False,
    ),
    "deployed-load": Section(
        kind=TypeAdapter(Load),
        measure=_deployed_load,
        tables=tables.load_tables,
        options=("nodes",),
        has_quick=False,
    ),
}
"""Sections by name, in the order in which they are measured."""
