"""A node takes part in a secure step only if the header is what it must be; each rule refuses with its reason."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from secure_steps import (
    EXPERIMENT,
    IDENTITIES,
    NUM_CLIENTS,
    RECEIVED,
    SESSION,
    TERMS,
    accept,
    changed_row,
    content_for,
    header_for,
    nodes_in,
    request_for,
    rows_of,
    uploaded,
)

from hyperfl_flwr.core.errors import RefusalError, for_others
from hyperfl_flwr.node.secure_cohort import SecureCohort
from hyperfl_flwr.node.secure_session import MOST_UPLOADS, SimulatedSessions, StoredSessions
from hyperfl_flwr.node.secure_sums import SecureNode
from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.messages import PER_CLIENT_ARRAYS, Reduction, Request
from hyperfl_flwr.protocol.secure_sums.header import Header, NodeRow, arrays_digest
from hyperfl_flwr.protocol.secure_sums.keys import public_of, sign_key, simulated_key
from hyperfl_flwr.protocol.secure_sums.noise import SumNoise

Change = Callable[[Header], Header]


def refused(node: SecureNode, header: Header | bytes, request: Request, **changes: Any) -> str:
    """Return the reason with which a node refuses a message; nothing of it may be recorded."""
    found: dict[str, Any] = {"received": RECEIVED, "terms": TERMS, "phase": "train"} | changes
    content = content_for(header, request)
    if found.pop("per_client", False):
        content[PER_CLIENT_ARRAYS] = content["arrays"]
    with pytest.raises(RefusalError) as caught:
        node.accept(content, found["phase"], request, found["received"], found["terms"])
    sessions = node.sessions
    assert isinstance(sessions, StoredSessions)
    assert not (sessions.folder / SESSION / "step.json").exists()
    assert for_others(caught.value) == str(caught.value)
    return str(caught.value)


OTHER = public_of(simulated_key(SESSION, 99))


def swapped(header: Header) -> Header:
    """Return a header in which nodes 1 and 2 have each other's clients."""
    one, two = header.nodes[1].clients, header.nodes[2].clients
    return changed_row(changed_row(header, 1, clients=two), 2, clients=one)


HEADERS: dict[str, tuple[Change, str]] = {
    "another phase": (lambda h: replace(h, phase="evaluate"), "the header is for a message of type evaluate"),
    "another session": (lambda h: replace(h, session="0" * 32), "this node has no key of the session"),
    "this node is left out": (lambda h: replace(h, nodes=h.nodes[1:]), "this node is not in the header"),
    "own key": (lambda h: changed_row(h, 0, key=OTHER), "the header has another key of this node"),
    "key of another node": (lambda h: changed_row(h, 2, key=OTHER), "the key of node 2 is not signed"),
    "signature": (lambda h: changed_row(h, 2, signature=h.nodes[1].signature), "the key of node 2 is not signed"),
    "no signature": (lambda h: changed_row(h, 2, signature=""), "the key of node 2 is not signed"),
    "clients of another node": (swapped, "clients of node 1 that it does not host"),
    "client of two nodes": (lambda h: changed_row(h, 2, clients=(2, 8)), "the header's clients is invalid"),
    "client that does not exist": (lambda h: changed_row(h, 2, clients=(2, 12)), "node 2 that it does not host"),
    "invented node": (
        lambda h: replace(h, nodes=(*h.nodes, replace(h.nodes[4], partition=5, key=OTHER, clients=(15, 20)))),
        "clients of node 5 that it does not host",
    ),
    "threshold too low": (lambda h: replace(h, threshold=2), "a sum could cover only 0 honest nodes"),
    "half of the nodes": (lambda h: replace(h, threshold=3), "a sum could cover only 2 honest nodes"),
    "threshold too high": (lambda h: replace(h, threshold=6), "a sum could cover only 0 honest nodes"),
    "cohort of one": (lambda h: replace(h, nodes=h.nodes[:1], threshold=1), "a sum could cover only 1 honest nodes"),
    "cohort of two": (lambda h: replace(h, nodes=h.nodes[:2], threshold=2), "its owner requires min-cohort = 3"),
    "settings": (lambda h: replace(h, settings="0" * 64), "other settings of the run than this node has received"),
    "weights": (lambda h: replace(h, max_examples=10**6), "another secagg.max-examples than the run's settings"),
    "arrays": (lambda h: replace(h, arrays="0" * 64), "other arrays than this node has received"),
    "times": (lambda h: replace(h, metrics=("loss", "train-seconds")), "clients do not send: train-seconds"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_wrong_header_is_refused(tmp_path: Path, name: str) -> None:
    change, reason = HEADERS[name]
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes)
    assert reason in refused(nodes[0], change(header), request_for(header, nodes[0]))
    accept(nodes[0], header)


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "spaces": (lambda data: data.replace(b",", b", ", 1), "not in its canonical form"),
    "key twice": (lambda data: data.replace(b'{"arrays"', b'{"round":1,"arrays"', 1), "not in its canonical form"),
    "escaped letter": (lambda data: data.replace(b'"train"', b'"tr\\u0061in"'), "not in its canonical form"),
    "float": (lambda data: data.replace(b'"round":1', b'"round":1.0'), "the header's round is invalid"),
    "unknown key": (lambda data: data.replace(b"{", b'{"a":1,', 1), "it is not a header: TypeError"),
    "missing key": (lambda data: data.replace(b'"round":1,', b""), "it is not a header: TypeError"),
    "list": (lambda data: b"[" + data + b"]", "it is not a header: TypeError"),
    "number for a list": (lambda data: data.replace(b'["accuracy","loss"]', b"5"), "the header's metrics is invalid"),
    "version": (lambda data: data.replace(b'"version":2', b'"version":3'), "another version of the protocol"),
    "size": (lambda data: data + b" " * 2**24, "a header must have at most 16777216 bytes"),
}


@pytest.mark.parametrize("name", BYTES)
def test_other_bytes_than_the_canonical_ones_are_refused(tmp_path: Path, name: str) -> None:
    change, reason = BYTES[name]
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes)
    data = change(header.to_bytes())
    assert data != header.to_bytes()
    assert reason in refused(nodes[0], data, request_for(header, nodes[0]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 2}, "another run or round"),
        ({"experiment": "f" * 16}, "another run or round"),
        ({"clients": [0]}, "other clients or versions"),
        ({"versions": [1, 0]}, "other clients or versions"),
    ],
)
def test_a_request_that_differs_from_its_row_is_refused(tmp_path: Path, changes: Any, reason: str) -> None:
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes)
    assert reason in refused(nodes[0], header, request_for(header, nodes[0], **changes))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.array([1, 2]), "model/a has type int64"),
        (np.array([1, np.inf], np.float32), "model/a is not finite"),
        (np.array([1, 1e31], np.float32), "elements above 1e+30"),
    ],
)
def test_arrays_that_cannot_be_encoded_are_refused(tmp_path: Path, array: np.ndarray, reason: str) -> None:
    nodes = nodes_in(tmp_path, 5)
    received = RECEIVED | {"model/a": array}
    header = header_for(nodes, arrays=arrays_digest(received))
    assert reason in refused(nodes[0], header, request_for(header, nodes[0]), received=received)


def test_arrays_of_other_groups_or_of_single_clients_are_refused(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes)
    request = request_for(header, nodes[0])
    assert "for single clients" in refused(nodes[0], header, request, per_client=True)
    received = {f"head/{key}": value for key, value in RECEIVED.items()}
    other = replace(header, arrays=arrays_digest(received))
    assert "groups that the method does not share" in refused(nodes[0], other, request, received=received)


@pytest.mark.parametrize("key", ["00" * 32, "01" + "00" * 31])
def test_keys_of_low_order_are_refused(tmp_path: Path, key: str) -> None:
    """Without peers, too: the secret of such a key and any other one is known to all (RFC 7748, section 6.1)."""
    nodes = nodes_in(tmp_path, 5, peers={})
    header = changed_row(header_for(nodes), 3, key=key)
    assert "the key of node 3 is not a valid public key" in refused(nodes[0], header, request_for(header, nodes[0]))


def test_more_than_100_nodes_are_refused(tmp_path: Path) -> None:
    node = replace(nodes_in(tmp_path, 1, peers={})[0], num_nodes=101)
    row = rows_of([node])[0]
    rows = [
        replace(row, partition=number, key=public_of(simulated_key(SESSION, number)), clients=(number,), versions=(0,))
        for number in range(101)
    ]
    header = header_for([node], nodes=(replace(rows[0], key=row.key), *rows[1:]), threshold=70)
    terms = replace(TERMS, num_clients=101)
    reason = refused(node, header, request_for(header, node), terms=terms)
    assert reason == "a secure sum has at most 100 nodes, the header has 101"


def test_a_victim_among_colluding_peers_is_refused(tmp_path: Path) -> None:
    """All 7 nodes are pinned and signed, but 6 may collude: their sum would be the victim's parameters."""
    nodes = nodes_in(tmp_path, 7, max_colluding=6)
    for threshold in range(1, 8):
        header = header_for(nodes, threshold=threshold)
        assert "min-cohort = 3" in refused(nodes[0], header, request_for(header, nodes[0]))


def test_the_owner_s_number_of_colluding_nodes_counts(tmp_path: Path) -> None:
    """The server's threshold 4 of 5 is right if nobody colludes, and with one: 3 honest nodes; not with 2 of them."""
    header = header_for(nodes_in(tmp_path, 5), threshold=4)
    for colluding, honest in ((0, 4), (1, 3)):
        (node, *_) = nodes_in(tmp_path, 5, max_colluding=colluding, min_cohort=honest)
        accept(node, header)
    (node, *_) = nodes_in(tmp_path / "other", 5, max_colluding=2)
    rows = rows_of(nodes_in(tmp_path / "other", 5))
    request = request_for(header, node)
    assert "if 2 collude" in refused(node, replace(header, nodes=rows), request)


def test_a_node_that_is_no_peer_is_refused(tmp_path: Path) -> None:
    """Node 4 is not in the file of peers of node 0, although its key is signed."""
    nodes = nodes_in(tmp_path, 5, peers={number: IDENTITIES[number].public_key() for number in range(4)})
    header = header_for(nodes)
    assert "node 4 is not in this node's peers-file" in refused(nodes[0], header, request_for(header, nodes[0]))


def test_a_key_signed_for_another_session_or_node_is_refused(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes)
    key = header.nodes[2].key
    for session, partition in (("0" * 32, 2), (SESSION, 1)):
        forged = changed_row(header, 2, signature=sign_key(IDENTITIES[2], session, partition, key))
        assert "the key of node 2 is not signed" in refused(nodes[0], forged, request_for(header, nodes[0]))


def test_steps_only_go_forward(tmp_path: Path) -> None:
    """A step is accepted on one set of terms; after it, no earlier one."""
    node, *others = nodes_in(tmp_path, 5)
    header = header_for([node, *others])
    accept(node, header)
    accept(node, header)
    with pytest.raises(RefusalError, match="the same step with other contents"):
        accept(node, replace(header, threshold=4))
    accept(node, replace(header, phase="evaluate"))
    with pytest.raises(RefusalError, match="a later step"):
        accept(node, header)
    accept(node, replace(header, round=2))
    with pytest.raises(RefusalError, match="a later step"):
        accept(node, replace(header, phase="evaluate"))
    rows = rows_of([node, *others], "0" * 32)
    accept(node, replace(header, session="0" * 32, nodes=rows))  # another session has its own steps


def test_a_message_that_is_sent_again_gets_unrelated_masks_and_not_without_end(tmp_path: Path) -> None:
    node, *others = nodes_in(tmp_path, 5)
    header = header_for([node, *others])
    uploads = [uploaded(node, header) for _ in range(MOST_UPLOADS)]
    assert len({upload.id for upload in uploads}) == MOST_UPLOADS
    for one, two in ((uploads[0], uploads[1]), (uploads[1], uploads[2])):
        assert not set(one.boxes.values()) & set(two.boxes.values())
        assert (one.vector != two.vector).all()  # equal with a probability of 3 / 2^32
    with pytest.raises(RefusalError, match="has trained 3 times for this step"):
        uploaded(node, header)


def test_an_upload_is_not_made_for_an_older_step(tmp_path: Path) -> None:
    """A node that is still training when the next step begins sends nothing for the first one."""
    node, *others = nodes_in(tmp_path, 5)
    header = header_for([node, *others])
    step = accept(node, header)
    accept(node, replace(header, round=2))
    with pytest.raises(RefusalError, match="not the newest step"):
        node.mask(step, np.zeros(3, np.uint32), np.zeros(6, np.uint64))


def test_a_simulated_node_has_no_memory(tmp_path: Path) -> None:
    node = replace(nodes_in(tmp_path, 5, peers={})[0], sessions=SimulatedSessions(partition=0))
    others = nodes_in(tmp_path, 5)[1:]
    header = header_for([node, *others])
    assert header.nodes[0].key == public_of(simulated_key(SESSION, 0))
    for number in (2, 1, 1):
        accept(node, replace(header, round=number))
    assert not (tmp_path / "node-0").exists()


def test_every_field_is_part_of_the_transcript(tmp_path: Path) -> None:
    header = header_for(nodes_in(tmp_path, 5))
    row: NodeRow = header.nodes[0]
    changed = [
        replace(header, session="0" * 32), replace(header, experiment="0" * 16), replace(header, round=2),
        replace(header, phase="evaluate"), replace(header, nodes=header.nodes[1:]), replace(header, threshold=2),
        replace(header, max_examples=2), replace(header, metrics=("loss",)), replace(header, settings="0" * 64),
        replace(header, arrays="0" * 64), changed_row(header, 0, key=OTHER), changed_row(header, 0, signature=""),
        changed_row(header, 0, clients=(0,), versions=(0,)), changed_row(header, 0, versions=(0, 1)),
    ]  # fmt: skip
    assert row.clients == (0, 5)
    assert header.experiment == EXPERIMENT
    assert len({each.to_bytes() for each in [header, *changed]}) == len(changed) + 1


@pytest.mark.parametrize(("owner", "run", "unknown"), [(0, 0, 3), (1, 1, 3), (0, 1, 3), (2, 2, 2), (0, 2, 2)])
def test_the_shares_of_noise_that_an_attacker_does_not_know_suffice(
    owner: int, run: int, unknown: int, tmp_path: Path
) -> None:
    """Of five nodes with the threshold 4: as many colluding ones as the run expects, for all nodes the same."""
    nodes = nodes_in(tmp_path, 5, max_colluding=owner, min_cohort=2)
    header = header_for(nodes, threshold=4)
    noise = SumNoise(clip_norm=0.5, multiplier=0.3)
    terms = replace(TERMS, noise=noise, colluding=run)
    request = request_for(header, nodes[0])
    _, encoding = nodes[0].accept(content_for(header, request), "train", request, RECEIVED, terms)
    share = SecureCohort(node=nodes[0], terms=terms)._share_of_noise(header, encoding)
    assert share == pytest.approx(0.3 * (noise.largest(NUM_CLIENTS, 5) + 0.5 * 3**0.5) / unknown**0.5, rel=1e-6)
    plain = replace(encoding, noise=None)
    assert SecureCohort(node=nodes[0], terms=terms)._share_of_noise(header, plain) == 0


def test_an_owner_who_expects_more_colluding_nodes_than_the_run(tmp_path: Path) -> None:
    """Its own share could be larger, but the shares of the other honest nodes would be too small."""
    nodes = nodes_in(tmp_path, 5, max_colluding=2, min_cohort=2)
    header = header_for(nodes, threshold=4)
    terms = replace(TERMS, noise=SumNoise(clip_norm=0.5, multiplier=0.3), colluding=1)
    request = request_for(header, nodes[0])
    _, encoding = nodes[0].accept(content_for(header, request), "train", request, RECEIVED, terms)
    with pytest.raises(
        RefusalError, match=r"up to 2 colluding nodes .* suffices for 1 .*; raise secagg.colluding to 2"
    ):
        SecureCohort(node=nodes[0], terms=terms)._share_of_noise(header, encoding)


@pytest.mark.parametrize(
    ("run", "noise", "problem"),
    [
        (3, SumNoise(clip_norm=0.5, multiplier=0.3), "need not have noise that others do not know if 3 collude"),
        (1, SumNoise(clip_norm=0.5, multiplier=1e-9), "is too small for noise=sum"),
    ],
)
def test_noise_that_cannot_suffice_is_refused(run: int, noise: SumNoise, problem: str, tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path, 5, max_colluding=0)
    header = header_for(nodes, threshold=4)
    terms = replace(TERMS, noise=noise, colluding=run)
    request = request_for(header, nodes[0])
    _, encoding = nodes[0].accept(content_for(header, request), "train", request, RECEIVED, terms)
    with pytest.raises(RefusalError, match=problem):
        SecureCohort(node=nodes[0], terms=terms)._share_of_noise(header, encoding)


def test_noise_on_the_sum_needs_equal_weights(tmp_path: Path) -> None:
    """A server cannot have a method's sums noised as if clients had equal weights."""
    nodes = nodes_in(tmp_path, 5)
    header = header_for(nodes, threshold=4)
    reductions = {"model": Reduction.MEAN_BY_EXAMPLES}
    terms = replace(TERMS, noise=SumNoise(clip_norm=0.5, multiplier=0.3), reductions=reductions)
    request = request_for(header, nodes[0])
    with pytest.raises(RefusalError, match="no mean with equal weights"):
        nodes[0].accept(content_for(header, request), "train", request, RECEIVED, terms)


@pytest.mark.parametrize(("num_nodes", "colluding", "unknown"), [(11, 0, 10), (11, 1, 10), (11, 2, 9), (10, 0, 9)])
def test_squares_are_summed_of_ten_unknown_nodes(num_nodes: int, colluding: int, unknown: int, tmp_path: Path) -> None:
    """All nodes must answer; without colluding ones, the owner of a node who reads the results knows its own numbers.

    Sums without squares are formed of fewer. How many clients a node hosts does not count: they could fail.
    """
    node = nodes_in(tmp_path, 1, peers={}, max_colluding=colluding)[0]
    node, terms = replace(node, num_nodes=num_nodes), replace(TERMS, num_clients=2 * num_nodes)
    row = rows_of([node])[0]
    rows = [
        replace(row, partition=number, key=public_of(simulated_key(SESSION, number)), clients=hosted, versions=(0, 0))
        for number in range(num_nodes)
        for hosted in [tuple(clients_of_node(number, num_nodes, 2 * num_nodes))]
    ]
    header = header_for([node], nodes=(replace(rows[0], key=row.key), *rows[1:]), threshold=num_nodes, squares=True)
    request = request_for(header, node)
    if unknown < 10:
        reason = refused(node, header, request, terms=terms)
        assert f"if {colluding} nodes collude (max-colluding of this node), only {unknown} nodes in a sum" in reason
        header = replace(header, squares=False)
    node.accept(content_for(header, request), "train", request, RECEIVED, terms)
