"""Create models for the novel clients of a deployment, with the data that their owners set in node.toml."""

from dataclasses import replace

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.run import stopped_on_interrupt, submit
from hyperfl_flwr.deploy.superlink import DeployedSuperLink
from hyperfl_flwr.launch.follow import RunCallbacks, watch
from hyperfl_flwr.launch.plans import Plan


def personalize_nodes(deployment: Deployment, planned: Plan, observer: RunCallbacks) -> list[str]:
    """Create a model for each novel client that is online.

    Args:
        deployment: The deployment; its SuperLink and the trained run must be on this machine.
        planned: A plan of `hyperfl_flwr.launch.planning.plan_personalized`.
        observer: Receives log lines and notes.

    Returns:
        One line for each novel client about the data that the server saw.

    Raises:
        HyperFLError: If no novel client is online, or one got no model.
    """
    for note in planned.warnings:
        observer.on_note(f"note: {note}")
    superlink = DeployedSuperLink(deployment)
    run_id = submit(superlink, deployment, planned, observer)
    seen: list[str] = []

    # The log is the only output of the server app that reaches this process.
    def listen(lines: str) -> None:
        found = (line.partition(" novel client ") for line in lines.splitlines())
        seen.extend(f"novel client {rest}" for _, mark, rest in found if mark)
        observer.on_log(lines)

    with stopped_on_interrupt(superlink, run_id, observer):
        watch(superlink, run_id, replace(observer, on_log=listen))
    if not seen:
        raise RunFailedError(
            "no client got a model; set novel-data or join-data, and novel-output, in the node.toml of its node"
        )
    return seen
