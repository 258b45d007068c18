"""Models on demand for the novel clients of a deployment: their owners have said in node.toml which data are meant."""

from dataclasses import replace

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.run import stopped_on_interrupt, submit
from hyperfl_flwr.deploy.superlink import DeployedSuperLink
from hyperfl_flwr.launch.follow import Observer, watch
from hyperfl_flwr.launch.plans import Plan


def personalize_nodes(deployment: Deployment, planned: Plan, observer: Observer) -> list[str]:
    """Make a model for each novel node that is online.

    Args:
        deployment: Its SuperLink is on this machine, as the run is.
        planned: What `hyperfl_flwr.launch.planning.plan_personalized` has checked.
        observer: Hears of the log.

    Returns:
        What the server saw of each novel client, in words.

    Raises:
        HyperFLError: If there is no novel node, or one got no model.
    """
    for note in planned.warnings:
        observer.on_note(f"note: {note}")
    superlink = DeployedSuperLink(deployment)
    run_id = submit(superlink, deployment, planned, observer)
    seen: list[str] = []

    def listen(lines: str) -> None:
        found = (line.partition(" novel client ") for line in lines.splitlines())
        seen.extend(f"novel client {rest}" for _, mark, rest in found if mark)
        observer.on_log(lines)

    with stopped_on_interrupt(superlink, run_id, observer):
        watch(superlink, run_id, replace(observer, on_log=listen))
    if not seen:
        raise RunFailedError("no novel client got a model; its node.toml must name novel-data and novel-output")
    return seen
