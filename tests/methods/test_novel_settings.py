"""Novel clients: valid settings, which queries are allowed, and means over clients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import setting_of

from hyperfl_flwr.app.methods import check_run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.grids import Settings, plain_grid
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.methods.pfedhn import PFedHNConfig
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.queries import ASSESS, DESCRIBE, DESCRIPTOR, ERRORS, GRADIENTS, QuerySpec
from hyperfl_flwr.runs.novel_results import NovelRecord, described, flat_means
from strategies.engine.query_clients import Query, ask

SHAPE = (1, 8, 8)
PLAN: dict[str, Any] = {"target": "mlp", "num_rounds": 1, "novel.clients": 2, "it-pfl.fine-tune-rounds": 0}


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        (
            "hyperfl",
            {},
            "with hyperfl: its clients .* which a client without labels cannot train",
        ),
        ("local", {}, "novel.clients must be 0 with local: its clients keep model private"),
        ("priv-hfl", {}, "take one of .*fedavg, .*it-pfl, .*ppsgd"),
        ("pfedhn-pc", {}, "keep classifier private"),
        (
            "it-pfl",
            {"novel.epsilons": "none,1", "it-pfl.pooling": "mean-max"},
            "none,1 needs it-pfl.pooling = mean, got mean-max",
        ),
        ("fedavg", {"novel.corruptions": "saturation"}, "must not have saturation: .* 1 channels"),
    ],
)
def test_what_cannot_be_is_refused(
    method: str, changes: Settings, problem: str, federate: Federate, tmp_path: Path
) -> None:
    """The run is refused before anything is written."""
    with pytest.raises(ConfigError, match=problem):
        federate(method, **PLAN, **changes)
    assert not list(tmp_path.iterdir())


def test_corruptions_are_of_images(make_settings: Callable[..., Settings]) -> None:
    config = RunConfig.from_flat(
        make_settings("fedavg", target="mlp", **{"novel.clients": 1, "novel.corruptions": "blur"})
    )
    with pytest.raises(ConfigError, match="must be none, got blur: the samples are not images"):
        check_run(config, (64,), 10)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("corruptions", "none,fog", "must be none or blur, .* got 'none,fog'"),
        ("samples", "0", "must be all or whole numbers above 0, each once"),
        ("samples", "8,8", "must be all or whole numbers above 0, each once"),
        ("epsilons", "1,-1", "must be none or numbers above 0"),
        ("epsilons", "1e999", "must be none or numbers above 0"),
        ("delta", 1.0, "must be less than 1"),
        ("clients", -1, "must be greater than or equal to 0"),
    ],
)
def test_wrong_settings_are_refused(key: str, value: Any, problem: str, make_settings: Callable[..., Settings]) -> None:
    with pytest.raises(ConfigError, match=f"novel.{key} {problem}"):
        RunConfig.from_flat(make_settings("fedavg", **{f"novel.{key}": value}))


def test_lists_are_read(make_settings: Callable[..., Settings]) -> None:
    changes: Settings = {"novel.samples": 5, "novel.epsilons": "none,0.5,1e2"}
    novel = RunConfig.from_flat(make_settings("fedavg", **changes)).novel
    assert (novel.amounts, novel.budgets) == ([5], [None, 0.5, 100.0])


@pytest.mark.parametrize("kind", [ASSESS, GRADIENTS, ERRORS])
def test_without_novel_clients_nothing_is_assessed(kind: str, make_settings: Callable[..., Settings]) -> None:
    """A server that queries anyway gets a failure and no arrays."""
    config = RunConfig.from_flat(make_settings("fedavg", target="mlp"))
    grid, arrays = plain_grid(1, config.flat()), {"classifiers/weight": np.zeros((1, 65), np.float32)}
    query = Query(kind=kind, clients=[0], expected={0: {}}, per_client={0: arrays})
    found = ask(grid, setting_of(config, grid), 1, query)
    assert (found.arrays, [failure.client for failure in found.failures]) == ({}, [0])
    reason = "only novel clients are assessed" if kind == ASSESS else "only in runs of pfedhn with novel clients"
    assert reason in found.failures[0].reason


def test_a_trained_client_describes_all_of_its_samples_or_none(make_settings: Callable[..., Settings]) -> None:
    """Queries for one sample, for corrupted or noisy ones, or for an assessment are answered with a failure."""
    config = RunConfig.from_flat(make_settings("it-pfl", target="mlp", **{"novel.clients": 2}))
    grid = plain_grid(1, config.flat())
    encoder = build_encoder("mlp", SHAPE, config.section(PFedHNConfig).dimension(NUM_CLIENTS), "mean")
    arrays = pack_arrays({f"encoder/{name}": np.zeros(v.shape, np.float32) for name, v in encoder.state_dict().items()})
    expected = {0: {DESCRIPTOR: np.zeros((1, config.section(PFedHNConfig).dimension(NUM_CLIENTS)), np.float32)}}
    for question in (QuerySpec(samples=1), QuerySpec(corruption="blur"), QuerySpec(epsilon=1.0, delta=0.1)):
        query = Query(kind=DESCRIBE, clients=[0], expected=expected, shared=arrays, question=question)
        found = ask(grid, setting_of(config, grid), 1, query)
        assert "describes all of its samples" in found.failures[0].reason
    query = Query(kind=ASSESS, clients=[0], expected={0: {}}, shared=arrays)
    assert "only novel clients are assessed" in ask(grid, setting_of(config, grid), 1, query).failures[0].reason


@pytest.mark.parametrize("kind", [GRADIENTS, ERRORS])
def test_a_trained_client_compares_all_of_its_samples_or_none(
    kind: str, make_settings: Callable[..., Settings]
) -> None:
    """With two samples, of which one is in each half, a gradient is a multiple of a sample."""
    config = RunConfig.from_flat(make_settings("pfedhn", target="mlp", **{"novel.clients": 1}))
    grid, arrays = plain_grid(1, config.flat()), {"classifiers/weight": np.zeros((1, 65), np.float32)}
    for question in (QuerySpec(samples=2), QuerySpec(corruption="blur"), QuerySpec(epsilon=1.0, delta=0.1)):
        query = Query(kind=kind, clients=[0], expected={0: arrays}, per_client={0: arrays}, question=question)
        found = ask(grid, setting_of(config, grid), 1, query)
        assert "compares all of its samples" in found.failures[0].reason


def record(**changes: Any) -> NovelRecord:
    values = {"way": "global", "client": 5, "corruption": "none", "accuracy": 0.5, "num_examples": 9, "bytes_down": 1}
    return NovelRecord(**{**values, "models": 1, **changes})


def test_means_are_over_clients_with_all_samples_and_without_noise() -> None:
    """For 0.2, 0.4 and 0.9: mean 0.5, variance (0.09 + 0.01 + 0.16) / 2 = 0.13."""
    records = [
        *(record(client=client, accuracy=share, bytes_down=client) for client, share in enumerate((0.2, 0.4, 0.9))),
        record(accuracy=1.0, all_samples=False), record(accuracy=1.0, epsilon=2.0),
        record(corruption="blur", accuracy=0.25),
    ]  # fmt: skip
    found = flat_means(records)
    assert found == {
        "novel_global": pytest.approx(0.5), "novel_global_sem": pytest.approx((0.13 / 3) ** 0.5),
        "novel_global_blur": 0.25, "novel_global_blur_sem": None,
        "novel_global_bytes_down": 1, "novel_global_bytes_up": 0, "novel_global_bytes_of_others": 0,
        "novel_global_models": 1,
    }  # fmt: skip
    assert flat_means(records[3:5]) == {}
    assert described(records) == "4 novel clients: global 50.0 +- 20.8, global 25.0 (blur)"
    assert described(records[3:5]) == (
        "1 novel client: none assessed with all samples and without noise, see novel.json"
    )
