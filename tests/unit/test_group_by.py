"""Samples of a subject, such as a patient, are in one part of the data only."""

import re
from pathlib import Path

import numpy as np
import pytest
from federations import Call
from PIL import Image

from clients.novel.labelled import labelled_data, labelled_dataset
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.core.errors import ConfigError, DataError, RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.dataset import IntArray
from hyperfl_flwr.data.federated_data import FederatedData, load_federated_data, load_local_data
from hyperfl_flwr.data.grouped_split import split_groups
from hyperfl_flwr.data.partition.assign import TOO_FEW
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_format import SampleFormat
from hyperfl_flwr.models.model_spec import TargetRecipe

PATIENTS = 12


def picture(path: Path, value: int) -> None:
    """Write an image of which every pixel has a value, so that it is recognised again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of two classes; patient p has images with the pixels 10 p to 10 p + 5 in both classes."""
    for patient in range(PATIENTS):
        for number in range(6):
            path = tmp_path / "images" / f"class-{number % 2}" / f"p{patient}" / f"scan_{number}.png"
            picture(path, 10 * patient + number)
    return tmp_path / "images"


def settings(dataset: str, **changes: Scalar) -> RunConfig:
    return RunConfig.from_flat({**default_settings(), "dataset": dataset, "num-clients": 3, **changes})


def patients(images: np.ndarray) -> set[int]:
    return {int(image.flat[0]) // 10 for image in images}


def sides(data: FederatedData) -> tuple[set[int], set[int]]:
    """Return the patients whose images any client trains on, and those whose images any client is tested on."""
    clients = range(data.num_clients)
    train = np.concatenate([data.train_indices(client) for client in clients])
    test = np.concatenate([data.test_indices(client) for client in clients])
    return patients(data.dataset.train.images[train]), patients(data.dataset.test.images[test])


@pytest.mark.parametrize("grouping", ["folder", "(p[0-9]+)/", "^(.*)/scan_[0-9].png$"])
def test_a_folder_is_divided_by_patients(folder: Path, grouping: str) -> None:
    """About a quarter of the patients are tested on, with both classes; without groups almost all are on both sides."""
    found = load_dataset(f"folder:{folder}", None, SampleFormat(grouping=grouping))
    train, test = patients(found.train.images), patients(found.test.images)
    assert train | test == set(range(PATIENTS))
    assert not train & test
    assert len(test) == PATIENTS // 4
    assert set(found.test.labels) == {0, 1}
    assert found.notes == ()
    plain = load_dataset(f"folder:{folder}", None, SampleFormat(grouping="none"))
    assert len(patients(plain.train.images) & patients(plain.test.images)) > PATIENTS / 2


def test_a_patient_is_on_one_side_in_all_clients(folder: Path) -> None:
    """Of training and test data, and of training and validation data, which come from the same pool."""
    config = settings(f"folder:{folder}", **{"data.group-by": "folder", "data.partition": "iid"})
    train, test = sides(load_federated_data(config.data_settings()))
    assert not train & test
    config = settings(
        f"folder:{folder}",
        **{"data.group-by": "folder", "data.partition": "iid", "data.validation-fraction": 0.3},
    )
    kept, held = sides(load_federated_data(config.data_settings()))
    assert not kept & held
    assert kept | held <= train
    assert held


@pytest.mark.parametrize("kind", ["npz", "csv", "folder"])
def test_a_class_of_a_single_group_is_not_lost(kind: str, tmp_path: Path) -> None:
    """Of two groups each has all samples of a class, so that neither can be held back for the test."""
    labels, groups = np.repeat([0, 1, 2, 2], 8), np.repeat(["p", "q", "p", "q"], 8)
    if kind == "npz":
        np.savez(tmp_path / "own.npz", features=np.ones((32, 2)), labels=labels, groups=groups)
    elif kind == "csv":
        rows = [f"{label},{group},1" for label, group in zip(labels, groups, strict=True)]
        (tmp_path / "own.csv").write_text("\n".join(["label,group,x", *rows]))
    else:
        for number, (label, group) in enumerate(zip(labels, groups, strict=True)):
            picture(tmp_path / "own.folder" / str(label) / group / f"{number}.png", number)
    form = SampleFormat(grouping="folder" if kind == "folder" else "auto")
    with pytest.raises(DataError, match="divided by whole groups, 1 of 3 classes have no training samples") as refused:
        load_dataset(f"{kind}:{tmp_path / f'own.{kind}'}", None, form)
    assert "add groups, give test data, or set data.group-by=none" in str(refused.value)


def test_an_owners_validation_data_are_of_other_patients(folder: Path) -> None:
    config = settings(f"folder:{folder}", **{"data.group-by": "folder", "data.validation-fraction": 0.25})
    data = load_local_data(config.data_settings(), 1)
    kept, held = sides(data)
    assert not kept & held
    assert len(held) == 2  # about a quarter of the nine that are left
    assert len(data.train_indices(1)) + len(data.test_indices(1)) == 9 * 6


def test_images_without_a_folder_are_their_own_groups(tmp_path: Path) -> None:
    for number in range(16):
        picture(tmp_path / "set" / f"{number % 2}" / f"{number}.png", 10 * number)
    found = load_dataset(f"folder:{tmp_path / 'set'}", None, SampleFormat(grouping="folder"))
    assert (len(found.train), len(found.test)) == (12, 4)


def test_an_owners_own_division_is_checked(tmp_path: Path) -> None:
    """p1 is in both parts, which is refused; images that lie in no patient's folder are not the same ones."""
    for part, names in (("train", ["p0/a", "p1/a", "c"]), ("test", ["p1/b", "p2/a", "c"])):
        for number, name in enumerate(names):
            for label in ("x", "y"):
                picture(tmp_path / part / label / f"{name}.png", 10 * number)
    where = f"folder:{tmp_path}"
    with pytest.raises(DataError, match="no group may have both training and test samples, but 1 have"):
        load_dataset(where, None, SampleFormat(grouping="folder"))
    assert len(load_dataset(where, None, SampleFormat(grouping="none")).test) == 6


def test_a_pattern_must_be_found(folder: Path) -> None:
    text = (
        "must be found in the path of every image below the folder of its class, but 72 of 72 lack it, the first is p0/"
    )
    with pytest.raises(DataError, match=re.escape(text)):
        load_dataset(f"folder:{folder}", None, SampleFormat(grouping="(q[0-9]+)"))


@pytest.mark.parametrize("value", ["(", "p[0-9]+", "(a)(b)", ""])
def test_values_that_are_no_grouping(value: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.group-by must be auto, none, folder or a regular expression"):
        settings("digits", **{"data.group-by": value})


def test_only_folders_have_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.group-by = 'folder' is for folder: data, got digits"):
        load_dataset("digits", None, SampleFormat(grouping="folder"))
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 8, 8), np.uint8), labels=[0, 1, 0, 1])
    with pytest.raises(DataError, match="is for folders; store the key groups"):
        load_dataset(f"npz:{tmp_path / 'a.npz'}", None, SampleFormat(grouping="folder"))


def test_sub_folders_are_noted(folder: Path, call: Call) -> None:
    """A simulation warns, unless the question is answered."""
    (note,) = load_dataset(f"folder:{folder}").notes
    assert note.startswith(f"72 of 72 images of {folder} lie in folders below those of the classes, such as p0; ")
    plan = ("run", "--dry-run", "--num-clients", "3", "--dataset", f"folder:{folder}", "--set", "data.partition=iid")
    assert "set data.group-by=folder" in call(*plan)[2].replace("\n", " ")
    for answer in ("none", "folder"):
        assert "set data.group-by" not in call(*plan, "--set", f"data.group-by={answer}")[2]


def npz(path: Path, **columns: object) -> str:
    """Write a file with 10 samples of each of 12 groups, of which image and name have the number."""
    groups = np.repeat(np.arange(PATIENTS), 10)
    images = np.broadcast_to((10 * groups).astype(np.uint8)[:, None, None], (len(groups), 8, 8))
    labels = np.arange(len(groups)) % 2
    names = np.array([f"patient {number}" for number in groups])
    np.savez(path, **{"images": images, "labels": labels, "groups": names, **columns})
    return f"npz:{path}"


def test_groups_of_a_file(tmp_path: Path) -> None:
    where = npz(tmp_path / "a.npz")
    found = load_dataset(where)
    train, test = patients(found.train.images), patients(found.test.images)
    assert not train & test
    assert len(test) == PATIENTS // 4
    plain = load_dataset(where, None, SampleFormat(grouping="none"))
    assert patients(plain.train.images) == patients(plain.test.images)
    assert plain.train.groups is None


def test_groups_of_a_file_with_clients(tmp_path: Path) -> None:
    """Every client has both parts; a client with one group cannot, which is refused."""
    clients = np.repeat(np.arange(PATIENTS), 10) % 3
    found = load_dataset(npz(tmp_path / "a.npz", clients=clients))
    assert set(found.train.clients) == set(found.test.clients) == {0, 1, 2}
    assert not patients(found.train.images) & patients(found.test.images)
    alone = np.where(np.repeat(np.arange(PATIENTS), 10) == 0, 9, clients)
    with pytest.raises(DataError, match=r"divided by whole groups, 1 clients have no (training|test) samples"):
        load_dataset(npz(tmp_path / "b.npz", clients=alone))


def test_groups_of_a_files_own_division(tmp_path: Path) -> None:
    other = {"test_images": np.zeros((2, 8, 8), np.uint8), "test_labels": np.array([0, 1])}
    fine = npz(tmp_path / "a.npz", **other, test_groups=np.array(["patient 12", "patient 13"]))
    found = load_dataset(fine)
    assert found.test.groups is not None
    assert not set(found.test.groups) & set(found.train.groups)
    shared = npz(tmp_path / "b.npz", **other, test_groups=np.array(["patient 0", "patient 13"]))
    with pytest.raises(DataError, match="no group may have both training and test samples, but 1 have"):
        load_dataset(shared)
    with pytest.raises(DataError, match="groups must be 120 integers or strings, one per sample"):
        load_dataset(npz(tmp_path / "c.npz", groups=np.arange(7)))
    with pytest.raises(DataError, match="must have 2 or more groups, one of them for the test, got 1"):
        load_dataset(npz(tmp_path / "d.npz", groups=np.zeros(120, int)))


def test_columns_that_cannot_be_compared(tmp_path: Path) -> None:
    """Test data without groups, and numbers beside texts, do not say who is on both sides."""
    other = {"test_images": np.zeros((2, 8, 8), np.uint8), "test_labels": np.array([0, 1])}
    with pytest.raises(DataError, match="groups without test_groups do not say"):
        load_dataset(npz(tmp_path / "a.npz", **other))
    assert len(load_dataset(f"npz:{tmp_path / 'a.npz'}", None, SampleFormat(grouping="none")).test) == 2
    with pytest.raises(DataError, match="must both be integers, or both strings"):
        load_dataset(npz(tmp_path / "b.npz", **other, test_groups=np.array([0, 1])))
    with pytest.raises(DataError, match="test_groups need groups and test data"):
        load_dataset(npz(tmp_path / "c.npz", test_groups=np.array([0, 1])))


def test_a_pattern_with_an_optional_group_must_match(folder: Path) -> None:
    with pytest.raises(DataError, match="but 72 of 72 lack it"):
        load_dataset(f"folder:{folder}", None, SampleFormat(grouping="(q[0-9]+)?"))


def test_one_patient_is_never_evaluated_alone(folder: Path) -> None:
    """A server that chooses the share could otherwise learn the accuracy on a patient, and the patient's samples."""
    for share in (1e-6, 0.01, 0.1):
        config = settings(f"folder:{folder}", **{"data.group-by": "folder", "data.validation-fraction": share})
        with pytest.raises(DataError, match="holds back a single group") as caught:
            load_local_data(config.data_settings(), 1)
        assert caught.value.public == TOO_FEW


def draws(seed: int) -> tuple[IntArray, IntArray]:
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 40, 500)
    return groups % 4, groups


@pytest.mark.parametrize("share", [0.1, 0.25, 0.4, 0.5, 0.75])
def test_the_parts_have_the_share_and_all_strata(share: float) -> None:
    for seed in range(5):
        strata, groups = draws(seed)
        rest, part = split_groups(strata, groups, share, np.random.default_rng(seed))
        assert np.array_equal(np.sort(np.concatenate([rest, part])), np.arange(500))
        assert not set(groups[rest]) & set(groups[part])
        assert len(part) / 500 == pytest.approx(share, abs=0.08)
        assert set(strata[part]) == set(strata[rest]) == {0, 1, 2, 3}


@pytest.mark.parametrize("groups_of_each", [2, 3, 10])
def test_every_client_has_both_parts(groups_of_each: int) -> None:
    """With groups of equal size that belong to one client each."""
    clients = np.repeat(np.arange(20), 10 * groups_of_each)
    groups = np.arange(len(clients)) // 10
    for seed in range(20):
        rest, part = split_groups(clients, groups, 0.25, np.random.default_rng(seed))
        assert set(clients[rest]) == set(clients[part]) == set(range(20))
        assert len(part) / len(clients) <= max(0.25, 1 / groups_of_each)


def test_the_training_data_keep_every_class() -> None:
    """The only patient of class 0 is never held back; one of the two of class 1 is, at any share."""
    strata = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2])
    groups = np.array([0, 0, 0, 1, 2, 3, 3, 4, 4, 5, 5])
    for seed in range(30):
        for share in (0.05, 0.3, 0.9):
            rest, part = split_groups(strata, groups, share, np.random.default_rng(seed))
            assert set(strata[rest]) == {0, 1, 2}
            assert set(strata[part]) == {1, 2}


def test_the_choice_is_not_always_the_same() -> None:
    """Every one of twelve equal groups is held back by some seed."""
    groups = np.repeat(np.arange(12), 5)
    chosen = [groups[split_groups(groups * 0, groups, 0.25, np.random.default_rng(seed))[1]] for seed in range(40)]
    assert {len(set(each)) for each in chosen} == {3}
    assert set(np.concatenate(chosen)) == set(range(12))


def test_each_class_in_one_group() -> None:
    """Where no group can be spared, a whole class is tested on; there is no better division."""
    rest, part = split_groups(np.array([0, 0, 0, 1]), np.array([0, 0, 0, 1]), 0.25, np.random.default_rng(0))
    assert (rest.tolist(), part.tolist()) == ([0, 1, 2], [3])


def test_two_groups_are_enough() -> None:
    rest, part = split_groups(np.array([0, 0, 1]), np.array([5, 5, 7]), 0.25, np.random.default_rng(0))
    assert sorted([rest.tolist(), part.tolist()]) == [[0, 1], [2]]
    with pytest.raises(ValueError, match="two or more groups, got 1"):
        split_groups(np.zeros(3, int), np.zeros(3, int), 0.25, np.random.default_rng(0))


def node(folder: Path, **owners: Scalar) -> NodeConfig:
    return NodeConfig.of({"partition-id": 0, "num-partitions": 1, "data": f"folder:{folder}", **owners})


def applied(folder: Path, run: Scalar, **owners: Scalar) -> str:
    run_config = {**default_settings(), "data.group-by": run}
    return node(folder, **owners).applied_to(run_config).data.group_by


def test_the_owner_decides_about_patterns(folder: Path) -> None:
    """A server's pattern could keep a node busy for ever; its other values hold unless the owner has one."""
    assert applied(folder, "folder") == "folder"
    assert applied(folder, "folder", **{"group-by": "none"}) == "none"
    assert applied(folder, "auto", **{"group-by": "(p[0-9]+)/"}) == "(p[0-9]+)/"
    assert applied(folder, "(a+)+b", **{"group-by": "folder"}) == "folder"
    assert applied(folder, "none") == "auto"  # a server does not switch off the groups of a file
    assert applied(folder, "none", simulated=True) == "none"
    with pytest.raises(RefusalError, match=r"only each node's owner may give one, as group-by in node\.toml"):
        applied(folder, "(a+)+b")
    assert applied(folder, "(a+)b", simulated=True) == "(a+)b"
    with pytest.raises(ConfigError, match="group-by must be auto, none, folder or a regular expression"):
        node(folder, **{"group-by": "["})


def test_a_run_divides_by_patients(folder: Path, federate: Federate) -> None:
    run = federate(
        "fedavg", dataset=f"folder:{folder}", num_clients=2, **{"data.group-by": "folder", "data.partition": "iid"}
    )
    assert (run / "summary.json").is_file()


def test_a_client_that_joins_divides_by_patients(folder: Path) -> None:
    recipe = TargetRecipe(
        target="cnn", input_shape=(1, 8, 8), mean=(0.5,), std=(0.5,), classes=("class-0", "class-1")
    )  # fmt: skip
    for grouping, shares in (("folder", False), ("auto", True)):
        data = labelled_data(f"folder:{folder}", recipe, grouping)
        train, test = ({round(float(image.flatten()[0]) * 127.5 + 127.5) // 10 for image in images}
                       for images in (data.train_images, data.test_images))  # fmt: skip
        assert bool(train & test) == shares
    assert len(labelled_dataset(f"folder:{folder}", recipe).notes) == 1
