"""FedPer's client: shares the extractor, keeps the classifier (Arivazhagan et al., 2019, algorithm 1)."""

from collections.abc import Mapping
from typing import ClassVar

from clients.engine.partial import PartialClient
from hyperfl_flwr.protocol.messages import Reduction


class FedPerClient(PartialClient):
    """Trains extractor and private classifier together, in the same steps."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.MEAN_BY_EXAMPLES}
    private: ClassVar[tuple[str, ...]] = ("classifier",)
