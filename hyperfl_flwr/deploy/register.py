"""`hyperfl deploy register`: register the nodes' public keys with the SuperLink."""

import os
import shlex
from collections.abc import Iterator

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.provision import write_connection
from hyperfl_flwr.deploy.registered_nodes import foreign_nodes, is_unregistered, registered_nodes
from hyperfl_flwr.launch.flower.commands import FlowerCommands, json_in
from hyperfl_flwr.launch.flower.env import CONNECTION

KNOWN = "already in use"
"""Part of Flower's error for a key that is already registered."""


def commands_environment(deployment: Deployment) -> dict[str, str]:
    """Return the environment of Flower's commands that connect to a deployment's SuperLink."""
    write_connection(deployment)
    settings = {
        "FLWR_HOME": str(deployment.flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    for name in ("NO_PROXY", "no_proxy"):  # the SuperLink is on this machine, which a proxy cannot reach
        settings[name] = ",".join(filter(None, [os.environ.get(name, ""), "127.0.0.1"]))
    return {**os.environ, **settings}


def register(deployment: Deployment) -> Iterator[str]:
    """Register the nodes' public keys with the running SuperLink, and unregister all keys that are not among them.

    Keys that are already registered are unchanged. Flower never accepts an unregistered key again.

    Yields:
        One line for each node, and one for each key that was unregistered.

    Raises:
        RunFailedError: If the SuperLink does not answer, or refuses a key.
    """
    environment = commands_environment(deployment)
    for number in range(deployment.num_nodes):
        if is_unregistered(deployment, number):  # before anything is changed: Flower says only "already in use"
            raise RunFailedError(
                f"node-{number} cannot be registered: its key was replaced before, and Flower never accepts such a key "
                f"again; its owner must make another one with `hyperfl deploy own-key`"
            )
    with FlowerCommands(environment, deployment.flower_home) as flower:
        for flower_id in foreign_nodes(deployment):
            if problem := _problem(flower, "unregister", str(flower_id), CONNECTION):
                raise RunFailedError(f"a replaced key could not be unregistered: {problem}; {_remedy(deployment)}")
            yield f"Flower's node {flower_id}: unregistered, because its key was replaced"
        known = registered_nodes(deployment)
        for number in range(deployment.num_nodes):
            if number in known:
                yield f"node-{number}: is already registered"
                continue
            file = deployment.public_key(number).absolute()
            problem = _problem(flower, "register", str(file), CONNECTION, "--name", f"node-{number}")
            if problem == "":
                yield f"node-{number}: registered"
            elif KNOWN in problem:
                yield f"node-{number}: is already registered"
            else:
                raise RunFailedError(f"node-{number} could not be registered: {problem}; {_remedy(deployment)}")


def _remedy(deployment: Deployment) -> str:
    start, folder = (shlex.quote(str(path)) for path in (deployment.server / "start.sh", deployment.folder))
    return f"is the SuperLink running ({start})? `hyperfl deploy check {folder}` finds the cause"


def _problem(flower: FlowerCommands, *words: str) -> str:
    """Register or unregister a key with Flower's command; return the command's error, or an empty text."""
    printed = flower.run("supernode", *words, "--format", "json")
    document = json_in(printed)
    if document.get("success") is True:
        return ""
    return " ".join(str(document.get("error-message", printed)).split()) or "Flower's command printed nothing"
