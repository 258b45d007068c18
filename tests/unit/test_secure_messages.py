"""Records of secure sums: what is packed is read again, and anything else is refused with `ValueError`."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_steps import Nodes, header_of, step_of

from hyperfl_flwr.protocol.packing import PACKED, PACKED_TYPE, names_in, pack_arrays
from hyperfl_flwr.protocol.secure_sums.masks import Release
from hyperfl_flwr.protocol.secure_sums.messages import (
    MASKED,
    SECURE,
    VECTOR,
    SecureReply,
    UnmaskRequest,
    handshake_request,
    header_record,
    release_content,
    release_of,
    session_in,
    step_in,
    unmasked_parts,
)
from hyperfl_flwr.protocol.sizes import content_bytes

NODES = Nodes(step_of(header_of([0, 1, 4], 2)))
HEADER = NODES.step.header.to_bytes()
REPLY = SecureReply(transcript=NODES.step.transcript, finished=[2], failed=[3], upload=NODES.upload(1))
OPENING = NODES.opening([1, 4])
REQUEST = UnmaskRequest(header=HEADER, uploads=OPENING.uploads, boxes=OPENING.boxes_for(4))
RELEASE = NODES.release(4, OPENING)


def on_the_wire(content):
    """Send a content through Flower's protocol buffers."""
    return recorddict_from_proto(recorddict_to_proto(content))


def unmask(request):
    return RecordDict({SECURE: request.to_record()})


def test_a_session_survives_the_wire():
    session = "0123456789abcdef" * 2
    assert session_in(on_the_wire(handshake_request(session))) == session
    assert session_in(RecordDict()) == ""


@pytest.mark.parametrize("session", ["", "0" * 31, "0" * 33, "F" * 32, "../" + "0" * 29, "0" * 31 + "\n", b"0" * 32, 5])
def test_a_session_that_could_be_a_path_is_refused(session):
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        session_in(RecordDict({SECURE: ConfigRecord({"session": session})}))


def test_a_step_survives_the_wire():
    step = step_in(on_the_wire(RecordDict({SECURE: header_record(HEADER)})))
    assert (step.header, step.transcript) == (NODES.step.header, NODES.step.transcript)


def test_a_reply_survives_the_wire():
    found = SecureReply.of(on_the_wire(REPLY.to_content()))
    assert (found.transcript, found.finished, found.failed) == (REPLY.transcript, [2], [3])
    assert found.upload.id == REPLY.upload.id
    assert dict(found.upload.boxes) == REPLY.upload.boxes
    for name in ("vector", "numbers"):
        one, two = getattr(found.upload, name), getattr(REPLY.upload, name)
        assert np.array_equal(one, two)
        assert one.dtype == two.dtype
    opening = NODES.opening([0, 4])
    opening.add(1, found.upload)
    assert np.array_equal(
        opening.open({holder: NODES.release(holder, opening) for holder in (0, 1)})[0], NODES.sums([0, 1, 4])[0]
    )


def test_a_reply_without_a_vector_survives_the_wire():
    nodes = Nodes(step_of(header_of([0, 1], 2, phase="evaluate")), size=0)
    content = replace(REPLY, upload=nodes.upload(0)).to_content()
    assert list(content) == [SECURE]
    assert SecureReply.of(on_the_wire(content)).upload.vector.shape == (0,)


def test_a_reply_without_an_upload_survives_the_wire():
    """No client finished: there is nothing to add. Flower can count the bytes of the empty lists that are left out."""
    content = SecureReply(transcript=bytes(32), finished=(), failed=(2, 3), upload=None).to_content()
    found = SecureReply.of(on_the_wire(content))
    assert (found.upload, found.finished, found.failed) == (None, [], [2, 3])
    assert content[SECURE].count_bytes() > 0


def test_a_reply_holds_nothing_else():
    """No number of a client, no reason and no time: the names of all that is sent."""
    content = REPLY.to_content()
    assert set(content) == {SECURE, MASKED}
    assert names_in(content[MASKED]) == [VECTOR]
    assert set(content[SECURE]) == {"transcript", "finished", "failed", "upload", "numbers", "holders", "boxes"}


@pytest.mark.parametrize(
    ("name", "arrays", "found"),
    [
        ("masked", {VECTOR: np.zeros(3, np.uint32)}, []),
        ("masked", {VECTOR: np.zeros(3, np.float32)}, ["masked/sum/masked"]),
        ("masked", {VECTOR: np.zeros((3, 1), np.uint32)}, ["masked/sum/masked"]),
        ("masked", {VECTOR: np.zeros(3, np.uint32), "more": np.zeros(3, np.uint32)}, ["masked/more"]),
        ("arrays", {"model/a": np.zeros(3, np.uint32)}, ["arrays/model/a"]),
        ("arrays", {}, ["arrays"]),
    ],
)
def test_what_a_secure_step_may_not_send(name, arrays, found):
    assert unmasked_parts("train", RecordDict({name: pack_arrays(arrays)})) == found


def test_a_question_survives_the_wire():
    found = UnmaskRequest.of(on_the_wire(unmask(REQUEST)))
    assert vars(found) == vars(REQUEST)
    assert step_in(unmask(REQUEST)).transcript == NODES.step.transcript


def test_the_digest_of_a_question():
    """It depends on the step and the uploads; boxes and the order of nodes are no part of the question."""
    uploads = dict(REQUEST.uploads)
    same = [replace(REQUEST, boxes={}), replace(REQUEST, uploads=dict(reversed(uploads.items())))]
    assert {one.digest for one in same} == {REQUEST.digest}
    others = [
        replace(REQUEST, header=HEADER + b" "), replace(REQUEST, uploads=uploads | {4: bytes(16)}),
        replace(REQUEST, uploads=uploads | {0: bytes(16)}), replace(REQUEST, uploads={1: uploads[1]}),
        replace(REQUEST, uploads={1: uploads[4], 4: uploads[1]}),
    ]  # fmt: skip
    assert len({one.digest for one in [REQUEST, *others]}) == 6


def test_shares_survive_the_wire():
    found = release_of(on_the_wire(release_content(RELEASE, REQUEST.digest)), REQUEST.digest)
    assert (found.shares, found.bad) == (RELEASE.shares, [])
    bad = release_of(on_the_wire(release_content(Release(shares={}, bad=[1]), bytes(32))), bytes(32))
    assert (bad.shares, bad.bad) == ({}, [1])


def test_shares_of_another_question_are_refused():
    with pytest.raises(ValueError, match="another question"):
        release_of(release_content(RELEASE, REQUEST.digest), bytes(32))


READ = {
    "session": (session_in, handshake_request("0" * 32)),
    "step": (step_in, RecordDict({SECURE: header_record(HEADER)})),
    "reply": (SecureReply.of, REPLY.to_content()),
    "question": (UnmaskRequest.of, unmask(REQUEST)),
    "shares": (lambda content: release_of(content, REQUEST.digest), release_content(RELEASE, REQUEST.digest)),
}
WRONG = [
    ("session", "session", 1), ("step", "header", "text"), ("step", "header", b"{}"), ("step", "header", None),
    ("reply", "transcript", "text"), ("reply", "transcript", None), ("reply", "finished", 2),
    ("reply", "finished", b""), ("reply", "finished", [True]), ("reply", "finished", [2.0]),
    ("reply", "failed", [-1]), ("reply", "failed", [2**41]), ("reply", "upload", [bytes(16)]),
    ("reply", "numbers", bytes(23)), ("reply", "numbers", [1, 2]), ("reply", "numbers", None),
    ("reply", "holders", [0, 1]), ("reply", "holders", [0, 1, 1]), ("reply", "boxes", None),
    ("reply", "holders", [0.0, 1.0, 4.0]), ("reply", "boxes", ["", "", ""]), ("reply", "boxes", b"three boxes"),
    ("question", "header", 5), ("question", "nodes", [1, 1]), ("question", "nodes", [1]),
    ("question", "nodes", [1, -4]), ("question", "uploads", ["", ""]), ("question", "uploads", None),
    ("question", "senders", [1]), ("question", "boxes", [1, 2]), ("question", "boxes", "text"),
    ("question", "senders", [1, 1]), ("shares", "question", None), ("shares", "senders", [1]),
    ("shares", "senders", [1, 1]), ("shares", "bad", [-1]), ("shares", "shares", [bytes(64), bytes(63)]),
    ("shares", "shares", ["", ""]), ("shares", "bad", ["1"]),
]  # fmt: skip


def changed(name, key, value):
    """Return a content with another value in its record `SECURE`, without it for None."""
    _, content = READ[name]
    values = dict(content[SECURE]) | {key: value}
    return RecordDict(
        dict(content) | {SECURE: ConfigRecord({key: one for key, one in values.items() if one is not None})}
    )


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_wrong_values_are_refused(name, key, value):
    read, content = READ[name]
    read(content)
    with pytest.raises(ValueError):
        read(changed(name, key, value))


@pytest.mark.parametrize("name", READ)
def test_other_records_are_refused(name):
    read, _ = READ[name]
    for record in (ArrayRecord(), MetricRecord(), ConfigRecord()):
        with pytest.raises(ValueError):
            read(RecordDict({SECURE: record}))
    if name != "session":
        with pytest.raises(ValueError):
            read(RecordDict())


@pytest.mark.parametrize(
    "record",
    [
        ConfigRecord(),
        ArrayRecord(),
        pack_arrays({"sum/other": np.zeros(40, np.uint32)}),
        pack_arrays({VECTOR: np.zeros(40, np.uint32), "sum/other": np.zeros(40, np.uint32)}),
        ArrayRecord({PACKED: Array(dtype="uint8", shape=(160,), stype="pickle", data=bytes(160))}),
        ArrayRecord({PACKED: Array(dtype="uint8", shape=(0,), stype=PACKED_TYPE, data=b"")}),
        ArrayRecord({PACKED: Array(dtype="uint8", shape=(8,), stype=PACKED_TYPE, data=b"\1" + bytes(7))}),
    ],
    ids=["config", "none", "other", "two", "pickle", "empty", "cut"],
)
def test_other_vectors_are_refused(record):
    with pytest.raises(ValueError):
        SecureReply.of(RecordDict(dict(REPLY.to_content()) | {MASKED: record}))


SCALARS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=8), st.binary())
KINDS = [st.booleans(), st.integers(-5, 2**42), st.floats(), st.text(max_size=40), st.binary(max_size=70)]
VALUES = st.one_of(st.none(), SCALARS, *(st.lists(kind, max_size=4) for kind in KINDS))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_malformed_records_end_in_no_other_exception(data):
    """Any value that Flower can send in any place is read, or refused with `ValueError`."""
    name = data.draw(st.sampled_from(list(READ)))
    read, content = READ[name]
    key = data.draw(st.sampled_from(sorted(content[SECURE])))
    found = changed(name, key, data.draw(VALUES))
    with contextlib.suppress(ValueError):
        read(found)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 140))
def test_damaged_vectors_end_in_no_other_exception(inserted, place):
    data = REPLY.to_content()[MASKED][PACKED].data
    damaged = data[:place] + inserted + data[place:]
    array = Array(dtype="uint8", shape=(len(damaged),), stype=PACKED_TYPE, data=damaged)
    content = RecordDict(dict(REPLY.to_content()) | {MASKED: ArrayRecord({PACKED: array})})
    with contextlib.suppress(ValueError):
        SecureReply.of(content)


def test_bytes_of_a_reply():
    """The vector, one box of shares for each node, and less than 500 bytes of everything else."""
    rest = content_bytes([REPLY.to_content()]) - REPLY.upload.vector.nbytes - 3 * (32 * 3 + 16)
    assert 0 < rest < 500
