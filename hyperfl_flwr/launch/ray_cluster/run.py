"""Run a simulation on the hosts of a running Ray cluster.

The SuperLink, the server and this process run on one host of the cluster. The app lies in a temporary folder next to
the run's, so that all hosts import the same code. Before the run starts, each host proves that it shares that folder
and has the same packages and data. Ray ends the processes of the run with its driver; the cluster itself stays.
"""

from pathlib import Path

from hyperfl_flwr.core.errors import DeviceError
from hyperfl_flwr.core.files.toml_files import settings_text
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.launch.app_bundle import build_app
from hyperfl_flwr.launch.flower.local_superlink import LocalSuperLink
from hyperfl_flwr.launch.follow import RunCallbacks, follow, with_resume_hint
from hyperfl_flwr.launch.other_accounts import deployment_warning
from hyperfl_flwr.launch.plans import SimulationPlan
from hyperfl_flwr.launch.ray_cluster.client import differences
from hyperfl_flwr.launch.ray_cluster.hosts import Cluster, Placement
from hyperfl_flwr.launch.subprocess_call import call_in_subprocess


def launch_on_cluster(planned: SimulationPlan, cluster: Cluster, observer: RunCallbacks) -> Path:
    """Run the app on a Ray cluster and wait for its end.

    Args:
        planned: The plan of the run.
        cluster: The cluster for which it was planned.
        observer: Receives rounds, log lines and notes of the run.

    Returns:
        The run's folder.

    Raises:
        DeviceError: If hosts do not fit the run, or other jobs use the cluster.
        RunFailedError: If the run failed.
    """
    on_gpus = planned.device == "cuda"
    placement = cluster.placement(planned.num_nodes, planned.threads, on_gpus=on_gpus)
    refuse_busy(cluster)
    observer.on_note(_where(planned, cluster, placement))
    if problem := deployment_warning():  # the SuperLink cannot have a private network here
        observer.on_note(f"warning: {problem}")
    shared = planned.directory.parent
    shared.mkdir(parents=True, exist_ok=True)
    with LocalSuperLink(ray_address=cluster.address, folder=shared) as superlink:
        app = build_app(superlink.home / "app", planned.sources, planned.settings)
        gpu_hosts = [host.id for host in placement.hosts] if on_gpus else []
        reports = call_in_subprocess(
            "hyperfl_flwr.launch.ray_cluster.client:host_reports",
            cluster.address, superlink.home, app, dict(planned.settings), gpu_hosts,
        )  # fmt: skip
        if reasons := differences(placement.hosts, reports, planned.device):
            raise DeviceError(_refused(cluster, reasons, shared))
        observer.on_note(f"all {len(placement.hosts)} host(s) share {shared} and have the same code and data")
        settings = superlink.home / "settings.toml"
        settings.write_text(settings_text(planned.settings))
        run_id = superlink.submit(app, settings, placement.federation_config(planned.num_nodes))
        with with_resume_hint(planned, observer, f"--ray-address {cluster.address}"):
            return follow(superlink, run_id, planned, observer)


def refuse_busy(cluster: Cluster) -> None:
    """Check that no other job has reserved CPUs of a cluster: Flower's engine counts on all of them.

    Raises:
        DeviceError: If one has.
    """
    if cluster.free_cpus < cluster.cpus:
        raise DeviceError(
            f"other jobs have reserved {cluster.cpus - cluster.free_cpus} of the {cluster.cpus} CPUs of the Ray "
            f"cluster at {cluster.address}, and Flower's engine counts on all of them; wait for their end (`ray "
            f"status` shows them), or start a cluster for this run"
        )


def _refused(cluster: Cluster, reasons: list[str], shared: Path) -> str:
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    return (
        f"hosts of the Ray cluster at {cluster.address} cannot take part:{listed}\nAll hosts must share {shared} "
        f"(choose another --output), have the same packages, and find the data at the same path (--data-root)."
    )


def _where(planned: SimulationPlan, cluster: Cluster, placement: Placement) -> str:
    """Describe where a run trains, and how to change it."""
    names = ", ".join(map(str, placement.hosts[:5])) + (" ..." if len(placement.hosts) > 5 else "")
    text = (
        f"{planned.settings['num-clients']} clients on {counted(planned.num_nodes, 'node')} in "
        f"{counted(placement.processes, 'process', 'processes')}, {counted(planned.threads, 'thread')} each, on "
        f"{planned.device} of {names}"
    )
    if planned.chosen_for:
        text += f"; chosen for {planned.chosen_for}, set --num-nodes and --set threads= to change it"
    return text
