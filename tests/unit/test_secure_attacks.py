"""Malicious nodes to the server of secure sums: the other nodes and the run go on."""

from collections.abc import Sequence

import pytest
from masked_steps import private_key
from scripted import A, Answer, ScriptedGrid, handshake_reply, says

from hyperfl_flwr.protocol.secure_sums.keys import public_of
from hyperfl_flwr.server.roster import Roster

SESSION = "5e" * 16


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperfl_flwr.server.roster.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("hyperfl_flwr.server.handshake_requests.PAUSE_SECONDS", 0.0)


def gathered(keys: Sequence[str], **last: object) -> Roster:
    """Return the roster of nodes with some keys of the session; `last` changes the last node's handshake."""
    answers: dict[int, Sequence[Answer]] = {}
    for number, key in enumerate(keys):
        changes = last if number == len(keys) - 1 else {}
        told = {"secure_key": key, "secure_signature": "", "num_examples": None} | changes
        properties = handshake_reply(number, len(keys), len(keys), **told)
        answers[A + number] = [says(properties)]
    roster = Roster(ScriptedGrid(answers), num_clients=len(keys), timeout=10.0, min_nodes=2, session=SESSION)
    roster.gather()
    return roster


KEYS = [public_of(private_key(number)) for number in range(4)]


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (KEYS[1], "node 3 is refused: it has the same key for secure sums as node 1"),
        ("00" * 32, "node 3 is refused: its secure-key is invalid"),
        ("01" + "00" * 31, "node 3 is refused: its secure-key is invalid"),
    ],
)
def test_a_key_that_the_other_nodes_refuse_is_not_sent_to_them(key: str, reason: str) -> None:
    """A copied key, or one of low order, would make every honest node refuse every step."""
    roster = gathered([*KEYS[:3], key])
    assert [node.partition for node in roster.federation.nodes] == [0, 1, 2]
    assert [str(refusal)[: len(reason)] for refusal in roster.refused] == [reason]


def test_one_node_does_not_set_the_weights_of_all() -> None:
    """A million samples of one node would be the weight 1, and the honest clients' weights would round away."""
    roster = gathered(KEYS, num_examples=[10**6])
    assert not roster.federation.num_examples
    assert [node.partition for node in roster.federation.nodes] == [0, 1, 2]
    assert [str(refusal) for refusal in roster.refused] == [
        "node 3 is refused: its handshake must not have num-examples in this run"
    ]
