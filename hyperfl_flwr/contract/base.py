"""Small federations for the contract of a method: their settings, and the error of a broken contract."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from clients.engine.base import BaseClient
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import HyperFLError

NUM_CLIENTS = 5
SMALL: Settings = {
    "num-clients": NUM_CLIENTS,
    "num-rounds": 2,
    "local-epochs": 1,
    "batch-size": 20,
    "device": "cpu",
    "data.train-samples": 40,
    "data.test-samples": 20,
    "hyperfl.hidden-width": 8,
    "hyperfl.embedding-dim": 4,
    "pfedhn.hidden-width": 8,
    "pfedhn.hidden-layers": 1,
    "it-pfl.fine-tune-rounds": 1,
    "fedgen.generator-width": 8,
    "fedgen.generator-steps": 2,
    "fedgen.generated-samples": 8,
    "fedftg.iterations": 1,
    "fedftg.student-steps": 2,
    "fedftg.batch-size": 6,
    "fedftg.generator-width": 2,
    "feddf.steps": 2,
    "feddf.batch-size": 8,
    "priv-hfl.local-steps": 2,
    "fedakd.samples": 30,
    "priv-hfl.distill": True,
    "priv-hfl.generator-width": 2,
    "priv-hfl.pseudo-samples": 8,
}
"""Settings of a small federation. An epoch has two steps, so that the order of the samples matters."""

MakeGrid = Callable[[int, Settings], Grid]
"""Makes the grid of a run from its number of nodes and its settings."""

Federate = Callable[..., Path]
"""Runs a small federation to its end and returns the run's folder: (method, num_nodes=2, *, grid: MakeGrid,
plots=False, **settings), where `num_rounds` stands for `num-rounds`."""


class ContractError(HyperFLError):
    """A method does not hold what all methods must.

    Args:
        text: What was seen.
        remedy: What to do.
    """

    exit_code = 1

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(f"{text}; {remedy}")
        self.text, self.remedy = text, remedy


def require(holds: bool, text: str, remedy: str) -> None:
    """Raise a ContractError unless a condition holds."""
    if not holds:
        raise ContractError(text, remedy)


@contextmanager
def replaced(owner: type[BaseClient], name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a class for a while."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
