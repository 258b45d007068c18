"""A client with labels joins a run of which the server has the hypernetwork: an embedding is trained for it."""

import json
from pathlib import Path

import numpy as np
import pytest
from federations import Call, small_settings, trained
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from novel_owner import HearingGrid, OwnedGrid
from safetensors.torch import load_file

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.joining import open_joinable
from hyperfl_flwr.app.server import join_nodes
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.folders import files_below
from hyperfl_flwr.contract.leaks import leaks
from hyperfl_flwr.core.errors import RunDirectoryError, RunFailedError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.privacy.budget import NEEDS_BOUND
from hyperfl_flwr.protocol.messages import CLIENTS, PER_CLIENT_ARRAYS, PROPERTIES, Report, record_of
from hyperfl_flwr.protocol.queries import JOIN
from hyperfl_flwr.server.in_process_grid import InProcessGrid

SETTINGS: dict[str, Scalar] = {
    "method": "pfedhn", "target": "mlp", "num-clients": 4, "num-rounds": 25, "local-epochs": 2,
    "data.partition": "natural", "data.train-samples": "auto", "data.test-samples": "auto", "pfedhn.combine": "sum",
    "pfedhn.embedding-dim": 3, "pfedhn.hidden-width": 32,
}  # fmt: skip

MEMBERS = ((0, 1), (2, 3), (4, 5), (6, 7))
"""Classes of the clients of the run; the new client has those of the second one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("join-server")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Return a finished run whose clients have two digits each."""
    digits = load_dataset("digits").train
    rows = [np.flatnonzero(np.isin(digits.labels, classes))[:60] for classes in MEMBERS]
    chosen = np.concatenate(rows)
    labels = digits.labels[chosen]
    np.savez(
        folder / "members.npz", images=digits.images[chosen], labels=labels,
        clients=np.repeat(np.arange(len(MEMBERS)), [len(some) for some in rows]),
    )  # fmt: skip
    settings: dict[str, Scalar] = {"dataset": f"npz:{folder / 'members.npz'}", "output": str(folder / "run")}
    return trained(small_settings(**(SETTINGS | settings)))


@pytest.fixture(scope="module")
def mine(folder: Path) -> Path:
    """Return a file with other samples of the classes of the second client."""
    digits, kept = load_dataset("digits"), {}
    for name, part in (("", digits.train), ("test_", digits.test)):
        chosen = np.flatnonzero(np.isin(part.labels, MEMBERS[1]))[-60:]
        kept |= {f"{name}images": part.images[chosen], f"{name}labels": part.labels[chosen]}
    np.savez(folder / "mine.npz", **kept)
    return folder / "mine.npz"


def node_of(data: Path, output: Path, **more: Scalar) -> dict[str, Scalar]:
    return {"join-data": f"npz:{data}", "novel-output": str(output), "device": "cpu", **more}


def test_the_embedding_is_trained_and_nothing_else(run: Path, mine: Path, tmp_path: Path) -> None:
    """Accuracy rises; the server's arrays keep their bits; no message has 16 bytes of them, of samples or of labels.

    The model that the client keeps is in no message either, since it was trained after the last one.
    """
    source = open_joinable(run, rate=1.0)
    before = {name: value.numpy().tobytes() for name, value in source.strategy.server.state().items()}
    files = files_below(run)
    node = node_of(mine, tmp_path / "out", **{"state-dir": str(tmp_path / "state")})
    grid = HearingGrid(node)
    (served,) = source.join(grid, 12)
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert facts["accuracy_generated"] > facts["accuracy_before"] + 0.2
    assert facts["accuracy"] >= facts["accuracy_generated"]
    assert {name: value.numpy().tobytes() for name, value in source.strategy.server.state().items()} == before
    assert files_below(run) == files
    with np.load(mine) as file:
        data = {name: file[name] for name in ("images", "test_images", "labels", "test_labels")}
    floats = {f"float {name}": (value / np.float32(16)).astype(np.float32) for name, value in data.items()}
    kept = {name: value.numpy() for name, value in load_file(tmp_path / "out" / "model.safetensors").items()}
    messages = {f"message {number}": data for number, data in enumerate([*grid.down, *grid.up])}
    secrets = {name: value.tobytes() for name, value in ({**data, **floats, **kept}).items()}
    momentum = {name for name in before if name.startswith("momentum/")}
    assert leaks(secrets | {name: value for name, value in before.items() if name not in momentum}, messages) == []
    assert served.rounds == 12
    assert served.bytes_of_round == sum(value.nbytes for value in kept.values())
    assert sum(len(data) > served.bytes_of_round for data in grid.down) == 13  # and a handshake
    assert sum(len(data) > served.bytes_of_round for data in grid.up) == 12
    record = (tmp_path / "state" / "privacy.jsonl").read_text().splitlines()
    assert [json.loads(line)["bounded_by"] for line in record] == ["nothing"] * 12


def test_the_command_writes_the_model(run: Path, mine: Path, call: Call) -> None:
    """The accuracies are those of model.json; the one after local training is that of the written model."""
    words = ("--data", f"npz:{mine}", "-o", "joined", "--rounds", "2", "--device", "cpu")
    code, out, err = call("join", run, *words)
    assert (code, err) == (0, "")
    facts = json.loads(Path("joined/model.json").read_text())
    assert out.startswith(
        f"accuracy {100 * facts['accuracy_before']:.2f} % of the model of the first embedding, "
        f"{100 * facts['accuracy_generated']:.2f} % of the trained one and {100 * facts['accuracy']:.2f} % after"
    )
    assert "the server received 2 changes of the client's model" in out
    names = {"model.safetensors", "model.json", "use_model.py", "privacy.jsonl"}
    assert {path.name for path in Path("joined").iterdir()} == names
    with np.load(mine) as file:
        np.savez("test.npz", images=file["test_images"], labels=file["test_labels"])
    code, out, _ = call("predict", "joined/model.safetensors", "--data", "test.npz", "-o", "p.csv")
    assert out.startswith(f"accuracy {100 * facts['accuracy']:.2f} %")


def test_join_at_a_server_refuses_bad_input(run: Path, mine: Path, folder: Path, call: Call) -> None:
    np.savez("large.npz", images=np.zeros((8, 9, 9), np.uint8), labels=np.arange(8) % 2)
    Path("used").mkdir()
    Path("used/file").write_text("")
    pc = trained(small_settings(method="pfedhn-pc", num_rounds=1, output=str(folder / "pc")))
    fedrep = trained(small_settings(method="fedrep", num_rounds=1, output=str(folder / "fedrep")))
    npz = f"npz:{mine}"
    for words, expected in (
        ((run, "--data", "npz:large.npz", "-o", "a"), "must have the shape 1x8x8"),
        ((run, "--data", npz, "-o", "used"), "used exists and is not empty"),
        ((run, "--data", npz), "no output folder given"),
        ((run, "--data", npz, "-o", "a", "--model", "cnn"), "has no network cnn; choose one with --model, of mlp"),
        ((run, "--data", npz, "--deployment", "."), "the node.toml of each joining node sets its data"),
        ((pc, "--data", npz, "-o", "a"), "is a run of pfedhn-pc, which a client cannot join"),
        ((fedrep, "--data", npz, "-o", "a", "--embedding-rate", "1"), "are for runs of pfedhn and it-pfl"),
    ):
        code, out, err = call("join", *words)
        assert (code, out) == (2, ""), words
        assert expected in err, err
        assert not Path("a").exists()
    with pytest.raises(RunDirectoryError, match="use a run of it-pfl, pfedhn"):
        open_joinable(fedrep)


def test_of_several_networks_one_is_chosen(mine: Path, folder: Path, call: Call) -> None:
    settings: dict[str, Scalar] = {"num-rounds": 1, "pfedhn.targets": "cnn,mlp", "output": str(folder / "hetero")}
    hetero = trained(small_settings(method="pfedhn", **settings))
    words = ("--data", f"npz:{mine}", "--rounds", "1", "--device", "cpu", "-o")
    code, _, err = call("join", hetero, *words, "a")
    assert (code, "has several networks; choose one with --model, of cnn, mlp" in err) == (2, True)
    for name in ("cnn", "mlp"):
        assert call("join", hetero, *words, name, "--model", name)[0] == 0
        assert json.loads(Path(name, "model.json").read_text())["target"] == name


def test_it_pfl_generates_with_the_hypernetwork_of_the_first_phase(serving_run: Path, tmp_path: Path) -> None:
    """The tuned hypernetwork takes descriptors; embeddings belong to the copy from before."""
    source = open_joinable(serving_run)
    strategy = source.strategy
    made = strategy.new_embedding("lenet")
    kept = strategy.kept  # type: ignore[attr-defined]
    assert np.array_equal(made.embedding.detach().numpy(), strategy.server.embeddings.detach().mean(dim=0).numpy())
    tuned = dict(strategy.server.hypernetwork.named_parameters())
    used = dict(made._hypernetwork.named_parameters())
    assert all(np.array_equal(used[name].detach().numpy(), value.numpy()) for name, value in kept.items())
    assert not np.array_equal(used["head_bias"].detach().numpy(), tuned["head_bias"].detach().numpy())
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", images=images, labels=np.arange(24) % 3)
    grid = HearingGrid(node_of(tmp_path / "mine.npz", tmp_path / "out", **{"state-dir": str(tmp_path / "state")}))
    (served,) = source.join(grid, 1)
    assert served.num_examples == 18
    assert (tmp_path / "out" / "use_model.py").exists()


def test_nodes_with_owners_join(run: Path, mine: Path, tmp_path: Path) -> None:
    """The server app serves joining nodes and leaves out others; a node with a privacy budget sends nothing."""
    nodes = [
        node_of(mine, tmp_path / str(number), **{"state-dir": str(tmp_path / f"state-{number}")}) for number in (0, 1)
    ]
    on_demand = {"novel-data": str(mine), "novel-output": str(tmp_path / "on-demand")}
    config = RunConfig.from_flat(default_settings() | {"personalize.run": str(run), "personalize.join-rounds": 2})
    lines = list(join_nodes(OwnedGrid([*nodes, on_demand], config.flat()), config))
    assert [line.split(":")[0] for line in lines] == ["novel client 0", "novel client 1"]
    one, other = (load_file(tmp_path / str(number) / "model.safetensors") for number in (0, 1))
    assert one.keys() == other.keys()
    assert not (tmp_path / "on-demand").exists()
    careful = [{**nodes[0], "novel-output": str(tmp_path / "careful"), "max-epsilon": 1.0}, nodes[1]]
    with pytest.raises(RunFailedError, match=r"1 of 2 novel .*; client 0: the owner .* has set max-epsilon"):
        list(join_nodes(OwnedGrid(careful, config.flat()), config))
    assert not (tmp_path / "careful" / "model.safetensors").exists()


def test_the_last_step_is_refused_with_a_privacy_budget(run: Path, mine: Path, tmp_path: Path) -> None:
    """No arrays leave in it, but whether the training ends in finite numbers does; and the server names it the last."""
    node = node_of(mine, tmp_path / "out", **{"state-dir": str(tmp_path / "state")})
    grid, sent = HearingGrid(node), list[Message]()
    answer = grid.answer

    def heard(message: Message) -> Message:
        sent.append(message)
        return answer(message)

    grid.answer = heard  # type: ignore[method-assign]
    open_joinable(run).join(grid, 1)
    careful = node | {"novel-output": str(tmp_path / "careful"), "max-epsilon": 4.0}
    reply = InProcessGrid(app, 1, {}, careful).answer(sent[-1])
    report = Report.from_record(record_of(reply.content, CLIENTS, ConfigRecord))
    assert [failure.reason for failure in report.failures] == [NEEDS_BOUND]


def test_a_node_that_claims_another_ones_number_takes_nothing_from_it(run: Path, mine: Path, tmp_path: Path) -> None:
    """It is refused for its clients, and the node whose number it claims joins."""
    grid = OwnedGrid([node_of(mine, tmp_path / str(number)) for number in (0, 1)])
    answer = grid.answer

    def forged(message: Message) -> Message:
        reply = answer(message)
        if message.metadata.message_type == "query.hello" and message.metadata.dst_node_id == 1001:
            reply.content[PROPERTIES] = ConfigRecord({**reply.content[PROPERTIES], "partition": 0, "clients": [2]})
        return reply

    grid.answer = forged  # type: ignore[method-assign]
    with pytest.raises(
        RunFailedError, match=r"^1 of 2 novel .*; client 0: its node reports other clients than its own"
    ):
        open_joinable(run).join(grid, 1)
    assert [(tmp_path / str(number) / "model.safetensors").exists() for number in (0, 1)] == [True, False]


def test_a_node_replaces_joined_models_only(run: Path, mine: Path, tmp_path: Path) -> None:
    """A join can be repeated in its folder; a model of another command stays there, and no change is sent."""
    source, output = open_joinable(run), tmp_path / "out"
    grid = HearingGrid(node_of(mine, output, **{"state-dir": str(tmp_path / "state"), "simulated": True}))
    for _ in range(2):
        source.join(grid, 1)
    facts = json.loads((output / "model.json").read_text())
    record = (tmp_path / "state" / "privacy.jsonl").read_text()
    for text in (json.dumps(facts | {"state": "personalized"}), "[]", ""):
        (output / "model.json").write_text(text)
        before = files_below(output)
        with pytest.raises(RunFailedError, match=r"novel-output = .*/out holds model.safetensors, model.json, use_mod"):
            source.join(grid, 1)
        assert files_below(output) == before
    assert (tmp_path / "state" / "privacy.jsonl").read_text() == record


def test_only_nodes_with_labelled_data_train(mine: Path, tmp_path: Path) -> None:
    """A node that receives models on demand refuses JOIN, and a joining node refuses TRAIN and wrong arrays."""
    join = Message(RecordDict(), dst_node_id=1000, message_type=JOIN)
    on_demand = InProcessGrid(app, 1, {}, {"novel-data": str(mine), "novel-output": str(tmp_path), "simulated": True})
    (reply,) = on_demand.send_and_receive([join])
    assert "its owner must set join-data" in reply.error.reason
    joining = InProcessGrid(app, 1, {}, node_of(mine, tmp_path / "out", simulated=True))
    train = Message(RecordDict(), dst_node_id=1000, message_type=MessageType.TRAIN)
    (reply,) = joining.send_and_receive([train])
    assert "this node is a novel client" in reply.error.reason
    (reply,) = joining.send_and_receive([join])
    assert PER_CLIENT_ARRAYS not in reply.content
    assert "joining" in str(dict(record_of(reply.content, "clients", ConfigRecord)))
