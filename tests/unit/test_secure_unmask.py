"""A node releases its shares once in a step, and only for a sum with its own upload and enough others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common.serde import recorddict_to_proto
from secure_steps import (
    METRICS,
    accept,
    header_for,
    nodes_in,
    question_for,
    released,
    uploaded,
)

from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.node.secure_sums import SecureNode
from hyperfl_flwr.protocol.secure_sums.header import Header
from hyperfl_flwr.protocol.secure_sums.masks import Opening, Upload
from hyperfl_flwr.protocol.secure_sums.messages import UnmaskRequest, release_of, unmasked_parts
from hyperfl_flwr.protocol.secure_sums.numbers import NumbersEncoding

Uploads = dict[int, Upload]


@pytest.fixture
def step(tmp_path: Path) -> tuple[list[SecureNode], Header, Uploads]:
    """Return five nodes, the header of a step with the threshold 4, and the uploads of all."""
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes, threshold=4)
    return nodes, header, {node.partition: uploaded(node, header) for node in nodes}


def digest_of(header: Header, uploads: Uploads) -> bytes:
    ids = {number: upload.id for number, upload in uploads.items()}
    return UnmaskRequest(header=header.to_bytes(), uploads=ids, boxes={}).digest


def without(uploads: Uploads, *gone: int) -> Uploads:
    return {number: upload for number, upload in uploads.items() if number not in gone}


def test_the_answers_open_the_sum_and_nothing_else(step: tuple[list[SecureNode], Header, Uploads]) -> None:
    """With the node 2 gone and one answer less: the sum of four vectors (1, 2, 3), and four nodes in the counts."""
    nodes, header, uploads = step
    data = header.to_bytes()
    size = NumbersEncoding(metrics=METRICS, num_clients=header.num_clients, squares=header.squares).size
    opening = Opening(step=accept(nodes[2], header), size=3, num_numbers=size)
    for number, upload in without(uploads, 2).items():
        opening.add(number, upload)
    answers = {}
    for number in (4, 0, 3, 1):
        content = released(nodes[number], question_for(header, nodes[number], without(uploads, 2)))
        assert unmasked_parts("query.unmask", content) == []
        answers[number] = release_of(content, digest_of(header, without(uploads, 2)))
        opening.check_release(answers[number])
    vector, numbers = opening.open(answers)
    assert vector.tolist() == [4, 8, 12]
    tally = NumbersEncoding(metrics=METRICS, num_clients=header.num_clients, squares=header.squares).decode(numbers)
    assert (tally.nodes, tally.clients, tally.examples, tally.means["accuracy"]) == (4, 4, 80, 0.5)
    assert data == header.to_bytes()


FALSE_MESSAGES: dict[str, tuple[Callable[[Header, Uploads], tuple[Header, Uploads, dict[str, Any]]], str]] = {
    "too few": (lambda h, u: (h, without(u, 2, 3), {}), "the sum of 3 nodes must not be opened, the threshold is 4"),
    "without this node": (lambda h, u: (h, without(u, 0), {}), "the question leaves out this node's upload"),
    "another upload": (lambda h, u: (h, {**u, 0: replace(u[0], id=bytes(16))}, {}), "that it has not sent"),
    "another node's": (lambda h, u: (h, {**u, 0: replace(u[0], id=u[1].id)}, {}), "that it has not sent"),
    "foreign node": (lambda h, u: (h, u, {"uploads": {9: bytes(16), **ids(u)}}), "nodes that are not in the header"),
    "long identity": (lambda h, u: (h, u, {"uploads": {**ids(u), 3: bytes(17)}}), "an invalid identity of an upload"),
    "another step": (lambda h, u: (replace(h, threshold=3), u, {}), "not the newest step"),
    "another round": (lambda h, u: (replace(h, round=2), u, {}), "not the newest step"),
    "no header": (lambda h, u: (h, u, {"header": b""}), "it is not a header: JSONDecodeError"),
}  # fmt: skip


def ids(uploads: Uploads) -> dict[int, bytes]:
    return {number: upload.id for number, upload in uploads.items()}


@pytest.mark.parametrize("name", FALSE_MESSAGES)
def test_a_lying_question_is_refused(step: tuple[list[SecureNode], Header, Uploads], name: str) -> None:
    """And the true one is answered after it: a refused question is not the one answer of the step."""
    nodes, header, uploads = step
    change, reason = FALSE_MESSAGES[name]
    other, told, changes = change(header, uploads)
    with pytest.raises(RefusalError, match=reason):
        released(nodes[0], question_for(other, nodes[0], told, **changes))
    released(nodes[0], question_for(header, nodes[0], uploads))


def test_a_node_named_twice_is_refused(step: tuple[list[SecureNode], Header, Uploads]) -> None:
    nodes, header, uploads = step
    content = question_for(header, nodes[0], uploads)
    record = content.config_records["secure"]
    record["nodes"], record["uploads"] = [0, 0, 1, 2, 3], list(ids(uploads).values())
    with pytest.raises(RefusalError, match="cannot be read: ValueError"):
        released(nodes[0], content)


def test_a_step_has_one_answer(step: tuple[list[SecureNode], Header, Uploads]) -> None:
    """The same question gets the same bytes; another one none, and no upload follows."""
    nodes, header, uploads = step
    question = question_for(header, nodes[0], without(uploads, 3))
    first, again = (recorddict_to_proto(released(nodes[0], question)).SerializeToString() for _ in range(2))
    assert first == again
    with pytest.raises(RefusalError, match="already helped to open the sum of this step"):
        released(nodes[0], question_for(header, nodes[0], uploads))
    with pytest.raises(RefusalError, match="already released its shares"):
        uploaded(nodes[0], header)


def test_an_older_step_is_not_opened(step: tuple[list[SecureNode], Header, Uploads]) -> None:
    nodes, header, uploads = step
    accept(nodes[0], replace(header, phase="evaluate"))
    with pytest.raises(RefusalError, match="not the newest step"):
        released(nodes[0], question_for(header, nodes[0], uploads))


def test_a_second_upload_may_be_the_one_that_is_opened(step: tuple[list[SecureNode], Header, Uploads]) -> None:
    """The server names the one that it has; a box of the other one does not open under it."""
    nodes, header, uploads = step
    second = uploaded(nodes[0], header)
    told = {**uploads, 0: second}
    answer = release_of(released(nodes[1], question_for(header, nodes[1], told)), digest_of(header, told))
    assert answer.bad == []
    boxes = {number: upload.boxes[2] for number, upload in uploads.items()}
    content = released(nodes[2], question_for(header, nodes[2], told, boxes=boxes))
    assert release_of(content, digest_of(header, told)).bad == [0]


@pytest.mark.parametrize(
    "change",
    [
        lambda boxes: {**boxes, 3: boxes[3][:-1] + bytes([boxes[3][-1] ^ 1])},
        lambda boxes: {**boxes, 3: boxes[4]},
        lambda boxes: {**boxes, 3: b""},
    ],
)
def test_a_changed_box_is_named_and_the_others_are_opened(
    step: tuple[list[SecureNode], Header, Uploads], change: Callable[[dict[int, bytes]], dict[int, bytes]]
) -> None:
    nodes, header, uploads = step
    boxes = change({number: upload.boxes[0] for number, upload in uploads.items()})
    content = released(nodes[0], question_for(header, nodes[0], uploads, boxes=boxes))
    answer = release_of(content, digest_of(header, uploads))
    assert (answer.bad, sorted(answer.shares)) == ([3], [0, 1, 2, 4])


def test_two_evaluations_tell_the_metrics_of_one_node(tmp_path: Path) -> None:
    """Stated on the page on secure sums: a model is evaluated twice in a session, the second time without node 4.

    Each node accepts both steps, also with an owner who expects a colluding node and wants three honest ones in a sum.
    """
    nodes = nodes_in(tmp_path, 5, max_colluding=1)
    losses = {node.partition: 1.0 + 0.3 * node.partition**2 for node in nodes}
    means = []
    for number, some in ((1, nodes), (2, nodes[:4])):
        header = header_for(nodes, round=number, phase="evaluate", threshold=4)
        header = replace(header, nodes=header.nodes[: len(some)])
        encoding = NumbersEncoding(metrics=METRICS, num_clients=header.num_clients, squares=False)
        opening = Opening(step=accept(some[0], header), size=0, num_numbers=encoding.size)
        uploads = {}
        for node in some:
            numbers = encoding.encode([{"accuracy": 0.5, "loss": losses[node.partition]}], num_examples=0, saturated=0)
            uploads[node.partition] = node.mask(accept(node, header), np.zeros(0, np.uint32), numbers)
            opening.add(node.partition, uploads[node.partition])
        answers = {
            node.partition: release_of(released(node, question_for(header, node, uploads)), digest_of(header, uploads))
            for node in some
        }
        means.append(encoding.decode(opening.open(answers)[1]).means["loss"] * len(some))
    assert means[0] - means[1] == pytest.approx(losses[4], abs=2**-11)
