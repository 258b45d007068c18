"""Replies are fetched within limits, by Flower's grid for deployments from a simulated SuperLink."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.server import fetching
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.fetching import LateReplyError, RefusedReplyError, ReplyLimits, SuperLinkError, fetch, repeated


@dataclass
class FakeSuperLink:
    """Serves one reply, with the faults that a test sets."""

    reply: Message
    tree: ObjectTree | None = None
    contents: dict[str, bytes] = field(default_factory=dict)
    before: Callable[[], None] = lambda: None
    answers: str = "m"
    asked: list[str] = field(default_factory=list)
    confirmed: int = 0

    def __post_init__(self) -> None:
        self.contents = self.contents or {
            key: part.deflate() for key, part in get_all_nested_objects(self.reply).items()
        }
        self.tree = self.tree or get_object_tree(self.reply)

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:  # noqa: N802
        self.before()
        proto = message_to_proto(remove_content_from_message(self.reply))
        proto.metadata.reply_to_message_id = self.answers
        proto.metadata.src_node_id = 7
        return PullAppMessagesResponse(messages_list=[proto], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> PullObjectResponse:  # noqa: N802
        self.asked.append(request.object_id)
        content = self.contents.get(request.object_id)
        available = content is not None
        return PullObjectResponse(object_found=True, object_available=available, object_content=content or b"")

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed += 1


def status_error(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://superlink.example/v1")
    return httpx.HTTPStatusError("failed", request=request, response=httpx.Response(code, request=request))


def message(content: RecordDict) -> Message:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    made = Message(content, dst_node_id=7, message_type="train")
    made.metadata.__dict__["_message_id"] = made.object_id
    return made


def arrays_of(sizes: Mapping[str, int]) -> ArrayRecord:
    rng = np.random.default_rng(0)
    return pack_arrays({name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()})


def deployed(superlink: FakeSuperLink) -> HttpGrid:
    grid = HttpGrid(token="secret")
    grid._client = superlink  # type: ignore[assignment]
    grid.set_run(Run.create_empty(1))
    return grid


SENT = RecordDict({"arrays": arrays_of({"model/a": 100, "model/b": 50}), "config": ConfigRecord({"round": 1})})
HONEST = RecordDict({"arrays": arrays_of({"model/a": 100, "model/b": 50}), "weights": MetricRecord({"n": 3})})
LATER = time.monotonic() + 1e6


def test_an_honest_reply_arrives_unchanged_and_is_confirmed() -> None:
    superlink = FakeSuperLink(message(HONEST))
    grid = deployed(superlink)
    (got,) = fetch(grid, "m", ReplyLimits.to(SENT), LATER)
    want = unpack_arrays(HONEST.array_records["arrays"])
    np.testing.assert_equal(unpack_arrays(got.content.array_records["arrays"]), want)
    assert superlink.confirmed == 1
    assert grid._client is superlink


def test_limits_leave_room_for_sums_in_float64() -> None:
    """A reply may have more than twice the bytes that were sent, and arrays that are divided into several parts."""
    record = arrays_of({f"model/{number}": 500_000 for number in range(10)})
    sent = RecordDict({"arrays": record})
    limits = ReplyLimits.to(sent)
    assert limits.num_bytes > 2 * 10 * 500_000 * 4
    doubled = {key: value.astype(np.float64) for key, value in unpack_arrays(record).items()}
    superlink = FakeSuperLink(message(RecordDict({"arrays": pack_arrays(doubled)})))
    assert len(fetch(deployed(superlink), "m", limits, LATER)) == 1


def test_too_many_objects_are_not_fetched() -> None:
    records = {str(number): ConfigRecord({"number": number}) for number in range(600)}
    superlink = FakeSuperLink(message(RecordDict(records)))
    with pytest.raises(RefusedReplyError, match=r"more than 500 records or parts"):
        fetch(deployed(superlink), "m", ReplyLimits.to(SENT), LATER)
    assert superlink.asked == []
    assert superlink.confirmed == 0


def test_a_deep_tree_of_objects_is_counted() -> None:
    """A tree of 51 nested objects exceeds a limit of 50; Protobuf itself refuses trees with more than 100 levels."""
    tree = ObjectTree(object_id="0" * 64)
    for _ in range(50):
        tree = ObjectTree(object_id="0" * 64, children=[tree])
    assert fetching._exceeds(tree, 50)
    assert not fetching._exceeds(tree, 51)


def test_a_reply_that_is_too_large_is_given_up_on_the_way() -> None:
    limit = 40_000_000
    parts = {f"model/{number}": 2_000_000 for number in range(10)}
    superlink = FakeSuperLink(message(RecordDict({"arrays": arrays_of(parts)})))
    with pytest.raises(RefusedReplyError, match="larger than 40 MB"):
        fetch(deployed(superlink), "m", ReplyLimits(num_bytes=limit), LATER)
    assert sum(len(superlink.contents[name]) for name in superlink.asked) < limit + 3 * 9_000_000


def test_parts_that_are_missing_at_the_end_are_given_up() -> None:
    superlink = FakeSuperLink(message(HONEST))
    del superlink.contents[max(superlink.contents)]
    with pytest.raises(LateReplyError, match="did not arrive in time"):
        fetch(deployed(superlink), "m", ReplyLimits(), time.monotonic() - 1.0)


def test_a_reply_that_has_arrived_is_fetched_after_the_end() -> None:
    """Replies are fetched one after another, so that the first may use up the time of others that have arrived."""
    superlink = FakeSuperLink(message(HONEST))
    assert len(fetch(deployed(superlink), "m", ReplyLimits(), time.monotonic() - 1.0)) == 1


def test_a_message_that_answers_nothing_is_dropped() -> None:
    """A message that does not answer the requested one is dropped; nodes can send the server app any message."""
    for answered in ("", "another"):
        superlink = FakeSuperLink(message(HONEST), answers=answered)
        assert fetch(deployed(superlink), "m", ReplyLimits(), LATER) == []
        assert superlink.asked == []


def test_where_a_reply_is_from_is_the_superlinks_word() -> None:
    reply = message(HONEST)
    reply.metadata.__dict__["_reply_to_message_id"], reply.metadata.__dict__["_src_node_id"] = "another", 8
    reply.metadata.__dict__["_message_id"] = reply.object_id
    (got,) = fetch(deployed(FakeSuperLink(reply)), "m", ReplyLimits(), LATER)
    assert (got.metadata.reply_to_message_id, got.metadata.src_node_id) == ("m", 7)


def test_an_array_that_repeats_a_part_is_counted_as_often() -> None:
    superlink = FakeSuperLink(message(RecordDict({"arrays": arrays_of({"model/a": 250_000})})))
    (name,) = [name for name, content in superlink.contents.items() if content.startswith(b"Array ")]
    superlink.contents[name] = superlink.contents[name].replace(
        b'"arraychunk_ids": [0]', b'"arraychunk_ids": [' + b", ".join([b"0"] * 100) + b"]"
    )
    with pytest.raises(RefusedReplyError, match="its arrays are larger than 16 MB"):
        fetch(deployed(superlink), "m", ReplyLimits(), LATER)
    assert superlink.confirmed == 0


def test_large_records_of_numbers_are_refused() -> None:
    """Numbers in records take more bytes in memory than in a message, here with ten bytes for each."""
    superlink = FakeSuperLink(message(RecordDict({"numbers": ConfigRecord({"n": [2**62] * 600_000})})))
    with pytest.raises(RefusedReplyError, match="larger than"):
        fetch(deployed(superlink), "m", ReplyLimits(), LATER)


def many_names_of_one_array() -> ArrayRecord:
    (array,) = arrays_of({"a": 1}).values()
    return ArrayRecord({f"model/{number}": array for number in range(600)})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            RecordDict({"arrays": arrays_of({f"model/{number}": 1 for number in range(600)})}),
            "names 600 arrays, at most 500",
        ),
        (RecordDict({"arrays": many_names_of_one_array()}), "cannot be decoded"),
        (RecordDict({str(number): SENT["config"] for number in range(30)}), "has 30 records, at most 20"),
    ],
)
def test_many_arrays_and_records_are_refused(content: RecordDict, reason: str) -> None:
    with pytest.raises(RefusedReplyError, match=reason):
        fetch(deployed(FakeSuperLink(message(content))), "m", ReplyLimits(), LATER)


@pytest.mark.parametrize("damage", [b"", b"\0" * 10, b"RecordDict 1\0\xff", b"Message 4\0abcd"])
def test_what_cannot_be_decoded_is_refused(damage: bytes) -> None:
    superlink = FakeSuperLink(message(HONEST))
    superlink.contents = dict.fromkeys(superlink.contents, damage)
    with pytest.raises(RefusedReplyError, match="cannot be decoded"):
        fetch(deployed(superlink), "m", ReplyLimits(), LATER)


def test_a_server_error_is_the_superlinks_and_other_errors_end_the_run() -> None:
    def fail(code: int) -> Callable[[], None]:
        def raising() -> None:
            raise status_error(code)

        return raising

    with pytest.raises(SuperLinkError, match="500"):
        fetch(deployed(FakeSuperLink(message(HONEST), before=fail(500))), "m", ReplyLimits(), LATER)
    with pytest.raises(httpx.HTTPStatusError):
        fetch(deployed(FakeSuperLink(message(HONEST), before=fail(403))), "m", ReplyLimits(), LATER)


def test_requests_are_repeated_while_the_superlink_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "RETRY_PAUSE_SECONDS", 0.0)
    errors = [status_error(500), status_error(503)]

    def request() -> str:
        if errors:
            raise errors.pop(0)
        return "answer"

    assert repeated(request) == "answer"
    errors = [status_error(404)]
    with pytest.raises(httpx.HTTPStatusError):
        repeated(request)
    monkeypatch.setattr(fetching, "RETRY_SECONDS", -1.0)
    errors = [status_error(500)] * 2
    with pytest.raises(httpx.HTTPStatusError):
        repeated(request)


class Deployment(HttpGrid):
    """A grid that sends nothing and takes its replies from a list: messages, or errors to raise."""

    def __init__(self, replies: list[Message | Exception]) -> None:
        super().__init__(token="secret")
        self.replies = replies
        self.pushed = 0

    def get_nodes(self) -> list[Any]:
        return []

    def push_messages(self, messages: Any) -> list[str]:
        self.pushed += len(list(messages))
        return [f"m{self.pushed}"]

    def pull_messages(self, message_ids: Any) -> list[Message]:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        reply.metadata.__dict__["_reply_to_message_id"] = next(iter(message_ids))
        reply.metadata.__dict__["_src_node_id"] = 7
        return [reply]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperfl_flwr.server.exchange.DEPLOYED_POLL_SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
def test_a_reply_that_a_server_error_lost_is_asked_for_once_more() -> None:
    deployment = Deployment([])
    deployment._client = FakeSuperLink(message(HONEST))  # type: ignore[assignment]
    deployment.replies = [status_error(500), message(HONEST)]
    (answer,) = exchange(deployment, [message(SENT)], timeout=60.0)
    assert answer.content is not None
    assert deployment.pushed == 2


@pytest.mark.usefixtures("quick")
def test_a_node_whose_reply_two_server_errors_lost_is_away() -> None:
    """The node is away, not refused: another node's message may have kept the SuperLink busy."""
    deployment = Deployment([status_error(500), status_error(500)])
    deployment._client = FakeSuperLink(message(HONEST))  # type: ignore[assignment]
    (answer,) = exchange(deployment, [message(SENT)], timeout=60.0)
    assert (answer.content, answer.away, answer.refused) == (None, True, False)
    assert deployment.pushed == 2


@pytest.mark.usefixtures("quick")
def test_a_refused_reply_is_harmful_and_not_asked_for_again() -> None:
    deployment = Deployment([RefusedReplyError("its reply is larger than 16 MB")])
    deployment._client = FakeSuperLink(message(HONEST))  # type: ignore[assignment]
    (answer,) = exchange(deployment, [message(SENT)], timeout=60.0)
    assert (answer.content, answer.refused, answer.is_harmful) == (None, True, True)
    assert answer.problem == "its reply is larger than 16 MB"
    assert deployment.pushed == 1
