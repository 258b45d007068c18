"""Check everything that can be checked before a run starts: settings, data, device and folders.

Planning loads torch, the data set and the method, some 600 MB in total, which are not needed once the run has started.
The commands therefore plan in a subprocess, see `hyperfl_flwr.launch.subprocess_call`.
"""

from collections.abc import Mapping
from pathlib import Path

from hyperfl_flwr.app.adversary import adversary_problem
from hyperfl_flwr.app.joining import open_joinable
from hyperfl_flwr.app.methods import check_run, check_secure_sum, client_of, strategy_of
from hyperfl_flwr.app.personalize import open_run
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.robust_reductions import check_enough_nodes, check_robust
from hyperfl_flwr.app.secure_sums import check_nodes
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.errors import ConfigError, DeviceError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.description import label_notes
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.launch.plans import AUTO, IN_PROCESS, RAY, Plan, SimulationPlan
from hyperfl_flwr.launch.ray_cluster.hosts import Cluster
from hyperfl_flwr.launch.settings import check_resume, requested, without_effect
from hyperfl_flwr.launch.simulation_plan import simulation_plan
from hyperfl_flwr.launch.warnings import partition_warnings, protection_warnings
from hyperfl_flwr.models.provenance import travelling_sources
from hyperfl_flwr.runs.resume import refuse_other_nodes
from hyperfl_flwr.runs.run_directory import is_simulation, read_manifest


def plan(
    changes: Mapping[str, Scalar], num_nodes: int | None = None, engine: str = AUTO, cluster: Cluster | None = None
) -> SimulationPlan:
    """Check everything that can be checked before a simulation starts, and choose its nodes and threads.

    Args:
        changes: Settings that differ from the defaults or, if `resume` is one of them, from the resumed run's.
        num_nodes: Number of simulated nodes P; None for a number that suits the machine
            (`hyperfl_flwr.launch.sizing`), with a robust rule the number of clients, or that of the resumed run.
        engine: `RAY`, `IN_PROCESS`, or `AUTO` for the one that is likely to end sooner.
        cluster: The Ray cluster on which the nodes train; None for this machine.

    Returns:
        The plan of the run.

    Raises:
        HyperFLError: With all problems of the settings, or the first problem of data, device and folders.
    """
    if engine not in (AUTO, RAY, IN_PROCESS):
        raise ConfigError(f"the engine must be {AUTO}, {RAY} or {IN_PROCESS}, got {engine}")
    config = requested(changes)
    if config.num_nodes != "auto":
        if num_nodes not in (None, config.num_nodes):
            raise ConfigError(
                f"--num-nodes and num-nodes must be the same; got {num_nodes} and {config.num_nodes}; leave one out"
            )
        num_nodes = config.num_nodes
    if config.resume:
        num_nodes = _resumed_nodes(config, num_nodes)
    if cluster is not None and engine == IN_PROCESS:
        raise ConfigError(f"the engine {IN_PROCESS} trains in one process; leave it out to train on a Ray cluster")
    if ":" in config.device:
        index = config.device.partition(":")[2]
        raise DeviceError(
            f"device={config.device} cannot be used in a simulation, where Ray assigns the GPUs; "
            f"set CUDA_VISIBLE_DEVICES={index} and device=cuda"
        )
    device = resolve_device(config.device).type if cluster is None else _device_of(cluster, config.device)
    data = load_federated_data(config.data_settings())
    check_run(config, data.dataset.input_shape, data.dataset.num_classes)
    ignored = [*without_effect(changes, config.method), *protection_warnings(changes, config)]
    notes = [*ignored, *partition_warnings(changes, data), *label_notes(data)]
    return simulation_plan(config, data, num_nodes, engine, device, cluster, notes)


def _device_of(cluster: Cluster, name: str) -> str:
    """Return the type of the device on which the hosts of a cluster train; this machine need not have a GPU.

    Raises:
        DeviceError: If the cluster does not have it.
    """
    if name == "auto":
        return "cuda" if cluster.gpus else "cpu"
    if name == "cuda" and not cluster.gpus:
        raise DeviceError(
            f"device is cuda, but the Ray cluster at {cluster.address} has no GPU ({cluster}); use device=cpu, or "
            f"start its hosts with `ray start --num-gpus`"
        )
    return name if name == "cuda" else resolve_device(name).type


def _resumed_nodes(config: RunConfig, num_nodes: int | None) -> int:
    """Return the number of nodes of a simulation that can be resumed."""
    manifest = check_resume(config)
    if not is_simulation(manifest):
        raise RunDirectoryError(
            f"{config.resume} is a run of a deployment, and the clients' private state is on its nodes; resume it with "
            f"--deployment DIR"
        )
    if num_nodes is not None:
        refuse_other_nodes(manifest, num_nodes)
    return len(manifest["nodes"])


def plan_deployed(num_nodes: int, changes: Mapping[str, Scalar]) -> Plan:
    """Check everything that can be checked before a run on a deployment starts; the nodes' data are not known yet.

    Args:
        num_nodes: Number of nodes of the deployment.
        changes: Settings that differ from the defaults or, if `resume` is one of them, from the resumed run's.
            Without `num-nodes` the run has all nodes of the deployment, and a resumed run as many as before. Without
            `num-clients` each node hosts one client.

    Returns:
        The plan of the run.

    Raises:
        HyperFLError: With all problems of the settings, or the first problem of the folders.
    """
    resume, given = str(changes.get("resume") or ""), changes.get("num-nodes", "auto")
    if given == "auto":  # nodes that were added since a run began take no part in it
        given = len(read_manifest(Path(resume))["nodes"]) if resume else num_nodes
    changes = {**changes, "num-nodes": given}
    if not resume:
        changes = {"num-clients": given if type(given) is int else num_nodes, **changes}
    config = requested(changes, deployed=True)
    if problem := adversary_problem(config, simulated=False):
        raise ConfigError(problem)
    chosen = num_nodes if config.num_nodes == "auto" else config.num_nodes
    if resume:
        manifest = check_resume(config)
        if is_simulation(manifest):
            raise RunDirectoryError(
                f"{config.resume} is a run of a simulation, and a deployment's nodes do not have its clients' private "
                f"state; resume it without --deployment"
            )
        refuse_other_nodes(manifest, chosen)
    if chosen > num_nodes:
        raise ConfigError(
            f"num-nodes must be at most the number of the deployment's nodes, {num_nodes}; got {chosen}; `hyperfl "
            f"deploy add-node` adds one"
        )
    if config.min_nodes != "auto" and config.min_nodes > chosen:
        raise ConfigError(
            f"min-nodes must be at most the number of the run's nodes, {chosen} (num-nodes); got {config.min_nodes}; "
            f"lower min-nodes, or set it to auto"
        )
    check_secure_sum(config)
    check_robust(config, client_of, strategy_of)
    check_nodes(config, chosen, chosen)
    check_enough_nodes(config, min(chosen, config.num_clients))
    warnings = [
        *without_effect(changes, config.method),
        *protection_warnings(changes, config),
        *strategy_of(config.method).warnings(resolved(config)),
    ]
    return Plan(settings=config.flat(), sources=travelling_sources(config.flat()), warnings=warnings)


def plan_joined(run: Path, rounds: int, target: str, rate: float) -> Plan:
    """Check that clients can join a trained run, before the joining nodes of a deployment are contacted.

    Args:
        run: Folder of a pfedhn or it-pfl run; an absolute path.
        rounds: Number of rounds.
        target: Target network of the clients; empty if the run has only one.
        rate: Learning rate of the embeddings; 0 for that of the run's.

    Returns:
        The plan for `hyperfl join`.

    Raises:
        HyperFLError: If clients cannot join the run.
    """
    notes = open_joinable(run, target).notes
    asked: dict[str, Scalar] = {
        "personalize.run": str(run),
        "personalize.join-rounds": rounds,
        "personalize.join-target": target,
        "personalize.join-learning-rate": rate,
    }
    config = RunConfig.from_flat(default_settings() | asked)
    return Plan(settings=config.flat(), warnings=notes)


def plan_personalized(run: Path) -> Plan:
    """Check that a trained run can create models on demand, before the novel clients of a deployment are contacted.

    Args:
        run: Folder of an it-pfl run; an absolute path.

    Returns:
        The plan for `hyperfl personalize`.

    Raises:
        HyperFLError: If the run cannot create models on demand.
    """
    notes = open_run(run).notes
    config = RunConfig.from_flat(default_settings() | {"personalize.run": str(run)})
    return Plan(settings=config.flat(), warnings=notes)
