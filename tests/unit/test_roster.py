"""The nodes of a deployment: some are missing, come later, leave, come back, or do not fit."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict
from scripted import A, Answer, B, C, ScriptedGrid, fails, handshake_reply, is_silent, nodes_of, says

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.packages.versions import shared_versions
from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.messages import PROPERTIES
from hyperfl_flwr.protocol.queries import NOVEL, WITHHOLDS_METRICS
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.server.roster import Roster

D = C + 1


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "roster.PAUSE_SECONDS",
        "roster.HANDSHAKE_SECONDS",
        "handshake_requests.PAUSE_SECONDS",
        "handshake_requests.ASK_AGAIN_SECONDS",
    ):
        monkeypatch.setattr(f"hyperfl_flwr.server.{name}", 0.0)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make_roster(said: list[str]) -> Callable[..., Roster]:
    def make(grid: ScriptedGrid, num_clients: int = 6, **changes: Any) -> Roster:
        return Roster(grid, num_clients=num_clients, **{"timeout": 0.05, "announce": said.append} | changes)

    return make


def there(roster: Roster) -> list[int]:
    return [node.partition for node in roster.federation.nodes]


def refuses(number: int, reason: str) -> Answer:
    return says(RecordDict({PROPERTIES: ConfigRecord({"partition": number, "problem": reason})}))


def test_all_nodes_are_waited_for(make_roster: Callable[..., Roster], said: list[str]) -> None:
    """Node p of 3 hosts clients p and p + 3; a line is logged when something has changed."""
    grid = ScriptedGrid(nodes_of(3, 6, num_examples=[10, 30]), arrivals=[C, A, B])
    roster = make_roster(grid, timeout=10.0)
    assert [(node.id, node.clients) for node in roster.gather().nodes] == [(A, [0, 3]), (B, [1, 4]), (C, [2, 5])]
    assert grid.asked == [C, A, B]
    assert said == [
        "waiting for nodes: 1 of 3 present, missing: 0 1",
        "waiting for nodes: 2 of 3 present, missing: 1",
        "node 0 takes part: clients 0 3, 40 training samples (33% of all)",
        "node 1 takes part: clients 1 4, 40 training samples (33% of all)",
        "node 2 takes part: clients 2 5, 40 training samples (33% of all)",
    ]


def test_a_run_begins_with_all_nodes_unless_it_is_told_otherwise(make_roster: Callable[..., Roster]) -> None:
    """Two of three nodes are enough with min-nodes = 2, and for resuming a run (half of three, rounded up)."""
    grid = ScriptedGrid(nodes_of(3, 6), arrivals=[A, C])
    text = r"node-timeout = 0\.05 s: all 3 nodes are required, missing: 1; start them, or set min-nodes=2"
    with pytest.raises(RunFailedError, match=text):
        make_roster(grid).gather()
    for roster, resumed in ((make_roster(grid, min_nodes=2), None), (make_roster(grid), {})):
        roster.gather(resumed=resumed)
        assert (there(roster), roster.away, roster.num_nodes) == ([0, 2], [1], 3)
        assert roster.clients_of(1) == [1, 4]
    with pytest.raises(RunFailedError, match="3 of 3 nodes are needed, present: 0 2, missing: 1; start the missing"):
        make_roster(grid, min_nodes=3).gather()


def test_nodes_that_say_they_are_fewer_do_not_begin_alone(make_roster: Callable[..., Roster]) -> None:
    """A node that reports a wrong number of nodes, here one, does not start a run that needs two."""
    grid = ScriptedGrid({A: [says(handshake_reply(0, 1, 6))]}, arrivals=[A])
    with pytest.raises(RunFailedError, match="2 of 1 nodes are needed, present: 0"):
        make_roster(grid, min_nodes=2).gather()


def test_a_run_without_nodes_fails(make_roster: Callable[..., Roster]) -> None:
    with pytest.raises(RunFailedError, match=r"node-timeout = 0\.05 s: no suitable node has replied"):
        make_roster(ScriptedGrid({})).gather()


def test_nodes_that_are_there_but_had_no_time_to_answer_are_told(make_roster: Callable[..., Roster]) -> None:
    """This happens in a deployment if node-timeout is below the duration of one phase."""
    grid = ScriptedGrid({A: [is_silent], B: [is_silent]})
    with pytest.raises(RunFailedError, match=r"has replied \(2 connected but without a reply .*raise node-timeout"):
        make_roster(grid, min_nodes=1).gather()


def test_a_node_with_other_versions_is_told_once_and_takes_part(
    make_roster: Callable[..., Roster], said: list[str]
) -> None:
    """Another build of torch, another patch version of Python and entries that cannot be read are not reported."""
    here = shared_versions()
    same = [f"flwr {here['flwr']}", f"torch {here['torch'].partition('+')[0]}+cu999", "python 3.11.99", "torch"]
    other = [f"hyperfl-flwr {here['hyperfl-flwr']}", "torch 1.0\n", "numpy 0.1"]
    python = here["python"].rpartition(".")[0]
    answers = {
        A: [says(handshake_reply(0, 2, 2, versions=[each.replace("3.11", python) for each in same]))],
        B: [says(handshake_reply(1, 2, 2, versions=other))],
    }
    roster = make_roster(ScriptedGrid(answers), num_clients=2)
    roster.gather()
    roster.refresh(1)
    assert there(roster) == [0, 1]
    assert [line for line in said if "runs" in line] == [
        f"node 1 runs torch 1.0 (here {here['torch']}): results may differ"
    ]


def test_a_node_without_metrics_is_named_once(make_roster: Callable[..., Roster], said: list[str]) -> None:
    answers = {
        A: [says(handshake_reply(0, 2, 2, **{WITHHOLDS_METRICS: False}))],
        B: [says(handshake_reply(1, 2, 2, **{WITHHOLDS_METRICS: True}))],
    }
    roster = make_roster(ScriptedGrid(answers), num_clients=2)
    roster.gather()
    roster.refresh(1)
    assert [line for line in said if "max-epsilon" in line] == [
        "node 1 sends no metrics, since its owner has set max-epsilon; secure sums with it contain none"
    ]


def test_a_node_that_failed_is_asked_again(make_roster: Callable[..., Roster], said: list[str]) -> None:
    """Its owner has set `max-epsilon` and restarted it between two rounds: Flower's id is the same."""
    told = [says(handshake_reply(1, 2, 2)), says(handshake_reply(1, 2, 2, **{WITHHOLDS_METRICS: True}))]
    grid = ScriptedGrid({A: [says(handshake_reply(0, 2, 2))], B: told})
    roster = make_roster(grid, num_clients=2)
    assert [node.withholds_metrics for node in roster.gather().nodes] == [False, False]
    roster.refresh(1)
    assert grid.asked == [A, B]
    roster.exclude(B, "the step sums metrics", is_failure=True)
    assert [node.withholds_metrics for node in roster.refresh(2).nodes] == [False, True]
    roster.refresh(3)
    assert grid.asked == [A, B, B]
    assert not [line for line in said if "away" in line or "back" in line]


def test_a_novel_node_is_not_waited_for_and_trains_nothing(make_roster: Callable[..., Roster], said: list[str]) -> None:
    """Node 2 of 3 takes models on demand: its answer ends the wait for it, and its place stays empty."""
    novel = {NOVEL: True, "partition": 2, "num-nodes": 1, "clients": [2]}
    answers = {**nodes_of(3, 2), C: [says(RecordDict({PROPERTIES: ConfigRecord(novel)}))]}
    roster = make_roster(ScriptedGrid(answers, arrivals=[A, B, C]), num_clients=2, timeout=10.0)
    assert [node.partition for node in roster.gather().nodes] == [0, 1]
    assert roster.refused == []
    assert said[-1] == "node 2 is missing (clients )"


@pytest.mark.parametrize("lie", ["honest", "fits", "novel"])
def test_a_node_beyond_the_run_is_neither_waited_for_nor_counted(
    lie: str, make_roster: Callable[..., Roster], said: list[str]
) -> None:
    """Node 2 answers first, in a run of nodes 0 and 1: whatever it says, the run waits for both, and asks it once."""
    answers = {
        "honest": refuses(2, "node 2 takes no part in this run, which has 2 nodes (num-nodes)"),
        "fits": says(handshake_reply(2, 2, 6, clients=[2])),
        "novel": says(RecordDict({PROPERTIES: ConfigRecord({NOVEL: True, "partition": 2, "num-nodes": 1})})),
    }
    grid = ScriptedGrid({**nodes_of(2, 6), C: [answers[lie]]}, arrivals=[C, A, B])
    roster = make_roster(grid, num_nodes=2, timeout=10.0)
    roster.gather()
    assert (there(roster), roster.num_nodes, roster.refused, roster.away) == ([0, 1], 2, [], [])
    assert said[0] == "node 2 takes no part in this run"
    assert said[1] == "waiting for nodes: 0 of 2 present, missing: 0 1"
    roster.refresh(1)
    roster.refresh(2)
    assert grid.asked == [C, A, B]
    assert said.count("node 2 takes no part in this run") == 1
    grid.present = [A, C]
    with pytest.raises(RunFailedError, match="all 2 nodes are required, missing: 1"):
        make_roster(grid, num_nodes=2).gather()


@pytest.mark.parametrize("changes", [{}, {"min_nodes": 1}])
@pytest.mark.parametrize("resumed", [None, {}])
@pytest.mark.parametrize("other", [fails(ErrorCode.CLIENT_APP_RAISED_EXCEPTION), says(handshake_reply(0, 2, 6))])
def test_nothing_but_its_own_answer_stands_for_a_node_of_the_run(
    other: Answer, resumed: dict[str, str] | None, changes: dict[str, int], make_roster: Callable[..., Roster]
) -> None:
    """The third node cannot load the app, so that its answer has no number, or has node 0's: node 1 is waited for."""
    grid = ScriptedGrid({**nodes_of(2, 6), C: [other]}, arrivals=[A, C, B])
    roster = make_roster(grid, num_nodes=2, timeout=10.0, **changes)
    roster.gather(resumed=resumed)
    assert (there(roster), roster.away) == ([0, 1], [])


def test_a_node_of_the_run_whose_answer_has_no_number_counts_as_missing(make_roster: Callable[..., Roster]) -> None:
    """Its owner has until node-timeout to correct it; then the run fails with its error, or begins without it."""
    broken = fails(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "broken")
    answers = {A: nodes_of(2, 6)[A], B: [broken]}
    text = rf"(?s)all 2 nodes are required, missing: 1; .*the node with Flower's id {B} is refused: broken"
    with pytest.raises(RunFailedError, match=text):
        make_roster(ScriptedGrid(answers), num_nodes=2).gather()
    for roster, resumed in (
        (make_roster(ScriptedGrid(answers), num_nodes=2, min_nodes=1), None),
        (make_roster(ScriptedGrid(answers), num_nodes=2), {}),
    ):
        roster.gather(resumed=resumed)
        assert there(roster) == [0]
    corrected = ScriptedGrid({A: answers[A], B: [broken, nodes_of(2, 6)[B][0]]})
    roster = make_roster(corrected, num_nodes=2, timeout=10.0)
    roster.gather()
    assert there(roster) == [0, 1]


def test_a_node_of_another_number_of_nodes_than_the_run_is_refused(make_roster: Callable[..., Roster]) -> None:
    """Also if most nodes say so: the number is the run's."""
    answers = {**nodes_of(3, 6), A: nodes_of(2, 6)[A]}
    roster = make_roster(ScriptedGrid(answers), num_nodes=2, min_nodes=1)
    roster.gather()
    assert (there(roster), roster.num_nodes) == ([0], 2)
    assert "its num-partitions is 3, but the run has 2" in str(roster.refused[0])


def test_a_node_joins_goes_and_comes_back(make_roster: Callable[..., Roster], said: list[str]) -> None:
    """Node 2 comes late, node 1 leaves and comes back; each change is logged once."""
    grid = ScriptedGrid(nodes_of(3, 6), arrivals=[A, B])
    roster = make_roster(grid, min_nodes=1)
    roster.gather()
    del said[:]
    history = []
    for present in ([A, B], [A, B, C], [A, B, C], [A, C], [A, B, C]):
        grid.present = present
        roster.refresh(1)
        history.append(there(roster))
    assert history == [[0, 1], [0, 1, 2], [0, 1, 2], [0, 2], [0, 1, 2]]
    joins = "node 2 joins (clients 2 5), 200 training samples (33% of all)"
    assert said == [joins, "node 1 is away (clients 1 4)", "node 1 is back (clients 1 4)"]
    assert grid.asked == [A, B, C, B]
    assert roster.seen == {0, 1, 2}


def test_a_node_does_not_come_back_with_another_weight(make_roster: Callable[..., Roster], said: list[str]) -> None:
    """It could make its update nearly all of the mean. With its data it takes part again."""
    true, heavy = says(handshake_reply(1, 2, 6)), says(handshake_reply(1, 2, 6, num_examples=[100, 10**9, 100]))
    grid = ScriptedGrid({A: nodes_of(2, 6)[A], B: [true, heavy, true]})
    roster = make_roster(grid)
    roster.gather()
    for present, expected in (([A], [0]), ([A, B], [0]), ([A], [0]), ([A, B], [0, 1])):
        grid.present = present
        roster.refresh(1)
        assert there(roster) == expected
    reason = "it announced 100 training samples of client 3 before, and 1000000000 now; restore its data, or begin"
    assert [line for line in said if reason in line]


def test_the_weight_of_a_node_with_another_id_is_announced(make_roster: Callable[..., Roster], said: list[str]) -> None:
    """One that has taken its number before must not keep it out, and its own number of samples is news."""
    other = says(handshake_reply(1, 2, 6, num_examples=[7, 7, 7]))
    grid = ScriptedGrid({**nodes_of(2, 6), C: [other]})
    grid.present = [A, B]
    roster = make_roster(grid)
    roster.gather()
    for present in ([A], [A, C]):
        grid.present = present
        roster.refresh(1)
    assert there(roster) == [0, 1]
    assert said[-1] == "node 1 is back (clients 1 3 5), 21 training samples (7% of all)"


def test_a_node_may_come_back_under_another_id(make_roster: Callable[..., Roster], said: list[str]) -> None:
    """Without key authentication, the new id is refused as long as Flower lists the old one."""
    answers = {**nodes_of(2, 6), C: [says(handshake_reply(1, 2, 6))]}
    grid = ScriptedGrid(answers)
    grid.present = [A, B]
    roster = make_roster(grid)
    roster.gather()
    grid.present = [A, B, C]
    assert [node.id for node in roster.refresh(1).nodes] == [A, B]
    assert said[-1] == "node 1 is refused: another one is node 1, too; correct the number (partition-id) of one"
    grid.present = [A, C]
    assert [node.id for node in roster.refresh(1).nodes] == [A, C]
    assert roster.refused == []


def test_a_node_that_was_lost_is_asked_again(make_roster: Callable[..., Roster], said: list[str]) -> None:
    """A node that was silent in a round takes part again when it has answered, although Flower still lists it."""
    reply = says(handshake_reply(1, 2, 6))
    grid = ScriptedGrid({**nodes_of(2, 6), B: [reply, is_silent, reply]})
    roster = make_roster(grid)
    roster.gather()
    roster.mark_away([B], "no reply in time")
    assert (there(roster), roster.away) == ([0], [1])
    assert said[-1] == "node 1 is away (clients 1 3 5): no reply in time"
    assert there(roster) == [0]
    roster.refresh(1)
    assert there(roster) == [0]
    while there(roster) == [0]:
        roster.refresh(1)
    assert said[-1] == "node 1 is back (clients 1 3 5)"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refuses(1, "DataError: no data here"), "node 1 is refused: DataError: no data here"),
        (fails(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "broken"), f"the node with Flower's id {B} is refused: broken"),
        (
            says(RecordDict()),
            "is refused: its handshake cannot be read: the message holds no ConfigRecord 'properties'",
        ),
        (
            says(handshake_reply(1, 3, 6, input_shape=[3, 8, 8])),
            r"its input-shape is [3, 8, 8], but the other nodes have [1",
        ),
        (says(handshake_reply(1, 3, 6, num_classes=9)), "its num-classes is 9, but the other nodes have 10"),
        (says(handshake_reply(1, 4, 6)), "its num-partitions is 4, but the other nodes have 3"),
        (says(handshake_reply(1, 3, 6, classes=["cat"])), "its classes is ['cat'], but the other nodes have ['dog']"),
        (
            says(handshake_reply(3, 3, 6)),
            "node 3 is refused: its partition-id 3 is not in the range from 0 to num-partitions - 1",
        ),
        (says(handshake_reply(0, 3, 6)), "node 0 is refused: another one is node 0, too"),
        (says(handshake_reply(1, 3, 6, clients=[1, 2])), "it claims the clients [1, 2]; node 1 of 3 hosts [1, 4]"),
        (says(handshake_reply(1, 3, 6, clients=[1, 9])), "it claims the clients [1, 9]; node 1 of 3 hosts [1, 4]"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_the_others_go_on(
    answer: Answer, reason: str, make_roster: Callable[..., Roster], said: list[str]
) -> None:
    """B is refused with the reason. Corrected and started again, it takes part as node 1."""
    answers: dict[int, Sequence[Answer]] = nodes_of(3, 6, classes=["dog"])
    grid = ScriptedGrid({A: answers[A], C: answers[C], B: [answer, answers[B][0]]})
    roster = make_roster(grid)
    roster.gather()
    assert there(roster) == [0, 2]
    assert reason in str(roster.refused[0])
    assert [line for line in said if "refused" in line] == [str(roster.refused[0])]
    grid.present = [A, C]
    roster.refresh(1)
    grid.present = [A, C, B]
    roster.refresh(1)
    assert (there(roster), roster.refused) == ([0, 1, 2], [])
    assert said[-1] == "node 1 joins (clients 1 4), 200 training samples (33% of all)"


def test_what_the_run_began_with_counts(make_roster: Callable[..., Roster]) -> None:
    """The run has begun with one node; two later ones that agree with each other do not outvote it."""
    answers = {**nodes_of(3, 6, num_classes=7), A: [says(handshake_reply(0, 3, 6))]}
    grid = ScriptedGrid(answers)
    grid.present = [A]
    roster = make_roster(grid, min_nodes=1)
    roster.gather()
    grid.present = [A, B, C]
    roster.refresh(1)
    assert (there(roster), len(roster.refused)) == ([0], 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"classes": ["malignant", "benign"]},
            "its classes is ['malignant', 'benign'], but the run has ['benign', 'mali",
        ),
        ({"num_classes": 3, "classes": ["a", "b", "c"]}, "its num-classes is 3, but the run has 2"),
        ({"input_shape": [1, 9, 9]}, "its input-shape is [1, 9, 9], but the run has [1, 8, 8]"),
    ],
)
def test_a_resumed_run_has_its_own_classes_whatever_most_nodes_say(
    changes: dict[str, Any], reason: str, make_roster: Callable[..., Roster]
) -> None:
    """The manifest of the run says which; class names are as in the manifest, without control characters."""
    run = {"num_classes": 2, "classes": ["benign", "malignant"]}
    first = make_roster(ScriptedGrid(nodes_of(3, 6, **run)))
    terms = RunData.read({"data": RunData.of(first.gather(), "digits").entry()}).terms()
    answers = nodes_of(3, 6, **(run | changes)) | {
        A: [says(handshake_reply(0, 3, 6, **run | {"classes": ["benign\n", "malignant"]}))]
    }
    roster = make_roster(ScriptedGrid(answers), min_nodes=1)
    roster.gather(resumed=terms)
    assert there(roster) == [0]
    assert [reason in refusal.reason for refusal in roster.refused] == [True, True]
    roster.refresh(2)
    assert there(roster) == [0]


def test_a_node_whose_csv_file_has_other_columns_is_refused(make_roster: Callable[..., Roster]) -> None:
    """By the hash of most nodes; a node without one, whose features have no names, fits."""
    changes = [{"columns": "a" * 64}, {"columns": "b" * 64}, {"columns": "a" * 64}, {}]
    answers = {
        node: [says(handshake_reply(number, 4, 6, **change))]
        for number, (node, change) in enumerate(zip((A, B, C, C + 1), changes, strict=True))
    }
    roster = make_roster(ScriptedGrid(answers), min_nodes=3)
    roster.gather()
    assert there(roster) == [0, 2, 3]
    (refusal,) = roster.refused
    assert refusal.number == 1
    reason = "its hash of the names and the order of the CSV columns is bbbb"
    assert refusal.reason.startswith(reason)
    resumed = RunData.read({"data": RunData.of(roster.federation, "digits").entry()}).terms()
    assert resumed["columns"] == "a" * 64


def test_columns_that_no_node_had_at_the_start_are_the_first_nodes(make_roster: Callable[..., Roster]) -> None:
    """Of two nodes with CSV files that join nodes without, one decides, and the other must have the same columns."""
    changes: list[dict[str, Any]] = [{}, {}, {"columns": "a" * 64}, {"columns": "b" * 64}]
    answers = {
        node: [says(handshake_reply(number, 4, 8, **change))]
        for number, (node, change) in enumerate(zip((A, B, C, C + 1), changes, strict=True))
    }
    grid = ScriptedGrid(answers)
    grid.present = [A, B]
    roster = make_roster(grid, num_clients=8, min_nodes=2)
    roster.gather()
    assert there(roster) == [0, 1]
    grid.present = [A, B, C, C + 1]
    roster.refresh(1)
    assert there(roster) == [0, 1, 2]
    assert [refusal.number for refusal in roster.refused] == [3]


def test_no_side_has_most_nodes(make_roster: Callable[..., Roster]) -> None:
    answers = {A: nodes_of(2, 6)[A], B: [says(handshake_reply(1, 2, 6, num_classes=7))]}
    with pytest.raises(RunFailedError, match="num-classes is 10 on nodes 0 but 7 on nodes 1; no value has a majority"):
        make_roster(ScriptedGrid(answers)).gather()


@pytest.mark.parametrize("sides", [[0, 1], [0, 1, 1]])
def test_long_lists_of_classes_are_compared_to_their_end(sides: list[int], make_roster: Callable[..., Roster]) -> None:
    """200 classes of more than 2000 characters, of which only the last differs; the texts are about that one."""
    same = [f"{number:03d}.species-{number}" for number in range(199)]
    lists = [[*same, "198.crow"], [*same, "199.raven"]]
    answers = {
        A + number: [says(handshake_reply(number, len(sides), 6, classes=lists[side], num_classes=200))]
        for number, side in enumerate(sides)
    }
    roster = make_roster(ScriptedGrid(answers), min_nodes=2)
    if len(sides) == 2:
        with pytest.raises(
            RunFailedError, match=r"'198.crow'\] \.\.\. on nodes 0 but .*'199.raven'\] \.\.\. on nodes 1;"
        ):
            roster.gather()
    else:
        roster.gather()
        assert there(roster) == [1, 2]
        assert "its classes is ... " in roster.refused[0].reason
        assert "'198.crow'] ..., but the other nodes have ... " in roster.refused[0].reason


def test_a_run_whose_nodes_are_all_refused_says_why(make_roster: Callable[..., Roster]) -> None:
    grid = ScriptedGrid({A: [refuses(0, "no data")], B: [refuses(1, "no key")]})
    with pytest.raises(RunFailedError, match=r"(?s)node 0 is refused: no data\n  - node 1 is refused: no key"):
        make_roster(grid).gather()


def test_too_few_nodes_before_a_round(make_roster: Callable[..., Roster], said: list[str]) -> None:
    """Half of four nodes must be present: with one, the server waits for a second one, and fails if none comes."""
    grid = ScriptedGrid(nodes_of(4, 8))
    roster = make_roster(grid, num_clients=8)
    roster.gather()
    grid.present, grid.arrivals = [A], []
    with pytest.raises(RunFailedError, match="2 of 4 nodes are needed, present: 0, missing: 1 2 3; start the missing"):
        roster.refresh(1)
    grid.present, grid.arrivals = [], [A, D]
    roster.refresh(1)
    assert there(roster) == [0, 3]


def test_in_a_simulation_one_refusal_ends_the_run(make_roster: Callable[..., Roster]) -> None:
    grid = ScriptedGrid({**nodes_of(2, 6), B: [refuses(1, "DataError: no data")]}, simulated=True)
    with pytest.raises(RunFailedError, match=f"node {B} cannot take part: DataError: no data"):
        make_roster(grid).gather()
