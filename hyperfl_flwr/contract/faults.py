"""Contract: failing clients are left out, and a killed run goes on as if nothing had happened."""

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Message

from clients.engine.base import BaseClient
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.contract.base import NUM_CLIENTS, ContractError, Federate, replaced, require
from hyperfl_flwr.contract.folders import last_checkpoint, metrics, outcome
from hyperfl_flwr.contract.grids import KilledError, KilledGrid, Settings
from hyperfl_flwr.core.packages.package_finder import where
from hyperfl_flwr.core.packages.user_code import UserCode, is_user_code
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.server.in_process_grid import InProcessGrid

BROKEN = 2
"""The client that fails."""


def check_failures(method: str, federate: Federate) -> None:
    """One client fails in a round, and in another run all do; both runs go on."""
    check_failing_client(method, federate)
    check_empty_round(method, federate)


def check_empty_round(method: str, federate: Federate) -> None:
    """A round in which all clients fail leaves finite parameters, and the run goes on with all of them."""
    remedy = "let the strategy's `advance` return its argument if that is empty, and leave the server's numbers"
    try:
        with _failing(method, range(NUM_CLIENTS)):
            run = federate(method, num_rounds=3, failure_budget=1.0)
    except Exception as error:
        raise ContractError(f"a round in which all clients fail ends the run: {where(error)}", remedy) from error
    failed = [row["failed"] for row in metrics(run) if row["kind"] == "train"]
    require(failed == [[], list(range(NUM_CLIENTS)), []], f"all failed in round 2, recorded are {failed}", remedy)
    for key, value in last_checkpoint(run)[0].items():
        require(bool(np.isfinite(value).all()), f"{key} is not finite after a round in which all failed", remedy)


@contextlib.contextmanager
def _failing(method: str, clients: Collection[int]) -> Iterator[None]:
    """Let clients fail in round 2."""
    client_class = client_of(method)
    fit = client_class.fit

    def broken(self: BaseClient, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:  # noqa: ANN401 - Flower's
        if self.context.client in clients and config["round"] == 2:
            raise RuntimeError("the camera is broken")
        return fit(self, parameters, config)

    with replaced(client_class, "fit", broken):
        yield


def check_failing_client(method: str, federate: Federate) -> None:
    """A client that fails in round 2 is named and left out, and is trained again in round 3."""
    with _failing(method, (BROKEN,)):
        run = federate(method, num_rounds=3)
    failed = [row["failed"] for row in metrics(run) if row["kind"] == "train"]
    remedy = "let the strategy aggregate whichever clients have replied"
    require(failed == [[], [BROKEN], []], f"one client failed in round 2, recorded are {failed}", remedy)
    versions = last_checkpoint(run)[1].versions
    expected = dict.fromkeys(range(NUM_CLIENTS), 3)
    require(versions == expected, f"after three rounds the clients have the versions {versions}", remedy)
    for key, value in last_checkpoint(run)[0].items():
        require(bool(np.isfinite(value).all()), f"{key} is not finite after a client failed", remedy)


def check_resume(method: str, federate: Federate, *, thorough: bool = False) -> None:
    """With half of the clients per round and a checkpoint every other round, a resumed run equals a straight one.

    The run is killed in round 4, where the last checkpoint is of round 2.

    Args:
        method: Name of the method.
        federate: Runs the federations.
        thorough: Whether a run is also killed in round 1, without a checkpoint, and in the last round.
    """
    plan: dict[str, Any] = {"num_rounds": 5, "fraction_train": 0.5, "checkpoint_every": 2}
    straight = federate(method, **plan)
    every = METHODS[method].weight_epsilon is not None  # each repeated round spends more
    remedy = "keep the server's numbers from round to round in `server_state`, and a client's in `private` groups"
    for in_round, checkpoint in ((4, 3 if every else 2), *(((1, 0), (5, 4)) if thorough else ())):
        killed = straight.parent / f"run-99{in_round}"
        with contextlib.suppress(KilledError):
            federate(method, grid=partial(KilledGrid, in_round=in_round), **plan, output=str(killed))
        last = max(Checkpoints(killed / "checkpoints").rounds(), default=0)
        found = f"a run that was killed in round {in_round} has a checkpoint of round {last}"
        require(last == checkpoint, found, remedy)
        with _imported_again(method):
            resumed = federate(method, **plan, output=str(killed), resume=str(killed))
        one, other = outcome(resumed), outcome(straight)
        for part, value in one.items():
            require(value == other[part], f"a run killed in round {in_round} and resumed differs in {part}", remedy)


def check_processes(method: str, federate: Federate) -> None:
    """Nodes that import the method again for each message, as processes of their own do, give the same bits."""
    remedy = "keep what a client needs from round to round in `private` groups, and nothing in the class or module"
    one, other = outcome(federate(method, num_rounds=3)), outcome(federate(method, grid=ForgettingGrid, num_rounds=3))
    for part, value in one.items():
        require(value == other[part], f"nodes in processes of their own change {part}", remedy)


def _imported_again(method: str) -> contextlib.AbstractContextManager[None]:
    """Return a block in which code of a user's own is imported again; that of built-in methods is not."""
    return UserCode("method", method).imported_apart() if is_user_code(method) else contextlib.nullcontext()


class ForgettingGrid(InProcessGrid):
    """Runs the receiver of each message with the method's code imported again, as a process of its own would."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self._method = str(settings["method"])

    def answer(self, message: Message) -> Message:
        """Run the receiver of one message, see `InProcessGrid`."""
        with _imported_again(self._method):
            return super().answer(message)
