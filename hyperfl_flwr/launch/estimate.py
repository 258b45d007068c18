"""Estimate the time, memory, disk and traffic of a run: train one client, and extrapolate."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clients.engine.context import client_setting
from hyperfl_flwr.app.data_properties import data_properties
from hyperfl_flwr.app.methods import client_of, new_strategy
from hyperfl_flwr.app.resolved import resolution, resolution_text, resolved
from hyperfl_flwr.app.robust_reductions import asked_nodes
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.arithmetic import set_arithmetic
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.process_memory import peak_memory
from hyperfl_flwr.data.federated_data import FederatedData, load_federated_data
from hyperfl_flwr.launch.plans import IN_PROCESS, RAY, SimulationPlan
from hyperfl_flwr.launch.sizing import WIRE_BYTES_PER_SECOND
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.protocol.arrays import num_bytes, num_elements, select
from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.protocol.secure_sums.field import ELEMENT_BYTES
from hyperfl_flwr.protocol.secure_sums.masks import TAG_BYTES
from hyperfl_flwr.runs.checkpoint import KEPT
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.handshake import Node

STARTUP_SECONDS = 12.0
"""Time to start and stop Flower's engine and Ray; measured on two cores."""

MASKED_BYTES = 4
"""Bytes of a masked parameter."""

SUM_BYTES = 8
"""Bytes of a parameter's sum over several clients of a node, a float64 (`hyperfl_flwr.node.array_sums`)."""

DRAWN_ROUNDS = 10
"""Largest number of rounds whose clients are drawn for an estimate."""

SERVER_COPIES = 8
"""Copies of the shared parameters that the server and Flower hold with two nodes, see docs/results/performance.md;
each further node can add one copy while its reply waits."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated cost of a run.

    Attributes:
        resolved: Values of the settings that are `auto`, see `hyperfl_flwr.app.resolved`.
        bytes_down_per_client_round: Payload that one client receives.
        bytes_up_per_client_round: Payload that one client sends.
        bytes_on_wire_per_round: Bytes between the server and all nodes in a round, both directions.
        disk_bytes: Size of checkpoints and private state.
        memory_bytes: Resident memory of the server and the training processes.
        seconds: Wall time of all rounds, including the start.
        client_seconds: Measured time of one client's round.
    """

    resolved: Mapping[str, Any]
    bytes_down_per_client_round: int
    bytes_up_per_client_round: int
    bytes_on_wire_per_round: int
    disk_bytes: int
    memory_bytes: int
    seconds: float
    client_seconds: float

    @property
    def resolution(self) -> str:
        """One line for the user on what each `auto` has become."""
        return resolution_text(self.resolved)


def estimate(planned: SimulationPlan, num_cores: int) -> Estimate:
    """Estimate a planned run by training one client for one epoch and for two; the results are discarded.

    If clients have different target networks, all are taken for clients of the largest one.

    Args:
        planned: A plan of `hyperfl_flwr.launch.planning.plan`.
        num_cores: Number of usable cores.
    """
    given, num_nodes = RunConfig.from_flat(planned.settings), planned.num_nodes
    config = resolved(given)
    data = load_federated_data(config.data_settings())
    federation = _federation(config, planned, data)
    strategy = new_strategy(config, federation, experiment="", run_directory="")
    common = unpack_arrays(strategy.initial_arrays())
    of_targets = [strategy.per_client_arrays([client]).get(client, {}) for client in range(len(config.targets))]
    number = max(range(len(of_targets)), key=lambda client: num_bytes(of_targets[client]))
    per_client = of_targets[number]
    arrays = {**common, **per_client}
    shared, of_one = num_bytes(common), num_bytes(per_client)
    reductions = strategy.context.reductions
    summed = select(common, reductions, lambda each: each.is_summed)
    answered = of_one + num_bytes(select(common, reductions, lambda each: each is Reduction.EACH))
    state = num_bytes(strategy.server_state())
    server_memory = peak_memory()
    timed = _Timed.of(config, data, number, arrays, threads=planned.threads)
    busy = 1 if planned.engine == IN_PROCESS else min(max(1, num_cores // planned.threads), num_nodes)
    asked = Asked.of(config, num_nodes, strategy.sampled)
    sums = round(SUM_BYTES * num_elements(summed) * asked.several)
    arrays_of_one = num_bytes(summed) * (asked.nodes - asked.several)
    wire = round(shared * asked.nodes + arrays_of_one + (of_one + answered) * asked.clients) + sums
    hosts = asked_nodes(config, num_nodes)
    if config.secagg.enabled:
        wire = shared * hosts + _masked_bytes(num_elements(summed), hosts)
    return Estimate(
        resolved=resolution(given, federation, num_nodes=num_nodes, min_nodes=num_nodes),
        bytes_down_per_client_round=shared + of_one,
        bytes_up_per_client_round=num_bytes(summed) + answered,
        bytes_on_wire_per_round=wire,
        disk_bytes=KEPT * (shared + state) + 2 * config.num_clients * timed.private_bytes,
        memory_bytes=server_memory
        + (SERVER_COPIES + num_nodes - 1) * shared
        + (of_one + answered) * config.num_clients
        + (num_bytes(summed) * hosts if config.robust.is_robust or config.adversary.forges else 0)
        + (sums if config.adversary.forges else 0)  # forging keeps the nodes' replies besides their means
        + busy * peak_memory(),
        seconds=(STARTUP_SECONDS if planned.engine == RAY else 0.0)
        + config.num_rounds * wire / WIRE_BYTES_PER_SECOND
        + timed.accounting_seconds * _num_budgets(config, data)
        + busy_seconds(config, busy, timed.client_seconds, timed.evaluation_seconds),
        client_seconds=timed.client_seconds,
    )


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """What a client's round was measured to take.

    Attributes:
        client_seconds: Seconds of the round, with all local epochs and two evaluations.
        evaluation_seconds: Seconds of an evaluation.
        accounting_seconds: Seconds of the search for the noise of a budget.
        private_bytes: Bytes of the client's private state on disk.
    """

    client_seconds: float
    evaluation_seconds: float
    accounting_seconds: float
    private_bytes: int

    @classmethod
    def of(
        cls, config: RunConfig, data: FederatedData, number: int, arrays: Mapping[str, Any], *, threads: int
    ) -> "_Timed":
        """Train a client for one and for two epochs.

        Args:
            config: The run's settings.
            data: The federation's data.
            number: The client.
            arrays: What it receives, by name.
            threads: Number of threads.
        """
        torch.set_num_threads(threads)
        device = resolve_device(config.device)
        set_arithmetic(config.precision, deterministic=config.deterministic, device=device)
        with tempfile.TemporaryDirectory() as folder:
            seconds, accounting_seconds = [], 0.0
            for epochs in (1, 1, 2):  # the first is a warm-up: libraries load, memory is mapped
                short = config.of_client(number).model_copy(update={"local_epochs": epochs})
                state = PrivateState(Path(folder), "", number)
                client = client_of(config.method)(client_setting(short, data, number, device, state))
                began = time.perf_counter()
                client.step_noise()  # searched once for each number of steps, and kept: not part of the training
                accounting_seconds = time.perf_counter() - began
                parameters = [arrays[name] for name in client.keys()]  # noqa: SIM118 - a client is no dict
                _, _, metrics = client.fit(parameters, {"round": 1, "version": 0, "kept-version": 0})
                seconds.append(float(metrics["seconds"]))
            private = sum(path.stat().st_size for path in Path(folder).rglob("*.npz"))
        # A fixed number of steps takes the same time whatever the number of epochs.
        per_epoch = 0.0 if client.epochs().steps else max(0.0, seconds[2] - seconds[1])
        return cls(
            client_seconds=seconds[1] + (config.local_epochs - 1) * per_epoch,
            # Besides the training, a client's round has two evaluations, each with about half of the rest.
            evaluation_seconds=max(0.0, seconds[-1] - float(metrics["train-seconds"])) / 2,
            accounting_seconds=accounting_seconds,
            private_bytes=private,
        )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How many clients and nodes a round asks: means over the drawn rounds.

    Attributes:
        clients: Number of clients that are trained.
        nodes: Number of nodes that train one or more of them.
        several: Number of these nodes that train more than one, and so send sums.
    """

    clients: float
    nodes: float
    several: float

    @classmethod
    def of(cls, config: RunConfig, num_nodes: int, sampled: Callable[[int], Sequence[int]]) -> "Asked":
        """Draw the clients of the first rounds; the last round, which may train all, counts only if it is the first.

        Args:
            config: The run's settings.
            num_nodes: Number P of nodes.
            sampled: Returns the clients of a round.
        """
        hosted = [clients_of_node(number, num_nodes, config.num_clients) for number in range(num_nodes)]
        drawn = [set(sampled(number)) for number in range(1, max(2, min(config.num_rounds, DRAWN_ROUNDS + 1)))]
        counts = [sum(client in chosen for client in mine) for chosen in drawn for mine in hosted]
        return cls(
            clients=sum(counts) / len(drawn),
            nodes=sum(count > 0 for count in counts) / len(drawn),
            several=sum(count > 1 for count in counts) / len(drawn),
        )


def busy_seconds(config: RunConfig, busy: int, client_seconds: float, evaluation_seconds: float) -> float:
    """Return the seconds that clients train and evaluate in a run: its rounds, the last one, and the evaluation.

    Args:
        config: The run's settings.
        busy: Number of processes that work at the same time.
        client_seconds: Seconds of one client's round.
        evaluation_seconds: Seconds of one client's evaluation.
    """
    sampled, everyone = max(1, round(config.fraction_train * config.num_clients)), config.num_clients
    last = everyone if config.trains_all(config.num_rounds) else sampled
    in_turn = (config.num_rounds - 1) * -(-sampled // busy) + -(-last // busy)
    return in_turn * client_seconds + -(-config.num_evaluated(everyone) // busy) * evaluation_seconds


def _num_budgets(config: RunConfig, data: FederatedData) -> int:
    """Return for how many numbers of samples the noise of a budget is searched; each process searches for itself."""
    return len({len(data.train_indices(client)) for client in range(config.num_clients)}) if config.dp.epsilon else 0


def _masked_bytes(num_parameters: int, num_nodes: int) -> int:
    """Return the bytes that the nodes of a secure step send, and those of the messages that open its sum."""
    boxes = num_nodes**2 * (
        ELEMENT_BYTES * num_nodes + TAG_BYTES
    )  # each node has one for each node, sent to the server and from there
    shares = num_nodes**2 * ELEMENT_BYTES
    return num_nodes * num_parameters * MASKED_BYTES + 2 * boxes + shares


def _federation(config: RunConfig, planned: SimulationPlan, data: FederatedData) -> Federation:
    """Return a federation of one node that hosts all clients, with the properties that the run's nodes would report."""
    clients = list(range(config.hosted_clients))
    of_process = {"device": planned.device, "threads": planned.threads}
    properties = data_properties(data, clients, simulated=True) | of_process
    return Federation([Node(id=0, partition=0, clients=clients, properties=properties)])
