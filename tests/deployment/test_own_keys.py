"""The commands of docs/how-to/deploy-security.md for the owners' keys, with a real SuperLink.

The operator and the owner of node 0 have a folder each. Keys that were replaced can no longer connect.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gates import PAGE
from programs import HYPERFL, SMALL, LocalDeployment, finished, local_deployment, sets

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.deploy.keys import public_line, read_node_key
from hyperfl_flwr.deploy.peers import accept_key
from hyperfl_flwr.deploy.register import register
from hyperfl_flwr.deploy.registered_nodes import registered_nodes
from hyperfl_flwr.flower.superlink.fleet_api import Registration, ask_registration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OWNERS = ("hyperfl deploy own-key", "cp ", "hyperfl deploy check node-0", "hyperfl deploy peers node-0")
"""First words of the commands that the owner of node 0 runs; the operator runs the others."""


def page_commands() -> list[str]:
    """Return the page's commands for keys in order."""
    section = PAGE.read_text().partition("\n## Secure sums\n")[2]
    return re.findall(r"^\$ (.*)$", section, flags=re.M)


@dataclass
class Machines:
    """Two people's folders, with the deployment in the operator's.

    Attributes:
        folder: Folder that contains `operator` and `owner`.
        made: The deployment, of which the SuperLink runs.
        said: Output of each command of the page.
    """

    folder: Path
    made: LocalDeployment
    said: dict[str, str] = field(default_factory=dict)

    def finish(self, command: str, place: Path) -> None:
        path = os.pathsep.join([str(HYPERFL.parent), os.environ.get("PATH", os.defpath)])
        done = subprocess.run(
            ["sh", "-c", command], cwd=place, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400, check=False,
        )  # fmt: skip
        self.said[command] = done.stdout
        assert done.returncode == 0, f"{command}: {done.stdout}"

    def registration(self, key: Path) -> Registration:
        """Return what the SuperLink says of a key."""
        deployment = self.made.deployment
        return ask_registration(f"127.0.0.1:{deployment.port}", deployment.server / "ca.crt", read_node_key(key))


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Run the page's commands; the files that people send each other are copied."""
    folder = tmp_path_factory.mktemp("two machines")
    operator, owner = folder / "operator", folder / "owner"
    owner.mkdir()
    operator.mkdir()
    with local_deployment(operator / "fl", 2) as made:
        made.start_server()
        list(register(made.deployment))
        shutil.move(made.deployment.node(0), owner)
        machines = Machines(folder=folder, made=made)
        assert machines.registration(owner / "node-0" / "node.key") is Registration.KNOWN
        for command in page_commands():
            machines.finish(command, owner if command.startswith(OWNERS) else operator)
            if command.startswith("hyperfl deploy own-key"):
                shutil.copy(owner / machines.said[command].splitlines()[0], operator)
            if command.startswith("hyperfl deploy register"):
                shutil.copy(operator / "fl" / "peers.toml", owner)
        yield machines


def test_the_page_has_the_commands() -> None:
    words = [command.split()[:3] for command in page_commands()]
    for name in ("own-key", "accept-key", "register", "peers", "check"):
        assert ["hyperfl", "deploy", name] in words, name


def test_only_the_owner_s_key_connects(machines: Machines) -> None:
    node = machines.folder / "owner" / "node-0"
    assert machines.registration(node / "node.key") is Registration.KNOWN
    assert machines.registration(node / "node.key.old") is Registration.UNKNOWN
    said = machines.said["hyperfl deploy register fl"].splitlines()
    assert re.fullmatch(r"Flower's node \d+: unregistered, because its key was replaced", said[0])
    assert said[1:] == ["node-0: registered", "node-1: is already registered"]
    assert sorted(registered_nodes(machines.made.deployment)) == [0, 1]


def test_both_sides_are_in_order(machines: Machines) -> None:
    owner, operator = machines.said["hyperfl deploy check node-0"], machines.said["hyperfl deploy check fl"]
    assert not re.search("^error", owner + operator, flags=re.M)
    assert "key: it is registered with the SuperLink" in owner
    (fingerprint,) = re.findall("^fingerprint: (.*)$", machines.said["hyperfl deploy peers node-0"], flags=re.M)
    assert machines.said["hyperfl deploy peers node-0"] == machines.said["hyperfl deploy peers fl"]
    for said in (owner, operator):
        assert f"peers: 2 nodes, fingerprint {fingerprint}" in said


def test_the_node_starts_with_its_own_key(machines: Machines) -> None:
    node = machines.folder / "owner" / "node-0"
    shutil.move(node, machines.made.nodes[0].folder)  # where the fixture stops it
    try:
        machines.made.nodes[0].start()
        machines.made.wait_until_online(0)
        machines.made.nodes[0].stop()
    finally:
        shutil.move(machines.made.nodes[0].folder, node)


@pytest.mark.extended
def test_flowers_check_of_apps_refuses_every_app_that_is_submitted_from_a_folder(machines: Machines) -> None:
    """If this fails, Flower can check such apps now, and the page has to say how owners use it."""
    node = machines.made.nodes[1]
    key = node.folder / "author"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (node.folder / "trusted.yaml").write_text(f"fpk_1: '{key.with_suffix('.pub').read_text().strip()}'\n")
    start = node.folder / "start.sh"
    option = '--trusted-entities "$here/trusted.yaml" --root-certificates'
    start.write_text(start.read_text().replace("--root-certificates", option))
    node.start()
    machines.made.wait_until_online(1)
    words = sets({**SMALL, "min-nodes": 1, "node-timeout": 20})
    code, _, said = finished(machines.made.hyperfl("run", "--dataset", "digits", "--num-rounds", "1", *words))
    node.stop()
    assert code == 1
    assert "is refused: The FAB could not be verified." in said


def test_a_replaced_key_is_not_registered_again(machines: Machines, tmp_path: Path) -> None:
    """Nothing is changed, so the present key can be accepted again."""
    deployment, node = machines.made.deployment, machines.folder / "owner" / "node-0"
    (tmp_path / "old.pub").write_bytes(public_line(read_node_key(node / "node.key.old").public_key(), "node-0"))
    list(accept_key(deployment, 0, tmp_path / "old.pub"))
    with pytest.raises(RunFailedError, match="its key was replaced before, and Flower never accepts such a key again"):
        list(register(deployment))
    assert machines.registration(node / "node.key") is Registration.KNOWN
    list(accept_key(deployment, 0, node / "node.pub"))
    assert list(register(deployment)) == [f"node-{number}: is already registered" for number in (0, 1)]
