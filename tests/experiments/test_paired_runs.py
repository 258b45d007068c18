"""Which clients of compared runs are the same, and what is known of the differences between them."""

import json
import math

import pytest
from federations import Call

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.results.compare import compare
from hyperfl_flwr.results.differences import Difference
from hyperfl_flwr.results.same_clients import NOT_KNOWN, differing, division_of, have_as_many_samples, namespace
from hyperfl_flwr.runs.run_directory import read_manifest


def test_clients_of_other_data_are_not_paired(federate: Federate) -> None:
    """Other seeds of the data give other clients; other samples for testing, too.

    Validation data replace the test data, unless they decide about rounds.
    """
    run = federate("local")
    for changes, paired in (
        ({"data.seed": 1}, False),
        ({"data.dirichlet-alpha": 0.9}, False),
        ({"num-clients": 4}, False),
        ({"novel.clients": 1}, False),
        ({"data.validation-fraction": 0.2}, False),
        ({"data.validation-fraction": 0.2, "early-stopping": 9}, True),
    ):
        other = federate("fedavg", **changes)  # type: ignore[arg-type]
        found = compare([run, other])
        assert (found.groups[1].difference is not None) is paired, changes
        assert ("cannot be paired" in found.answers[0]) is not paired
        assert any(note.startswith("Clients are paired only where") for note in found.notes) is not paired
        of_validation = changes == {"data.validation-fraction": 0.2}
        assert any(note.startswith("Scores of validation data") for note in found.notes) is of_validation


def test_each_division_of_the_data_has_a_reference(federate: Federate, call: Call) -> None:
    """With two partitions, each method is compared with local training on the same one."""
    partitions = ("iid", "dirichlet")
    methods = ("fedavg", "local", "fedrep")
    runs = [federate(method, **{"data.partition": name}) for name in partitions for method in methods]
    found = compare(runs)
    for place, partition in enumerate(partitions):
        groups = found.groups[3 * place : 3 * place + 3]
        alone = compare(runs[3 * place : 3 * place + 3])
        assert {group.reference for group in groups} == {f"local, data.partition={partition}"}
        assert [group.difference for group in groups] == [group.difference for group in alone.groups]
        assert f"Compared with local, data.partition={partition}: " in "\n".join(found.notes)
    assert not any("cannot be paired" in answer for answer in found.answers)
    assert len(found.answers) == 4
    # A division without local training has its first row as reference, and no answer.
    found = compare([runs[0], runs[2], runs[4]])
    assert [group.reference for group in found.groups[:2]] == ["fedavg, data.partition=iid"] * 2 or (
        [group.reference for group in found.groups[:2]] == ["fedavg"] * 2
    )
    assert len(found.answers) == 2
    assert all("cannot be paired" in answer for answer in found.answers)
    _, text, _ = call("compare", *runs)
    assert text.count(" reference ") == 2


def test_clients_of_nodes_with_data_of_their_own_are_paired_by_their_sizes(federate: Federate) -> None:
    """The manifest does not know whose data they are: other numbers of test samples are other clients."""
    runs = [federate("local"), federate("fedavg")]
    for run in runs:
        manifest = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps(manifest | {"partitioned_by": "own"}))
    found = compare(runs)
    assert found.groups[1].difference is not None
    assert any("Whether these are the same samples is not known" in note for note in found.notes)
    lines = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    more = [
        line | {"test_examples": line["test_examples"] + 1}
        if line.get("client") == 2 and "test_examples" in line
        else line
        for line in lines
    ]
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more))
    found = compare(runs)
    assert found.groups[1].difference is None
    assert "cannot be paired" in found.answers[0]
    # Another seed of the data may divide the same owners' samples anew.
    manifest = json.loads((runs[1] / "manifest.json").read_text())
    manifest["settings"]["data.seed"] = 1
    (runs[1] / "manifest.json").write_text(json.dumps(manifest))
    assert compare(runs).groups[1].difference is not None


def test_a_difference_of_equal_clients_is_zero() -> None:
    same = {(0, (0, client)): 0.25 for client in range(3)}
    found = Difference.of(same, same)
    assert found == Difference(mean=0.0, low=0.0, high=0.0, clients=3, seeds=1, better=0, worse=0)
    assert not math.isnan(found.mean)


def test_a_difference_is_the_mean_over_all_pairs() -> None:
    """Differences of 2 and 3 of a client that both seeds have, 4 of one that only the first has, and one unpaired."""
    ours = {((0, 0), (0, 1)): 3.0, ((0, 0), (0, 2)): 5.0, ((1, 0), (0, 1)): 4.0, ((1, 0), (0, 3)): 99.0}
    difference = Difference.of(ours, {((0, 0), (0, 1)): 1.0, ((0, 0), (0, 2)): 1.0, ((1, 0), (0, 1)): 1.0})
    assert difference is not None
    assert (difference.mean, difference.clients, difference.seeds) == (3.0, 2, 2)
    assert (difference.better, difference.worse) == (2, 0)


def test_federations_with_other_data_seeds_are_clusters() -> None:
    """Clients of one federation are trained together: ten of them with equal differences are no ten observations."""
    reference = {((0, data), (data, client)): 0.5 for data in (0, 1) for client in range(10)}
    ours = {place: 0.5 + 0.1 * place[0][1] for place in reference}
    found = Difference.of(ours, reference)
    assert (found.clients, found.seeds, found.mean) == (20, 2, pytest.approx(0.05))
    assert found.low < -0.05
    assert found.high > 0.15


def test_what_an_earlier_version_did_not_record_is_equal_to_all() -> None:
    """But it does not make two others equal."""
    assert differing([{"a": NOT_KNOWN}, {"a": 1}]) == {}
    assert differing([{"a": NOT_KNOWN}, {"a": 1}, {"a": 2}]) == {"a": [NOT_KNOWN, 1, 2]}
    assert all(have_as_many_samples([3, 4], other) for other in (None, [3, None], [None, 4], [3]))
    assert not have_as_many_samples([3, 4], [None, 3])


def test_clients_that_the_data_name_are_the_same_with_each_seed() -> None:
    """But for those that a seed of the data draws as novel ones, after which the others are numbered.

    What the data name, and what nodes have, is divided so with any `data.partition`: the manifest knows it.
    """
    settings = {"data.partition": "similarity", "novel.clients": 0, "data.seed": 3}
    for divided_by in ("natural", "own"):
        manifest = {"partitioned_by": divided_by}
        assert namespace(settings, manifest) == namespace(settings | {"data.seed": 4}, manifest)
        assert namespace(settings | {"novel.clients": 2}, manifest) == 3
    assert namespace(settings, {"partitioned_by": "similarity"}) == 3
    assert namespace(settings | {"data.partition": "natural"}, {}) == namespace(settings, {"partitioned_by": "natural"})


@pytest.mark.parametrize(("partition", "counted"), [("iid", 2), ("natural", 1)])
def test_clients_are_counted_once_for_each_division(partition: str, counted: int, federate: Federate) -> None:
    """Two runs of each method, which divide the data anew; the manifests of the same runs are made to name clients."""
    changes = [{"data.seed": seed, "data.partition": "iid"} for seed in (0, 1)]
    runs = [federate(method, **change) for method in ("local", "fedavg") for change in changes]
    for run in runs:
        manifest = json.loads((run / "manifest.json").read_text())
        manifest["partitioned_by"] = partition
        (run / "manifest.json").write_text(json.dumps(manifest))
    difference = compare(runs).groups[1].difference
    assert difference is not None
    assert (difference.clients, difference.seeds) == (counted * manifest["settings"]["num-clients"], 2)


def test_a_description_of_before_a_key_was_added_is_the_same(federate: Federate) -> None:
    """The key was empty then; one that says something is another description."""
    run = federate("fedavg", num_rounds=1)
    manifest = read_manifest(run)
    before = manifest | {"data": {key: value for key, value in manifest["data"].items() if key != "columns"}}
    other = manifest | {"data": manifest["data"] | {"columns": "ab12"}}
    now, then, changed = (division_of(manifest["settings"], each) for each in (manifest, before, other))
    assert differing([now, then]) == {}
    assert list(differing([now, changed])) == ["the data's description in manifest.json"]
