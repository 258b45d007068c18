"""Replies of malicious nodes are replaced before the strategy reads them: sums of clients, and arrays sent alone."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from federations import small_settings
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.flower.messages import identify_process
from hyperfl_flwr.node.array_sums import PlainSum
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CLIENTS,
    CONFIG,
    LABEL_COUNTS,
    OUTLIER_SUMS,
    PER_CLIENT_ARRAYS,
    WEIGHTS,
    ClientResult,
    Failure,
    Reduction,
    Report,
    Request,
    record_of,
    weights_record,
)
from hyperfl_flwr.protocol.packing import pack_arrays, pack_by_number
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from hyperfl_flwr.server.exchange import Exchange
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.handshake import Node
from strategies.engine.context import ServerContext
from strategies.engine.forged_replies import with_forgeries
from strategies.engine.replies import TrainingReply, read_training

NUM_CLIENTS = 6
EXAMPLES = [4, 2, 8, 6, 4, 8]
"""Numbers of training samples by client; node p of P hosts the clients p, p + P, ..."""

SENT: SharedArrays = {
    "model/w": np.array([1.0, -2.0], np.float32),
    "control/c": np.array([8.0], np.float32),
}
REDUCTIONS = {"model": Reduction.MEAN_BY_EXAMPLES, "control": Reduction.SUM, "own": Reduction.PER_CLIENT}
REDUCTIONS |= {"labels": Reduction.EACH, "copy": Reduction.EACH}

ALIKE: SharedArrays = {LABEL_COUNTS: np.zeros(2, np.float32), "copy/w": np.array([5.0], np.float32)}
"""What each client is sent alike, and sends back alone."""


def change_of(client: int) -> np.ndarray:
    return np.array([client + 1.0, 2.0 - client], np.float32)


def shared_of(client: int) -> SharedArrays:
    """Return what a client has trained; `control` holds a change already."""
    return {
        "model/w": SENT["model/w"] + change_of(client),
        "control/c": np.array([client + 0.5], np.float32),
    }


def sent_alone(client: int) -> SharedArrays:
    return {"own/v": np.array([10.0 * client], np.float32)}


def own_of(client: int) -> SharedArrays:
    """Return what a client sends alone; `own` holds a change already."""
    counts = np.array([EXAMPLES[client], 0.0], np.float32)
    change = np.array([client + 1.0], np.float32)
    return {"own/v": change, "copy/w": ALIKE["copy/w"] + change, LABEL_COUNTS: counts}


class Step:
    """A training step of six clients on P nodes, with honest replies."""

    def __init__(self, num_nodes: int, **adversary: Scalar) -> None:
        identify_process()
        changes = {key if "." in key else f"adversary.{key}": value for key, value in adversary.items()}
        hosted = [list(range(number, NUM_CLIENTS, num_nodes)) for number in range(num_nodes)]
        nodes = [
            Node(id=100 + number, partition=number, clients=clients, properties={"num-nodes": num_nodes})
            for number, clients in enumerate(hosted)
        ]
        self.context = ServerContext(
            config=RunConfig.from_flat(small_settings(method="fedavg", **changes)),
            federation=Federation(nodes), reductions=REDUCTIONS, experiment="0" * 16, run_directory="",
        )  # fmt: skip
        self.requests = [self.request(clients) for clients in hosted]
        self.messages = [self.message(node.id, each) for node, each in zip(nodes, self.requests, strict=True)]
        self.honest = [
            Exchange(node=node.id, content=self.content(each)) for node, each in zip(nodes, self.requests, strict=True)
        ]

    @staticmethod
    def request(clients: Sequence[int]) -> Request:
        nothing = [0] * len(clients)
        return Request(
            round=1, experiment="0" * 16, run_directory="", clients=clients, versions=nothing, kept_versions=nothing,
            num_clients=NUM_CLIENTS, max_num_examples=max(EXAMPLES),
        )  # fmt: skip

    @staticmethod
    def message(node: int, request: Request, kind: str = MessageType.TRAIN) -> Message:
        content = RecordDict({ARRAYS: pack_arrays({**SENT, **ALIKE}), CONFIG: request.to_record()})
        content[PER_CLIENT_ARRAYS] = pack_by_number({client: sent_alone(client) for client in request.clients})
        return Message(content, dst_node_id=node, message_type=kind)

    @staticmethod
    def content(request: Request) -> RecordDict:
        """Return a node's honest reply."""
        total = PlainSum(SENT, REDUCTIONS, request)
        for client in request.clients:
            total.add(shared_of(client), EXAMPLES[client])
        results = [
            ClientResult(client=client, num_examples=EXAMPLES[client], metrics={"personalized-accuracy": 0.5})
            for client in request.clients
        ]
        return RecordDict(
            {
                ARRAYS: pack_arrays(total.arrays),
                WEIGHTS: weights_record(sum(each.num_examples for each in results), len(results)),
                CLIENTS: Report(results=results).to_record(),
                PER_CLIENT_ARRAYS: pack_by_number({client: own_of(client) for client in request.clients}),
            }
        )

    def lied(self) -> list[Exchange]:
        return list(with_forgeries(self.context, self.messages, iter(self.honest)))

    def replies(self) -> list[TrainingReply]:
        """Return the replies as the server reads them."""
        found = []
        for request, answer in zip(self.requests, self.lied(), strict=True):
            starts = {client: {**ALIKE, **sent_alone(client)} for client in request.clients}
            assert answer.content is not None
            found.append(read_training(answer.content, request.clients, SENT, starts))
        return found

    def mean(self, replies: Sequence[TrainingReply]) -> SharedArrays:
        """Return what the server reduces some replies to."""
        total = ReproducibleSum(SENT, REDUCTIONS, num_clients=NUM_CLIENTS, max_num_examples=max(EXAMPLES))
        for reply in replies:
            reply.add_to(total)
        number = sum(len(reply.report.results) for reply in replies)
        return total.take_mean(sum(reply.num_examples for reply in replies), number)


def weighted(changes: Mapping[int, np.ndarray]) -> np.ndarray:
    total = sum(EXAMPLES[client] for client in changes)
    return sum((EXAMPLES[client] * change for client, change in changes.items()), np.zeros(2)) / total


def node_change(*clients: int) -> np.ndarray:
    return weighted({client: change_of(client) for client in clients})


@pytest.mark.parametrize("num_nodes", [2, 3, 6])
def test_a_node_turns_its_sum_around(num_nodes: int) -> None:
    """Node 1 sends the start less its clients' mean change; groups of sums hold changes."""
    step = Step(num_nodes, attack="sign-flip", nodes="1")
    clients, reply = step.requests[1].clients, step.replies()[1]
    mean = step.mean([reply])
    np.testing.assert_allclose(mean["model/w"], SENT["model/w"] - node_change(*clients), rtol=1e-6)
    np.testing.assert_array_equal(mean["control/c"], [-sum(client + 0.5 for client in clients)])
    for client, arrays in reply.per_client.items():
        np.testing.assert_array_equal(arrays["own/v"], [-(client + 1)])
        np.testing.assert_array_equal(arrays["copy/w"], ALIKE["copy/w"] - (client + 1))
        np.testing.assert_array_equal(arrays[LABEL_COUNTS], own_of(client)[LABEL_COUNTS])


def test_honest_nodes_are_left_alone() -> None:
    step = Step(3, attack="sign-flip", nodes="1")
    lied = step.lied()
    assert lied[0] is step.honest[0]
    assert lied[2] is step.honest[2]


def test_metrics_of_malicious_nodes_are_left_out() -> None:
    """Their clients still finish, with the weight that they have announced."""
    reports = [reply.report for reply in Step(3, attack="label-flip", nodes="1").replies()]
    have_metrics = [[bool(result.metrics) for result in report.results] for report in reports]
    assert have_metrics == [[True, True], [False, False], [True, True]]
    assert [result.num_examples for result in reports[1].results] == [EXAMPLES[1], EXAMPLES[4]]


def test_an_attack_on_data_changes_no_arrays() -> None:
    step = Step(3, attack="label-flip", nodes="1")
    honest, lied = step.honest[1].content, step.lied()[1].content
    assert honest is not None
    assert lied is not None
    assert {name: lied[name] for name in lied if name != CLIENTS} == {
        name: honest[name] for name in honest if name != CLIENTS
    }


@pytest.mark.parametrize("num_nodes", [3, 6])
def test_malicious_nodes_collude(num_nodes: int) -> None:
    """They send one change: mean and z deviations of their nodes' mean changes, which honest nodes do not move."""
    step = Step(num_nodes, attack="alie", nodes="0,1", scale=1.5)
    replies = step.replies()
    of_nodes = np.array([node_change(*request.clients) for request in step.requests[:2]])
    expected = SENT["model/w"] + of_nodes.mean(axis=0) + 1.5 * of_nodes.std(axis=0)
    for reply in replies[:2]:
        np.testing.assert_allclose(step.mean([reply])["model/w"], expected, rtol=1e-6)
    # Of the arrays that are sent alone, the senders are the clients.
    alone = np.array([client + 1.0 for request in step.requests[:2] for client in request.clients])
    for reply in replies[:2]:
        for arrays in reply.per_client.values():
            np.testing.assert_allclose(arrays["own/v"], [alone.mean() + 1.5 * alone.std()], rtol=1e-6)


def test_the_mean_over_all_is_turned() -> None:
    """IPM of weight l against h: the mean changes by (h - ε l)/(h + l) of the honest nodes' weighted mean change."""
    step = Step(3, attack="ipm", nodes="1", scale=4.0)
    honest = {client: change_of(client) for client in (0, 3, 2, 5)}
    h, l = sum(EXAMPLES[client] for client in honest), EXAMPLES[1] + EXAMPLES[4]  # noqa: E741 - of the formula
    expected = SENT["model/w"] + (h - 4 * l) / (h + l) * weighted(honest)
    np.testing.assert_allclose(step.mean(step.replies())["model/w"], expected, rtol=1e-6)


def test_a_model_is_replaced() -> None:
    """With γ = auto the mean is the malicious nodes' mean plus the honest nodes' share of the change."""
    step = Step(2, attack="backdoor", nodes="1")
    honest = {client: change_of(client) for client in (0, 2, 4)}
    share = sum(EXAMPLES[client] for client in honest) / sum(EXAMPLES)
    expected = SENT["model/w"] + node_change(1, 3, 5) + share * weighted(honest)
    np.testing.assert_allclose(step.mean(step.replies())["model/w"], expected, rtol=1e-6)


def test_under_a_robust_rule_nodes_have_the_same_weight() -> None:
    """γ = auto is then the number of nodes divided by that of malicious nodes, whatever their numbers of samples."""
    step = Step(3, attack="backdoor", nodes="1", **{"robust.reduction": "norm-bound"})
    expected = SENT["model/w"] + 3 * node_change(1, 4)
    np.testing.assert_allclose(step.mean([step.replies()[1]])["model/w"], expected, rtol=1e-6)


def test_large_lies_use_further_levels_of_sums() -> None:
    """A change of 10^6 is beyond the first level of a sum of several clients; nothing of it is lost."""
    step = Step(3, attack="sign-flip", nodes="1", scale=1e6)
    assert OUTLIER_SUMS in (step.lied()[1].content or {})
    expected = SENT["model/w"] - 1e6 * node_change(1, 4)
    np.testing.assert_allclose(step.mean([step.replies()[1]])["model/w"], expected, rtol=1e-6)


def test_without_malicious_nodes_nothing_is_read() -> None:
    """Not even held back: results are passed on one by one."""
    step = Step(3, attack="ipm", share=0.0)
    assert all(lied is honest for lied, honest in zip(step.lied(), step.honest, strict=True))


def test_evaluations_are_not_forged() -> None:
    step = Step(3, attack="ipm", nodes="1")
    step.messages = [
        step.message(each.metadata.dst_node_id, request, MessageType.EVALUATE)
        for each, request in zip(step.messages, step.requests, strict=True)
    ]
    lied, honest = step.lied()[1].content, step.honest[1].content
    assert lied is not None
    assert honest is not None
    assert lied[ARRAYS] == honest[ARRAYS]
    assert not any(result.metrics for result in Report.from_record(record_of(lied, CLIENTS, ConfigRecord)).results)


def test_malicious_nodes_that_fail_say_nothing() -> None:
    """A missing reply and one without a finished client are passed on; the other malicious node acts alone."""
    step = Step(3, attack="sign-flip", nodes="0,1")
    failures = [Failure(client=client, reason="broken") for client in step.requests[0].clients]
    nothing = RecordDict(
        {ARRAYS: pack_arrays({}), WEIGHTS: weights_record(0, 0), CLIENTS: Report(failures=failures).to_record()}
    )
    for answer in (Exchange(node=100, problem="no reply"), Exchange(node=100, content=nothing)):
        step.honest[0] = answer
        lied = step.lied()
        assert (lied[0].content is None) == (answer.content is None)
        assert lied[1].content != step.honest[1].content
