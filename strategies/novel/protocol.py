"""Optional interface of strategies: provide models to novel clients, which were never trained and have no labels."""

from collections.abc import Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import SharedArrays


class Ways:
    """The ways in which a strategy provides a model to a novel client; there are none by default.

    Attributes:
        ways: Names of the ways, see `strategies.novel.assess`.
        descriptor_dimension: Length d of a client's descriptor, for the way `descriptor`.
    """

    ways: ClassVar[tuple[str, ...]] = ()
    descriptor_dimension = 0

    def models(self, arrays: SharedArrays) -> SharedArrays:
        """Return the M models that do not depend on the novel client, [M, *shape] by `model/name`.

        Args:
            arrays: The shared parameters.
        """
        return {}

    def models_of(self, descriptors: Mapping[int, NDArray[Any]]) -> Mapping[int, SharedArrays]:
        """Generate models from clients' descriptors.

        Args:
            descriptors: Descriptors [1, d] by client.

        Returns:
            Models [1, *shape] by `model/name`, by client.
        """
        return {}
