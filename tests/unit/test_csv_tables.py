"""Tables of the user in CSV files: accepted contents, how they are read, and one clear error for everything else."""

import hashlib
import json
import tracemalloc

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from hyperfl_flwr.app.data_properties import data_properties
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError, DataError
from hyperfl_flwr.core.tasks import CLASSIFICATION, REGRESSION
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_format import SampleFormat
from hyperfl_flwr.data.sources.csv_table import read_table
from hyperfl_flwr.data.unlabelled import read_unlabelled

ROWS = ["age,label,size", *(f"{number},{'sick' if number % 2 else 'calm'},{number / 4}" for number in range(12))]


def write(tmp_path, rows, name="own.csv", encoding="utf-8"):
    (tmp_path / name).write_text("\n".join(rows) + "\n", encoding=encoding)
    return tmp_path / name


def load(tmp_path, rows, **changes):
    return load_dataset(f"csv:{write(tmp_path, rows)}", None, SampleFormat(**changes))


def test_columns_of_numbers_are_features_in_their_order(tmp_path):
    dataset = load(tmp_path, ROWS)
    assert (dataset.num_classes, dataset.classes, dataset.input_shape) == (2, ("calm", "sick"), (2,))
    every = np.concatenate([dataset.train.images, dataset.test.images])
    np.testing.assert_array_equal(every[np.argsort(every[:, 0])], [[n, n / 4] for n in range(12)])
    for part in (dataset.train, dataset.test):
        np.testing.assert_array_equal(part.labels, part.images[:, 0] % 2)
    assert np.bincount(dataset.test.labels).tolist() == [2, 2]  # a quarter of each class, as of an npz file
    assert dataset.mean == pytest.approx(dataset.train.images.mean(axis=0))


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_other_separators_and_marks_give_the_same_data(separator, encoding, tmp_path):
    usual = read_table(write(tmp_path, ROWS))
    rows = [row.replace(",", separator) for row in [*ROWS[:3], "", *ROWS[3:]]]
    other = read_table(write(tmp_path, rows, "other.csv", encoding))
    np.testing.assert_array_equal(usual.features, other.features)
    assert usual.names == other.names == ("age", "size")
    np.testing.assert_array_equal(usual.columns["label"], other.columns["label"])


def test_whole_numbers_as_classes_are_in_numerical_order(tmp_path):
    rows = ["label,x", *(f"{label},{number}" for number, label in enumerate(["10", "2", "10", "2", "1", "1"]))]
    assert load(tmp_path, rows).classes == ("1", "2", "10")


def test_agreed_classes_give_the_numbers(tmp_path):
    dataset = load(tmp_path, ROWS, classes=("sick", "other", "calm"))
    assert (dataset.num_classes, set(dataset.train.labels)) == (3, {0, 2})
    with pytest.raises(
        DataError, match="label must be one of calm, dead, but 1 others occur, such as 'sick'"
    ) as caught:
        load(tmp_path, ROWS, classes=("calm", "dead"))
    assert "sick" not in caught.value.public


def test_clients_groups_weights_and_split_are_those_of_an_npz_file(tmp_path):
    rows = ["label,client,group,sample_weight,split,x"]
    rows += [f"{n % 2},{'b' if n < 10 else 'a'},p{n},{n},{'test' if n % 5 == 0 else 'train'},{n}" for n in range(20)]
    path = write(tmp_path, rows)
    numbers, chosen = np.arange(20), np.arange(20) % 5 != 0
    own = {"features": numbers[:, None].astype(np.float32), "labels": numbers % 2}
    named = {"clients": np.where(numbers < 10, "b", "a"), "groups": np.array([f"p{n}" for n in numbers])}
    arrays = {key: value[chosen] for key, value in (own | named | {"weights": numbers}).items()}
    np.savez(tmp_path / "same.npz", **arrays, **{f"test_{k}": v[~chosen] for k, v in (own | named).items()})
    one, two = load_dataset(f"csv:{path}"), load_dataset(f"npz:{tmp_path / 'same.npz'}")
    for first, second in ((one.train, two.train), (one.test, two.test)):
        for field in ("images", "labels", "clients", "groups"):
            np.testing.assert_array_equal(getattr(first, field), getattr(second, field))
    np.testing.assert_array_equal(one.train.weights, two.train.weights)
    assert one.client_ids == two.client_ids == ("a", "b")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (["label,x,Group", "a,1,p", "b,2,q"], "the column Group is neither group nor a feature; rename it"),
        (["label,x,groups", "a,1,7", "b,2,8"], "the column groups is neither group nor a feature; rename it"),
        (["label,x,Clients", "a,1,7", "b,2,8"], "the column Clients is neither client nor a feature; rename it"),
        (["labels,x", "1,7", "2,8"], "the column labels is neither label nor a feature; rename it"),
        (["label:A,Label:B,x", "1,0,7", "0,1,8"], "the column Label:B is neither label:B nor a feature; rename it"),
        (["label,x", "a,1", ",2", "b,3"], "label is empty in 1 samples, the first is 2"),
        (["label,x,group", "a,1,", "b,2,p", "a,3,"], "group is empty in 2 samples, the first is 1"),
        ([], "must have a header and a row per sample, got 0 lines"),
        (["label,x"], "must have a header and a row per sample, got 1 lines"),
        (["label,x,x", "a,1,2"], "every column must have a name of its own"),
        (["label,,x", "a,1,2"], "every column must have a name of its own"),
        (["label,x", "a,1", "b"], "row 2 has 1 fields, the header 2"),
        (["label", "a", "b"], "must have columns of numbers besides label"),
        (["x,y", "1,2", "3,4"], "must have a column label, got x, y"),
        (["label,x", "a,1", "a,2"], "must have two or more classes in label, got only a"),
        (["label,x", "a,1", "b,old"], "the column x must have finite numbers, but 1 of the .* is 'old' in sample 2"),
        (["label,x", "a,", "b,2"], "the column x must have finite numbers, .* is '' in sample 1"),
        (["label,x", "a,nan", "b,1e99"], "but 2 of the file's fields are not, the first is 'nan' in sample 1"),
        (["label,x,sample_weight", "a,1,heavy", "b,1,1"], "the column sample_weight must have finite numbers"),
        (["label,x,sample_weight", "a,1,-1", "b,1,1", "a,1,1", "b,1,1"], "weights must be finite and at least 0"),
        (["label,x,split", "a,1,train", "b,1,valid"], "split must be train or test, .* got train, valid"),
        (["label,x,split", "a,1,train", "b,1,train"], "split must be train or test, both at least once, got train"),
        (["label,x,client", f"a,1,{'p' * 257}", "b,2,q"], "at most 256 characters, got one of 257 in sample 1"),
        (['label,x', '"a,1', "b,2"], "must be a CSV file in UTF-8, but unexpected end of data"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(rows, text, tmp_path):
    with pytest.raises(DataError, match=text) as caught:
        load(tmp_path, rows)
    assert str(tmp_path / "own.csv") in str(caught.value)


QUOTED = rf"the first is 'the patient says {'x' * 43}'\.\.\. \(8017 characters\) in sample 8; write numbers"


@pytest.mark.parametrize(
    ("header", "text", "task"),
    [
        ("x,note,label", QUOTED, CLASSIFICATION),
        ("x,sample_weight,label", QUOTED, CLASSIFICATION),
        ("x,label:dose,y", QUOTED, REGRESSION),
        ("x,client,label", "client must have names of at most 256 characters, got one of 8017 in", CLASSIFICATION),
        ("x,group,label", "group must have names of at most 256 characters, got one of 8017 in", CLASSIFICATION),
        ("x,split,label", "split must be train or test", CLASSIFICATION),
        ("x,label,y", "label must be one of 7, 8, but 1 others occur", CLASSIFICATION),
    ],
)
def test_a_long_field_does_not_multiply_the_memory(header, text, task, tmp_path):
    """As an array of texts, all 2,000 fields of the column would be as wide as the longest one: 64 MB."""
    classes = ("dose",) if task is REGRESSION else ("7", "8") if header == "x,label,y" else ("0", "1")
    chosen = SampleFormat(task=task, classes=classes)
    load(tmp_path, ROWS)  # what it imports does not count
    rows = [header, *(f"0.5,7,{number % 2}" for number in range(2000))]
    rows[8] = f"0.5,the patient says {'x' * 8000},1"
    path = write(tmp_path, rows)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=text):
            load_dataset(f"csv:{path}", None, chosen)
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "own.csv").write_bytes(b"label,x\n\xff\xfe,1\n")
    with pytest.raises(DataError, match="must be a CSV file in UTF-8"):
        load_dataset(f"csv:{tmp_path / 'own.csv'}")
    with pytest.raises(DataError, match="must be an existing CSV file"):
        load_dataset(f"csv:{tmp_path / 'missing.csv'}")


def test_a_name_without_prefix_gets_a_hint():
    with pytest.raises(ConfigError, match=r"for data of your own write csv:own\.csv"):
        RunConfig.from_flat(default_settings() | {"dataset": "own.csv"})


def test_a_table_from_training_to_predictions(call, tmp_path):
    """Train on breast_cancer as a table, export, predict the same table, and join with another one."""
    data = load_breast_cancer()
    names = [name.replace(" ", "_") for name in data.feature_names]
    rows = [",".join(["label", *names])]
    rows += [
        ",".join([str(data.target_names[label]), *map(str, row)])
        for label, row in zip(data.target, data.data, strict=True)
    ]
    table = write(tmp_path, rows, "cells.csv")
    config = RunConfig.from_flat(default_settings() | {"dataset": f"csv:{table}", "num-clients": 3})
    assert load_federated_data(config.data_settings()).dataset.input_shape == (30,)
    run = tmp_path / "run"
    words = ["--method", "fedrep", "--dataset", f"csv:{table}", "--num-clients", "3", "--num-rounds", "3", "--quiet"]
    words += ["--set", "target=mlp", "--set", "data.partition=iid", "--output", run]
    code, _, problem = call("run", *words)
    assert code == 0, problem
    summary = json.loads((run / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.9
    assert summary["dataset"] == "cells.csv, 2 classes, 30 features"
    model = tmp_path / "model.safetensors"
    assert call("export", run, "--client", "0", "-o", model)[0] == 0
    predictions = tmp_path / "predictions.csv"
    code, printed, problem = call("predict", model, "--data", table, "-o", predictions)
    assert code == 0, problem
    lines = predictions.read_text().splitlines()
    assert len(lines) == 570
    right = [line.split(",")[1] == data.target_names[label] for line, label in zip(lines[1:], data.target, strict=True)]
    assert np.mean(right) > 0.9
    assert f"accuracy {100 * np.mean(right):.2f} % of 569 samples" in printed
    unlabelled = write(tmp_path, [",".join(row.split(",")[1:]) for row in rows], "unlabelled.csv")
    assert call("predict", model, "--data", f"csv:{unlabelled}", "-o", tmp_path / "same.csv")[0] == 0
    short = write(tmp_path, [",".join(row.split(",")[:20]) for row in rows], "short.csv")
    code, _, problem = call("predict", model, "--data", short, "-o", tmp_path / "none.csv")
    assert (code, "got 19 columns of numbers" in problem) == (2, True)
    code, _, problem = call("join", run, "--data", f"csv:{table}", "-o", tmp_path / "joined", "--rounds", "1")
    assert code == 0, problem
    for folder in (tmp_path, tmp_path / "joined"):  # both descriptions have the names of the columns
        assert json.loads((folder / "model.json").read_text())["features"] == names
    fields = [row.split(",") for row in rows]
    swapped = write(tmp_path, [",".join([row[0], row[2], row[1], *row[3:]]) for row in fields], "swapped.csv")
    renamed = write(tmp_path, [rows[0].replace("mean_area", "area"), *rows[1:]], "renamed.csv")
    for file, reason in (
        (
            swapped,
            "the same columns in another order than the model was trained on: feature 1 is 'mean_texture', and ",
        ),
        (
            renamed,
            "other columns than the model was trained on: feature 4 is 'area', and was 'mean_area'; give",
        ),
    ):
        for words in (
            ("predict", model, "--data", file, "-o", tmp_path / "none.csv"),
            ("join", run, "--data", f"csv:{file}", "-o", tmp_path / "none", "--rounds", "1"),
        ):
            code, _, problem = call(*words)
            assert (code, reason in " ".join(problem.split())) == (2, True), problem
    assert not list(tmp_path.glob("none*"))


def test_a_servers_names_are_quoted_and_cut(tmp_path):
    """In the owner's log they would be lines of their own."""
    table = write(tmp_path, ROWS)
    with pytest.raises(DataError) as caught:
        read_unlabelled(table, (2,), features=("age", "\x1b[2J\nINFO all is well " + "x" * 1000))
    text = str(caught.value)
    assert "feature 2 is 'size', and was '\\x1b[2J\\nINFO all is well xxx" in text
    assert "\n" not in text
    assert len(text) < 300 + len(str(table))


def test_nodes_report_their_columns_as_a_hash(tmp_path):
    """The same for the same columns in the same order; an `.npz` file has no names."""
    swapped = [",".join(row.split(",")[::-1]) for row in ROWS]
    hashes = []
    for rows in (ROWS, [ROWS[0], *(row.replace("sick", "ill") for row in ROWS[1:])], swapped):
        flat = {"dataset": f"csv:{write(tmp_path, rows)}", "num-clients": 2, "data.partition": "iid"}
        config = RunConfig.from_flat(default_settings() | flat)
        properties = data_properties(load_federated_data(config.data_settings()), [0], simulated=False)
        hashes.append(properties["columns"])
    assert hashes[0] == hashlib.sha256(b"age\nsize").hexdigest() == hashes[1]
    assert hashes[2] == hashlib.sha256(b"size\nage").hexdigest()
    table = read_table(tmp_path / "own.csv")
    np.savez(tmp_path / "own.npz", features=table.features, labels=np.arange(12) % 2)
    flat = {"dataset": f"npz:{tmp_path / 'own.npz'}", "num-clients": 2, "data.partition": "iid"}
    data = load_federated_data(RunConfig.from_flat(default_settings() | flat).data_settings())
    assert "columns" not in data_properties(data, [0], simulated=False)


def test_a_small_node_may_lack_most_of_the_agreed_classes(tmp_path):
    rows = ["label,weight", "y,1.5", "z,2.5", "y,3.5", "z,4.5"]
    dataset = load(tmp_path, rows, classes=tuple("abcdefghyz"))
    assert (dataset.num_classes, dataset.input_shape) == (10, (1,))
    assert set(dataset.train.labels) | set(dataset.test.labels) == {8, 9}
