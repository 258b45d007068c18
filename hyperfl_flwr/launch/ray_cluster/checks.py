"""Check what a Ray cluster lacks for runs: hosts, free CPUs, a token, a shared folder, equal packages, data sets."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hyperfl_flwr.core.errors import HyperFLError
from hyperfl_flwr.launch.app_bundle import build_app
from hyperfl_flwr.launch.findings import Finding, error, ok, warning
from hyperfl_flwr.launch.ray_cluster.client import PROBLEM, differences
from hyperfl_flwr.launch.ray_cluster.hosts import Cluster
from hyperfl_flwr.launch.ray_cluster.run import refuse_busy
from hyperfl_flwr.launch.subprocess_call import call_in_subprocess


def cluster_findings(address: str, data_root: Path, folder: Path) -> Iterator[Finding]:
    """Check a Ray cluster and each of its hosts; takes some seconds, and nothing is left on the hosts.

    Args:
        address: HOST:PORT of the cluster's head.
        data_root: Folder of the data sets.
        folder: Folder below which runs would be, which all hosts must share.
    """
    try:
        cluster: Cluster = call_in_subprocess("hyperfl_flwr.launch.ray_cluster.client:cluster_at", address)
    except HyperFLError as problem:
        text, _, remedy = str(problem).partition("; ")
        yield error("Ray cluster", text, remedy or "start one with `ray start --head`")
        return
    yield from of_cluster(cluster)
    with tempfile.TemporaryDirectory(prefix=".hyperfl-", dir=folder) as shared:
        app = build_app(Path(shared) / "app")
        asked = {"data-root": str(data_root)}
        reports = call_in_subprocess(
            "hyperfl_flwr.launch.ray_cluster.client:host_reports", address, Path(shared), app, asked
        )
    yield from of_hosts(cluster, reports, folder)


def of_cluster(cluster: Cluster) -> Iterator[Finding]:
    """Check the resources and the access of a cluster."""
    yield ok("Ray cluster", f"{cluster.address} has {cluster}: {', '.join(map(str, cluster.hosts))}")
    try:
        refuse_busy(cluster)
    except HyperFLError as problem:
        text, _, remedy = str(problem).partition("; ")
        yield warning("Ray cluster", text, remedy)
    without = [str(host) for host in cluster.hosts if not host.gpus]
    if cluster.gpus and without:
        text = f"{', '.join(without)} have no GPU and train nothing in runs on GPUs"
        yield warning("GPUs of hosts", text, "start a cluster of hosts with GPUs alone, or set device=cpu to use them")
    if cluster.has_token:
        yield ok("token", "the cluster asks for a token")
    else:
        text = "the cluster asks for no token: whoever reaches its ports can run programs as you"
        yield warning("token", text, "start its hosts with RAY_AUTH_MODE=token, or in a network that is yours alone")


def of_hosts(cluster: Cluster, reports: Mapping[str, Mapping[str, str]], folder: Path) -> Iterator[Finding]:
    """Check the reports of a cluster's hosts.

    Args:
        cluster: The cluster.
        reports: See `hyperfl_flwr.launch.ray_cluster.client.host_reports`.
        folder: The folder that all hosts must share.
    """
    remedy = f"share {folder} among all hosts, or start in a folder that they share; install the same packages on all"
    problems = differences(cluster.hosts, reports)
    yield from (error("hosts", problem, remedy) for problem in problems)
    if not problems:
        yield ok("hosts", f"all share {folder} and have the same packages")
    for host in cluster.hosts:
        there, here = (reports.get(name, {}) for name in (host.id, ""))
        if PROBLEM not in there and (missing := sorted(_data_sets(here) - _data_sets(there))):
            text = f"{host} lacks {', '.join(missing)}, which this machine has"
            yield warning("data of hosts", text, "copy them there, or name a folder that all hosts share: --data-root")


def _data_sets(report: Mapping[str, str]) -> set[str]:
    return set(filter(None, report.get("data-sets", "").split(",")))
