"""What the server can learn: from all that it can say to few nodes, from a sum, and from the bytes of an upload."""

from collections import defaultdict
from itertools import combinations, product

import numpy as np
import pytest
from masked_steps import Nodes, header_of, private_key, step_of

from hyperfl_flwr.protocol.secure_sums import field, masks
from hyperfl_flwr.protocol.secure_sums.field import combine, from_bytes, to_bytes
from hyperfl_flwr.protocol.secure_sums.keys import agree, pair_secret, vector_key
from hyperfl_flwr.protocol.secure_sums.masks import position, release
from hyperfl_flwr.protocol.secure_sums.streams import add_stream
from hyperfl_flwr.protocol.secure_sums.thresholds import crowd

OWN = -1
"""Stands for b_i in the place of the other node of a pair."""


class LyingServer:
    """A server that tells each honest node what it likes, the last c nodes being its own.

    A node answers once in a step, if at least t nodes have uploaded, itself among them with an upload that it knows.
    """

    def __init__(self, num_nodes, threshold, colluding, uploads_of_first=1):
        self.nodes = Nodes(step_of(header_of(range(num_nodes), threshold)), size=3)
        self.threshold, self.honest = threshold, range(num_nodes - colluding)
        self.own = range(num_nodes - colluding, num_nodes)
        self.uploads = {
            (one, number): self.nodes.upload(one)
            for one in range(num_nodes)
            for number in range(uploads_of_first if one == 0 else 1)
        }
        self.from_own = self.shares_of_own()
        self.answers = {holder: [self.answer(holder, view) for view in self.views(holder)] for holder in self.honest}

    def views(self, holder):
        """Yield what a node can be told: for each node that has uploaded, the number of the upload."""
        everyone = [*self.honest, *self.own]
        for size in range(self.threshold, len(everyone) + 1):
            for members in combinations(everyone, size):
                if holder in members:
                    choices = [[number for one, number in self.uploads if one == member] for member in members]
                    yield from (dict(zip(members, numbers, strict=True)) for numbers in product(*choices))

    def answer(self, holder, view):
        """Return a node's real answer: (upload, other node or OWN) -> share, as the server files it."""
        ids = {one: self.uploads[one, number].id for one, number in view.items()}
        boxes = {one: self.uploads[one, number].boxes[holder] for one, number in view.items()}
        found = release(self.nodes.step, holder, private_key(holder), ids, boxes)
        gone = [one for one in self.nodes.step.partitions if one not in view]
        return {
            ((sender, view[sender]), other): from_bytes(share)
            for sender, shares in found.shares.items()
            for other, share in zip([OWN, *gone], shares, strict=True)
        }

    def shares_of_own(self):
        """Return the shares that the colluding nodes hold: of everything, as they open their boxes themselves."""
        found = {}
        for holder in self.own:
            found[holder] = {}
            for (sender, number), upload in self.uploads.items():
                boxes = {sender: upload.boxes[holder]}
                answer = release(self.nodes.step, holder, private_key(holder), {sender: upload.id}, boxes)
                others = [one for one in self.nodes.step.partitions if one != sender]
                for other, share in zip([OWN, *others], answer.shares[sender], strict=True):
                    found[holder][(sender, number), other] = from_bytes(share)
        return found

    def every_outcome(self):
        """Yield the secrets that each combination of views gives to the server, by upload and other node."""
        for combination in product(*self.answers.values()):
            held = defaultdict(dict)
            for holder, shares in [*zip(self.honest, combination, strict=True), *self.from_own.items()]:
                for secret, share in shares.items():
                    held[secret][position(holder)] = share
            yield {secret: shares for secret, shares in held.items() if len(shares) >= self.threshold}

    def sums(self, opened):
        """Return the sets of honest nodes of which the server can open the sum.

        Node i belongs to a sum if b_i is known, and so does every j of which neither side's copy of u_ij is known.
        """
        found = []
        for start in self.honest:
            members, waiting = set(), [start]
            while waiting:
                one = waiting.pop()
                members.add(one)
                waiting += [two for two in self.honest if two not in members and not self.knows_pair(opened, one, two)]
            if members not in found and all(self.own_masks(opened, one) for one in members):
                found.append(members)
        return found

    def own_masks(self, opened, one):
        """Return the numbers of a node's uploads of which the own mask is known."""
        return [number for (sender, number), other in opened if sender == one and other == OWN]

    def knows_pair(self, opened, one, two):
        return any((sender, other) in ((one, two), (two, one)) for (sender, _), other in opened)

    def open(self, opened, members):
        """Return the sum of some honest nodes' vectors as the server computes it, from uploads and shares only."""
        total = np.zeros(3, np.uint32)
        for one in members:
            upload = one, self.own_masks(opened, one)[0]
            total += self.uploads[upload].vector
            add_stream(total, vector_key(combine(opened[upload, OWN])), -1)
            for two in self.nodes.step.partitions:
                if two not in members and two != one:
                    add_stream(total, vector_key(self.pair(opened, one, two)), 1 if two < one else -1)
        return total

    def pair(self, opened, one, two):
        if two in self.own:
            step = self.nodes.step
            return pair_secret(agree(private_key(two), step.header.nodes[one].key), step.transcript, one, two)
        found = next(
            shares for ((sender, _), other), shares in opened.items() if (sender, other) in ((one, two), (two, one))
        )
        return combine(found)


@pytest.mark.parametrize(
    ("sizes", "uploads_of_first"),
    [((3, 2, 0), 1), ((4, 3, 1), 1), ((5, 4, 1), 1), ((5, 4, 0), 1), ((3, 2, 0), 2), ((4, 3, 1), 2), ((5, 4, 1), 2)],
)
def test_every_false_answer_of_the_server(sizes, uploads_of_first):
    """The smallest sum that any combination of views opens is of G honest nodes, and there is one sum at most.

    The own masks of two uploads of one node are never both opened. The sums are computed from the real answers.
    """
    server, smallest = LyingServer(*sizes, uploads_of_first), {}
    for opened in server.every_outcome():
        sums = server.sums(opened)
        assert len(sums) <= 1
        assert len(server.own_masks(opened, 0)) <= 1
        smallest |= {len(members): (members, opened) for members in sums}
    assert min(smallest) == crowd(*sizes) > 1
    assert max(smallest) == len(server.honest)
    for members, opened in smallest.values():
        assert np.array_equal(server.open(opened, members), server.nodes.sums(members)[0])


def test_a_low_threshold_opens_single_uploads():
    """With 2 t = n + c the server opens uploads alone; this shows that the test above can fail."""
    server = LyingServer(4, 2, 0)
    found = [(members, opened) for opened in server.every_outcome() for members in server.sums(opened)]
    alone, opened = next((members, opened) for members, opened in found if len(members) == 1)
    assert np.array_equal(server.open(opened, alone), server.nodes.vectors[min(alone)])
    assert crowd(4, 2, 0) == 0


@pytest.fixture
def pads(monkeypatch):
    """Replace each stream by a true random pad, and the operating system's randomness by a repeatable one."""
    table = {}
    pad_rng = np.random.default_rng(2)

    def add_pad(vector, key, sign):
        pad = table.setdefault((key, vector.dtype), pad_rng.integers(0, 2**32, vector.size, dtype=vector.dtype))
        (np.add if sign == 1 else np.subtract)(vector, pad, out=vector)

    def restart():
        rng = np.random.default_rng(3)
        monkeypatch.setattr(masks.secrets, "token_bytes", rng.bytes)
        for module in (field, masks):
            monkeypatch.setattr(module, "random_element", lambda: int.from_bytes(rng.bytes(31), "little"))

    monkeypatch.setattr(masks, "add_stream", add_pad)
    table["restart"] = restart
    return table


@pytest.mark.parametrize("uploaded", [[0, 1, 2, 3], [0, 1, 3]])
def test_the_server_sees_the_sum_only(pads, uploaded):
    """Two nodes' inputs shifted against each other, and their common pad with them: all messages are bit-identical.

    As the pad is uniform, both inputs are equally likely given all that the server sees, even the opened sum.
    """
    nodes, seen = Nodes(step_of(header_of(range(4), 3))), []
    delta = np.random.default_rng(4).integers(0, 2**32, nodes.size, dtype=np.uint32)
    pair = pair_secret(agree(private_key(0), nodes.step.header.nodes[1].key), nodes.step.transcript, 0, 1)
    for shift in (np.zeros_like(delta), delta):
        nodes.vectors[0] += shift
        nodes.vectors[1] -= shift
        if shift.any():
            pads[vector_key(pair), nodes.vectors[0].dtype] -= shift
        pads["restart"]()
        opening = nodes.opening(uploaded)
        answers = {holder: nodes.release(holder, opening) for holder in uploaded}
        pads["restart"]()
        sent = [(one.vector.tobytes(), one.numbers.tobytes(), one.boxes) for one in map(nodes.upload, uploaded)]
        seen.append((sent, answers, [sums.tobytes() for sums in opening.open(answers)], nodes.vectors[0].tobytes()))
    assert seen[0][:3] == seen[1][:3]
    assert seen[0][3] != seen[1][3]


@pytest.fixture(scope="module")
def recorded():
    """Record an upload of one node, and all secrets from which it was made."""
    nodes = Nodes(step_of(header_of(range(4), 3)), size=20_000)
    changes = np.random.default_rng(5).normal(0, 1e6, nodes.size)
    nodes.vectors[0] = np.rint(changes).astype(np.int32).view(np.uint32)
    drawn = []

    def remembered():
        drawn.append(field.secrets.randbelow(field.PRIME))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        for module in (field, masks):
            patch.setattr(module, "random_element", remembered)
        upload = nodes.upload(0)
    step, key = nodes.step, private_key(0)
    shared = {one: agree(key, step.header.nodes[one].key) for one in step.partitions}
    elements = drawn + [pair_secret(shared[one], step.transcript, 0, one) for one in (1, 2, 3)]
    secrets = [nodes.vectors[0].tobytes(), nodes.numbers[0].tobytes(), key.private_bytes_raw(), *shared.values()]
    return nodes, upload, [*secrets, *map(to_bytes, elements)]


def test_an_upload_holds_no_piece_of_a_secret(recorded):
    """No 16 successive bytes of inputs, own mask, coefficients, pair secrets, agreed secrets or the private key."""
    _, upload, secrets = recorded
    assert len(secrets) == len(["vector", "numbers", "key"]) + 4 + (1 + 4 * 2) + 3
    sent = b"".join([upload.vector.tobytes(), upload.numbers.tobytes(), *upload.boxes.values(), upload.id])
    pieces = {sent[first : first + 16] for first in range(len(sent) - 15)}
    for secret in secrets:
        assert not any(secret[first : first + 16] in pieces for first in range(len(secret) - 15))


def test_an_upload_does_not_correlate_with_the_update(recorded):
    nodes, upload, _ = recorded
    signed = upload.vector.view(np.int32), nodes.vectors[0].view(np.int32)
    assert abs(np.corrcoef(*signed)[0, 1]) < 5 / np.sqrt(nodes.size)


def test_bytes_of_an_upload_are_uniform(recorded):
    """Pearson's statistic of the 256 values is within 5 standard deviations of its mean, 255."""
    _, upload, _ = recorded
    for data in (upload.vector.tobytes(), b"".join(upload.boxes.values())):
        counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
        expected = len(data) / 256
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert abs(statistic - 255) < 5 * np.sqrt(2 * 255)


def test_bytes_of_a_plain_update_are_not_uniform(recorded):
    """The statistic finds a vector that is not masked."""
    nodes, _, _ = recorded
    counts = np.bincount(np.frombuffer(nodes.vectors[0].tobytes(), np.uint8), minlength=256)
    expected = 4 * nodes.size / 256
    assert ((counts - expected) ** 2 / expected).sum() > 10 * 255
