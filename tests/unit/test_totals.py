"""`hyperfl datasets --check`: published sizes of data sets, and files that do not have them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from federations import Call
from test_emnist_cinic import random_cinic, write_emnist

from hyperfl_flwr.data import registry as data_registry
from hyperfl_flwr.data import totals
from hyperfl_flwr.data.dataset import Dataset, Split
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.data.totals import TOTALS, Totals, differences


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    data_registry._load.cache_clear()


@pytest.mark.parametrize("name", TOTALS)
def test_the_published_numbers_agree_with_each_other(name: str) -> None:
    """Sums over classes and groups are the totals, groups cover all classes, and the registry has the same numbers."""
    published, spec = TOTALS[name], DATASETS[name]
    assert (published.train, published.test, published.classes) == (spec.train_size, spec.test_size, spec.num_classes)
    assert len(spec.classes) == published.classes
    for part, number in published.per_class.items():
        assert number * published.classes == getattr(published, part)
    if published.groups:
        borders = [border for first, end, _ in published.groups.values() for border in (first, end)]
        assert borders[0] == 0
        assert borders[1:-1:2] == borders[2::2]
        assert borders[-1] == published.classes
        assert sum(number for _, _, number in published.groups.values()) == published.train + published.test


def test_emnist_has_its_published_total() -> None:
    assert TOTALS["emnist"].train + TOTALS["emnist"].test == 814_255


def dataset(train: list[int], test: list[int]) -> Dataset:
    """Return a data set with these labels."""
    splits = [Split(images=np.zeros((len(part), 1), np.float32), labels=np.array(part)) for part in (train, test)]
    return Dataset(
        name="made", num_classes=3, input_shape=(1,), train=splits[0], test=splits[1], mean=(0.0,), std=(1.0,),
        augment=False, train_samples=None, test_samples=None, classes=("a", "b", "c"),
    )  # fmt: skip


MADE = Totals(
    train=6,
    test=3,
    classes=3,
    source="",
    per_class={"train": 2, "test": 1},
    groups={"first": (0, 1, 3), "b": (1, 3, 6)},
)


@pytest.mark.parametrize(
    ("train", "test", "expected"),
    [
        ([0, 0, 1, 1, 2, 2], [0, 1, 2], []),
        (
            [0, 0, 1, 1, 2], [0, 1, 2],
            ["train has 5 samples instead of 6", "train does not have 2 samples of 1 classes, the first is c with 1",
             "both parts have 5 b instead of 6"],
        ),
        (
            [0, 0, 0, 1, 2, 2], [0, 1, 2],
            ["train does not have 2 samples of 2 classes, the first is a with 3",
             "both parts have 4 first instead of 3", "both parts have 5 b instead of 6"],
        ),
        (
            [0, 0, 1, 1, 2, 2], [0, 1, 1],
            ["test has no samples of 1 classes, the first is c",
             "test does not have 1 samples of 2 classes, the first is b with 2"],
        ),
        (
            [0, 0, 1, 1, 2, 2], [0, 1, 3],
            ["test has labels up to 3, but there are 3 classes", "test has no samples of 1 classes, the first is c",
             "test does not have 1 samples of 1 classes, the first is c with 0", "both parts have 5 b instead of 6"],
        ),
    ],
)  # fmt: skip
def test_every_difference_is_named(train: list[int], test: list[int], expected: list[str]) -> None:
    assert differences(dataset(train, test), MADE) == expected


def test_files_of_the_right_form_with_other_numbers_are_refused(call: Call, tmp_path: Path) -> None:
    write_emnist(tmp_path, train=124, test=62)
    random_cinic(tmp_path)
    for name, problem in (
        (
            "emnist",
            "train has 124 samples instead of 697,932; test has 62 samples instead of 116,323; both parts have 30 ",
        ),
        (
            "cinic10",
            "train has 30 samples instead of 90,000; test has 20 samples instead of 90,000; train does not have ",
        ),
    ):
        code, out, err = call("datasets", "--check", name, "--data-root", tmp_path)
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {name} in {tmp_path} is not the published data set (")
        assert problem in err
        assert "delete its files and get them again" in err


def test_files_with_the_published_numbers_pass(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_cinic(tmp_path)
    small = dataclasses.replace(TOTALS["cinic10"], train=30, test=20, per_class={"train": 3, "test": 2})
    monkeypatch.setattr(totals, "TOTALS", {"cinic10": small})
    code, out, err = call("datasets", "--check", "cinic10", "--data-root", tmp_path)
    assert (code, err) == (0, "")
    assert out.startswith("cinic10: 30 training and 20 test samples of 10 classes, as published (Darlow")


def test_other_names_and_a_lone_folder_are_refused(call: Call) -> None:
    code, _, err = call("datasets", "--check", "digits")
    assert (code, err) == (2, "error: --check must be one of emnist, cinic10, got 'digits'\n")
    code, _, err = call("datasets", "--data-root", ".")
    assert (code, "--data-root belongs to --check" in err) == (2, True)
