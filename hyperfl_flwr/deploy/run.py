"""Run the app on a deployment, with a SuperLink and nodes that are running already and keep running."""

import contextlib
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from hyperfl_flwr.core.errors import ConfigError, HyperFLError, RunFailedError
from hyperfl_flwr.core.files.folder_lock import wait_for_folder
from hyperfl_flwr.core.files.toml_files import settings_text
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.sample_format import is_local_data
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.superlink import DeployedSuperLink
from hyperfl_flwr.launch import subprocess_call
from hyperfl_flwr.launch.app_bundle import build_app
from hyperfl_flwr.launch.early_check import check_early
from hyperfl_flwr.launch.follow import POLL_SECONDS, Platform, ReadyRun, RunCallbacks, follow, with_resume_hint
from hyperfl_flwr.launch.other_accounts import deployment_warning
from hyperfl_flwr.launch.plans import Plan

STOP_SECONDS = 15.0
"""Seconds that a run may take to stop; it needs about one."""


def deployment(folder: Path | str) -> Platform:
    """Return the platform of a deployment's SuperLink and nodes.

    Args:
        folder: Folder that `hyperfl deploy init` has created.

    Raises:
        ConfigError: If the folder is not a deployment; from the platform, as `refuse_own_data` and planning do.
    """
    place = Deployment.read(Path(folder))

    @contextlib.contextmanager
    def ready(changes: Mapping[str, Scalar]) -> Iterator[ReadyRun]:
        refuse_own_data(changes)
        check_early(changes)
        planned: Plan = subprocess_call.call_in_subprocess(
            "hyperfl_flwr.launch.planning:plan_deployed", place.num_nodes, changes
        )
        yield ReadyRun(plan=planned, launch=partial(launch_deployed, place, planned))

    return ready


def refuse_own_data(changes: Mapping[str, Scalar]) -> None:
    """Refuse a run that names a file or folder, before all of its nodes do.

    Args:
        changes: Settings that differ from the defaults or, if `resume` is one of them, from the resumed run's.

    Raises:
        ConfigError: If the data set is a file or folder.
    """
    if is_local_data(dataset := str(changes.get("dataset", ""))):
        raise ConfigError(
            f"dataset must be the name of a data set on a deployment, whose nodes read no file or folder that a run "
            f"names; got {dataset!r}; set `data` in each node's node.toml, and leave out --dataset"
        )


def launch_deployed(deployment: Deployment, planned: Plan, observer: RunCallbacks) -> Path:
    """Run the app on the deployment's SuperLink and wait for its end.

    Args:
        deployment: The deployment.
        planned: A plan of `hyperfl_flwr.launch.planning.plan_deployed`.
        observer: Receives rounds, log lines and notes of the run.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If the run could not start or failed, whatever exit code Flower's commands returned.
    """
    for warning in planned.warnings:
        observer.on_note(f"warning: {warning}")
    if problem := deployment_warning():
        observer.on_note(f"warning: {problem}")
    superlink = DeployedSuperLink(deployment)
    run_id = submit(superlink, deployment, planned, observer)
    words = f"--deployment {shlex.quote(str(deployment.folder))}"
    with with_resume_hint(planned, observer, words), stopped_on_interrupt(superlink, run_id, observer):
        return follow(superlink, run_id, planned, observer)


def submit(superlink: DeployedSuperLink, deployment: Deployment, planned: Plan, observer: RunCallbacks) -> int:
    """Start a run of the app on a deployment as soon as a node is online; returns the run's id.

    Raises:
        RunFailedError: If the SuperLink does not run, no node comes online, another run is active, or Flower did not
            accept the run.
    """
    superlink.require()
    superlink.require_free(observer.on_note)
    wait_for_a_node(superlink, deployment, planned.settings, observer)
    with tempfile.TemporaryDirectory(prefix="hyperfl-") as folder:  # Flower copies the app when it is submitted
        app = build_app(Path(folder) / "app", planned.sources, planned.settings)
        settings = Path(folder) / "settings.toml"
        settings.write_text(settings_text(planned.settings))
        # Of several commands that have waited for a node, only the first one submits its run.
        with wait_for_folder(deployment.server, is_required=False):
            superlink.require_free(observer.on_note)
            return superlink.submit(app, settings)


@contextlib.contextmanager
def stopped_on_interrupt(superlink: DeployedSuperLink, run_id: int, observer: RunCallbacks) -> Iterator[None]:
    """Stop the run when the user interrupts this process, and wait until its folder is free for a resume.

    If it may go on, a note says why, with the command that stops it.
    """
    try:
        yield
    except KeyboardInterrupt:
        observer.on_note("stopping the run; the SuperLink and the nodes keep running")
        if problem := _stop(superlink, run_id):
            observer.on_note(f"the run may go on: {problem}; stop it: {superlink.stop_command(run_id)}")
        raise


def _stop(superlink: DeployedSuperLink, run_id: int) -> str:
    """Stop a run and wait for its end; returns why it may go on, an empty text if it has ended."""
    end = time.monotonic() + STOP_SECONDS
    try:
        superlink.stop(run_id)
        while not superlink.status(run_id).finished:
            if time.monotonic() > end:
                return f"it has not ended after {STOP_SECONDS:g} s"
            time.sleep(POLL_SECONDS)
    except HyperFLError as error:
        return str(error)
    except KeyboardInterrupt:
        return "you interrupted its end, too"
    return ""


def wait_for_a_node(
    superlink: DeployedSuperLink, deployment: Deployment, settings: Mapping[str, Scalar], observer: RunCallbacks
) -> None:
    """Wait until a node of the run is online; the run itself waits for the others, and reports which are missing.

    Args:
        superlink: The deployment's SuperLink, which need not run.
        deployment: The deployment.
        settings: The run's settings, of which `num-nodes` and `node-timeout` are used.
        observer: Receives a note about the nodes, and about each that comes or goes.

    Raises:
        RunFailedError: If no node is online after `node-timeout` seconds.
    """
    timeout, chosen = float(settings["node-timeout"]), settings["num-nodes"]
    numbers = range(deployment.num_nodes if isinstance(chosen, str) else int(chosen))
    end = time.monotonic() + timeout
    while True:
        for line in superlink.new_notes():
            observer.on_note(line)
        if any(online for number, online in superlink.nodes().items() if number in numbers):
            return
        if time.monotonic() > end:
            raise RunFailedError(
                f"no node of {deployment.folder} came online within node-timeout = {timeout:g} s; register the nodes' "
                f"keys (`hyperfl deploy register`) and start each with the start.sh of its folder; `hyperfl deploy "
                f"check` in a node's folder finds problems there"
            )
        time.sleep(POLL_SECONDS)
