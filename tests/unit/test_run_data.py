"""The title of a run's data, from its nodes' handshakes and from manifests of earlier versions."""

from typing import Any

import pytest

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.launch.settings import requested
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.handshake import Node


def federation(*owners_data: bool, shape: tuple[int, ...] = (1, 28, 28), **told: Any) -> Federation:
    """Return a federation with a node for each of `owners_data`, which says whether its data are its owner's."""
    properties = {"input-shape": list(shape), "num-classes": 6, "partitioned-by": "own", **told}
    return Federation(
        [
            Node(id=number, partition=number, clients=[number], properties={**properties, "owners-data": owners})
            for number, owners in enumerate(owners_data)
        ]
    )


@pytest.mark.parametrize(
    ("owners_data", "dataset", "title"),
    [
        ((True, True), "digits", "the nodes' own data, 6 classes, 1x28x28"),
        ((False, True), "digits", "the nodes' own data, 6 classes, 1x28x28"),
        ((False, False), "digits", "digits"),
        ((False, False), "npz:/home/somebody/wards.npz", "wards.npz, 6 classes, 1x28x28"),
        ((False, False), "folder:/home/somebody/my images", "folder my images, 6 classes, 1x28x28"),
    ],
)
def test_a_title_names_the_data_without_their_folder(owners_data: tuple[bool, ...], dataset: str, title: str) -> None:
    found = RunData.of(federation(*owners_data), dataset)
    assert found.title == title
    assert RunData.read({"data": found.entry()}) == found


def test_a_title_counts_features() -> None:
    title = RunData.of(federation(True, shape=(64,)), "digits").title
    assert title == "the nodes' own data, 6 classes, 64 features"


def test_data_that_were_used_stay_used() -> None:
    """The source is `nodes` if a node with its owner's data took part before or takes part now."""
    owners, others = (RunData.of(federation(said), "digits") for said in (True, False))
    assert others.with_earlier(owners).source == "nodes"
    assert owners.with_earlier(others).source == "nodes"
    assert others.with_earlier(others) == others


def test_names_that_were_known_stay_known() -> None:
    """A resumed run may first go on with nodes that do not tell the names of their classes."""
    names = tuple("abcdef")
    before, now = (RunData.of(federation(True, **told), "digits") for told in ({"classes": list(names)}, {}))
    assert now.with_earlier(before).classes == names
    assert now.with_earlier(now).classes == ()


def test_names_of_classes_are_those_of_as_many_classes() -> None:
    """Names come from other machines: control characters are removed, and a list of another length is not used."""
    names = ["a", "b\n\x1b[31m", "c", "d", "e", "f"]
    assert RunData.of(federation(True, classes=names), "digits").classes == ("a", "b [31m", "c", "d", "e", "f")
    assert RunData.of(federation(True, classes=names[:2]), "digits").classes == ()


OLD = {
    "a simulation": ({"label_counts": {}, "partitioned_by": "iid"}, "mnist", "mnist"),
    "a simulation on a file": ({"label_counts": {}, "partitioned_by": "iid"}, "npz:/a/b.npz", "b.npz"),
    "a deployment": ({"partitioned_by": "iid"}, "mnist", "mnist"),
    "a deployment on owners' files": ({"partitioned_by": "own"}, "mnist", "the nodes' own data"),
    "a deployment of an early version": ({}, "mnist", "mnist"),
}


@pytest.mark.parametrize("kind", OLD)
def test_manifests_of_earlier_versions(kind: str) -> None:
    manifest, dataset, title = OLD[kind]
    found = RunData.read({**manifest, "settings": {"dataset": dataset}})
    assert found.title == title
    assert found.named_in({"dataset": dataset, "seed": 0})["dataset"] == (title if "own" in title else dataset)


def test_a_title_has_a_title_of_its_own() -> None:
    """A title's title is the title itself: kept models of earlier versions have a path, newer ones a title."""
    for name in ("digits", "npz:/a/b.npz", "folder:/a/c"):
        assert title_of(title_of(name)) == title_of(name)


def test_a_deployments_folder_is_not_called_after_a_data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The folder's name is chosen before the nodes report their data."""
    monkeypatch.chdir(tmp_path)
    assert "-fedavg-mnist-seed0-" in requested({"method": "fedavg", "dataset": "mnist"}).output
    assert "-fedavg-deployment-seed0-" in requested({"method": "fedavg", "dataset": "mnist"}, deployed=True).output


def test_data_of_a_deployment_need_not_be_on_the_operators_machine() -> None:
    there = {"method": "fedavg", "dataset": "npz:/nowhere/samples.npz"}
    assert requested(there, deployed=True).dataset == there["dataset"]
    with pytest.raises(DataError, match=r"/nowhere/samples\.npz: must be an existing"):
        requested(there)
