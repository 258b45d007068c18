"""Check a machine for simulations and deployments: installation, resources, data sets and running Flower processes."""

import contextlib
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import HyperFLError
from hyperfl_flwr.core.files.toml_files import app_file
from hyperfl_flwr.core.packages.package_guard import ALL, refuse_foreign_packages
from hyperfl_flwr.data.cache import cache_directory
from hyperfl_flwr.data.registry import DATASETS, default_data_root
from hyperfl_flwr.launch import machine_checks as machine
from hyperfl_flwr.launch import other_accounts
from hyperfl_flwr.launch.findings import Finding, error, ok, warning
from hyperfl_flwr.launch.flower.env import can_use_database_file, flower_command
from hyperfl_flwr.launch.processes import Process, descendants, is_ours, process_table, user_of
from hyperfl_flwr.launch.ray_cluster.checks import cluster_findings

COMMANDS = ("flwr", "flower-superlink", "flower-supernode", "flower-superexec", "flwr-simulation")
"""Programs of Flower that runs need."""

FLOWERS = re.compile(
    r"(?:^|[/ ])(flower-superlink|flower-supernode|flower-superexec|flwr-\w+app|flwr-simulation)(?: |$)"
)
RAYS = re.compile(r"(?:^|/)(raylet|gcs_server)(?: |$)")
OURS = re.compile(r"hyperfl_flwr/launch/processes\.py --owner \d+")
"""Command lines of Flower's and Ray's processes, and of the supervisor of this project's processes."""

DEPLOYED = re.compile(r"--(?:ssl-ca-certfile|root-certificates) (\S.*?)/ca\.crt(?: |$)")
"""Argument of a deployment's SuperLink or node that names its folder."""

DEPLOYED_FILES = ("start.sh", "place.toml")
"""Files of which the folder of a deployment's SuperLink or node has at least one."""


def examine(data_root: Path | None = None, ray_address: str | None = None) -> Iterator[Finding]:
    """Run all checks of this machine, and yield each finding as soon as it is known.

    Args:
        data_root: Folder of the data sets; None for this user's default.
        ray_address: HOST:PORT of a Ray cluster to check, too.
    """
    root = (data_root or default_data_root()).absolute()
    project = tomllib.loads(app_file("pyproject.toml").read_text())["project"]
    folders = {"working folder": Path.cwd(), "cache": cache_directory(), "temporary files": machine.temporary_folder()}
    checks: list[Callable[[], Iterable[Finding]]] = [
        lambda: python_version(project["requires-python"]),
        lambda: packages([*project["dependencies"], "ray"]),  # ray comes with flwr[simulation]
        project_packages,
        flowers_commands,
        machine.cores,
        machine.memory,
        machine.threads,
        machine.gpus,
        lambda: machine.disks(folders),
        machine.shared_memory,
        machine.open_files,
        machine.ports,
        other_accounts.simulations,
        lambda: others(process_table(), in_cluster=ray_address is not None),
        lambda: data_sets(root),
    ]
    for check in checks:
        yield from check()
    if ray_address is not None:
        yield from cluster_findings(ray_address, root, Path.cwd())


def python_version(required: str, found: str = "{}.{}.{}".format(*sys.version_info)) -> Iterator[Finding]:
    """Check the version of Python."""
    if SpecifierSet(required).contains(found):
        yield ok("Python", f"{found} at {sys.executable}")
    else:
        yield error("Python", f"{found}, but {required} is needed", "install hyperfl-flwr with such a version")


def packages(required: Iterable[str], installed: Callable[[str], str] = version) -> Iterator[Finding]:
    """Check that the required packages are installed, in versions that `pyproject.toml` allows."""
    fitting = []
    for line in required:
        requirement = Requirement(line)
        remedy = f'python -m pip install "{line}"'
        try:
            found = installed(requirement.name)
        except PackageNotFoundError:
            yield error("packages", f"{requirement.name} is not installed", remedy)
            continue
        if requirement.specifier.contains(found, prereleases=True):
            fitting.append(f"{requirement.name} {found}")
        else:
            text = f"{requirement.name} {found} is installed, but {requirement.specifier} is needed"
            yield error("packages", text, remedy)
    yield ok("packages", ", ".join(fitting) or "none has a suitable version")


def project_packages() -> Iterator[Finding]:
    """Check that this project's packages are not shadowed: names such as `clients` are common."""
    try:
        refuse_foreign_packages(ALL)
        yield ok("own packages", f"{', '.join(ALL)} come from {ROOT}")
    except HyperFLError as problem:
        yield error("own packages", str(problem).rpartition("; ")[0], str(problem).rpartition("; ")[2])


def flowers_commands(names: Iterable[str] = COMMANDS) -> Iterator[Finding]:
    """Check that Flower's programs are installed next to this Python, and that they can use a database file."""
    try:
        folder = {flower_command(name).parent for name in names}.pop()
    except HyperFLError as problem:
        text, _, remedy = str(problem).partition(". ")
        yield error("Flower's programs", text, remedy)
        return
    yield ok("Flower's programs", f"in {folder}")
    if not can_use_database_file():
        text = "a blank, comma or per cent sign in Flower's path prevents the SuperLink from creating a database file"
        remedy = "install into another folder; without a database file a deployment cannot be resumed"
        yield warning("Flower's programs", text, remedy)


def others(table: Mapping[int, Process], *, in_cluster: bool = False) -> Iterator[Finding]:
    """List running SuperLinks, nodes and Ray clusters, and warn of those of no run and no deployment of this project.

    Args:
        table: All processes.
        in_cluster: Whether this machine is a host of a cluster that is wanted.
    """
    supervisors = [process.pid for process in table.values() if OURS.search(process.command)]
    known = {*descendants(supervisors, table), *supervisors}
    if supervisors:
        yield ok("running", f"{len(supervisors)} simulation(s) of hyperfl, process(es) {_numbers(supervisors)}")
    deployed = [process for process in table.values() if process.pid not in known and _deployed_in(process)]
    for process in sorted(deployed, key=lambda each: each.pid):
        known |= {process.pid, *descendants([process.pid], table)}
        name = "SuperLink" if "--ssl-ca-certfile" in process.command else "node"
        yield ok("running", f"the {name} in {_deployed_in(process)}, process {process.pid}, user {user_of(process)}")
    foreign: dict[tuple[str, str], list[int]] = {}
    for process in table.values():
        found = FLOWERS.search(process.command) or (not in_cluster and RAYS.search(process.command))
        if found and process.pid not in known and process.pid != os.getpid():
            foreign.setdefault((found[1], "" if is_ours(process) else user_of(process) or "unknown"), []).append(
                process.pid
            )
    for (name, user), pids in sorted(foreign.items()):
        text = f"{name} as process(es) {_numbers(pids)}, which belong to no simulation or deployment of hyperfl"
        remedy = f"if it is not needed: kill {' '.join(map(str, sorted(pids)))}"
        if user:
            text, remedy = f"{text} that is known here, of the user {user}", "ask that user whether it is needed"
        yield warning("running", text, remedy)
    if not supervisors and not deployed and not foreign:
        yield ok("running", "no SuperLink or node" if in_cluster else "no SuperLink, node or Ray cluster")


def _deployed_in(process: Process) -> str:
    """Return the folder of the deployment's SuperLink or node that a process is; empty if it is neither."""
    found = DEPLOYED.search(process.command) if FLOWERS.search(process.command) else None
    folder = Path(found[1]) if found else None
    return str(folder) if folder and any((folder / name).is_file() for name in DEPLOYED_FILES) else ""


def data_sets(root: Path) -> Iterator[Finding]:
    """List the data sets that are present below a data root; nothing is loaded or downloaded."""
    present, absent = [], []
    for name, spec in DATASETS.items():
        if spec.load is None:
            continue
        if all(path.exists() for path in spec.files(root)):
            present.append(name)
        else:
            how = f"{spec.download_mb} MB, downloaded on demand" if spec.download_mb else "copy it there"
            absent.append(f"{name} ({how})")
    yield ok("data", f"in {root}: {', '.join(present)}" + (f"; missing: {', '.join(absent)}" if absent else ""))
    with contextlib.suppress(FileNotFoundError):
        if not os.access(root, os.R_OK | os.X_OK) and root.stat():
            yield error("data", f"{root} is not readable", "change its mode, or choose another one with --data-root")


def _numbers(pids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
