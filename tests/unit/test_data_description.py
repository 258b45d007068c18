"""What a user is shown of the data before training: classes, the partition, and settings that it ignores."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.planning import plan

Make = Callable[..., dict[str, Scalar]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of 40 random images of four classes, of two clients."""
    rng = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    images, labels = rng.random((40, 8, 8)).astype(np.float32), np.tile(np.arange(4), 10)
    np.savez(path, images=images, labels=labels, clients=np.arange(40) // 20)
    return path


def test_the_data_are_described(make_settings: Make) -> None:
    """The number of samples that the clients have shows a partition that leaves most of them out."""
    few = plan(make_settings(**{"data.train-samples": 10, "num-clients": 4, "dataset": "digits"}))
    assert few.data == "data: 1,347 training samples of 10 classes, partition similarity: the clients have 40 of them"
    assert not [warning for warning in few.warnings if "partition" in warning]
    iid: dict[str, Scalar] = {"num-clients": 4, "dataset": "digits", "data.partition": "iid"}
    assert plan(make_settings(**iid, **{"data.train-samples": 1347})).data == (
        "data: 1,347 training samples of 10 classes, partition iid: the clients have 5,388, with up to 4 uses of a "
        "sample"
    )


def test_a_partition_that_client_ids_replace_is_named(make_settings: Make, file: Path) -> None:
    settings = make_settings(
        **{"dataset": f"npz:{file}", "num-clients": 2, "data.train-samples": "auto", "data.test-samples": "auto"}
    )
    changed = plan(settings | {"data.partition": "dirichlet", "data.dirichlet-alpha": 0.1})
    assert "partition natural" in changed.data
    (warning,) = [warning for warning in changed.warnings if "data.partition" in warning]
    assert "data.partition = dirichlet has no effect" in warning
    assert "client ids" in warning


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data.dirichlet-alpha": 0.1}, "data.dirichlet-alpha has no effect with the partition similarity; it is a "),
        ({"data.shards-per-client": 3, "data.partition": "iid"}, "data.shards-per-client has no effect with the parti"),
        ({"dp.epsilon": 0.0}, "dp.epsilon = 0 switches differential privacy off"),
        ({"dp.delta": 1e-6, "dp.heads": "noised"}, "dp.delta has no effect with dp.epsilon = 0, which trains without "),
        (
            {"secagg.min-cohort": 4},
            "secagg.min-cohort has no effect with secagg.enabled = false; set it to true, or the ",
        ),
        ({"privacy.clip-norm": 1.0, "privacy.delta": 1e-6}, "privacy.delta has no effect with privacy.unit = none"),
    ],
)
def test_settings_without_effect_are_named(make_settings: Make, changes: dict[str, Scalar], text: str) -> None:
    changes = {"num-clients": 2, **changes}
    warned = plan({"output": make_settings()["output"], **changes}).warnings
    assert len([warning for warning in warned if warning.startswith(text)]) == 1
    used = plan({
        "output": make_settings()["output"], "num-clients": 4, "data.partition": "dirichlet", "dp.epsilon": 4.0,
        "dp.delta": 1e-6, "method": "fedavg", "secagg.enabled": True, "secagg.range": 5.0,
    }, num_nodes=4).warnings  # fmt: skip
    assert not [warning for warning in used if "no effect" in warning or "switches" in warning]


def test_labels_that_count_from_one_are_named(make_settings: Make, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    with np.load(file) as arrays:
        np.savez(other, images=arrays["images"], labels=arrays["labels"] + 1)
    base: dict[str, Scalar] = {"num-clients": 2, "data.partition": "iid"}
    warned = [
        plan({"output": make_settings()["output"], "dataset": f"npz:{each}", **base}).warnings for each in (other, file)
    ]
    texts = [[warning for warning in warnings if "class 0" in warning] for warnings in warned]
    assert texts[0] == ["no training sample has class 0 of the classes 0 to 4; if the labels count from 1, subtract 1"]
    assert texts[1] == []
