"""What it takes to use the models of a run: public, and the same for all clients."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, get_args

from hyperfl_flwr.core.setting_types import Pooling
from hyperfl_flwr.models.encoder import Encoder, build_encoder
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target

_LARGEST = 10_000
"""Numbers of classes, pixels of a side and features above this are refused."""

_LARGEST_MEAN = 1e6
"""Means and standard deviations beyond this, or below its inverse, are refused: samples must not overflow."""


@dataclass(frozen=True, kw_only=True)
class TargetRecipe:
    """What it takes to use a target network.

    Attributes:
        target: Name of the target network.
        input_shape: (C, H, W) of an image, or (D,) of a feature vector.
        mean: Per channel, of images scaled to [0, 1]; or per feature.
        std: Likewise, above 0.
        classes: Names of the K classes.
    """

    target: str
    input_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]

    SIZES: ClassVar[str] = "shape and number of classes"
    """What `sizes` are, in words."""

    def values(self) -> dict[str, Any]:
        """Return numbers, texts and lists of them, by field, for `of`."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make a recipe of what `values` has returned on a machine that is not ours.

        Raises:
            ValueError: If it is something else, or no network can be built by it.
        """
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        try:
            recipe = cls(**fields)
            recipe.check()
        except (TypeError, AttributeError) as error:
            raise ValueError(f"it is no recipe of a model: {error}") from None
        return recipe

    def check(self) -> None:
        """Check that a model can be built.

        Raises:
            ValueError: If not.
        """
        sizes = self.sizes()
        if not all(type(size) is int and 0 < size <= _LARGEST for size in sizes) or len(self.input_shape) not in (1, 3):
            raise ValueError(f"{self.SIZES} are out of range: {sizes}")
        if not len(self.mean) == len(self.std) == self.input_shape[0]:
            raise ValueError(f"mean and std must have {self.input_shape[0]} numbers")
        if not all(abs(value) <= _LARGEST_MEAN for value in self.mean):
            raise ValueError(f"mean must be between -{_LARGEST_MEAN:g} and {_LARGEST_MEAN:g}")
        if not all(1 / _LARGEST_MEAN <= value <= _LARGEST_MEAN for value in self.std):
            raise ValueError(f"std must be between {1 / _LARGEST_MEAN:g} and {_LARGEST_MEAN:g}")
        if not all(isinstance(name, str) and name.isprintable() for name in self.classes):
            raise ValueError("names of classes must be printable texts")
        self.new_target()

    def sizes(self) -> tuple[int, ...]:
        """Return all sizes."""
        return (*self.input_shape, len(self.classes))

    def new_target(self) -> Target:
        """Return the target network on the meta device."""
        return build_target(self.target, self.input_shape, len(self.classes))


@dataclass(frozen=True, kw_only=True)
class Recipe(TargetRecipe):
    """What a client needs to know to describe its samples and to use the model that it is sent.

    Attributes:
        pooling: Of the encoder.
        descriptor_length: d.
    """

    pooling: Pooling
    descriptor_length: int

    SIZES: ClassVar[str] = "shape, length of a descriptor and number of classes"

    def sizes(self) -> tuple[int, ...]:
        """Return all sizes."""
        return (*self.input_shape, self.descriptor_length, len(self.classes))

    def check(self) -> None:
        """Check that a model and an encoder can be built.

        Raises:
            ValueError: If not.
        """
        super().check()
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"unknown pooling {self.pooling!r}")
        self.new_encoder()

    def new_encoder(self) -> Encoder:
        """Return the encoder on the meta device."""
        return build_encoder(self.target, self.input_shape, self.descriptor_length, self.pooling)
