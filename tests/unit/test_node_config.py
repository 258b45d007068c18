"""An owner's settings are checked together; the server learns only their names, and cannot change them."""

from pathlib import Path

import numpy as np
import pytest
from federations import small_settings
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from clients.engine import adapter
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.node import NodeApp
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError, DataError, RefusalError, for_others
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.protocol.messages import ARRAYS, CONFIG, HELLO, PROPERTIES, Request, record_of
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.queries import PROBLEM
from hyperfl_flwr.server.in_process_grid import InProcessGrid


def context(run: Settings | None = None, **node: Scalar) -> Context:
    """Return the context of a node; `state_dir` stands for `state-dir`."""
    config: dict[str, Scalar] = {"partition-id": 0, "num-partitions": 5}
    config |= {key.replace("_", "-"): value for key, value in node.items()}
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config=run or small_settings())


def app_of(found: Context) -> NodeApp:
    return NodeApp(NodeConfig.of_context(found), found.run_config)


def test_all_that_is_wrong_is_told_together_and_the_server_learns_the_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        NodeConfig.of(context(data_rot="/secret", threads=0, state_dir="state", data="mnits", device="mps").node_config)
    text, told = str(caught.value), for_others(caught.value)
    assert text.startswith("in the node config, 5 settings are wrong:")
    for part in (
        "did you mean data-root?",
        "threads must be",
        "state-dir must be an absolute path",
        "did you mean mnist",
    ):
        assert part in text
    assert "device must be auto, cpu, cuda" in text
    assert told.startswith("its owner must repair data, data-rot, device, state-dir, threads in the node config")
    assert "secret" not in told
    with pytest.raises(ConfigError, match="qqqq is unknown; known are partition-id, num-partitions, data"):
        NodeConfig.of(context(qqqq=1).node_config)


@pytest.mark.parametrize("data", ["npz:", "folder:", "npz:PATH"])
def test_data_must_name_something(data: str) -> None:
    with pytest.raises(ConfigError, match="data must name a file after npz: or csv:, or a folder after folder:"):
        NodeConfig.of(context(data=data).node_config)


def test_the_server_cannot_decide_about_the_machine(tmp_path: Path) -> None:
    """A node uses the owner's values, or the defaults without any; in a simulation it uses the run's settings, too."""
    run = small_settings(device="cpu", threads=3, **{"data-root": "/etc"})
    left_open = app_of(context(run)).config
    assert (left_open.device, left_open.threads, left_open.data_root) == ("auto", "auto", "")
    given = app_of(context(run, device="cpu", threads=1, data_root=str(tmp_path))).config
    assert (given.device, given.threads, given.data_root) == ("cpu", 1, str(tmp_path))
    simulated = app_of(context(run, simulated=True, threads=2)).config
    assert (simulated.device, simulated.threads, simulated.data_root) == ("cpu", 2, "/etc")


def test_state_and_data_and_limits_are_no_settings_of_a_run() -> None:
    """The server may send any key, but an owner's key is unknown among the run's settings."""
    for key in ("state-dir", "max-message-mb", "mixing-key-file", "data", "keep-model"):
        with pytest.raises(ConfigError, match=f"{key} is unknown|data must"):
            app_of(context(small_settings() | {key: 1}))


@pytest.mark.parametrize("dataset", ["npz:/home/me/a.npz", "folder:../me"])
def test_the_server_cannot_name_files(dataset: str) -> None:
    with pytest.raises(RefusalError, match=r"only each node's owner may name one, as data in node\.toml"):
        app_of(context(small_settings(dataset=dataset)))
    assert app_of(context(small_settings(dataset=dataset), data="digits")).config.dataset == "digits"


def test_a_node_with_its_own_data_hosts_one_client() -> None:
    assert app_of(context(data="npz:/a.npz")).clients == [0]
    with pytest.raises(RefusalError, match="must be the number of nodes, 5, got 20"):
        app_of(context(small_settings(**{"num-clients": 20}), data="npz:/a.npz"))
    assert app_of(context(small_settings(**{"num-clients": 20}), data="digits")).clients == [0, 5, 10, 15]


def ask(kind: str, content: RecordDict, **node: Scalar) -> Message:
    """Send one message to a node with this node config, and return the reply."""
    grid = InProcessGrid(app, 1, small_settings(**{"num-clients": 1}), node)
    (number,) = grid.get_node_ids()
    return grid.answer(Message(content, dst_node_id=number, message_type=kind))


def test_a_message_that_is_too_large_is_refused_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays of 2 MB are refused with a limit of 1 MB, and unpacked with one of 3 MB or without any (0)."""

    def unpacked(_: ArrayRecord) -> None:
        raise DataError("unpacked")

    monkeypatch.setattr(adapter, "unpack_arrays", unpacked)
    request = Request(round=1, experiment="0" * 16, run_directory="", clients=[0], versions=[0], kept_versions=[0])
    arrays = pack_arrays({"model/a": np.zeros(500_000, np.float32)})

    def reason(limit: float) -> str:
        content = RecordDict({ARRAYS: arrays, CONFIG: request.to_record()})
        return str(ask("train", content, **{"state-dir": str(tmp_path), "max-message-mb": limit}).error.reason)

    assert reason(1) == "a message has 2.0 MB, but its owner allows max-message-mb = 1"
    assert reason(3) == reason(0) == "DataError, see the node's log"


def test_a_node_tells_why_it_cannot_take_part_without_its_paths(tmp_path: Path) -> None:
    missing = tmp_path / "nobody's business.npz"
    reply = ask(HELLO, RecordDict(), **{"state-dir": str(tmp_path), "data": f"npz:{missing}"})
    told = dict(record_of(reply.content, PROPERTIES, ConfigRecord))
    assert told == {"partition": 0, PROBLEM: "DataError, see the node's log"}


def test_errors_have_a_public_side() -> None:
    assert for_others(ValueError("/home/me")) == "ValueError, see the node's log"
    assert for_others(DataError("/home/me", public="too few")) == "too few"
    assert for_others(RefusalError("no")) == "no"
