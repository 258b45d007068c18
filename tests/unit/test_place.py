"""The number of nodes is a run's: what a node and the server make of `num-nodes`, also if the server lies with it."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from federations import small_settings, trained
from flwr.app import ConfigRecord, Context, Message, RecordDict

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.node import NodeApp
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.grids import Settings, plain_grid
from hyperfl_flwr.core.errors import ConfigError, RefusalError, RunDirectoryError, RunFailedError
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.planning import plan, plan_deployed
from hyperfl_flwr.launch.plans import IN_PROCESS
from hyperfl_flwr.protocol.messages import CONFIG, HELLO, PROPERTIES, Request, record_of
from hyperfl_flwr.protocol.queries import PROBLEM
from hyperfl_flwr.protocol.secure_sums.messages import KEY, handshake_request
from hyperfl_flwr.protocol.secure_sums.peers import peers_text
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid

SESSION = "5e" * 16


class Deployed(InProcessGrid):
    """Nodes with owners and separate state folders, whose `place.toml` says another number of nodes than there are.

    Attributes:
        late: Flower's id of a node that comes when the first round has ended; None for none.
        output: Folder of the run.
    """

    def __init__(self, settings: Settings, folder: Path, num_nodes: int, late: int | None = None) -> None:
        super().__init__(app, num_nodes, settings)
        self.output, self.late = Path(str(settings["output"])), late
        for number, context in enumerate(self._contexts.values()):
            known = 2 if number < 2 else num_nodes
            context.node_config |= {"state-dir": str(folder / f"node-{number}"), "num-partitions": known}

    def get_node_ids(self) -> Sequence[int]:
        begun = (self.output / "checkpoints" / "round-000001.npz").is_file()
        return [node for node in super().get_node_ids() if node != self.late or begun]


def deployed(settings: Settings, folder: Path, num_nodes: int, late: int | None = None) -> Path:
    return run(Deployed(settings, folder, num_nodes, late), RunConfig.from_flat(settings), plots=False)


def context(run_config: Settings, **node: Scalar) -> Context:
    config: dict[str, Scalar] = {"partition-id": 0, "num-partitions": 2}
    config |= {key.replace("_", "-"): value for key, value in node.items()}
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config=run_config)


def app_of(run_config: Settings, **node: Scalar) -> NodeApp:
    return NodeApp(NodeConfig.of_context(context(run_config, **node)), run_config)


def ask(kind: str, content: RecordDict, run_config: Settings, **node: Scalar) -> Message:
    grid = InProcessGrid(app, 1, run_config)
    (number,) = grid.get_node_ids()
    grid._contexts[number].node_config = context(run_config, **node).node_config
    return grid.answer(Message(content, dst_node_id=number, message_type=kind))


def test_a_node_follows_the_run_and_not_its_place() -> None:
    """Clients 0, 3, 6 of 8 on three nodes, where place.toml says two; without the setting, place.toml counts."""
    assert app_of(small_settings(num_clients=8, num_nodes=3)).clients == [0, 3, 6]
    assert app_of(small_settings(num_clients=8)).clients == [0, 2, 4, 6]
    assert app_of(small_settings(num_clients=8, num_nodes=3), simulated=True).clients == [0, 2, 4, 6]


def test_a_node_with_its_owners_data_has_its_own_client_or_refuses() -> None:
    """Whatever the server says, it never has several clients, none, or another one."""
    for number, chosen, clients in product(range(4), ("auto", 1, 2, 3, 4), range(1, 6)):
        settings = small_settings(num_clients=clients, num_nodes=chosen)
        try:
            found = app_of(settings, partition_id=number, num_partitions=4, data="npz:/a.npz")
        except RefusalError:
            continue
        assert found.clients == [number]
        assert clients == (4 if chosen == "auto" else chosen) > number


@pytest.mark.parametrize("value", [0, -1, 10_001, True, 2.0, "two"])
def test_what_is_no_number_of_nodes_is_refused(value: Scalar) -> None:
    with pytest.raises(ConfigError, match="num-nodes"):
        app_of(small_settings(num_nodes=value))


def test_a_node_beyond_the_run_says_so_and_does_nothing(tmp_path: Path) -> None:
    """It reads no data (here there are none), makes no key, and answers no other message."""
    settings = small_settings(num_clients=2, num_nodes=2, **{"secagg.enabled": True})
    node: dict[str, Scalar] = {"partition_id": 2, "num_partitions": 3, "data": "npz:/none", "state_dir": str(tmp_path)}
    reply = ask(HELLO, handshake_request(SESSION), settings, **node)
    reason = "node 2 takes no part in this run, which has 2 nodes (num-nodes)"
    assert dict(record_of(reply.content, PROPERTIES, ConfigRecord)) == {"partition": 2, PROBLEM: reason}
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.jsonl"}
    plain = small_settings(num_clients=3, num_nodes=2)  # client 2 is node 0's
    request = Request(round=1, experiment="0" * 16, run_directory="", clients=[2], versions=[0], kept_versions=[0])
    reply = ask("train", RecordDict({CONFIG: request.to_record()}), plain, **node)
    assert reply.error.reason == reason


def keys_of(folder: Path, number: int, num_nodes: int) -> dict[str, Scalar]:
    """Write the list of peers and the key of a node, and return its settings."""
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(num_nodes)]
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    (folder / "node.key").write_bytes(keys[number].private_bytes(*form))
    (folder / "peers.toml").write_text(peers_text({each: key.public_key() for each, key in enumerate(keys)}))
    return {
        "peers_file": str(folder / "peers.toml"), "identity_key_file": str(folder / "node.key"),
        "state_dir": str(folder / "state"), "data": "digits", "min_cohort": 2,
    }  # fmt: skip


@pytest.mark.parametrize("chosen", [1, 2, 4, "auto"])
def test_the_server_cannot_change_the_number_of_peers(chosen: Scalar, tmp_path: Path) -> None:
    """The owner of node 0 knows three: another number is refused in every message, and three of a stale place not."""
    node = keys_of(tmp_path, 0, 3)
    common: Settings = {"secagg.enabled": True, "method": "fedavg", "num_clients": 3}
    settings = small_settings(**common, num_nodes=chosen)
    told = dict(record_of(ask(HELLO, handshake_request(SESSION), settings, **node).content, PROPERTIES, ConfigRecord))
    number = 2 if chosen == "auto" else chosen  # that of place.toml
    assert f"the run has secure sums of {number} nodes (num-nodes), but this node's peers-file has 3" in told[PROBLEM]
    assert "needs the peers.toml with exactly the nodes 0 to" in told[PROBLEM]
    with pytest.raises(RefusalError, match="secure sums"):
        app_of(settings, **node)
    settings = small_settings(**common, num_nodes=3)
    assert KEY in record_of(ask(HELLO, handshake_request(SESSION), settings, **node).content, PROPERTIES, ConfigRecord)


def test_without_peers_the_place_decides_about_secure_sums() -> None:
    settings = small_settings(num_clients=3, num_nodes=3, method="fedavg", **{"secagg.enabled": True})
    with pytest.raises(RefusalError, match=r"must set nodes = 3 in place\.toml, or take a peers\.toml with 3 nodes"):
        app_of(settings)
    assert app_of(settings, num_partitions=3).num_nodes == 3
    assert app_of(settings, simulated=True).num_nodes == 2


def arrays(folder: Path, number: int) -> dict[str, np.ndarray]:
    return read_arrays(folder / "checkpoints" / f"round-{number:06d}.npz")[0]


def test_a_node_that_comes_in_mid_run_changes_no_bit_and_the_next_run_has_it(tmp_path: Path) -> None:
    """Node 2 comes after round 1 of 2. The run is resumed with two nodes, and a new one has three."""
    own: Settings = {
        "num_clients": 4, "num_rounds": 2, "local-epochs": 1, "checkpoint-every": 1, "dataset": "digits",
        "num_nodes": 2, "node-timeout": 30.0,
    }  # fmt: skip
    alone = deployed(small_settings(**own, output=str(tmp_path / "alone")), tmp_path / "a", 2)
    late = FIRST_NODE_ID + 2
    settings = small_settings(**own, output=str(tmp_path / "run"))
    found = deployed(settings, tmp_path / "b", 3, late)
    np.testing.assert_equal(arrays(found, 2), arrays(alone, 2))
    log = (found / "server.log").read_text()
    assert log.count("node 2 takes no part in this run\n") == 1  # the server's line, without the node's
    assert "refused" not in log
    manifest = read_manifest(found)
    assert (manifest["nodes"], manifest["refused"], manifest["joined"]) == ([[0, 2], [1, 3]], [], [])
    assert not (tmp_path / "b" / "node-2" / manifest["experiment"]).exists()
    longer = settings | {"num-rounds": 3, "resume": str(found), "output": ""}
    assert deployed(longer, tmp_path / "b", 3) == found
    assert len(read_manifest(found)["nodes"]) == 2
    following = small_settings(**own | {"num_nodes": 3, "num_rounds": 1}, output=str(tmp_path / "next"))
    assert read_manifest(deployed(following, tmp_path / "b", 3))["nodes"] == [[0, 3], [1], [2]]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a deployment's run of two nodes by a version without the setting."""
    folder = tmp_path_factory.mktemp("earlier") / "run"
    settings = small_settings(num_clients=2, num_rounds=2, output=str(folder))
    deployed(settings | {"num-nodes": 2}, folder.with_name("state"), 2)
    manifest = read_manifest(folder)
    del manifest["settings"]["num-nodes"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_the_plan_names_the_number_of_nodes(tmp_path: Path) -> None:
    output: dict[str, Scalar] = {"output": str(tmp_path / "run")}
    for changes, nodes, clients in (({}, 3, 3), ({"num-nodes": 2}, 2, 2), ({"num-nodes": 2, "num-clients": 9}, 2, 9)):
        settings = plan_deployed(3, output | changes).settings
        assert (settings["num-nodes"], settings["num-clients"]) == (nodes, clients)
    with pytest.raises(ConfigError, match="at most the number of the deployment's nodes, 3; got 4; `hyperfl deploy"):
        plan_deployed(3, output | {"num-nodes": 4})


@pytest.mark.parametrize(("changes", "most"), [({"num-nodes": 2, "min-nodes": 3}, 2), ({"min-nodes": 5}, 3)])
def test_a_run_that_could_only_wait_for_nodes_is_refused(changes: dict[str, Scalar], most: int, tmp_path: Path) -> None:
    output: dict[str, Scalar] = {"output": str(tmp_path / "run")}
    text = rf"min-nodes must be at most the number of the run's nodes, {most} \(num-nodes\); got {changes['min-nodes']}"
    with pytest.raises(ConfigError, match=text):
        plan_deployed(3, output | changes)
    assert plan_deployed(3, output | changes | {"min-nodes": most}).settings["min-nodes"] == most


def test_a_resumed_run_keeps_its_number_of_nodes(earlier: Path) -> None:
    changes: dict[str, Scalar] = {"resume": str(earlier), "num-rounds": 3}
    for more in ({}, {"num-nodes": 2}, {"num-nodes": "auto"}):
        assert plan_deployed(3, changes | more).settings["num-nodes"] == 2
    with pytest.raises(RunDirectoryError, match=r"must have as many nodes as before \(2\), got 3"):
        plan_deployed(3, changes | {"num-nodes": 3})
    with pytest.raises(ConfigError, match="at most the number of the deployment's nodes, 1; got 2"):
        plan_deployed(1, changes)


def test_in_a_simulation_it_is_the_number_of_simulated_nodes(tmp_path: Path) -> None:
    settings = small_settings(num_clients=4, num_nodes=2, output=str(tmp_path / "run"))
    assert plan(settings, None, IN_PROCESS).num_nodes == 2
    with pytest.raises(ConfigError, match="--num-nodes and num-nodes must be the same; got 3 and 2; leave one out"):
        plan(settings, 3, IN_PROCESS)
    assert plan(settings, 2, IN_PROCESS).num_nodes == 2
    with pytest.raises(RunFailedError, match="num-nodes is 2, but the simulation has 1 nodes"):
        trained(settings)
    run(plain_grid(2, settings), RunConfig.from_flat(settings), plots=False)
