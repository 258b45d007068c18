"""Secure steps through the client app: exact sums of real clients, and nothing of a single one leaves a node."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common.serde import recorddict_to_proto
from secure_federation import SESSION, SecureFederation

from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.node.ledger import read_ledger
from hyperfl_flwr.node.secure_session import StoredSessions
from hyperfl_flwr.protocol.messages import HELLO
from hyperfl_flwr.protocol.secure_sums import masks
from hyperfl_flwr.protocol.secure_sums.field import to_bytes
from hyperfl_flwr.protocol.secure_sums.header import Header, transcript_of
from hyperfl_flwr.protocol.secure_sums.keys import agree, pair_secret
from hyperfl_flwr.protocol.secure_sums.messages import UNMASK, SecureReply

MakeSettings = Callable[..., Settings]
JOB: dict[str, Any] = {"round": 1, "version": 0, "kept-version": 0}


def outside(
    grid: SecureFederation, header: Header, clients: range, folder: Path
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Train clients outside of any node; return the sum of their encoded arrays, and their metrics."""
    encoding = grid.encoding(header)
    total, metrics = encoding.new_sum(), []
    for client in clients:
        member = grid.member(client, folder)
        keys = member.keys()
        arrays, num_examples, found = member.fit([grid.initial[key] for key in keys], JOB)
        encoding.add(total, dict(zip(keys, arrays, strict=True)), num_examples)
        metrics.append(found)
    return total, metrics


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "hyperfl-frozen"])
def test_the_opened_sum_is_that_of_the_clients(make_settings: MakeSettings, tmp_path: Path, method: str) -> None:
    """All nodes upload, one of them is gone before UNMASK: every bit of the sum over five clients is right."""
    grid = SecureFederation(make_settings(method), tmp_path)
    header = grid.header()
    vector, tally = grid.open(header, grid.replies(header, [2, 0, 1]), asked=[2, 1])
    expected, metrics = outside(grid, header, range(5), tmp_path)
    np.testing.assert_array_equal(vector, expected)
    assert (tally.nodes, tally.clients, tally.examples, tally.saturated) == (3, 5, 200, 0)
    assert set(tally.means) == set(header.metrics)
    for name, mean in tally.means.items():
        assert mean == pytest.approx(np.mean([found[name] for found in metrics]), abs=2**-13)


def test_a_node_that_has_not_uploaded_is_left_out(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Node 2 with the client 2 is gone before its upload; the others' masks with it are removed."""
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    header = grid.header()
    vector, tally = grid.open(header, grid.replies(header, [0, 1]), asked=[0, 1])
    encoding = grid.encoding(header)
    assert (tally.nodes, tally.clients) == (2, 4)
    parts = [outside(grid, header, range(client, client + 1), tmp_path)[0] for client in (0, 1, 3, 4)]
    expected = encoding.new_sum()
    for part in parts:
        expected += part
    np.testing.assert_array_equal(vector, expected)


def test_an_evaluation_has_numbers_only(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings("fedrep") | {"data.global-test": True}
    grid = SecureFederation(settings, tmp_path)
    header = grid.header("evaluate")
    vector, tally = grid.open(header, grid.replies(header, [0, 1, 2]), asked=[0, 1, 2])
    assert vector.size == 0
    assert (tally.nodes, tally.clients, tally.examples, tally.saturated) == (3, 5, 0, 0)
    found = []
    for client in range(5):
        member = grid.member(client, tmp_path)
        found.append(member.evaluate([grid.initial[key] for key in member.keys()], JOB)[2])  # noqa: SIM118 - Flower's
    scores = {f"aggregate-{name}" for name in ("accuracy", "loss", "balanced-accuracy", "macro-f1")}
    assert set(tally.means) == {*scores, "aggregate-global-accuracy"}
    for name, mean in tally.means.items():
        assert mean == pytest.approx(np.mean([each[name] for each in found]), abs=2**-13)


def test_a_failed_client_is_counted_and_its_reason_stays(
    make_settings: MakeSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Client 3 has no private state of version 9, so it fails; the node's log says why, and the reply does not."""
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    header = grid.header(versions={3: 9})
    with caplog.at_level(logging.ERROR, "flwr"):
        reply = grid.ask(0, "train", grid.content(header, 0))
        first = SecureReply.of(reply.content)
    assert (first.finished, first.failed) == ([0], [3])
    assert "client 3 failed" in caplog.text
    sent = recorddict_to_proto(reply.content).SerializeToString()
    assert b"State" not in sent
    assert b"round-000009" not in sent
    replies = {0: first} | grid.replies(header, [1, 2])
    assert grid.open(header, replies, asked=[0, 1])[1].clients == 4


def test_a_node_without_a_finished_client_uploads_nothing(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Each client's update is longer than a billionth of what it received; the same limit holds on the node."""
    grid = SecureFederation(make_settings("fedavg", max_update_ratio=1e-9), tmp_path)
    header = grid.header()
    for number, reply in grid.replies(header, [0, 1, 2]).items():
        row = header.row(number)
        assert row is not None
        assert (reply.upload, reply.finished, reply.failed) == (None, [], list(row.clients))
    assert json.loads((grid.folders[0] / "secagg" / SESSION / "step.json").read_text())["uploads"] == []


def test_a_client_of_which_many_elements_are_cut_off_fails(make_settings: MakeSettings, tmp_path: Path) -> None:
    """With a tiny range, a sum of cut-off elements would be that of each client's weight with a sign."""
    grid = SecureFederation(make_settings("fedavg", target="mlp") | {"secagg.range": 1e-12}, tmp_path)
    header = grid.header()
    for number, reply in grid.replies(header, [0, 1, 2]).items():
        row = header.row(number)
        assert row is not None
        assert (reply.upload, reply.finished, reply.failed) == (None, [], list(row.clients))


def windows(data: bytes) -> set[bytes]:
    """Return the parts of 16 bytes at every fourth position; without those of one repeated byte."""
    parts = {data[first : first + 16] for first in range(0, len(data) - 15, 4)}
    return {part for part in parts if len(set(part)) > 1}


def test_nothing_of_a_client_is_in_the_bytes(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the encoded sum, nor a secret of a mask, nor a key, nor a shared secret; no metric, count or time."""
    drawn: list[int] = []
    draw = masks.random_element

    def record() -> int:
        drawn.append(draw())
        return drawn[-1]

    monkeypatch.setattr(masks, "random_element", record)
    grid = SecureFederation(make_settings("fedrep"), tmp_path)
    header = grid.header()
    contents = [grid.ask(0, "train", grid.content(header, 0)).content]
    replies = {0: SecureReply.of(contents[0])} | grid.replies(header, [1, 2])
    contents.append(grid.ask(0, UNMASK, grid.question(header, replies, 0)).content)
    sent = b"".join(recorddict_to_proto(content).SerializeToString() for content in contents)
    q = sum(outside(grid, header, range(client, client + 1), tmp_path)[0].astype(np.int64) for client in (0, 3))
    key = StoredSessions(folder=grid.folders[0] / "secagg").key(SESSION)
    transcript = transcript_of(header.to_bytes())
    agreed = [agree(key, row.key) for row in header.nodes]
    pairs = [pair_secret(agreed[number], transcript, 0, number) for number in (1, 2)]
    secret = [np.asarray(q).astype(np.uint32).tobytes(), key.private_bytes_raw(), *agreed]
    secret += [to_bytes(number) for number in (*pairs, *drawn)]
    assert drawn
    everywhere = {sent[first : first + 16] for first in range(len(sent) - 15)}
    for data in secret:
        assert windows(data)
        assert not windows(data) & everywhere
    entries, _ = read_ledger(grid.folders[0])
    assert [(entry.kind, entry.error) for entry in entries if entry.direction == "out"][-2:] == [
        ("train", ""),
        (UNMASK, ""),
    ]
    for entry in entries:
        if entry.direction == "out" and entry.kind != HELLO:
            keys = {key for record in entry.records for key in record.values or {}}
            assert keys <= {
                "transcript",
                "finished",
                "upload",
                "numbers",
                "holders",
                "boxes",
                "question",
                "senders",
                "shares",
            }
