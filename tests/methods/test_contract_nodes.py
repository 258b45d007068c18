"""Contract tests for the number of nodes: it does not change a single bit of a run's results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import REPRESENTATIVES, of_every_method_if_extended, of_representatives

from clients.engine.base import BaseClient
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics, outcome
from hyperfl_flwr.contract.grids import RecordingGrid, Settings, plain_grid
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.protocol.messages import LABEL_COUNTS, Reduction, group_of
from hyperfl_flwr.runs.checkpoint import SERVER, Checkpoints
from hyperfl_flwr.server.in_process_grid import InProcessGrid

NODES = (2, 3, 4, 5, 7)
"""Numbers of nodes for five clients, up to one for each; with seven, two nodes have no client."""

SIZES = (12, 20, 7, 33, 16)
"""Number of images of each client."""


@pytest.fixture
def unequal(tmp_path: Path) -> Settings:
    """Return settings of three rounds on random images, with a different number of images per client."""
    rng, total = np.random.default_rng(3), sum(SIZES)
    path = tmp_path / "unequal.npz"
    np.savez(
        path,
        images=rng.integers(0, 256, (total, 8, 8), dtype=np.uint8),
        labels=np.arange(total) % 4,
        clients=np.repeat(np.arange(len(SIZES)), SIZES),
    )
    return {
        "dataset": f"npz:{path}", "num_rounds": 3, "checkpoint_every": 1, "data.partition": "natural",
        "data.train-samples": "auto", "data.test-samples": "auto",
    }  # fmt: skip


def results(run: Path) -> dict[str, Any]:
    """Return everything that must not depend on the nodes: all but times, memory and message sizes."""
    found = outcome(run)
    for row in found["metrics"]:
        row.pop("bytes_on_wire", None)
    checkpoints = Checkpoints(run / "checkpoints")
    arrays = {number: exact(checkpoints.load(number)[0]) for number in checkpoints.rounds()}
    return found | {"checkpoints": arrays}


def alter_fit(patch: pytest.MonkeyPatch, method: str, alter: Callable[[int, Any], Any]) -> None:
    """Patch `fit` so that in round 2 clients return `alter(client id, result)`."""
    client_class = client_of(method)
    fit = client_class.fit

    def altered(self: BaseClient, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        result = fit(self, parameters, config)
        return alter(self.context.client, result) if config["round"] == 2 else result

    patch.setattr(client_class, "fit", altered)


@of_every_method_if_extended
def test_the_number_of_nodes_changes_nothing(method: str, federate: Federate, unequal: Settings) -> None:
    """Checkpoints of all rounds, private state, metrics and result equal those of a run on one node."""
    expected = results(federate(method, 1, **unequal))
    assert len(expected["checkpoints"]) > 1
    for num_nodes in NODES if method in REPRESENTATIVES else (7,):
        assert results(federate(method, num_nodes, **unequal)) == expected


@of_representatives
def test_nor_does_it_with_sampled_clients(method: str, federate: Federate, unequal: Settings) -> None:
    """The same holds with three of five clients in the first two rounds and all in the last."""
    expected, *others = (results(federate(method, each, fraction_train=0.6, **unequal)) for each in (1, 2, 5))
    assert [row["clients"] for row in expected["metrics"] if row["kind"] == "train"] == [3, 3, 5]
    assert others == [expected] * len(others)


@of_representatives
def test_nor_does_it_with_clients_that_fail(
    method: str, federate: Federate, unequal: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds when two clients fail in round 2; of two nodes, each then loses one client."""

    def fail(client: int, result: Any) -> Any:
        if client in (2, 3):
            raise RuntimeError("the camera is broken")
        return result

    alter_fit(monkeypatch, method, fail)
    expected, *others = (results(federate(method, each, failure_budget=0.5, **unequal)) for each in (1, 2, 5))
    assert [row["failed"] for row in expected["metrics"] if row["kind"] == "train"] == [[], [2, 3], []]
    assert others == [expected] * len(others)


@of_representatives
def test_nor_does_it_with_clients_that_diverge(
    method: str, federate: Federate, unequal: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds when two clients return values 10^6 times as large, which need separate outlier sums.

    `max-update-ratio` = 0 switches off the check that would refuse such updates.
    """

    def diverge(client: int, result: Any) -> Any:
        arrays, *others = result
        factor = np.float32(1e6 if client in (0, 2) else 1)
        # Label counts, the last array, cannot diverge: wrong ones are refused.
        last = len(arrays) - (group_of(LABEL_COUNTS) in client_of(method).shared)
        return [*(array * factor for array in arrays[:last]), *arrays[last:]], *others

    grids: list[RecordingGrid] = []

    def make(num_nodes: int, settings: Settings) -> InProcessGrid:
        grids.append(RecordingGrid(num_nodes, settings))
        return grids[-1] if num_nodes == 2 else plain_grid(num_nodes, settings)

    alter_fit(monkeypatch, method, diverge)
    settings = {**unequal, "num_rounds": 2}  # training on such numbers may not stay finite
    expected, *others = (
        results(federate(method, each, grid=make, max_update_ratio=0.0, **settings)) for each in (1, 2, 3, 5)
    )
    assert others == [expected] * len(others)
    is_summed = any(reduction.is_summed for reduction in client_of(method).shared.values())
    if is_summed and method != "it-pfl":  # whose sums are frozen
        assert any(b"outlier-sums" in sent for sent in grids[1].sent)


@of_representatives
def test_the_mean_is_that_of_what_the_clients_returned(
    method: str, federate: Federate, unequal: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one round, an array of a summed group is sum_i w_i x_i / sum_i w_i of the clients' arrays, in float64.

    PRIV-HFL's server steps its generator along this mean, with a rate of 0.1. Tolerance: two roundings to float32.
    """
    returned: list[tuple[dict[str, np.ndarray], int]] = []
    received: dict[str, np.ndarray] = {}
    client_class = client_of(method)
    fit = client_class.fit

    def recorded_fit(self: Any, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        arrays, num_examples, numbers = fit(self, parameters, config)
        exact = dict(zip(self.keys(), (array.astype(np.float64) for array in parameters), strict=True))
        received.update({key: value for key, value in exact.items() if group_of(key) in self.uploaded_groups()})
        returned.append(
            (dict(zip(received, (array.astype(np.float64) for array in arrays), strict=True)), num_examples)
        )
        return arrays, num_examples, numbers

    encoder = {"it-pfl.fine-tune-rounds": 0, "it-pfl.encoder-optimiser": "mean"}  # the encoder is trained and averaged
    monkeypatch.setattr(client_class, "fit", recorded_fit)
    run = federate(method, 3, **{**unequal, "num_rounds": 1}, **encoder)
    assert sorted(count for _, count in returned) == sorted(size - round(size / 4) for size in SIZES)
    arrays, _ = last_checkpoint(run)
    for key, value in arrays.items():
        if key.startswith(SERVER) or not (reduction := client_class.shared[group_of(key)]).is_summed:
            continue
        weights = [count if reduction is Reduction.MEAN_BY_EXAMPLES else 1 for _, count in returned]
        expected = np.average([each[key] for each, _ in returned], axis=0, weights=weights)
        if group_of(key) == "generator":
            expected = received[key] - 0.1 * expected
        np.testing.assert_allclose(value, expected, rtol=1.3e-7, atol=1e-10, err_msg=key)


@of_representatives
def test_an_audit_changes_nothing(method: str, federate: Federate, unequal: Settings) -> None:
    """Audited clients upload separately, but the metrics equal those of a run without an audit."""
    if not METHODS[method].uploads:
        pytest.skip("sends nothing that could be observed")
    plain, audited = (
        metrics(federate(method, 2, **unequal, **{"audit.clients": clients, "audit.rounds": "all"}))
        for clients in ("", "0,2,3")
    )
    for row in (*plain, *audited):
        row.pop("bytes_on_wire", None)
    assert plain == audited
