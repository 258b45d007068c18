"""The best model of a client so far, by validation data (`keep = best`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from hyperfl_flwr.core.files.storage import Arrays


@dataclass(frozen=True, kw_only=True)
class BestModel:
    """A client's model after local training in the round that is the best on validation data.

    It is part of the client's private state, so that a resumed run finds that of its checkpoint.

    Attributes:
        round: The round, the last of several.
        merit: How good the model is on the client's validation data, see `Task.merit`.
        test_score: Main score of the task on its test data.
        tensors: Values of the whole target network by name.
    """

    GROUP: ClassVar[str] = "best"
    FACTS: ClassVar[str] = "best:facts"  # no group has a colon in its name

    round: int
    merit: float
    test_score: float
    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, arrays: Mapping[str, Tensor]) -> Self:
        """Return the model in the private state of a client that was trained with `keep = best`.

        Args:
            arrays: The private state, keyed `group/name`.
        """
        server_round, merit, test_score = arrays[cls.FACTS].tolist()
        return cls(
            round=int(server_round),
            merit=merit,
            test_score=test_score,
            tensors={key.partition("/")[2]: value for key, value in arrays.items() if key.startswith(f"{cls.GROUP}/")},
        )

    def to_store(self) -> Arrays:
        """Return the arrays from which `of` restores the model."""
        facts = torch.tensor([self.round, self.merit, self.test_score], dtype=torch.float64)
        tensors = {f"{self.GROUP}/{name}": value for name, value in self.tensors.items()} | {self.FACTS: facts}
        return {key: value.detach().cpu().numpy() for key, value in tensors.items()}

    def or_better(self, later: Self) -> Self:
        """Return a later model unless it is worse on validation data, otherwise this one.

        Few samples have few different accuracies, and of models with the same one those that were trained longer are
        better on other samples.
        """
        return later if later.merit >= self.merit or math.isnan(self.merit) else self
