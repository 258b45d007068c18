"""Models on demand for the novel clients of a deployment: their owners have said in node.toml which data are meant."""

from dataclasses import replace
from pathlib import Path

from experiments.deploy_layout import Deployment
from experiments.deploy_run import stopped_on_interrupt, submit
from experiments.deployed import DeployedSuperLink
from experiments.following import Observer, watch
from hyperfl_flwr.config import RunConfig, default_settings
from hyperfl_flwr.errors import RunFailedError
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.personalize import open_run


def personalize_nodes(deployment: Deployment, run: Path, observer: Observer) -> list[str]:
    """Make a model for each novel node that is online.

    Args:
        deployment: Its SuperLink is on this machine, as the run is.
        run: The folder of an it-pfl run; an absolute path.
        observer: Hears of the log.

    Returns:
        What the server saw of each novel client, in words.

    Raises:
        HyperFLError: If the run makes no models on demand, there is no novel node, or one got no model.
    """
    for note in open_run(run).notes:
        observer.on_note(f"note: {note}")
    config = RunConfig.from_flat(default_settings() | {"personalize.run": str(run)}, methods=METHODS)
    superlink = DeployedSuperLink(deployment)
    run_id = submit(superlink, deployment, config, observer)
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
