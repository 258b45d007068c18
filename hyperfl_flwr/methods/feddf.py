"""FedDF: the server distils the ensemble of the clients' models into their mean, on unlabelled data."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, setting


class FedDFConfig(Section):
    """Settings of FedDF."""

    key: ClassVar[str] = "feddf"
    title: ClassVar[str] = "FedDF"

    unlabelled: str = setting(
        "noise",
        "The server's unlabelled samples: `noise`, or the name of a data set, `npz:FILE`, `csv:FILE` or "
        "`folder:PATH`, of which labels are not used. Samples must have the shape of the clients'.",
        values="`noise`, a data set",
    )
    steps: NonNegative = setting(200, "Number of distillation steps in each round; 0 is `fedavg`.")
    batch_size: Positive = setting(128, "Number of unlabelled samples per step.")
    learning_rate: PositiveFloat = setting(
        1e-3, "Learning rate of Adam in the first step; it falls to 0 along half a cosine in each round."
    )
    clip_norm: NonNegativeFloat = setting(5.0, "Largest norm of the gradient of a step; 0 does not clip.")


METHOD = Method(
    name="feddf",
    title="federated averaging; the server distils the ensemble of the models into their mean",
    paper="Lin et al., NeurIPS 2020",
    sends="the whole model, alone",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.feddf:FedDFClient",
    strategy="strategies.feddf:FedDF",
    settings=(FedDFConfig,),
)
