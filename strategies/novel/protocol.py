"""What a method's strategy has for clients that were never trained and have no labels."""

from collections.abc import Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import SharedArrays


class Ways:
    """The ways in which a strategy gives a model to such a client; none, if it does not say otherwise.

    Attributes:
        ways: Their names, see `strategies.novel.assess`.
        descriptor_dimension: Length d of what a client tells of its samples in the way `descriptor`.
    """

    ways: ClassVar[tuple[str, ...]] = ()
    descriptor_dimension = 0

    def models(self, arrays: SharedArrays) -> SharedArrays:
        """Return the whole models, [M, *shape] by `model/name`, that the server has without knowing the client.

        Args:
            arrays: The shared parameters.
        """
        return {}

    def models_of(self, descriptors: Mapping[int, NDArray[Any]]) -> Mapping[int, SharedArrays]:
        """Return the models, [1, *shape] by `model/name`, of clients that have sent descriptors [1, d]."""
        return {}
