"""Checks of the keys for secure sums: the list of a node's peers, and the lists on the operator's machine."""

import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hyperfl_flwr.core.errors import ConfigError, StateError
from hyperfl_flwr.deploy.checks import files as machine
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import FILE, PLACE, NodeAddress
from hyperfl_flwr.deploy.peers import Peers, deployment_peers
from hyperfl_flwr.launch.findings import Finding, error, ok, warning
from hyperfl_flwr.protocol.secure_sums.peers import PEERS_FILE, fingerprint, read_identity, read_peers
from hyperfl_flwr.protocol.secure_sums.thresholds import smallest_threshold, usual_colluding

if TYPE_CHECKING:
    from hyperfl_flwr.config.node_config import NodeConfig

SUBJECT = "peers"


def pinned_keys(folder: Path, place: NodeAddress, node: "NodeConfig") -> Iterator[Finding]:
    """Check a node's list of peers and its identity, and whether a secure sum of all nodes is possible.

    Args:
        folder: Folder of the node.
        place: The node's place in its deployment.
        node: Its settings.
    """
    if not node.peers_file:
        text = f"peers-file is not set in {FILE}: in secure sums this node takes the others' keys from the server"
        yield warning(SUBJECT, text, f'set peers-file = "{PEERS_FILE}" and identity-key-file = "node.key"')
        return
    if not node.identity_key_file:
        text = f"identity-key-file is not set in {FILE}: the others refuse this node in secure sums"
        yield error(SUBJECT, text, 'set identity-key-file = "node.key"')
        return
    file, identity_file = Path(node.peers_file), Path(node.identity_key_file)
    try:
        peers, identity = read_peers(file), read_identity(identity_file)
    except ConfigError as failure:
        yield error(SUBJECT, str(failure), f"check peers-file and identity-key-file in {FILE}")
        return
    if identity_file != folder / "node.key":  # this one has its own check
        yield from machine.private("identity-key-file", [identity_file])
    if stat.S_IMODE(file.stat().st_mode) & 0o022:
        yield error(SUBJECT, f"other users can change {file}", f"chmod go-w {shlex.quote(str(file))}")
    new_list = f"ask the operator for the present {PEERS_FILE}, and compare its fingerprint with the other owners"
    if set(peers) != set(range(max(place.nodes, len(peers)))):  # nodes may have been added since place.toml was written
        numbers = ", ".join(map(str, peers))
        yield error(SUBJECT, f"{file} has the nodes {numbers}, but the deployment has {place.nodes} nodes", new_list)
    elif owner := [number for number, key in peers.items() if key == identity.public_key() and number != place.number]:
        text = f"{PLACE} says that this is node {place.number}, but by {identity_file} it is node {owner[0]}"
        yield error(SUBJECT, text, f"set number = {owner[0]} in {PLACE}, or use the key of node {place.number}")
    elif peers[place.number] != identity.public_key():
        text = f"{file} has another key for this node than {identity_file}"
        yield error(SUBJECT, text, f"send node.pub to the operator; once it is accepted, {new_list}")
    else:
        yield ok(SUBJECT, f"{len(peers)} nodes, fingerprint {fingerprint(peers)}")
        yield _crowd(peers, node)


def _crowd(peers: Peers, node: "NodeConfig") -> Finding:
    """Return whether a secure sum of all nodes can satisfy this node's owner."""
    colluding = usual_colluding(len(peers)) if node.max_colluding == "auto" else int(node.max_colluding)
    wanted = f"min-cohort = {node.min_cohort}, max-colluding = {colluding}"
    try:
        threshold = smallest_threshold(len(peers), colluding, node.min_cohort)
    except ConfigError:
        text = f"{len(peers)} nodes are too few for {wanted}, so this node refuses every secure sum"
        if not node.secure_sum_only:
            return warning(
                "secure sums",
                text,
                f"add nodes, or lower them in {FILE} at every node, if runs are to have secure sums",
            )
        return error("secure sums", f"{text}; with secure-sum-only it refuses every run", f"lower them in {FILE}")
    return ok("secure sums", f"possible with {wanted}, if {threshold} of {len(peers)} nodes answer")


def listed_keys(deployment: Deployment) -> Iterator[Finding]:
    """Check that the lists of peers on the operator's machine have the keys of the server's folder."""
    try:
        peers = deployment_peers(deployment)
    except StateError as failure:
        yield error(SUBJECT, str(failure), "`hyperfl deploy accept-key` replaces a node's key")
        return
    folders = [deployment.node(number) for number in range(deployment.num_nodes)]
    files = [deployment.peers, *(folder / PEERS_FILE for folder in folders if folder.is_dir())]
    found = {str(file.relative_to(deployment.folder)): _peers(file) for file in files}
    remedy = f"hyperfl deploy peers {shlex.quote(str(deployment.folder))}, and send peers.toml to all owners"
    earlier = [name for name, each in found.items() if each and each != peers and each.items() <= peers.items()]
    others = [name for name, each in found.items() if each != peers and name not in earlier]
    if others:
        yield error(SUBJECT, f"{', '.join(others)} do not have the keys of server/keys", remedy)
    if earlier:
        text = f"{', '.join(earlier)} are from before a node was added; their nodes refuse secure sums of all nodes"
        yield warning(SUBJECT, text, f"once no run with secure sums is unfinished: {remedy}")
    if not (others or earlier):
        yield ok(SUBJECT, f"{len(peers)} nodes, fingerprint {fingerprint(peers)}")


def _peers(file: Path) -> Peers | None:
    try:
        return read_peers(file)
    except ConfigError:
        return None
