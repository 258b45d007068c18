"""FedBN's client: keeps the normalisation layers, shares all others (Li et al., ICLR 2021, algorithm 1)."""

from collections.abc import Mapping
from typing import ClassVar

from clients.engine.partial import PartialClient
from hyperfl_flwr.protocol.messages import Reduction


class FedBNClient(PartialClient):
    """Trains shared layers and private normalisation layers together, in the same steps."""

    shared: ClassVar[Mapping[str, Reduction]] = {"layers": Reduction.MEAN_BY_EXAMPLES}
    private: ClassVar[tuple[str, ...]] = ("normalisation",)
