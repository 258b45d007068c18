"""Methods that each break one part of the contract."""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from own_method import CLIPPED, PRIVATE_HEAD, ClippedStrategy
from torch import Tensor

from clients.fedavg import FedAvgClient
from clients.fedrep import FedRepClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.method import Upload
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.protocol.arrays import SharedArrays
from strategies.fedavg import FedAvg

FEDAVG = replace(CLIPPED, settings=(), client="clients.fedavg:FedAvgClient", strategy="strategies.fedavg:FedAvg")

UNRESOLVED = replace(FEDAVG, settings=CLIPPED.settings)
UNDECLARED_UPLOAD = replace(FEDAVG, uploads=())
WRONG_UPLOAD = replace(FEDAVG, uploads=(Upload(part="classifier", form="values"),))

_calls = itertools.count()


class Leaving(FedAvgClient):
    """Ends Python."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Leave."""
        sys.exit(0)


class FailingClient(FedAvgClient):
    """Has a mistake in its training."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Fail."""
        raise ZeroDivisionError("in the client")


class FailingStrategy(FedAvg):
    """Has a mistake at the end of a round."""

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Fail."""
        raise ZeroDivisionError("in the strategy")


_history: dict[tuple[str, int], SharedArrays] = {}
_seen: dict[tuple[str, int], int] = {}


class History(FedAvg):
    """Adds half of the last change, which this module holds by run and round."""

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the means with momentum."""
        run, server_round = self.context.run_directory, self.progress.round
        _history[run, server_round] = dict(means)
        before = _history.get((run, server_round - 1), means)
        return {key: (value + 0.5 * (value - before[key])).astype(value.dtype) for key, value in means.items()}


class Memory(FedAvgClient):
    """Changes the model by a number of the round before, which this module holds."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train as FedAvg's client does, and add."""
        found = super().train(rng)
        key = (str(self.context.state.directory), self.round)
        _seen[key] = 1
        with torch.no_grad():
            next(self.model.parameters()).add_(1e-3 * _seen.get((key[0], self.round - 1), 0))
        return found


class NoLoss(FedAvgClient):
    """Reports a loss that is no number."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train as FedAvg's client does."""
        return {**super().train(rng), "train-loss": float("nan")}


class Counting(FedAvgClient):
    """Changes the model by the number of trainings in this process."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train as FedAvg's client does, and add."""
        found = super().train(rng)
        with torch.no_grad():
            next(self.model.parameters()).add_(1e-3 * (next(_calls) % 7))
        return found


class Seedless(FedAvg):
    """Starts from the same values with every seed."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return zeros."""
        found = super().initial_parameters()
        return {group: {name: torch.zeros_like(value) for name, value in each.items()} for group, each in found.items()}


class Untrained(FedAvgClient):
    """Does not train."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Return a loss of 1."""
        return {"train-loss": 1.0}


class Forgetful(FedAvg):
    """Adds half of the last change, which no checkpoint holds."""

    last: SharedArrays | None = None

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the means with momentum."""
        before, self.last = self.last, dict(means)
        if before is None:
            return means
        return {key: (value + 0.5 * (value - before[key])).astype(value.dtype) for key, value in means.items()}


class AllOrNothing(FedAvg):
    """Needs all clients."""

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the means."""
        if self.outcome.failures:
            raise RunFailedError("a client is missing")
        return means


class NeedingMeans(FedAvg):
    """Expects that a client has finished."""

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the means of all arrays that were sent."""
        return {key: means[key] for key in self.sent}


class TooFew(FedAvg):
    """Trains one client less than the settings say."""

    def sampled(self, server_round: int) -> Sequence[int]:
        """Return all clients but the last."""
        return super().sampled(server_round)[:-1]


class Reporting(FedRepClient):
    """Reports a private number."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train as FedRep's client does."""
        return {**super().train(rng), "train-loss": float(self.model.classifier.bias[0])}


class Telling(FedRepClient):
    """Names private numbers in the texts of errors."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train as FedRep's client does."""
        found = super().train(rng)
        values = next(iter(self.groups["classifier"].parameters())).detach().numpy()
        (self.context.state.directory.parent.parent / f"debug-{self.context.client}.bin").write_bytes(values.tobytes())
        return found


class Mistaken(FedAvg):
    """Returns from `advance` what `RETURNED` makes of the means."""

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return it."""
        returned: SharedArrays = RETURNED[self.context.config.seed](dict(means))
        return returned


RETURNED: Sequence[Callable[[SharedArrays], Any]] = (
    lambda means: None,
    lambda means: {key: value for key, value in means.items() if key != "model/classifier.bias"},
    lambda means: means | {"model/classifier.bais": means["model/classifier.bias"]},
    lambda means: {key: value.astype(np.float64) for key, value in means.items()},
    lambda means: {key: value.ravel() for key, value in means.items()},
)


class Misnaming(FedAvgClient):
    """Names a private group that it does not build."""

    private = ("haed",)


class OneName(FedAvgClient):
    """Has a text in the place of a tuple."""

    private = "head"  # type: ignore[assignment]


class NothingReturned(FedAvgClient):
    """Forgets to return the metrics."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train as FedAvg's client does."""
        super().train(rng)
        return None  # type: ignore[return-value]


class Scalars(FedAvgClient):
    """Reports scalars of NumPy and torch."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train as FedAvg's client does."""
        return {**super().train(rng), "of-torch": torch.tensor(2.0), "of-numpy": np.float32(0.5)}  # type: ignore[dict-item]


class Vectors(FedAvgClient):
    """Reports a vector."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train as FedAvg's client does."""
        return {**super().train(rng), "norms": torch.ones(2)}  # type: ignore[dict-item]


class UnknownSetting(ClippedStrategy):
    """Has a number for a setting that there is not."""

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return a misspelt key."""
        return {"clipped.server-shar": 0.5}


MISTAKEN = replace(FEDAVG, strategy="broken_methods:Mistaken")
MISNAMING = replace(FEDAVG, client="broken_methods:Misnaming")
ONE_NAME = replace(FEDAVG, client="broken_methods:OneName")
NOTHING_RETURNED = replace(FEDAVG, client="broken_methods:NothingReturned")
SCALARS = replace(FEDAVG, client="broken_methods:Scalars")
VECTORS = replace(FEDAVG, client="broken_methods:Vectors")
UNKNOWN_SETTING = replace(CLIPPED, strategy="broken_methods:UnknownSetting")
LEAVING = replace(FEDAVG, client="broken_methods:Leaving")
FAILING_CLIENT = replace(FEDAVG, client="broken_methods:FailingClient")
FAILING_STRATEGY = replace(FEDAVG, strategy="broken_methods:FailingStrategy")
HISTORY = replace(FEDAVG, strategy="broken_methods:History")
MEMORY = replace(FEDAVG, client="broken_methods:Memory")
NO_LOSS = replace(FEDAVG, client="broken_methods:NoLoss")
COUNTING = replace(FEDAVG, client="broken_methods:Counting")
SEEDLESS = replace(FEDAVG, client="broken_methods:Untrained", strategy="broken_methods:Seedless")
FORGETFUL = replace(FEDAVG, strategy="broken_methods:Forgetful")
ALL_OR_NOTHING = replace(FEDAVG, strategy="broken_methods:AllOrNothing")
NEEDING_MEANS = replace(FEDAVG, strategy="broken_methods:NeedingMeans")
TOO_FEW = replace(FEDAVG, strategy="broken_methods:TooFew")
REPORTING = replace(PRIVATE_HEAD, client="broken_methods:Reporting")
TELLING = replace(PRIVATE_HEAD, client="broken_methods:Telling")
