"""Run a simulation, on Flower's engine or in one process, and follow it to its end."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.toml_files import settings_text
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch import subprocess_call
from hyperfl_flwr.launch.app_bundle import build_app
from hyperfl_flwr.launch.core_locks import WAITING, CoreSlots
from hyperfl_flwr.launch.early_check import check_early
from hyperfl_flwr.launch.flower.early_superlink import EarlySuperLink
from hyperfl_flwr.launch.flower.env import federation_config
from hyperfl_flwr.launch.follow import Platform, ReadyRun, RunCallbacks, follow, with_resume_hint
from hyperfl_flwr.launch.in_process_engine import InProcessEngine
from hyperfl_flwr.launch.other_accounts import simulation_warning
from hyperfl_flwr.launch.plans import AUTO, IN_PROCESS, RAY, SimulationPlan
from hyperfl_flwr.launch.ray_cluster.hosts import Cluster, parse_address
from hyperfl_flwr.launch.ray_cluster.run import launch_on_cluster

PLAN = "hyperfl_flwr.launch.planning:plan"


def simulation(num_nodes: int | None = None, engine: str = AUTO, ray_address: str | None = None) -> Platform:
    """Return the platform of simulations on this machine or a Ray cluster.

    Args:
        num_nodes: As for `hyperfl_flwr.launch.planning.plan`.
        engine: As there.
        ray_address: HOST:PORT of a running Ray cluster; None for this machine.
    """
    if ray_address is not None and engine == IN_PROCESS:
        raise ConfigError(
            f"the engine must be ray or auto with a Ray cluster (--ray-address), got {IN_PROCESS}; leave out one of "
            f"them"
        )

    @contextmanager
    def ready(changes: Mapping[str, Scalar]) -> Iterator[ReadyRun]:
        if engine == RAY or ray_address is not None:
            with EarlySuperLink(wanted=ray_address is None) as superlink:
                check_early(changes)
                cluster = found_cluster(ray_address)
                planned = subprocess_call.call_in_subprocess(PLAN, changes, num_nodes, engine, cluster)
                yield ReadyRun(plan=planned, launch=partial(launch, planned, superlink=superlink))
            return
        with InProcessEngine() as process:
            check_early(changes)
            planned = process.call(PLAN, changes, num_nodes, engine)
            if planned.engine == IN_PROCESS:
                yield ReadyRun(plan=planned, launch=partial(launch_in_process, planned, process=process))
                return
        with EarlySuperLink() as superlink:
            yield ReadyRun(plan=planned, launch=partial(launch, planned, superlink=superlink))

    return ready


def found_cluster(ray_address: str | None) -> Cluster | None:
    """Return the Ray cluster at an address; None without an address.

    Raises:
        HyperFLError: As `hyperfl_flwr.launch.ray_cluster.client.cluster_at`.
    """
    if ray_address is None:
        return None
    parse_address(ray_address)  # before a process is started
    find = "hyperfl_flwr.launch.ray_cluster.client:cluster_at"
    found: Cluster = subprocess_call.call_in_subprocess(find, ray_address)
    return found


def launch(planned: SimulationPlan, observer: RunCallbacks, superlink: EarlySuperLink | None = None) -> Path:
    """Run the app on Flower's engine and wait for its end.

    Args:
        planned: A plan of `hyperfl_flwr.launch.planning.plan` for Ray.
        observer: Receives rounds, log lines and notes of the run.
        superlink: The SuperLink to use, which keeps running after the run; None for one that ends with the run. While
            the run waits for a core, there is none.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If the run failed, whatever exit code Flower's commands returned.
        DeviceError: If hosts of a cluster do not fit the run.
    """
    _note_data(planned, observer)
    if planned.cluster is not None:
        return launch_on_cluster(planned, planned.cluster, observer)
    if superlink is None:
        with EarlySuperLink(wanted=False) as own:
            return launch(planned, observer, own)

    def on_wait() -> None:
        observer.on_note(WAITING)
        superlink.discard()

    with CoreSlots() as slots:
        held = slots.acquire(planned.num_nodes * planned.threads, on_wait)
        actors = min(planned.num_nodes, max(1, held // planned.threads))
        observer.on_note(_where(planned, actors))
        if problem := simulation_warning():
            observer.on_note(f"warning: {problem}")
        flower = superlink.get()
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=flower.home))
        app = build_app(folder / "app", planned.sources, planned.settings)
        settings = folder / "settings.toml"
        settings.write_text(settings_text(planned.settings))
        federation = federation_config(planned.num_nodes, actors, planned.num_gpus)
        run_id = flower.submit(app, settings, federation)
        with with_resume_hint(planned, observer):
            return follow(flower, run_id, planned, observer)


def launch_in_process(planned: SimulationPlan, observer: RunCallbacks, process: InProcessEngine) -> Path:
    """Run the app in one process and wait for its end.

    Args:
        planned: A plan of `hyperfl_flwr.launch.planning.plan` for one process.
        observer: Receives rounds, log lines and notes of the run.
        process: The process, which keeps running after the run. While the run waits for a core, there is none.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If the run failed.
    """
    _note_data(planned, observer)

    def on_wait() -> None:
        observer.on_note(WAITING)
        process.end()

    with CoreSlots() as slots:
        slots.acquire(planned.threads, on_wait)
        observer.on_note(_where(planned, 1))
        with with_resume_hint(planned, observer):
            return follow(process, process.submit(planned.settings, planned.num_nodes), planned, observer)


def _note_data(planned: SimulationPlan, observer: RunCallbacks) -> None:
    """Show what data a run has, and the warnings about it and about the settings."""
    if planned.data:
        observer.on_note(planned.data)
    for warning in planned.warnings:
        observer.on_note(f"warning: {warning}")


def _where(planned: SimulationPlan, actors: int) -> str:
    """Describe where a run trains, and how to change it."""
    text = (
        f"{planned.settings['num-clients']} clients on {counted(planned.num_nodes, 'node')} in "
        f"{counted(actors, 'process', 'processes')}, {counted(planned.threads, 'thread')} each, on {planned.device}, "
        f"engine {planned.engine}"
    )
    if planned.chosen_for:
        text += f"; chosen for {planned.chosen_for}, set --engine, --num-nodes and --set threads= to change it"
    return text
