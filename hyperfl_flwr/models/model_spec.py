"""Specification of a run's models: public facts, equal for all clients, from which a network can be built."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self, get_args

from hyperfl_flwr.core.setting_types import Pooling
from hyperfl_flwr.core.target_scale import scale_problem
from hyperfl_flwr.core.tasks import CLASSIFICATION, REGRESSION, TASKS
from hyperfl_flwr.models.encoder import Encoder, build_encoder
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target

_LARGEST = 10_000
"""Largest number of classes, pixels per side and features that is accepted."""

_LARGEST_MEAN = 1e6
_LONGEST_NAME = 10_000
"""Largest mean and standard deviation that is accepted (and inverse of the smallest standard deviation).

Normalised samples must not overflow.
"""


@dataclass(frozen=True, kw_only=True)
class TargetRecipe:
    """Everything that is needed to build a target network and to use its values.

    Attributes:
        target: Name of the target network.
        input_shape: Shape of a sample: (C, H, W) of an image, or (D,) of a feature vector.
        mean: Mean of each channel, of images scaled to [0, 1], or of each feature.
        std: Standard deviation of each channel or feature, above 0.
        classes: Names of the K classes, labels or targets.
        body: SHA-256 of the weights of a pre-trained body; empty for other networks.
        window: Values of grey images with more than 8 bits that become 0 and 1; empty if the run had none.
        task: Name of the task, see `hyperfl_flwr.core.tasks`.
        target_mean: Mean of each target of a regression, of which the network returns the standardised values; empty
            for other tasks.
        target_std: Standard deviation of each of these targets, above 0.
        features: Names of the features of a vector; empty if they have none, or only the nodes know them.
    """

    target: str
    input_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    body: str = ""
    window: tuple[float, ...] = ()
    task: str = CLASSIFICATION.name
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    features: tuple[str, ...] = field(default=(), repr=False)  # descriptors do not depend on it

    SIZES: ClassVar[str] = "shape and number of classes"
    """Description of `sizes` for error messages."""

    def values(self) -> dict[str, Any]:
        """Return the fields by name, with tuples as lists, for messages and JSON; `of` reads them back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Build a recipe from the result of `values` (untrusted input).

        Raises:
            ValueError: If fields are missing, unknown, of a wrong type or out of range.
        """
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        try:
            recipe = cls(**fields)
            recipe.check()
        except (TypeError, AttributeError) as error:
            raise ValueError(f"the description of the model is invalid: {error}") from None
        return recipe

    def check(self) -> None:
        """Check that the target network can be built.

        Raises:
            ValueError: If a field is out of range, or the network cannot take such inputs.
        """
        # The fields may come from another machine: sizes are bounded before anything is allocated from them.
        sizes = self.sizes()
        if not all(type(size) is int and 0 < size <= _LARGEST for size in sizes) or len(self.input_shape) not in (1, 3):
            raise ValueError(f"{self.SIZES} are out of range: {sizes}")
        if not len(self.mean) == len(self.std) == self.input_shape[0]:
            numbers = f"got {len(self.mean)} and {len(self.std)}"
            raise ValueError(f"mean and std must have {self.input_shape[0]} numbers, {numbers}")
        if not all(abs(value) <= _LARGEST_MEAN for value in self.mean):
            raise ValueError(f"mean must be between -{_LARGEST_MEAN:g} and {_LARGEST_MEAN:g}")
        if not all(1 / _LARGEST_MEAN <= value <= _LARGEST_MEAN for value in self.std):
            raise ValueError(f"std must be between {1 / _LARGEST_MEAN:g} and {_LARGEST_MEAN:g}")
        if not all(isinstance(name, str) and name.isprintable() for name in self.classes):
            raise ValueError("names of classes must be printable strings")
        if not isinstance(self.features, tuple) or len(self.features) not in (0, self.input_shape[0]):
            raise ValueError(f"features must have {self.input_shape[0]} names, or none")
        if not all(isinstance(name, str) and len(name) <= _LONGEST_NAME for name in self.features):
            raise ValueError(f"names of features must be strings of at most {_LONGEST_NAME} characters")
        if not isinstance(self.body, str) or not re.fullmatch("([0-9a-f]{64})?", self.body):
            raise ValueError("body must be a hash of 64 hexadecimal digits, or empty")
        if self.window and not (len(self.window) == 2 and -math.inf < self.window[0] < self.window[1] < math.inf):
            raise ValueError("window must be two numbers, the first below the second, or empty")
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        number = len(self.classes) if self.task == REGRESSION.name else 0
        if not len(self.target_mean) == len(self.target_std) == number:
            raise ValueError(f"target_mean and target_std must have {number} numbers for the task {self.task}")
        if problem := scale_problem(self.target_mean, self.target_std):
            raise ValueError(f"{problem} (of the targets)")
        self.new_target()

    def sizes(self) -> tuple[int, ...]:
        """Return all sizes that must be positive integers, for `check`."""
        return (*self.input_shape, len(self.classes))

    def new_target(self) -> Target:
        """Return the target network on the meta device."""
        return build_target(self.target, self.input_shape, len(self.classes))


@dataclass(frozen=True, kw_only=True)
class Recipe(TargetRecipe):
    """Everything that a client needs to describe its samples and to use the model that it receives.

    Attributes:
        pooling: Pooling of the encoder.
        descriptor_length: Length d of a descriptor.
    """

    pooling: Pooling
    descriptor_length: int

    SIZES: ClassVar[str] = "shape, length of a descriptor and number of classes"

    def sizes(self) -> tuple[int, ...]:
        """Return all sizes that must be positive integers, for `check`."""
        return (*self.input_shape, self.descriptor_length, len(self.classes))

    def check(self) -> None:
        """Check that the target network and the encoder can be built.

        Raises:
            ValueError: If a field is out of range, or a network cannot take such inputs.
        """
        super().check()
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"unknown pooling {self.pooling!r}")
        self.new_encoder()

    def new_encoder(self) -> Encoder:
        """Return the encoder on the meta device."""
        return build_encoder(self.target, self.input_shape, self.descriptor_length, self.pooling)
