"""Contract tests for failing clients: they are named and left out, and the run stops when too many fail."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import REPRESENTATIVES, of_every_method, of_every_method_if_extended, of_representatives

from clients.engine.base import BaseClient
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.faults import check_failures
from hyperfl_flwr.contract.folders import last_checkpoint, metrics, outcome
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.run_directory import read_manifest
from strategies.engine.base import BaseStrategy
from strategies.it_pfl import ITPFL

BROKEN = 2


def raises(client: BaseClient, result: Any) -> Any:
    raise RuntimeError("the camera is broken")


def wrong_shape(client: BaseClient, result: Any) -> Any:
    arrays, num_examples, numbers = result
    return [*arrays[:-1], arrays[-1][..., None]], num_examples, numbers


def too_many(client: BaseClient, result: Any) -> Any:
    arrays, num_examples, numbers = result
    return [*arrays, np.zeros(3, np.float32)], num_examples, numbers


def too_few(client: BaseClient, result: Any) -> Any:
    arrays, num_examples, numbers = result
    return arrays[:-1], num_examples, numbers


def not_a_number(client: BaseClient, result: Any) -> Any:
    arrays, num_examples, numbers = result
    arrays[-1].flat[-1] = np.nan
    return arrays, num_examples, numbers


def break_fit(
    patch: pytest.MonkeyPatch,
    method: str,
    fault: Callable[[BaseClient, Any], Any],
    *,
    clients: Collection[int] = (BROKEN,),
    rounds: Collection[int] = range(99),
) -> None:
    client_class = client_of(method)
    fit = client_class.fit

    def broken(self: BaseClient, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        result = fit(self, parameters, config)
        return fault(self, result) if self.context.client in clients and config["round"] in rounds else result

    patch.setattr(client_class, "fit", broken)


def run_of(error: Exception) -> Path:
    """Return the folder that the error message suggests to resume."""
    return Path(str(error).rsplit("hyperfl run --resume ", 1)[1])


def without(clients: Collection[int]) -> Callable[[BaseStrategy, int], list[int]]:
    return lambda self, server_round: [client for client in range(NUM_CLIENTS) if client not in clients]


FAULTS = (raises, not_a_number, wrong_shape, too_many, too_few)


@pytest.mark.parametrize(
    ("method", "fault"),
    [(method, fault) for method in METHODS for fault in (FAULTS if method in REPRESENTATIVES else FAULTS[:1])],
)
def test_a_failing_client_is_named_and_left_out(
    method: str, fault: Callable[[BaseClient, Any], Any], federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other clients' results equal those of a run in which the failing client was never sampled.

    IT-PFL-HN's encoder targets depend on which clients were sampled, so they are patched to be independent of it.
    """
    monkeypatch.setattr(ITPFL, "_targets", lambda self, clients: self.server.embeddings.detach()[list(clients)])
    if fault is not raises and fault is not too_many and not client_of(method).shared:
        pytest.skip("returns no arrays that could be wrong")
    with monkeypatch.context() as patch:
        break_fit(patch, method, fault)
        broken = federate(method)
    with monkeypatch.context() as patch:
        patch.setattr(BaseStrategy, "sampled", without({BROKEN}))
        break_fit(patch, method, fault, clients=())  # clients with another `fit` share no hypernetwork, which rounds
        absent = federate(method)
    training = [row for row in metrics(broken) if row["kind"] == "train"]
    assert [row["failed"] for row in training] == [[BROKEN], [BROKEN]]
    assert [row["clients"] for row in training] == [NUM_CLIENTS - 1] * 2
    names = sorted(path.name for path in (broken / "failures").iterdir())
    assert names == [f"round-00000{number}-client-{BROKEN:05d}.txt" for number in (1, 2)]
    if fault is raises:
        text = (broken / "failures" / names[0]).read_text()
        assert text.startswith("RuntimeError: the camera is broken\n\nTraceback")
        assert f"client {BROKEN} is left out: RuntimeError" in (broken / "server.log").read_text()
    one, other = outcome(broken), outcome(absent)
    assert one["private"].pop(BROKEN, None) is None  # its version stays the initial one
    for part in ("arrays", "private", "accuracies"):
        assert one[part] == other[part], part
    assert one["progress"].versions == other["progress"].versions
    per_client = [[row for row in result["metrics"] if row["kind"].startswith("client")] for result in (one, other)]
    assert per_client[0] == per_client[1]


@of_every_method
def test_private_parameters_that_are_no_numbers_are_not_stored(
    method: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose last parameter becomes NaN is left out and has no stored version of that round.

    Where an epsilon is stated for each upload, its failure would be without noise: it finishes without a change.
    """
    client_class = client_of(method)
    train = client_class.train

    def broken(self: BaseClient, rng: np.random.Generator) -> dict[str, float]:
        numbers = train(self, rng)
        if self.context.client == BROKEN:
            with torch.no_grad():
                for group in client_class.private or client_class.shared:
                    for value in self.groups[group].state_dict().values():
                        value.fill_(float("nan"))
        return numbers

    monkeypatch.setattr(client_class, "train", broken)
    run = federate(method)
    failed = [] if METHODS[method].weight_epsilon else [BROKEN]
    assert [row["failed"] for row in metrics(run) if row["kind"] == "train"] == [failed, failed]
    assert not list((run / "clients").glob(f"client-{BROKEN:05d}/*"))
    assert all(np.isfinite(value).all() for value in last_checkpoint(run)[0].values())


@of_every_method_if_extended
def test_clients_that_fail_once_come_back(method: str, federate: Federate) -> None:
    check_failures(method, federate)


@of_representatives
def test_a_client_that_cannot_be_evaluated_is_named(
    method: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last evaluation reports the other four clients, and failures/ gives the reason."""
    client_class = client_of(method)
    evaluate = client_class.evaluate

    def broken(self: BaseClient, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        if self.context.client == BROKEN:
            raise RuntimeError("the test data are broken")
        return evaluate(self, parameters, config)

    monkeypatch.setattr(client_class, "evaluate", broken)
    run = federate(method)
    last = [row for row in metrics(run) if row["kind"] == "aggregate"][-1]
    assert (last["round"], last["clients"]) == (2, NUM_CLIENTS - 1)
    texts = [path.read_text() for path in (run / "failures").glob(f"*-client-{BROKEN:05d}*")]
    assert any("the test data are broken" in text for text in texts)


@of_representatives
def test_a_run_in_which_every_client_fails_has_failed(
    method: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error gives the reason, the manifest's status is "failed", and no summary is written."""
    break_fit(monkeypatch, method, raises, clients=range(NUM_CLIENTS))
    with pytest.raises(RunFailedError, match="the camera is broken") as caught:
        federate(method, num_rounds=1, failure_budget=1.0)
    run = run_of(caught.value)
    assert read_manifest(run)["status"] == "failed"
    assert not (run / "summary.json").exists()


@of_representatives
@pytest.mark.parametrize(("budget", "enough"), [(0.25, False), (0.4, True)])
def test_the_failure_budget(
    method: str, budget: float, enough: bool, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five client trainings fail (0.4): a budget of 0.25 ends the run, one of 0.4 is just enough."""
    break_fit(monkeypatch, method, raises, clients={1, 2})
    if enough:
        run = federate(method, failure_budget=budget)
        assert json.loads((run / "summary.json").read_text())["test_accuracy_num_clients"] == 3
    else:
        with pytest.raises(RunFailedError, match=r"2 of 5 client trainings failed.*failure-budget = 0\.25"):
            federate(method, failure_budget=budget)


@of_representatives
def test_failed_rounds_in_a_row_end_the_run(method: str, federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds 1, 3 and 4 fail: one alone is tolerated, two in a row end the run with max-failed-rounds = 2."""
    break_fit(monkeypatch, method, raises, clients=range(NUM_CLIENTS), rounds={1, 3, 4})
    with pytest.raises(RunFailedError, match="2 rounds in a row") as caught:
        federate(method, num_rounds=6, failure_budget=1.0, max_failed_rounds=2)
    run = run_of(caught.value)
    assert [row["clients"] for row in metrics(run) if row["kind"] == "train"] == [0, NUM_CLIENTS, 0, 0]
