"""Runs the app on a SuperLink of its own and follows it to the end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from clients.setting import client_setting
from experiments.bundle import build_app, settings_text
from experiments.cores import WAITING, CoreSlots
from experiments.flower import federation_config
from experiments.following import Observer, explained, follow
from experiments.layout import Machine, suitable_nodes, suitable_threads
from experiments.leaks import leak_warnings
from experiments.requested import check_resume, requested
from experiments.superlink import LocalSuperLink
from hyperfl_flwr.config import RunConfig
from hyperfl_flwr.data.client_data import FederatedData, load_federated_data
from hyperfl_flwr.device import resolve_device
from hyperfl_flwr.errors import DeviceError, RunDirectoryError
from hyperfl_flwr.methods import METHODS, check_novel, check_target
from hyperfl_flwr.recording import is_simulation
from hyperfl_flwr.resolved import resolved
from hyperfl_flwr.resume import refuse_other_nodes
from hyperfl_flwr.scalars import Scalar
from hyperfl_flwr.state import PrivateState


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that can start.

    Attributes:
        config: Its settings, with an absolute output directory.
        num_nodes: Number of simulated nodes P.
        threads: torch threads of each process, as in the settings.
        chosen_for: The machine for which nodes or threads were chosen; empty if the caller gave both.
        warnings: What its owner should know before it starts.
    """

    config: RunConfig
    num_nodes: int
    threads: int
    chosen_for: str
    warnings: Sequence[str] = ()


def plan(changes: Mapping[str, Scalar], num_nodes: int | None = None) -> Plan:
    """Check everything that can be checked before a run starts.

    Args:
        changes: Settings that differ from the defaults, or, where `resume` is one of them, from the resumed run's.
        num_nodes: Number of simulated nodes P; None is what suits the machine (`experiments.layout`), or that of the
            resumed run.

    Returns:
        The run's settings and number of nodes.

    Raises:
        HyperFLError: With all problems of the settings, or the first of data, device and directories.
    """
    config = requested(changes)
    if config.resume:
        num_nodes = _resumed_nodes(config, num_nodes)
    if ":" in config.device:
        index = config.device.partition(":")[2]
        raise DeviceError(f"a simulation takes its GPUs from Ray: set CUDA_VISIBLE_DEVICES={index} and device=cuda")
    resolve_device(config.device)
    data = load_federated_data(config.data_settings())
    check_target(config, data.dataset.input_shape, data.dataset.num_classes)
    check_novel(config, data.dataset.input_shape)
    return _laid_out(config, data, num_nodes)


def _laid_out(config: RunConfig, data: FederatedData, num_nodes: int | None) -> Plan:
    """Choose the nodes and threads that the caller has not."""
    device = resolve_device(config.device)
    machine = Machine.here(device)
    chosen_for = str(machine) if num_nodes is None or config.threads == "auto" else ""
    if num_nodes is None:
        # The handshake needs every node, and the last round trains all clients; a usual round trains a sample.
        clients = max(1, round(config.fraction_train * config.num_clients))
        state = PrivateState(Path(), "", 0)
        client = METHODS[config.method].client(client_setting(resolved(config), data, 0, device, state))
        threads = 1 if config.threads == "auto" else config.threads
        num_nodes = suitable_nodes(machine, clients, client.shared_bytes(), threads)
    threads = suitable_threads(machine, num_nodes) if config.threads == "auto" else config.threads
    config = config.model_copy(update={"threads": threads})
    samples = [len(data.train_indices(client)) for client in range(config.num_clients)]
    leaks = leak_warnings(config, samples) if len(data.dataset.input_shape) == 3 else []  # of images
    warnings = [*METHODS[config.method].strategy.warnings(resolved(config)), *leaks]
    return Plan(config=config, num_nodes=num_nodes, threads=threads, chosen_for=chosen_for, warnings=warnings)


def _resumed_nodes(config: RunConfig, num_nodes: int | None) -> int:
    """Return the number of nodes of a simulation that can be resumed."""
    manifest = check_resume(config)
    if not is_simulation(manifest):
        raise RunDirectoryError(
            f"{config.resume} is the run of a deployment, whose nodes have the clients' private state; add "
            f"--deployment DIR to the command"
        )
    if num_nodes is not None:
        refuse_other_nodes(manifest, num_nodes)
    return len(manifest["nodes"])


def launch(planned: Plan, observer: Observer) -> Path:
    """Run the app in Flower's simulation engine and wait for its end.

    Args:
        planned: What `plan` has checked.
        observer: Hears of the run.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If the run failed, whatever Flower's commands said.
    """
    config = planned.config
    for warning in planned.warnings:
        observer.on_note(f"warning: {warning}")
    with CoreSlots() as slots:
        wanted = planned.num_nodes * planned.threads
        held = slots.acquire(wanted, lambda: observer.on_note(f"{WAITING} for one"))
        with LocalSuperLink() as superlink:
            app = build_app(superlink.home / "app", config.target)
            settings = superlink.home / "settings.toml"
            settings.write_text(settings_text(config))
            actors = max(1, held // planned.threads)
            observer.on_note(_where(planned, actors))
            run_id = superlink.submit(app, settings, _federation(config, planned.num_nodes, actors))
            with explained(config, observer):
                return follow(superlink, run_id, config, observer)


def _where(planned: Plan, actors: int) -> str:
    """Say where a run trains, and how to have it otherwise."""
    device = resolve_device(planned.config.device).type
    text = (
        f"{planned.config.num_clients} clients on {planned.num_nodes} nodes in {actors} processes, "
        f"{planned.threads} thread(s) each, on {device}"
    )
    if planned.chosen_for:
        text += f"; chosen for {planned.chosen_for}, set --num-nodes and --set threads= to change it"
    return text


def _federation(config: RunConfig, num_nodes: int, actors: int) -> str:
    if resolve_device(config.device).type != "cuda":
        return federation_config(num_nodes, actors)
    gpus = torch.cuda.device_count()
    sharing = math.ceil(actors / gpus)  # Ray places each process on one GPU
    return federation_config(num_nodes, actors, gpus, 1 / sharing)
