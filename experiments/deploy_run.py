"""Runs the app on a deployment: the SuperLink and the nodes are there already and stay."""

import contextlib
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bundle import build_app, settings_text
from experiments.deploy_layout import Deployment
from experiments.deployed import DeployedSuperLink
from experiments.following import POLL_SECONDS, Observer, explained, follow
from experiments.requested import check_resume, requested
from hyperfl_flwr.config import RunConfig
from hyperfl_flwr.errors import RunDirectoryError, RunFailedError
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.recording import is_simulation
from hyperfl_flwr.resolved import resolved
from hyperfl_flwr.scalars import Scalar

STOP_SECONDS = 15.0
"""How long a run may take to stop; it needs about one second."""


@dataclass(frozen=True, kw_only=True)
class DeployedPlan:
    """A run that can start on a deployment.

    Attributes:
        config: Its settings, with an absolute output directory on this machine.
        deployment: Where it runs.
        warnings: What its owner should know before it starts.
    """

    config: RunConfig
    deployment: Deployment
    warnings: Sequence[str] = ()


def plan_deployed(deployment: Deployment, changes: Mapping[str, Scalar]) -> DeployedPlan:
    """Check everything that can be checked before a run starts; what the nodes have, they tell when it does.

    Args:
        deployment: Where it is to run.
        changes: Settings that differ from the defaults, or, where `resume` is one of them, from the resumed run's.
            Without `num-clients` each node hosts one client.

    Raises:
        HyperFLError: With all problems of the settings, or the first of the directories.
    """
    if not changes.get("resume"):
        changes = {"num-clients": deployment.num_nodes, **changes}
    config = requested(changes)
    if config.resume and is_simulation(check_resume(config)):
        raise RunDirectoryError(
            f"{config.resume} is the run of a simulation; a deployment's nodes do not have its clients' private state: "
            f"resume it without --deployment"
        )
    warnings = METHODS[config.method].strategy.warnings(resolved(config))
    return DeployedPlan(config=config, deployment=deployment, warnings=warnings)


def launch_deployed(planned: DeployedPlan, observer: Observer) -> Path:
    """Run the app on the deployment's SuperLink and wait for its end.

    Args:
        planned: What `plan_deployed` has checked.
        observer: Hears of the run.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If it could not start or failed, whatever Flower's commands said.
    """
    config, deployment = planned.config, planned.deployment
    for warning in planned.warnings:
        observer.on_note(f"warning: {warning}")
    superlink = DeployedSuperLink(deployment)
    run_id = submit(superlink, deployment, config, observer)
    words = f"--deployment {shlex.quote(str(deployment.folder))}"
    with explained(config, observer, words), stopped_on_interrupt(superlink, run_id, observer):
        return follow(superlink, run_id, config, observer)


def submit(superlink: DeployedSuperLink, deployment: Deployment, config: RunConfig, observer: Observer) -> int:
    """Start a run of the app on a deployment as soon as a node is there; returns its id.

    Raises:
        RunFailedError: If the SuperLink or all nodes are missing, another run is active, or Flower did not accept it.
    """
    superlink.require()
    superlink.require_free()
    _wait_for_a_node(superlink, deployment, config.node_timeout, observer)
    with tempfile.TemporaryDirectory(prefix="hyperfl-") as folder:
        app = build_app(Path(folder) / "app", config.target)
        settings = Path(folder) / "settings.toml"
        settings.write_text(settings_text(config))
        return superlink.submit(app, settings)


@contextlib.contextmanager
def stopped_on_interrupt(superlink: DeployedSuperLink, run_id: int, observer: Observer) -> Iterator[None]:
    """Stop the run when the user interrupts this process, and wait until its folder can be used again."""
    try:
        yield
    except KeyboardInterrupt:
        observer.on_note("the run is being stopped; the SuperLink and the nodes stay up")
        superlink.stop(run_id)
        end = time.monotonic() + STOP_SECONDS
        while not superlink.status(run_id).finished and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        raise


def _wait_for_a_node(superlink: DeployedSuperLink, deployment: Deployment, timeout: float, observer: Observer) -> None:
    """Wait until a node is online; the run itself waits for the others, and tells for which.

    Raises:
        RunFailedError: If none is there in time.
    """
    end = time.monotonic() + timeout
    while True:
        for line in superlink.news():
            observer.on_note(line)
        if any(superlink.nodes().values()):
            return
        if time.monotonic() > end:
            raise RunFailedError(
                f"no node of {deployment.folder} came online within node-timeout = {timeout:g} s; register the nodes' "
                f"keys (`hyperfl deploy register`) and start each with the start.sh of its folder; `hyperfl deploy "
                f"check` in a node's folder tells what is wrong there"
            )
        time.sleep(POLL_SECONDS)
