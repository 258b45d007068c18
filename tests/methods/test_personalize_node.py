"""A novel client's node: only one vector of d numbers leaves it, whatever messages it receives."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from federations import small_settings
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from novel_owner import HearingGrid, OwnedGrid, node_of, normalised, predictions
from safetensors.torch import load_file

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.personalize import open_run
from hyperfl_flwr.contract.leaks import leaks
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import ARRAYS, CLIENTS, PER_CLIENT_ARRAYS, PROPERTIES, Report, record_of
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.queries import DESCRIBE, PERSONALIZE, PROBLEM, RECIPE
from hyperfl_flwr.server.federation import handshake, request_handshakes
from hyperfl_flwr.server.in_process_grid import InProcessGrid


@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_nothing_but_the_descriptor_leaves(
    serving_run: Path, photographs: Path, pixels: np.ndarray, tmp_path: Path, epsilon: float | None
) -> None:
    """No message has 16 bytes of the images, the pooled features or the predictions; the model's bytes are found.

    Names of files and folders do not occur in replies either.
    """
    noise: dict[str, Scalar] = {} if epsilon is None else {"novel-epsilon": epsilon, "novel-delta": 0.01}
    grid = HearingGrid(node_of(photographs, tmp_path / "out", **noise))
    (served,) = open_run(serving_run).serve(grid)
    planar, floats = pixels.transpose(0, 3, 1, 2), normalised(serving_run, pixels).numpy()
    with np.load(tmp_path / "out" / "release.npz") as release:
        pooled = release["vector"][release["vector"] != 0]  # windows of zeros would occur in any encoder
    secrets = {
        "pixels": pixels.tobytes(), "planes": planar.tobytes(), "scaled": (planar / np.float32(255)).tobytes(),
        "normalised": floats.tobytes(), "pooled": pooled.tobytes(), "pooled32": pooled.astype(np.float32).tobytes(),
        "predictions": (tmp_path / "out" / "predictions.csv").read_bytes(),
    }  # fmt: skip
    messages = {f"message {number}": data for number, data in enumerate([*grid.down, *grid.up])}
    assert leaks(secrets, messages) == []
    assert not [word for word in (b"private", b"ward", b"photographs", b"confidence") for m in grid.up if word in m]
    sent = {"model": load_file(tmp_path / "out" / "model.safetensors")["classifier.weight"].numpy().tobytes()}
    assert leaks(sent, messages)
    assert any(served.descriptor.tobytes() in message for message in grid.up)
    assert max(map(len, grid.up)) < 1200  # 16 bytes are the descriptor, the rest the report's names and numbers


def descriptor_message(run: Path, change: Callable[[SharedArrays], SharedArrays] = lambda arrays: arrays) -> Message:
    source = open_run(run)
    arrays = change({key: value.copy() for key, value in unpack_arrays(source.encoder).items()})
    content = RecordDict({ARRAYS: pack_arrays(arrays), RECIPE: ConfigRecord(source.recipe.values())})
    return Message(content, dst_node_id=1000, message_type=DESCRIBE)


def reply_to(grid: InProcessGrid, message: Message) -> RecordDict:
    (reply,) = grid.send_and_receive([message])
    assert not reply.has_error(), reply.error
    return reply.content


def described(content: RecordDict) -> bytes:
    return unpack_arrays(record_of(content, PER_CLIENT_ARRAYS, ArrayRecord))["0/embedding/weight"].tobytes()


def failure(content: RecordDict) -> str:
    assert PER_CLIENT_ARRAYS not in content
    return Report.from_record(record_of(content, CLIENTS, ConfigRecord)).failures[0].reason


def test_a_message_that_is_sent_again_gets_the_same_noise(serving_run: Path, photographs: Path, tmp_path: Path) -> None:
    """The noise is the same bits, also in a new process of the node; another output folder draws new noise."""
    node = node_of(photographs, tmp_path / "out", **{"novel-epsilon": 1.0, "novel-delta": 0.01})
    first = described(reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(serving_run)))
    assert described(reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(serving_run))) == first
    other = node | {"novel-output": str(tmp_path / "other")}
    assert described(reply_to(InProcessGrid(app, 1, {}, other), descriptor_message(serving_run))) != first


def test_a_second_release_needs_the_owners_will(serving_run: Path, photographs: Path, tmp_path: Path) -> None:
    """With another encoder, epsilon or data, the same output folder is refused; a new one is accepted."""
    node = node_of(photographs, tmp_path / "out", **{"simulated": True, "novel-epsilon": 1.0, "novel-delta": 0.01})
    first = described(reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(serving_run)))

    def changed(arrays: SharedArrays) -> SharedArrays:
        arrays["encoder/body.8.bias"][0] += 1
        return arrays

    assert "with other encoder" in failure(
        reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(serving_run, changed))
    )
    dearer = InProcessGrid(app, 1, {}, node | {"novel-epsilon": 2.0})
    assert "with other epsilon" in failure(reply_to(dearer, descriptor_message(serving_run)))
    (photographs / "ward-0" / "private-0.png").unlink()
    assert "with other samples" in failure(reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(serving_run)))
    elsewhere = InProcessGrid(app, 1, {}, node | {"novel-output": str(tmp_path / "b")})
    assert described(reply_to(elsewhere, descriptor_message(serving_run))) != first


def test_a_model_of_another_command_is_kept(serving_run: Path, photographs: Path, tmp_path: Path) -> None:
    """A node whose output folder has a model without a release sends no descriptor, and writes nothing."""
    (output := tmp_path / "out").mkdir()
    (output / "model.safetensors").write_bytes(b"mine")
    grid = InProcessGrid(app, 1, {}, node_of(photographs, output, simulated=True))
    assert "holds model.safetensors of another command" in failure(reply_to(grid, descriptor_message(serving_run)))
    with pytest.raises(RunFailedError, match="of another command, which would be replaced; choose another one"):
        open_run(serving_run).serve(grid)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == {"model.safetensors": b"mine"}


def test_the_server_cannot_name_data_of_a_node_with_an_owner(
    serving_run: Path, photographs: Path, tmp_path: Path
) -> None:
    """Only simulated nodes read the run's personalize settings; an owner's data take precedence everywhere."""
    asked: dict[str, Scalar] = small_settings(
        **{
            "personalize.run": str(serving_run), "personalize.data": str(photographs),
            "personalize.output": str(tmp_path / "out"),
        }
    )  # fmt: skip
    grid = InProcessGrid(app, 1, asked, {})
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1000, message_type="query.hello")])
    assert "novel" not in record_of(reply.content, PROPERTIES, ConfigRecord)
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1000, message_type=PERSONALIZE)])
    assert "is not a novel client" in reply.error.reason
    missing = InProcessGrid(app, 1, asked, node_of(tmp_path / "gone", tmp_path / "out", simulated=True))
    assert "gone does not exist" in failure(reply_to(missing, descriptor_message(serving_run)))
    assert not (tmp_path / "out").exists()


def test_what_goes_wrong_stays_on_a_node_with_an_owner(serving_run: Path, tmp_path: Path) -> None:
    """The server learns the type of an error, but not its text, which contains paths."""
    grid = HearingGrid(node_of(tmp_path / "secret-place", tmp_path / "out"))
    assert failure(reply_to(grid, descriptor_message(serving_run))) == "DataError, see the node's log"
    assert not [message for message in grid.up if b"secret-place" in message]


def test_a_wrong_node_config_is_told_without_its_values(photographs: Path, tmp_path: Path) -> None:
    grid = HearingGrid(node_of(photographs, tmp_path / "secret-place", **{"novel-epsilonn": 1.0}))
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1000, message_type="query.hello")])
    told = str(record_of(reply.content, PROPERTIES, ConfigRecord)[PROBLEM])
    assert told.startswith("its owner must repair novel-epsilonn in the node config")
    assert not [message for message in grid.up if b"secret-place" in message]


def test_messages_that_are_no_good_are_answered_with_a_failure(
    serving_run: Path, photographs: Path, tmp_path: Path
) -> None:
    grid = InProcessGrid(app, 1, {}, node_of(photographs, tmp_path / "out", simulated=True))
    recipe = open_run(serving_run).recipe.values()
    for bad in (
        {"target": "../x"},
        {"std": [0.0] * 3},
        {"std": [1e-38] * 3},
        {"mean": [1e30] * 3},
        {"input_shape": [10**9, 1, 1]},
        {"pooling": "max"},
    ):
        message = descriptor_message(serving_run)
        message.content[RECIPE] = ConfigRecord(recipe | bad)
        assert failure(reply_to(grid, message)).startswith("ValueError")
    fewer = descriptor_message(serving_run, lambda arrays: {k: v for k, v in arrays.items() if "head.5" not in k})
    assert "arrays are missing: encoder/head.5.bias" in failure(reply_to(grid, fewer))
    broken = descriptor_message(serving_run, lambda arrays: {k: v * np.float32("nan") for k, v in arrays.items()})
    assert "not finite" in failure(reply_to(grid, broken))
    assert not (tmp_path / "out" / "release.npz").exists()


def test_several_novel_nodes_are_served_at_once(serving_run: Path, photographs: Path, tmp_path: Path) -> None:
    """Two nodes with the same data are both served and get the same descriptor."""
    grid = HearingGrid(node_of(photographs, tmp_path / "out"), num_nodes=2)
    one, other = open_run(serving_run).serve(grid)
    assert (one.client, other.client) == (0, 1)
    np.testing.assert_array_equal(one.descriptor, other.descriptor)


def test_a_novel_node_neither_trains_nor_evaluates(photographs: Path, tmp_path: Path) -> None:
    """It refuses even if the run's settings name a data set that it could load."""
    node = node_of(photographs, tmp_path / "out") | {"partition-id": 0, "num-partitions": 1}
    grid = InProcessGrid(app, 1, small_settings(method="fedavg"), node)
    for kind in (MessageType.TRAIN, MessageType.EVALUATE):
        (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1000, message_type=kind)])
        assert "this node is a novel client" in reply.error.reason


def test_a_node_that_names_another_ones_client_is_refused(serving_run: Path, photographs: Path, tmp_path: Path) -> None:
    """Otherwise it would receive the other node's model, which gets it."""
    grid = HearingGrid(node_of(photographs, tmp_path / "out"), num_nodes=2)
    answer = grid.answer

    def falsify(message: Message) -> Message:
        reply = answer(message)
        if message.metadata.message_type == "query.hello" and message.metadata.dst_node_id == 1001:
            reply.content[PROPERTIES]["clients"] = [0]  # type: ignore[index]
        return reply

    grid.answer = falsify  # type: ignore[method-assign]
    with pytest.raises(RunFailedError, match=r"^1 of 2 novel .*; client 1: its node reports other clients than its ow"):
        open_run(serving_run).serve(grid)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_nodes_with_one_number_are_refused(serving_run: Path, photographs: Path, tmp_path: Path) -> None:
    """Neither receives the other's model; a node with a number of its own is served."""
    config = {"partition-id": 0, "num-partitions": 3}
    nodes = [node_of(photographs, tmp_path / str(number), **config) for number in range(3)]
    nodes[2]["partition-id"] = 7
    with pytest.raises(RunFailedError, match=r"^2 of 3 novel .*; client 0: 2 novel nodes have .*; client 0: 2 novel"):
        open_run(serving_run).serve(OwnedGrid(nodes))
    assert [(tmp_path / str(number)).exists() for number in range(3)] == [False, False, True]


class MixedGrid(InProcessGrid):
    """A grid of one ordinary node of a federation and two novel ones."""

    def __init__(self, settings: dict[str, Scalar], photographs: Path, output: Path) -> None:
        super().__init__(app, 3, settings, {"simulated": True})
        ordinary, *novel = self._contexts.values()
        ordinary.node_config["num-partitions"] = 1
        for number, context in enumerate(novel):
            folder = node_of(photographs, output / f"node-{number}")
            context.node_config = {"partition-id": number, "num-partitions": 2, **folder}


def test_novel_nodes_and_others_are_left_alone_by_each_others_servers(
    serving_run: Path, photographs: Path, tmp_path: Path
) -> None:
    """The federation's handshake finds its one node with all clients; serving finds the two novel nodes."""
    grid = MixedGrid(json.loads((serving_run / "manifest.json").read_text())["settings"], photographs, tmp_path)
    (node,) = handshake(grid, 5, timeout=5.0).nodes
    assert node.clients == [0, 1, 2, 3, 4]
    assert [served.client for served in open_run(serving_run).serve(grid)] == [0, 1]
    assert predictions(tmp_path / "node-0") == predictions(tmp_path / "node-1")
    lonely = InProcessGrid(app, 1, dict(grid._contexts[1000].run_config), {"simulated": True})
    with pytest.raises(RunFailedError, match="only 0 of an unknown number of novel nodes replied"):
        request_handshakes(lonely, 0.1, novel=True)
