"""Plan a simulation: choose its engine, nodes and threads, and warn of what its settings do."""

from collections.abc import Sequence
from pathlib import Path

import torch

from clients.engine.context import client_setting
from hyperfl_flwr.app.methods import client_of, strategy_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.data.description import describe
from hyperfl_flwr.data.federated_data import FederatedData
from hyperfl_flwr.launch.engine_choice import chosen_engine
from hyperfl_flwr.launch.node_numbers import check_given_nodes, suitable_for_reduction
from hyperfl_flwr.launch.plans import AUTO, IN_PROCESS, RAY, SimulationPlan
from hyperfl_flwr.launch.ray_cluster.hosts import Cluster
from hyperfl_flwr.launch.sizing import Machine, suitable_nodes, suitable_threads
from hyperfl_flwr.launch.warnings import adversary_warnings, clients_of_a_round, leak_warnings, noise_warnings
from hyperfl_flwr.models.provenance import travelling_sources
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.private_state import PrivateState

FLOAT_BYTES = 4
"""Bytes of a shared parameter, which is a float32."""


def simulation_plan(
    config: RunConfig,
    data: FederatedData,
    num_nodes: int | None,
    engine: str,
    device: str,
    cluster: Cluster | None,
    notes: Sequence[str],
) -> SimulationPlan:
    """Choose the engine, nodes and threads of a simulation that were not given.

    Args:
        config: The run's settings.
        data: The clients' data.
        num_nodes: Number of nodes; None to choose it.
        engine: `RAY`, `IN_PROCESS`, or `AUTO` to choose it.
        device: Type of the device on which the nodes train.
        cluster: The Ray cluster on which the nodes train; None for this machine.
        notes: Warnings about the settings.

    Raises:
        HyperFLError: If the number of nodes does not suit the run's reduction or its malicious nodes, or no host has
            room for a process.
    """
    machine = _machine(device, cluster)
    chosen_for = str(cluster or machine) if num_nodes is None or config.threads == "auto" else ""
    shared_bytes = 0 if engine == IN_PROCESS else _shared_bytes(config, data)
    if engine == AUTO:
        engine = RAY if cluster else chosen_engine(resolved(config), data, shared_bytes, machine)
    if num_nodes is None:
        num_nodes = _suitable_nodes(config, engine, machine, shared_bytes)
    else:
        check_given_nodes(config, num_nodes)
    warnings = [*notes, *_warnings(config, data, num_nodes)]  # raises if the malicious nodes are not among them
    threads = _suitable_threads(num_nodes, engine, machine, cluster) if config.threads == "auto" else config.threads
    if cluster is not None:
        cluster.placement(num_nodes, threads, on_gpus=device == "cuda")  # raises if no host has room
    config = config.model_copy(update={"threads": threads})
    return SimulationPlan(
        settings=config.flat(),
        sources=travelling_sources(config.flat()),
        warnings=warnings,
        data=describe(data),
        num_nodes=num_nodes,
        threads=threads,
        device=device,
        num_gpus=machine.gpus,
        chosen_for=chosen_for,
        engine=engine,
        cluster=cluster,
    )


def _machine(device: str, cluster: Cluster | None) -> Machine:
    """Return the resources of this machine, or of all hosts of a cluster together."""
    if cluster is None:
        return Machine.detect(torch.device(device))
    return Machine(cores=cluster.cpus, memory=cluster.memory, gpus=cluster.gpus if device == "cuda" else 0)


def _suitable_nodes(config: RunConfig, engine: str, machine: Machine, shared_bytes: int) -> int:
    """Return a number of nodes that suits the machine, and the reduction of the run."""
    if engine == IN_PROCESS:
        return suitable_for_reduction(config, 1)
    # The choice is for a usual round, which trains a sample of the clients; the last round trains all of them.
    clients = clients_of_a_round(config)
    threads = 1 if config.threads == "auto" else config.threads
    return suitable_for_reduction(config, suitable_nodes(machine, clients, shared_bytes, threads))


def _suitable_threads(num_nodes: int, engine: str, machine: Machine, cluster: Cluster | None) -> int:
    """Return a number of threads for each process that suits the machine, or every host of the cluster."""
    if engine != RAY:  # in one process, threads slow each other down when other programs use the same cores
        return 1
    threads = suitable_threads(machine, num_nodes)
    # The CPUs of a process are those of one host.
    while cluster is not None and threads > 1 and cluster.processes(threads) < num_nodes:
        threads -= 1
    return threads


def _warnings(config: RunConfig, data: FederatedData, num_nodes: int) -> list[str]:
    """Return warnings about the data and the method, of what leaks, and of attacks and noise that spoil the result.

    Raises:
        ConfigError: If the malicious nodes are none of the run's, or all of them.
    """
    samples = [len(data.train_indices(client)) for client in range(config.num_clients)]
    # Reconstruction is of images only.
    pool = len(data.dataset.train.labels) if data.partition == config.data.partition else 0
    leaks = leak_warnings(config, samples, pool) if len(data.dataset.input_shape) == 3 else []
    spoiled = adversary_warnings(config, num_nodes)
    if config.privacy.noise_multiplier:
        spoiled += noise_warnings(config, num_nodes, _noisy_parameters(config, data))
    return [*data.dataset.notes, *strategy_of(config.method).warnings(resolved(config)), *leaks, *spoiled]


def _shared_bytes(config: RunConfig, data: FederatedData) -> int:
    """Return the bytes of the parameters that a client shares, the largest of all target networks."""
    state, cpu = PrivateState(Path(), "", 0), torch.device("cpu")  # a GPU's memory is for the nodes
    members = [
        client_of(config.method)(client_setting(resolved(config).of_client(client), data, client, cpu, state))
        for client in range(len(config.targets))
    ]
    return max(member.shared_bytes() for member in members)


def _noisy_parameters(config: RunConfig, data: FederatedData) -> int:
    """Return the number of parameters that a client trains under the noise: shared ones, or those they generate."""
    shape, num_classes = data.dataset.input_shape, data.dataset.num_classes
    networks = [build_target(name, shape, num_classes) for name in dict.fromkeys(config.targets)]
    largest = max(sum(parameter.numel() for parameter in network.parameters()) for network in networks)
    return min(largest, _shared_bytes(config, data) // FLOAT_BYTES)
