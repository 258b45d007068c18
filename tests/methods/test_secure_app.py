"""The client app in runs with secure sums: what it refuses, its handshake, its last check, and what it imports."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from PIL import Image
from secure_federation import SESSION, SecureFederation
from secure_steps import IDENTITIES

import hyperfl_flwr.app.client
from clients.engine import adapter
from hyperfl_flwr.app.client import app
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.partition.assign import TOO_FEW
from hyperfl_flwr.node.ledger import read_ledger
from hyperfl_flwr.protocol.messages import HELLO, PER_CLIENT_ARRAYS, PROPERTIES, record_of
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.queries import JOIN, PERSONALIZE, PROBLEM, QUERIES
from hyperfl_flwr.protocol.secure_sums.header import settings_digest
from hyperfl_flwr.protocol.secure_sums.keys import is_signed
from hyperfl_flwr.protocol.secure_sums.messages import (
    KEY,
    MASKED,
    SECURE,
    SIGNATURE,
    UNMASK,
    handshake_request,
    header_record,
)
from hyperfl_flwr.protocol.secure_sums.peers import peers_text
from hyperfl_flwr.server.in_process_grid import InProcessGrid

MakeSettings = Callable[..., Settings]


def reason_of(reply: Message) -> str:
    assert reply.has_error()
    return str(reply.error.reason)


@pytest.mark.parametrize("kind", ["train", "evaluate", *QUERIES, JOIN, PERSONALIZE])
def test_a_message_that_is_not_for_a_secure_sum_is_refused(
    make_settings: MakeSettings, tmp_path: Path, kind: str
) -> None:
    """Without a header no message is answered, and with one no query."""
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    header = grid.header()
    content = grid.content(header, 0)
    if kind in ("train", "evaluate"):
        del content[SECURE]
        expected = f"the run has secagg.enabled = true, but a message of type {kind} is not for a secure sum"
    else:
        expected = f"the run has secagg.enabled = true, so a message of type {kind} is not answered"
    assert reason_of(grid.ask(0, kind, content)) == expected
    entries, _ = read_ledger(grid.folders[0])
    assert entries[-1].error == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "hyperfl", "hyperfl.embedding": "per-client"}, "false with hyperfl.embedding = per-client: a sum"),
        ({"method": "fedgen"}, "false with fedgen: the server must see each client's classifier, labels"),
        ({"audit.clients": "all"}, "audit.clients must be empty with secagg.enabled, got all"),
    ],
)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_sum_that_can_be_separated_is_refused_by_the_node(
    make_settings: MakeSettings, tmp_path: Path, kind: Literal["train", "evaluate"], changes: Settings, expected: str
) -> None:
    """An honest server refuses such a run before it begins; a malicious server asks the nodes all the same."""
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    secure = {key: value for key, value in grid.settings.items() if key.startswith("secagg.")}
    settings = make_settings(str(changes.get("method", "fedrep"))) | secure | changes
    content = grid.content(grid.header(kind, settings=settings_digest(RunConfig.from_flat(settings).flat())), 0)
    grid.context(0).run_config.clear()
    grid.context(0).run_config.update(settings)
    assert expected in reason_of(grid.ask(0, kind, content))
    entries, _ = read_ledger(grid.folders[0])
    assert entries[-1].error == reason_of(grid.ask(0, kind, content))


def plain_node(settings: Settings, **node: Scalar) -> InProcessGrid:
    return InProcessGrid(app, 3, settings, {key.replace("_", "-"): value for key, value in node.items()})


def asked(grid: InProcessGrid, kind: str, content: RecordDict) -> Message:
    return grid.answer(Message(content, dst_node_id=next(iter(grid.get_node_ids())), message_type=kind))


def handshake_with(grid: InProcessGrid, session: str = "") -> Mapping[str, Any]:
    content = handshake_request(session)
    return dict(record_of(asked(grid, HELLO, content).content, PROPERTIES, ConfigRecord))


def peers_file(folder: Path, num_nodes: int = 3) -> str:
    path = folder / "peers.toml"
    path.write_text(peers_text({number: IDENTITIES[number].public_key() for number in range(num_nodes)}))
    return str(path)


def identity_file(folder: Path, number: int) -> str:
    path = folder / f"node-{number}.key"
    path.write_bytes(
        IDENTITIES[number].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    )
    return str(path)


@pytest.mark.parametrize("kind", ["train", "evaluate", *QUERIES, JOIN, PERSONALIZE, UNMASK])
def test_an_owner_who_allows_secure_sums_only_takes_part_in_no_other_run(
    make_settings: MakeSettings, tmp_path: Path, kind: str
) -> None:
    """The handshake says so, and messages that come all the same are refused, with a header, too."""
    node = {"state_dir": str(tmp_path / "state"), "secure_sum_only": True, "peers_file": peers_file(tmp_path)}
    grid = plain_node(make_settings("fedrep"), **node)
    expected = "its owner allows only secure sums (secure-sum-only = true); start the run with secagg.enabled = true"
    assert handshake_with(grid) == {"partition": 0, PROBLEM: expected}
    assert handshake_with(grid, SESSION)[PROBLEM] == expected
    secure = SecureFederation(make_settings("fedrep"), tmp_path)
    content = secure.content(secure.header(), 0)
    assert reason_of(asked(grid, kind, content)) == expected
    del content[SECURE]
    assert reason_of(asked(grid, kind, content)) == expected


def test_secure_sums_only_needs_peers(make_settings: MakeSettings, tmp_path: Path) -> None:
    grid = plain_node(make_settings("fedrep"), state_dir=str(tmp_path), secure_sum_only=True)
    assert "must repair secure-sum-only in the node config" in handshake_with(grid)[PROBLEM]


@pytest.mark.parametrize(("enabled", "session"), [(True, ""), (False, SESSION), (True, "../../x"), (True, "A" * 32)])
def test_a_handshake_fits_the_run(make_settings: MakeSettings, tmp_path: Path, enabled: bool, session: str) -> None:
    settings = make_settings("fedrep") | {"secagg.enabled": enabled}
    problem = handshake_with(plain_node(settings, state_dir=str(tmp_path)), session)[PROBLEM]
    assert problem == {
        "": "the run has secagg.enabled = true, but a message of type query.hello is not for a secure sum",
        SESSION: "a message of type query.hello is for a secure sum, but the run has secagg.enabled = false",
    }.get(session, "the session must be 32 hexadecimal digits")
    assert not (tmp_path / "secagg").exists()


def test_a_message_for_a_secure_sum_needs_the_setting(make_settings: MakeSettings, tmp_path: Path) -> None:
    secure = SecureFederation(make_settings("fedrep"), tmp_path)
    content = secure.content(secure.header(), 0)
    grid = plain_node(make_settings("fedrep"), state_dir=str(tmp_path))
    assert "is for a secure sum, but the run has secagg.enabled = false" in reason_of(asked(grid, "train", content))


def test_the_handshake_of_a_deployed_node_tells_no_number_of_samples(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    """A simulated node hides nothing: it reports them, with the counts of labels."""
    settings = make_settings("fedrep") | {"secagg.enabled": True}
    deployed = handshake_with(plain_node(settings, state_dir=str(tmp_path)), SESSION)
    simulated = handshake_with(plain_node(settings, simulated=True), SESSION)
    assert "num-examples" not in deployed
    assert not [key for key in deployed if "counts" in key]
    assert len(deployed[KEY]) == 64
    assert deployed[SIGNATURE] == ""
    assert simulated["num-examples"] == [40, 40]
    assert "train-label-counts" in simulated
    assert simulated[KEY] not in ("", deployed[KEY])


def owners_file(path: Path, count: int, groups: int) -> str:
    """Store an owner's images of the digits' shape, of three classes; return their name as a data set."""
    labels, tested = np.arange(count) % 3, np.arange(9) % 3
    images = {"images": np.zeros((count, 8, 8), np.uint8), "test_images": np.ones((9, 8, 8), np.uint8)}
    patients = {"groups": np.arange(count) % groups, "test_groups": groups + np.arange(9)} if groups else {}
    np.savez(path, labels=labels, test_labels=tested, **images, **patients)
    return f"npz:{path}"


OWN: Settings = {
    "num_clients": 3, "secagg.enabled": True, "data.classes": ",".join("abcdefghij"), "data.train-samples": "auto",
    "data.test-samples": "auto",
}  # fmt: skip


def test_a_handshake_does_not_tell_how_the_samples_are_divided(make_settings: MakeSettings, tmp_path: Path) -> None:
    """A server that asks with one fraction after another could find the numbers of samples and of groups by it."""
    answers = set()
    for count, groups in ((4, 0), (100, 0), (12, 1), (12, 2), (60, 20)):
        data = owners_file(tmp_path / f"{count}-{groups}.npz", count, groups)
        for fraction in (0.0, 1e-6, 0.1, 0.5, 0.99):
            settings = make_settings("fedrep", **OWN, **{"data.validation-fraction": fraction})
            told = handshake_with(plain_node(settings, state_dir=str(tmp_path / "state"), data=data), SESSION)
            answers.add(str(sorted((key, value) for key, value in told.items() if key != KEY)))
    (answer,) = answers
    assert PROBLEM not in answer


def test_a_fraction_that_leaves_too_few_is_named_at_the_first_training(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    """A sentence for the operator; whether samples or groups are too few is in the node's log alone."""
    settings = make_settings("fedrep", **OWN, **{"data.validation-fraction": 0.01})
    grid = SecureFederation(settings, tmp_path)
    for number in range(3):
        data = owners_file(tmp_path / f"{number}.npz", 12, 1 if number == 2 else 0)
        grid.context(number).node_config["data"] = data
    header = grid.header()
    assert [grid.ask(number, "train", grid.content(header, number)).has_error() for number in (0, 1)] == [False] * 2
    assert reason_of(grid.ask(2, "train", grid.content(header, 2))) == TOO_FEW


@pytest.mark.parametrize("kind", ["csv", "folder"])
def test_the_number_of_unknown_classes_stays_on_the_node(
    make_settings: MakeSettings, tmp_path: Path, kind: str
) -> None:
    names = ("benign", "rare", "very rare")
    rows = [f"{number},0,{name}" for number, name in enumerate(names * 4)]
    (tmp_path / "own.csv").write_text("\n".join(["a,b,label", *rows]))
    for name in names:
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(2):
            Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "own" / name / f"{number}.png")
    data = f"csv:{tmp_path / 'own.csv'}" if kind == "csv" else f"folder:{tmp_path / 'own'}"
    problems = set()
    for classes in ("benign,other", "benign,rare"):
        settings = make_settings("fedrep", **OWN | {"data.classes": classes, "target": "mlp"})
        problems.add(
            handshake_with(plain_node(settings, state_dir=str(tmp_path / "state"), data=data), SESSION)[PROBLEM]
        )
    what = "classes" if kind == "csv" else "class folders"
    assert problems == {f"some of its {what} are not in data.classes, see the node's log"}


def test_the_identity_signs_the_key_of_the_session(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings("fedrep") | {"secagg.enabled": True}
    files = {"peers_file": peers_file(tmp_path), "identity_key_file": identity_file(tmp_path, 0)}
    properties = handshake_with(plain_node(settings, state_dir=str(tmp_path), **files), SESSION)
    assert is_signed(IDENTITIES[0].public_key(), properties[SIGNATURE], SESSION, 0, properties[KEY])


@pytest.mark.parametrize("identity", [None, 1])
def test_an_identity_must_be_the_node_s_own_peer(
    make_settings: MakeSettings, tmp_path: Path, identity: int | None
) -> None:
    settings = make_settings("fedrep") | {"secagg.enabled": True}
    files = {} if identity is None else {"identity_key_file": identity_file(tmp_path, identity)}
    grid = plain_node(settings, state_dir=str(tmp_path), peers_file=peers_file(tmp_path), **files)
    assert (
        handshake_with(grid, SESSION)[PROBLEM]
        == "its identity-key-file is not the key of its own row in its peers-file"
    )


def test_peers_of_real_nodes_open_a_sum(make_settings: MakeSettings, tmp_path: Path) -> None:
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    for number in range(3):
        grid.context(number).node_config["peers-file"] = peers_file(tmp_path)
        grid.context(number).node_config["identity-key-file"] = identity_file(tmp_path, number)
        grid.context(number).node_config["secure-sum-only"] = True
    header = grid.header()
    assert grid.open(header, grid.replies(header, [0, 1, 2]), asked=[1, 2])[1].clients == 5


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("clients", ConfigRecord({"metric/accuracy": [0.5]})),
        ("weights", MetricRecord({"num-examples": 40})),
        (PER_CLIENT_ARRAYS, None),
        (SECURE, ConfigRecord({"seconds": 0.5})),
        (MASKED, None),
    ],
)
def test_a_reply_with_more_than_a_secure_sum_is_not_sent(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, record: Any
) -> None:
    """The last check before a reply leaves, whatever has built it; the ledger records what left instead."""
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    header = grid.header()
    record = record or pack_arrays({"0/extractor/a": grid.initial[next(iter(grid.initial))]})

    def leaking(_: object, message: Message) -> Message:
        return Message(RecordDict({name: record}), reply_to=message)

    expected = "ValueError: the reply contains more than a secure sum"
    monkeypatch.setattr(adapter, "train", leaking)
    assert reason_of(grid.ask(0, "train", grid.content(header, 0))) == expected
    assert read_ledger(grid.folders[0])[0][-1].error == expected


def test_shares_alone_answer_unmask(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a plain run, too: arrays of private groups cannot leave with a message for which no groups are looked up."""
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    header = grid.header()
    leak = RecordDict({"arrays": pack_arrays({"classifier/weight": grid.initial[next(iter(grid.initial))]})})
    monkeypatch.setattr(hyperfl_flwr.app.client, "release_shares", lambda *_: leak)
    for enabled in (True, False):
        grid.context(0).run_config["secagg.enabled"] = enabled
        content = RecordDict({SECURE: header_record(header.to_bytes())})
        reply = grid.ask(0, UNMASK, content)
        expected = "more than a secure sum" if enabled else "is for a secure sum, but the run has"
        assert expected in reason_of(reply)


PROCESS = """
import json, sys
from pathlib import Path

spoken = json.loads(sys.stdin.read())
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import recorddict_from_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto
from hyperfl_flwr.app.client import app
from hyperfl_flwr.flower.messages import identify_process

identify_process()
content = recorddict_from_proto(Proto.FromString(bytes.fromhex(spoken["content"])))
context = Context(run_id=1, node_id=1000, state=RecordDict(), **spoken["context"])
reply = app(Message(content, dst_node_id=1000, message_type="query.unmask"), context)
heavy = {"torch", "torchvision", "sklearn", "scipy", "matplotlib", "ray"} & set(sys.modules)
print(json.dumps([reply.has_content() and sorted(reply.content["secure"]), sorted(heavy)]))
"""


@pytest.mark.parametrize("data", ["", "npz:/data/own.npz"])
def test_unmask_is_answered_without_torch(make_settings: MakeSettings, tmp_path: Path, data: str) -> None:
    """A deployment starts a process for every message, and torch takes seconds to import; the answer is a real one."""
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    header = grid.header()
    replies = grid.replies(header, [0, 1, 2])
    content = recorddict_to_proto(grid.question(header, replies, 0)).SerializeToString().hex()
    context = grid.context(0)
    node_config = dict(context.node_config) | {"data": data}
    spoken = {"content": content, "context": {"node_config": node_config, "run_config": dict(context.run_config)}}
    found = subprocess.run(
        [sys.executable, "-c", PROCESS], input=json.dumps(spoken), capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout) == [["question", "senders", "shares"], []]


def test_a_message_that_is_sent_twice_is_trained_twice(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Both uploads have the same clients and other bytes; the sum opens with the second one of a node."""
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    header = grid.header()
    lost, replies = grid.replies(header, [0]), grid.replies(header, [0, 1, 2])
    assert lost[0].finished == replies[0].finished == [0, 3]
    assert lost[0].upload is not None
    assert replies[0].upload is not None
    assert (lost[0].upload.vector != replies[0].upload.vector).mean() > 0.99
    assert grid.open(header, replies, asked=[0, 2])[1].clients == 5
    assert "has already released its shares" in reason_of(grid.ask(0, "train", grid.content(header, 0)))
