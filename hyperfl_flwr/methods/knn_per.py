"""kNN-Per: FedAvg; a client mixes the model's probabilities with those of its nearest training samples."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import Positive, Section, Share, ShareBelowOne, setting


class KNNPerConfig(Section):
    """Settings of kNN-Per."""

    key: ClassVar[str] = "knn-per"
    title: ClassVar[str] = "kNN-Per"

    neighbours: Positive = setting(10, "Number k of neighbours; a client with fewer samples takes all of them.")
    weight: Share = setting(
        0.5,
        "Share λ of the network in the mixed probabilities; the rest is the neighbours'. 1 is `fedavg`. Without effect "
        "if `knn-per.held-back` is above 0.",
    )
    held_back: ShareBelowOne = setting(
        0.0,
        "Share of a client's training samples, at most all but one, that are held back from local training and from "
        "the neighbours, and on which the client chooses λ from 0, 0.1, ..., 1. 0 takes `knn-per.weight`.",
    )


METHOD = Method(
    name="knn-per",
    title="federated averaging; predictions are mixed with those of a client's nearest training samples",
    paper="Marfoq et al., ICML 2022",
    sends="the whole model",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.knn_per:KNNPerClient",
    strategy="strategies.fedavg:FedAvg",
    settings=(KNNPerConfig,),
)
