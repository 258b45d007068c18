"""Masked uploads: exact sums whoever drops out, boxes that only open in their place, and fixed bytes."""

import hashlib
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_steps import Nodes, header_of, private_key, step_of

from hyperfl_flwr.protocol.secure_sums import field, masks
from hyperfl_flwr.protocol.secure_sums.keys import agree, box_key
from hyperfl_flwr.protocol.secure_sums.masks import Opening, Release, UnmaskError, box_bytes, release
from hyperfl_flwr.protocol.secure_sums.thresholds import MOST_NODES, smallest_threshold


def nodes_of(num_nodes, threshold, **changes):
    return Nodes(step_of(header_of(range(num_nodes), threshold)), **changes)


def test_an_opened_sum_is_the_integer_sum():
    nodes = nodes_of(4, 3)
    opening = nodes.opening([0, 1, 2, 3])
    found = opening.open({holder: nodes.release(holder, opening) for holder in (3, 0, 2)})
    for sums, expected in zip(found, nodes.sums([0, 1, 2, 3]), strict=True):
        assert np.array_equal(sums, expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_sum_opens_with_a_threshold_of_nodes_and_not_with_fewer(data):
    """Nodes drop out before their upload and before their answer, n - t in all at most; one more, and nothing opens."""
    num_nodes = data.draw(st.integers(2, 8))
    partitions = data.draw(st.lists(st.integers(0, 40), min_size=num_nodes, max_size=num_nodes, unique=True))
    partitions = sorted(partitions)
    threshold = data.draw(st.integers(num_nodes // 2 + 1, num_nodes))
    nodes = Nodes(step_of(header_of(partitions, threshold)), size=data.draw(st.sampled_from([0, 1, 7])))
    order = data.draw(st.permutations(partitions))
    uploaded = order[: data.draw(st.integers(threshold, num_nodes))]
    opening = nodes.opening(uploaded)
    assert opening.can_open
    answers = {holder: nodes.release(holder, opening) for holder in data.draw(st.permutations(uploaded))}
    for answer in answers.values():
        opening.check_release(answer)
    few = dict(list(answers.items())[: threshold - 1])
    before = opening._vector.copy(), opening._numbers.copy()
    with pytest.raises(UnmaskError, match=f"{threshold - 1} nodes answered, {threshold} are needed"):
        opening.open(few)
    assert all(np.array_equal(one, two) for one, two in zip(before, (opening._vector, opening._numbers), strict=True))
    used = dict(list(answers.items())[: data.draw(st.integers(threshold, len(uploaded)))])
    for sums, expected in zip(opening.open(used), nodes.sums(uploaded), strict=True):
        assert np.array_equal(sums, expected)


def test_too_few_uploads_are_not_opened():
    """Below the threshold the server may ask nobody, and there cannot be enough answers."""
    nodes = nodes_of(5, 4)
    opening = nodes.opening([0, 1, 4])
    assert not opening.can_open
    with pytest.raises(UnmaskError):
        opening.open({holder: nodes.release(holder, opening) for holder in (0, 1, 4)})


def test_an_evaluation_has_numbers_only():
    nodes = Nodes(step_of(header_of(range(3), 2, phase="evaluate")), size=0)
    opening = nodes.opening([0, 2])
    vector, numbers = opening.open({holder: nodes.release(holder, opening) for holder in (0, 2)})
    assert vector.shape == (0,)
    assert np.array_equal(numbers, nodes.sums([0, 2])[1])


def test_other_headers_do_not_cancel():
    """A node that was sent other terms than the rest, here another model, makes the sum useless."""
    nodes = nodes_of(3, 2)
    other = Nodes(step_of(replace(nodes.step.header, arrays="00" * 32)), size=nodes.size)
    opening = nodes.opening([0, 1])
    opening.add(2, other.upload(2))
    answers = {holder: nodes.release(holder, opening) for holder in (0, 1)}
    assert all(answer.bad == [2] for answer in answers.values())
    with pytest.raises(ValueError, match=r"lacks shares; boxes that do not open: \[2\]"):
        opening.check_release(answers[0])


@pytest.mark.extended
def test_a_hundred_nodes_open_their_sum():
    """The largest step: 30 nodes are missing in training, and 3 more do not answer."""
    threshold = smallest_threshold(MOST_NODES, 0)
    nodes = nodes_of(MOST_NODES, threshold, size=100)
    opening = nodes.opening(range(70))
    answers = {holder: nodes.release(holder, opening) for holder in range(3, 70)}
    assert len(answers) == threshold == 67
    for answer in answers.values():
        opening.check_release(answer)
    for sums, expected in zip(opening.open(answers), nodes.sums(range(70)), strict=True):
        assert np.array_equal(sums, expected)


class TestBoxes:
    """Boxes that are altered or come from elsewhere are named, and give no shares."""

    nodes = nodes_of(4, 3)

    def bad_in(self, opening, **boxes):
        given = opening.boxes_for(1) | {int(name.removeprefix("of_")): box for name, box in boxes.items()}
        answer = release(self.nodes.step, 1, private_key(1), opening.uploads, given)
        assert sorted([*answer.shares, *answer.bad]) == [0, 1, 2, 3]
        return answer.bad

    def test_altered_boxes_give_no_shares(self):
        opening = self.nodes.opening(range(4))
        box = opening.boxes_for(1)[2]
        assert self.bad_in(opening) == []
        for wrong in (bytes([box[0] ^ 1]) + box[1:], box[:-1] + bytes([box[-1] ^ 128]), box[:-1], box + b"\0", b""):
            assert self.bad_in(opening, of_2=wrong) == [2]

    def test_boxes_of_another_sender_or_holder_give_no_shares(self):
        opening = self.nodes.opening(range(4))
        boxes = opening.boxes_for(1)
        assert self.bad_in(opening, of_2=boxes[3], of_3=boxes[2]) == [2, 3]
        assert self.bad_in(opening, of_2=opening.boxes_for(3)[2]) == [2]
        assert self.bad_in(opening, of_2=opening.boxes_for(2)[1]) == [2]

    def test_boxes_of_another_upload_give_no_shares(self):
        opening = self.nodes.opening(range(4))
        assert self.bad_in(opening, of_2=self.nodes.upload(2).boxes[1]) == [2]
        opening.uploads[2] = bytes(16)
        assert self.bad_in(opening) == [2]

    def test_boxes_of_another_step_give_no_shares(self):
        opening = self.nodes.opening(range(4))
        other = Nodes(step_of(header_of(range(4), 3, number=2))).upload(2)
        opening.uploads[2] = other.id
        assert self.bad_in(opening, of_2=other.boxes[1]) == [2]

    @pytest.mark.parametrize(
        "shares",
        [b"", bytes(96), bytes(127), bytes(160), bytes(96) + b"\xff" * 32],
        ids=["none", "too-few", "cut", "too-many", "no-element"],
    )
    def test_sealed_by_a_malicious_node(self, shares):
        """Boxes that open, but hold too few or too many shares, or one that is no element of the field."""
        opening = self.nodes.opening([0, 1, 3])
        step, key = self.nodes.step, private_key(2)
        secret = agree(key, step.header.nodes[1].key)
        box = ChaCha20Poly1305(box_key(secret, step.transcript, 2, 1, bytes(16)))
        opening.uploads[2] = bytes(16)
        assert self.bad_in(opening, of_2=box.encrypt(bytes(12), bytes(128), step.transcript)) == []
        assert self.bad_in(opening, of_2=box.encrypt(bytes(12), shares, step.transcript)) == [2]

    def test_omitted_and_unknown(self):
        """A box that is not there gives no shares; one of a node that is not in the step is ignored."""
        opening = self.nodes.opening([0, 1, 3])
        boxes = opening.boxes_for(1)
        answer = release(self.nodes.step, 1, private_key(1), opening.uploads | {9: bytes(16)}, {0: boxes[0], 9: b"x"})
        assert list(answer.shares) == [0]
        assert not answer.bad
        with pytest.raises(ValueError, match="lacks shares"):
            opening.check_release(answer)


class TestUploads:
    """Uploads that do not fit are refused, and leave the sums as they are."""

    @pytest.fixture
    def nodes(self):
        return nodes_of(4, 3)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"vector": np.zeros(41, np.uint32)}, r"uint32 \[40\]"),
            ({"vector": np.zeros(0, np.uint32)}, r"uint32 \[40\]"),
            ({"vector": np.zeros((40, 1), np.uint32)}, r"uint32 \[40\]"),
            ({"vector": np.zeros(40, np.float32)}, r"uint32 \[40\]"),
            ({"vector": np.zeros(40, ">u4")}, r"uint32 \[40\]"),
            ({"numbers": np.zeros(4, np.uint64)}, r"uint64 \[3\]"),
            ({"numbers": np.zeros(3, np.int64)}, r"uint64 \[3\]"),
            ({"id": bytes(15)}, "identity"),
            ({"boxes": {}}, "one box of 144 bytes"),
            ({"boxes": dict.fromkeys(range(3), bytes(144))}, "one box of 144 bytes"),
            ({"boxes": dict.fromkeys(range(1, 5), bytes(144))}, "one box of 144 bytes"),
            ({"boxes": dict.fromkeys(range(4), bytes(143))}, "one box of 144 bytes"),
        ],
    )
    def test_wrong_upload(self, nodes, changes, reason):
        opening = nodes.opening([0])
        before = opening._vector.copy()
        with pytest.raises(ValueError, match=reason):
            opening.add(1, replace(nodes.upload(1), **changes))
        assert np.array_equal(opening._vector, before)
        assert list(opening.uploads) == [0]

    def test_twice_or_from_elsewhere(self, nodes):
        opening = nodes.opening([0])
        upload = nodes.upload(0)
        for partition in (0, 4):
            with pytest.raises(ValueError, match="uploaded before, or is not in this step"):
                opening.add(partition, upload)
        with pytest.raises(ValueError, match="identity"):
            opening.add(1, replace(nodes.upload(1), id=opening.uploads[0]))

    def test_the_length_of_a_box(self, nodes):
        assert {len(box) for box in nodes.upload(0).boxes.values()} == {box_bytes(4)}

    def test_invalid_keys_of_others_end_before_masking(self, nodes):
        """A point of low order is found before the vectors are changed."""
        rows = nodes.step.header.nodes
        header = replace(nodes.step.header, nodes=(*rows[:3], replace(rows[3], key="00" * 32)))
        vector, numbers = nodes.vectors[0].copy(), nodes.numbers[0].copy()
        with pytest.raises(ValueError):
            masks.mask(vector, numbers, step_of(header), 0, private_key(0))
        assert np.array_equal(vector, nodes.vectors[0])
        assert np.array_equal(numbers, nodes.numbers[0])


def test_incomplete_answers_are_refused():
    nodes = nodes_of(4, 3)
    opening = nodes.opening([0, 1, 3])
    shares = dict(nodes.release(0, opening).shares)
    opening.check_release(Release(shares=shares))
    wrong = [
        ({}, "lacks shares"),
        ({number: shares[number] for number in (0, 1)}, "lacks shares"),
        (shares | {2: shares[0]}, "lacks shares"),
        (shares | {3: shares[3][:1]}, "must be 2 shares"),
        (shares | {3: [*shares[3], shares[0][0]]}, "must be 2 shares"),
        (shares | {3: [shares[3][0], b"\xff" * 32]}, "an element"),
        (shares | {3: [shares[3][0], bytes(31)]}, "an element"),
    ]
    for found, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            opening.check_release(Release(shares=found))


def test_two_uploads_of_one_node_have_nothing_in_common():
    """A repeated message gets another own mask, identity and sharing; the difference of the two hides both inputs."""
    nodes = nodes_of(3, 2)
    one, two = nodes.upload(0), nodes.upload(0)
    assert one.id != two.id
    assert not np.any(one.vector == two.vector)
    assert not set(one.boxes.values()) & set(two.boxes.values())
    openings = [nodes.opening([1, 2]) for _ in range(2)]
    for opening, upload in zip(openings, (one, two), strict=True):
        opening.add(0, upload)
    first, second = (nodes.release(1, opening).shares[0] for opening in openings)
    assert not set(first) & set(second)


def test_golden_upload(monkeypatch):
    """The bytes of an upload with fixed keys and randomness; a change of them needs another `VERSION`."""
    numbers = count(1)
    monkeypatch.setattr(masks.secrets, "token_bytes", lambda size: bytes(range(size)))
    for module in (field, masks):
        monkeypatch.setattr(module, "random_element", lambda: next(numbers) ** 20)
    nodes = Nodes(step_of(header_of([0, 1, 4], 2)), size=5)
    nodes.vectors[1], nodes.numbers[1] = np.arange(5, dtype=np.uint32), np.arange(3, dtype=np.uint64)
    upload = nodes.upload(1)
    assert upload.vector.tolist() == [2642759907, 3514984315, 1260468062, 641882963, 3401016]
    assert upload.numbers.tolist() == [2213038975312395704, 14925880204487947396, 18432883660237548612]
    assert list(upload.boxes) == [0, 1, 4]
    assert hashlib.sha256(b"".join(upload.boxes.values())).hexdigest() == (
        "36e0665ba38f0be1801126018941af81a64f0294676cd7db6b04a75921ed62ca"
    )


def test_an_opening_has_no_uploads_at_first():
    assert Opening(step=nodes_of(3, 2).step, size=2, num_numbers=3).uploads == {}
