"""The best model of a client so far, by its accuracy on validation data (`keep = best`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from hyperfl_flwr.core.storage import Arrays


@dataclass(frozen=True, kw_only=True)
class BestModel:
    """A client's model after local training in the round with its highest validation accuracy.

    It is part of the client's private state, so that a resumed run finds that of its checkpoint.

    Attributes:
        round: The round, the last of several.
        validation_accuracy: Accuracy on the client's validation data, in [0, 1].
        test_accuracy: Accuracy on its test data, in [0, 1].
        tensors: Values of the whole target network by name.
    """

    GROUP: ClassVar[str] = "best"
    FACTS: ClassVar[str] = "best:facts"  # no group has a colon in its name

    round: int
    validation_accuracy: float
    test_accuracy: float
    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, arrays: Mapping[str, Tensor]) -> Self:
        """Return the model in the private state of a client that was trained with `keep = best`.

        Args:
            arrays: The private state, keyed `group/name`.
        """
        server_round, validation_accuracy, test_accuracy = arrays[cls.FACTS].tolist()
        return cls(
            round=int(server_round),
            validation_accuracy=validation_accuracy,
            test_accuracy=test_accuracy,
            tensors={key.partition("/")[2]: value for key, value in arrays.items() if key.startswith(f"{cls.GROUP}/")},
        )

    def to_store(self) -> Arrays:
        """Return the arrays from which `of` restores the model."""
        facts = torch.tensor([self.round, self.validation_accuracy, self.test_accuracy], dtype=torch.float64)
        tensors = {f"{self.GROUP}/{name}": value for name, value in self.tensors.items()} | {self.FACTS: facts}
        return {key: value.detach().cpu().numpy() for key, value in tensors.items()}

    def or_better(self, later: Self) -> Self:
        """Return a later model unless its validation accuracy is lower, otherwise this one.

        Few samples have few different accuracies, and of models with the same one those that were trained longer are
        better on other samples.
        """
        return later if later.validation_accuracy >= self.validation_accuracy else self
