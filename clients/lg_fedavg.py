"""LG-FedAvg's client: shares the classifier, keeps the extractor (Liang et al., 2020, algorithm 1)."""

from collections.abc import Mapping
from typing import ClassVar

from clients.engine.partial import PartialClient
from hyperfl_flwr.protocol.messages import Reduction


class LGFedAvgClient(PartialClient):
    """Trains private extractor and classifier together, in the same steps."""

    shared: ClassVar[Mapping[str, Reduction]] = {"classifier": Reduction.MEAN_BY_EXAMPLES}
    private: ClassVar[tuple[str, ...]] = ("extractor",)
