"""Files with several labels or with numbers: what is read, how it is divided, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError, DataError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import MULTI_LABEL, REGRESSION
from hyperfl_flwr.data.digests import sample_digest
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_format import SampleFormat, normalisation_text, parse_normalisation
from hyperfl_flwr.data.strata import strata_of

RNG = np.random.default_rng(3)
FEATURES = RNG.normal(size=(60, 5)).astype(np.float32)
SEVERAL = (RNG.random((60, 3)) < 0.4).astype(np.int64)
NUMBERS = 100 + 30 * RNG.normal(size=60)
LABELS, TARGETS = SampleFormat(task=MULTI_LABEL), SampleFormat(task=REGRESSION)


def file(folder: Path, **arrays: Any) -> str:
    path = folder / f"{len(list(folder.iterdir()))}.npz"
    np.savez(path, **{"features": FEATURES, **arrays})
    return f"npz:{path}"


def table(folder: Path, text: str) -> str:
    path = folder / f"{len(list(folder.iterdir()))}.csv"
    path.write_text(text)
    return f"csv:{path}"


def config(**changes: Scalar) -> RunConfig:
    settings = {key.replace("_", "-").replace("--", "."): value for key, value in changes.items()}
    return RunConfig.from_flat(
        default_settings(str(settings.get("method", "fedavg"))) | {"method": "fedavg"} | settings
    )


def test_several_labels_are_read(tmp_path: Path) -> None:
    found = load_dataset(file(tmp_path, labels=SEVERAL), None, LABELS)
    assert (found.task, found.num_classes, found.input_shape) == (MULTI_LABEL, 3, (5,))
    assert found.train.targets is not None
    assert found.test.targets is not None
    whole = np.concatenate((found.train.targets, found.test.targets))
    assert whole.dtype == bool
    assert sorted(map(tuple, whole.tolist())) == sorted(map(tuple, SEVERAL.astype(bool).tolist()))
    as_bool = load_dataset(file(tmp_path, labels=SEVERAL.astype(bool)), None, LABELS)
    assert as_bool.train.targets is not None
    assert np.array_equal(as_bool.train.targets, found.train.targets)


def test_numbers_are_read_with_the_scale_of_the_training_data(tmp_path: Path) -> None:
    found = load_dataset(file(tmp_path, labels=NUMBERS), None, TARGETS)
    assert (found.task, found.num_classes) == (REGRESSION, 1)
    assert found.train.targets is not None
    assert found.target_mean == pytest.approx([found.train.targets.mean()], rel=1e-5)
    assert found.target_std == pytest.approx([found.train.targets.std()], rel=1e-5)
    agreed = SampleFormat(task=REGRESSION, target_scale=((50.0,), (2.0,)))
    two = load_dataset(file(tmp_path, labels=np.stack((NUMBERS, NUMBERS), axis=1)), None, agreed)
    assert (two.num_classes, two.target_mean, two.target_std) == (2, (50.0, 50.0), (2.0, 2.0))


def test_large_numbers_with_a_small_spread_are_told_apart(tmp_path: Path) -> None:
    """Of times in seconds since 1970, float32 would keep a few values only."""
    times = 1.7e9 + np.arange(60.0)
    name = file(tmp_path, labels=times)
    settings = config(task="regression", dataset=name, num_clients=1, data__partition="iid").data_settings()
    found = load_federated_data(settings)
    labels = found.client(0).train_labels
    assert len(labels.unique()) == len(labels)
    assert float(labels.std(unbiased=False)) == pytest.approx(1, rel=0.1)


def test_a_constant_target_is_only_shifted(tmp_path: Path) -> None:
    assert load_dataset(file(tmp_path, labels=np.full(60, 7.0)), None, TARGETS).target_std == (1.0,)


def test_clients_get_labels_of_the_type_of_the_task(tmp_path: Path) -> None:
    several = load_federated_data(
        config(task="multi-label", dataset=file(tmp_path, labels=SEVERAL), num_clients=3).data_settings()
    )
    assert several.client(0).train_labels.dtype == torch.bool
    assert several.client(0).train_labels.shape[1:] == (3,)
    numbers = load_federated_data(
        config(task="regression", dataset=file(tmp_path, labels=NUMBERS), num_clients=3).data_settings()
    )
    data, dataset = numbers.client(1), numbers.dataset
    assert data.train_labels.dtype == torch.float32
    raw = dataset.train.targets[numbers.train_indices(1)]  # type: ignore[index]
    restored = data.train_labels.numpy() * dataset.target_std[0] + dataset.target_mean[0]
    np.testing.assert_allclose(restored, raw, rtol=1e-5)
    train, test = numbers.label_counts()
    assert train.shape == test.shape == (3, 1)
    assert train[1, 0] == len(data.train_labels)


@pytest.mark.parametrize("partition", ["similarity", "iid", "dirichlet", "dirichlet-per-label", "shards"])
@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_every_partition_divides_by_strata(tmp_path: Path, task: str, partition: str) -> None:
    labels = SEVERAL if task == "multi-label" else NUMBERS
    settings = {"task": task, "dataset": file(tmp_path, labels=labels), "num-clients": 3, "data.dirichlet-alpha": 5.0}
    found = load_federated_data(
        RunConfig.from_flat(
            default_settings("fedavg") | {"method": "fedavg", "data.partition": partition, **settings}
        ).data_settings()
    )
    assert all(len(found.train_indices(client)) and len(found.test_indices(client)) for client in range(3))


def test_clients_differ_by_their_targets_in_shards(tmp_path: Path) -> None:
    found = load_federated_data(
        config(
            task="regression", dataset=file(tmp_path, labels=NUMBERS), num_clients=3, data__partition="shards",
            data__shards_per_client=1,
        ).data_settings()
    )  # fmt: skip
    means = sorted(float(found.client(client).train_labels.mean()) for client in range(3))
    assert means[0] < -0.7
    assert means[2] > 0.7


def test_the_stratum_of_labels_is_the_rarest() -> None:
    labels = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1], [1, 0, 1]], bool)
    (found,) = strata_of(MULTI_LABEL, [labels])
    # The second label has two samples, the third three, the first five.
    assert [found[i] for i in (1, 4)] == [found[1]] * 2
    assert [found[i] for i in (2, 5)] == [found[2]] * 2
    assert found[3] == 0
    assert len({*found.tolist()}) == 4


def test_the_strata_of_numbers_are_tenths() -> None:
    numbers = RNG.normal(size=(1000, 1)).astype(np.float32)
    first, second = strata_of(REGRESSION, [numbers[:700], numbers[700:]])
    assert (len(first), len(second)) == (700, 300)
    both = np.concatenate((first, second))
    assert np.bincount(both).tolist() == [100] * 10
    assert (np.diff(both[np.argsort(numbers[:, 0])]) >= 0).all()


def test_targets_are_part_of_a_version_of_the_data(tmp_path: Path) -> None:
    one = load_dataset(file(tmp_path, labels=NUMBERS), None, TARGETS)
    changed = NUMBERS.copy()
    changed[0] += 1e-3
    two = load_dataset(file(tmp_path, labels=changed), None, TARGETS)
    assert np.array_equal(one.train.labels, two.train.labels)
    assert sample_digest(one) != sample_digest(two)


@pytest.mark.parametrize(
    ("labels", "form", "message"),
    [
        (SEVERAL, SampleFormat(), r"labels must be 60 integers.*save labels.argmax\(1\);.*set task=multi-label"),
        (NUMBERS, SampleFormat(), "set task=regression"),
        (SEVERAL[:, :1], SampleFormat(), r"got int64 of shape \(60, 1\); save labels\[:, 0\]$"),
        (0 * SEVERAL[:, 0], SampleFormat(), "must have two or more classes, but all labels are 0; .* data.classes"),
        (SEVERAL * 2, LABELS, "labels must be 0 or 1 with task=multi-label, got 2"),
        (NUMBERS, LABELS, r"must be \[60, K\] of 0 and 1, a column per label"),
        (SEVERAL[:, 0], LABELS, r"must be \[60, K\] of 0 and 1"),
        (SEVERAL[:50], LABELS, r"got int64 of shape \(50, 3\)"),
        (NUMBERS[:50], TARGETS, r"must be 60 numbers, or \[60, K\]"),
        (NUMBERS.astype(str), TARGETS, "must be 60 numbers"),
        (
            np.where(np.arange(60) < 2, np.nan, NUMBERS),
            TARGETS,
            "numbers up to 1e.15, 2 of 60 samples have others",
        ),
        (NUMBERS * 1e300, TARGETS, "numbers up to 1e.15, 60 of 60"),
        (np.zeros((60, 0)), TARGETS, r"or \[60, K\]"),
    ],
)
def test_labels_of_another_task_are_refused(
    tmp_path: Path, labels: np.ndarray[Any, Any], form: SampleFormat, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_dataset(file(tmp_path, labels=labels), None, form)


def test_test_data_must_have_as_many_columns(tmp_path: Path) -> None:
    name = file(tmp_path, labels=SEVERAL, test_features=FEATURES, test_labels=SEVERAL[:, :2])
    with pytest.raises(DataError, match="test_labels must have the columns of labels, got 2 and 3"):
        load_dataset(name, None, LABELS)


def test_data_sets_with_classes_are_refused() -> None:
    with pytest.raises(DataError, match="digits has classes, but task is regression, which needs npz: or csv: data"):
        load_dataset("digits", None, TARGETS)


def test_nodes_with_local_data_must_agree_on_the_scale(tmp_path: Path) -> None:
    name = file(tmp_path, labels=NUMBERS)
    with pytest.raises(DataError, match=r"data.target-scale must be MEAN/STD .* where nodes have data of their own"):
        load_dataset(name, None, SampleFormat(task=REGRESSION, has_owner=True))
    agreed = SampleFormat(task=REGRESSION, has_owner=True, target_scale=((1.0,), (2.0,)))
    assert load_dataset(name, None, agreed).target_std == (2.0,)
    with pytest.raises(DataError, match=r"data.target-scale must have 1 or 1 numbers .* got 2"):
        load_dataset(name, None, SampleFormat(task=REGRESSION, target_scale=((1.0, 2.0), (1.0, 2.0))))


def test_tables_name_their_labels_and_targets(tmp_path: Path) -> None:
    rows = "\n".join(f"{i % 2},{i % 3 == 0:d},{i},{i * i}" for i in range(20))
    several = load_dataset(table(tmp_path, f"label:sick,label:old,a,b\n{rows}\n"), None, LABELS)
    assert several.classes == ("sick", "old")
    assert several.input_shape == (2,)
    assert several.train.targets is not None
    assert several.train.targets.dtype == bool
    one = load_dataset(table(tmp_path, f"a,b,label,c\n{rows}\n"), None, TARGETS)
    assert (one.classes, one.num_classes, one.input_shape) == (("label",), 1, (3,))
    swapped = SampleFormat(task=REGRESSION, classes=("old", "sick"))
    two = load_dataset(table(tmp_path, f"label:sick,label:old,a,b\n{rows}\n"), None, swapped)
    assert two.classes == ("old", "sick")
    assert several.test.targets is not None
    assert two.train.targets is not None
    everything = np.concatenate((two.train.targets, two.test.targets))  # type: ignore[arg-type]
    assert everything[:, 1].sum() == 10  # sick: every other row


@pytest.mark.parametrize(
    ("header", "form", "message"),
    [
        ("label:a,label:b,x,y", SampleFormat(), "must have a column label.*or set task to multi-label or regression"),
        ("label,label:b,x,y", SampleFormat(), "label:b is for another task, beside label"),
        ("w,z,x,y", LABELS, "must have columns label:NAME"),
        ("label:,z,x,y", LABELS, "must have the name of a label after the colon"),
        ("label:a,label:b,x,y", SampleFormat(task=MULTI_LABEL, classes=("a", "c")), "must have the columns label:a, "),
        ("label,z,x,y", SampleFormat(task=MULTI_LABEL, classes=("a", "b")), "got label; rename them"),
    ],
)
def test_tables_of_another_task_are_refused(tmp_path: Path, header: str, form: SampleFormat, message: str) -> None:
    rows = "\n".join(f"{i % 2},{i % 3 == 0:d},{i},{i * i}" for i in range(20))
    with pytest.raises(DataError, match=message):
        load_dataset(table(tmp_path, f"{header}\n{rows}\n"), None, form)


def test_fields_of_tables_are_checked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="columns of labels must be 0 or 1 with task=multi-label, got 2"):
        load_dataset(table(tmp_path, "label:a,x\n1,1\n2,2\n0,3\n1,4\n"), None, LABELS)
    with pytest.raises(DataError, match="the column label:a must have finite numbers"):
        load_dataset(table(tmp_path, "label:a,x\n1,1\nmany,2\n0,3\n1,4\n"), None, TARGETS)
    with pytest.raises(DataError, match="label:a is empty in 1 samples"):
        load_dataset(table(tmp_path, "label:a,x\n1,1\n,2\n0,3\n1,4\n"), None, TARGETS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "fedrod"}, "task must be classification with method = fedrod; got 'regression'"),
        ({"class_weights": "balanced"}, "class-weights must be none with task = regression: it is for classification"),
        ({"cross_site": True}, "cross-site must be false with task = regression"),
        ({"novel__clients": 2}, "novel.clients must be 0 with task = regression"),
        ({"audit__rounds": "1"}, "audit.rounds must be empty with task = regression"),
        ({"task": "ranking"}, "task must be 'classification', 'multi-label' or 'regression'"),
        ({"data__target_scale": "3"}, "data.target-scale must be auto or MEAN/STD"),
        ({"data__target_scale": "1e400/1"}, "the mean must be between"),
        ({"data__target_scale": "0/1e-50"}, "the standard deviation must be between 1e-15 and 1e.15"),
        (
            {"task": "multi-label", "data__target_scale": "0/1"},
            "data.target-scale must be auto with task = multi-label",
        ),
        ({"task": "classification", "data__classes": "one"}, "data.classes must be auto or two or more names"),
    ],
)
def test_settings_that_do_not_fit_the_task_are_refused(changes: dict[str, Scalar], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**({"task": "regression"} | changes))


def test_a_scale_is_read_as_it_is_written() -> None:
    for mean, std in (((1.7e9,), (161.0,)), ((1e-20, 3.0), (2e6, 1.0))):
        assert parse_normalisation(normalisation_text(mean, std)) == (mean, std)
    assert normalisation_text((0.0,) * 4, (1.0,) * 4, "targets").endswith("each of 4 targets")


def test_a_single_target_may_have_a_name(tmp_path: Path) -> None:
    settings = config(task="regression", dataset=file(tmp_path, labels=NUMBERS), data__classes="age").data_settings()
    assert load_dataset(settings.dataset, None, settings.sample_format).classes == ("age",)
    wrong = config(task="regression", dataset=settings.dataset, data__classes="age,height").data_settings()
    with pytest.raises(DataError, match=r"data\.classes must name the 1 targets"):
        load_dataset(wrong.dataset, None, wrong.sample_format)
